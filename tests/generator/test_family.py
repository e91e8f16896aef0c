"""A new family is a new folder: found, enumerated, rendered and right; one that is wrong is refused in words."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.generator import family as family_module
from tilewright.generator import render as render_module
from tilewright.generator.build import build
from tilewright.generator.errors import IllegalVariant, InvalidInput
from tilewright.generator.family import all_families, family_named
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.space import default_variant, family_default, legal_variants, problem_reason
from tilewright.generator.variant import kernel_of

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "adding-a-kernel.md"
TERMS = {
    "gather": ("bound", "window", "tokens"),
    "analytic": ("window", "stride"),
    "list": ("window", "or_blocks"),
    "bitmap": ("bound", "and_blocks"),
    "scan": ("and_bits",),
}


def documented(language: str) -> str:
    """The first block of this language in the guide."""
    found = re.search(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{GUIDE.name} shows no {language}"
    return found[1]


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `tilewright.templates` of the test's own, with the real stages and no family."""
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "_stages").symlink_to(REPOSITORY / "templates" / "_stages")
    spec = importlib.util.spec_from_file_location(
        "tilewright.templates", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    monkeypatch.setitem(sys.modules, "tilewright.templates", importlib.util.module_from_spec(spec))

    def forget() -> None:
        family_module.all_families.cache_clear()
        render_module._environment.cache_clear()

    forget()
    yield folder
    monkeypatch.undo()
    forget()


@pytest.fixture
def plain(templates: Path) -> Path:
    """The guide's example, as the only family."""
    folder = templates / "forward_plain"
    folder.mkdir()
    (folder / "space.toml").write_text(documented("toml"), encoding="utf-8")
    (folder / "kernel.cpp.jinja").write_text(documented("jinja"), encoding="utf-8")
    return folder


def problem(form: str = "gather", head_dim: int = 64, dtype: str = "float32") -> Problem:
    return Problem(dtype, head_dim, 1, 4, 2, 256, 256, "cpu", MaskClass(TERMS[form], form))


def test_a_new_folder_is_found(plain: Path) -> None:
    assert list(all_families()) == ["forward_plain"]
    family = family_named("forward_plain")
    assert family.axes["block_n"] == (32, 64, 128)
    assert family.rules[0][0] == "output_bytes <= 16384"


def test_a_folder_without_a_space_is_no_family(plain: Path, templates: Path) -> None:
    (templates / "notes").mkdir()
    assert list(all_families()) == ["forward_plain"]


def test_its_variants_are_enumerated_and_ruled(plain: Path) -> None:
    legal = legal_variants(problem())
    # 3 x 3 x 2 axis values in each of the forms that a window with tokens has: all but analytic.
    assert len(legal) == 18 * 4
    assert {spec.mask_form for spec in legal} == {"gather", "list", "bitmap", "scan"}
    narrow = {spec.block_m for spec in legal_variants(problem(head_dim=256))}
    assert narrow == {16}
    wide = next(spec for spec in legal if spec.block_m == 64)
    assert problem_reason(problem(head_dim=256), wide) == (
        "64 rows of 256 floats take 65536 bytes; past 16384 they leave the first-level cache"
    )


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_it_has_a_default_for_every_head_dim(plain: Path, head_dim: int) -> None:
    for form in TERMS:
        spec = default_variant(problem(form, head_dim))
        assert (spec.family, spec.block_n) == ("forward_plain", 64)
        assert spec.block_m == (32 if head_dim <= 128 else 16)


def test_its_source_says_what_it_is(plain: Path) -> None:
    asked = problem()
    rendered = render(kernel_of(asked, default_variant(asked)))
    lines = rendered.sources["kernel.cpp"].splitlines()
    assert rendered.digest in "\n".join(lines[:6])
    assert "constexpr int HEAD_DIM = 64;" in lines
    assert "constexpr bool HAS_TOKENS = true;" in lines
    assert "{{" not in rendered.sources["kernel.cpp"]


@pytest.mark.parametrize("form", list(TERMS))
def test_it_is_right(plain: Path, form: str) -> None:
    from tilewright.runtime.launch import LoadedKernel
    from tilewright.tuner.verify import verify

    asked = problem(form)
    spec = next(spec for spec in legal_variants(asked) if spec.mask_form == form)
    rendered = render(kernel_of(asked, spec))
    report = verify(LoadedKernel(build(rendered), rendered.kernel, rendered.module_name), "cpu")
    assert report.ok, report.message


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("operation = ", "operation: ", r"templates/forward_plain/space\.toml is not TOML"),
        ("preference = 50", "", r"templates/forward_plain/space\.toml lacks 'preference'"),
        ('"gather", "analytic"', '"gather", "diagonal"', "mask_forms must be among analytic, .*; got diagonal"),
        ('language = "cpp"', 'language = "fortran"', "language must be cpp or cuda, got fortran"),
        ('purpose = "main"', 'purpose = "demo"', "purpose must be main or ladder, got demo"),
        ('purpose = "main"', 'purpose = "main"\nproven = "soon"', "proven must be true or false, got 'soon'"),
        ("block_n = [32, 64, 128]", "", "axes lacks block_n"),
        (
            '{ block_m = 32, block_n = 64, threading = "dynamic" }',
            "{ block_m = 32, block_n = 64 }",
            "every entry of defaults must give block_m, block_n, threading; got",
        ),
    ],
    ids=[
        "not TOML",
        "missing key",
        "mask form",
        "language",
        "purpose",
        "proven",
        "shared axis",
        "default lacks an axis",
    ],
)
def test_a_wrong_space_is_refused_in_words(plain: Path, old: str, new: str, told: str) -> None:
    text = documented("toml")
    assert old in text
    (plain / "space.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InvalidInput, match=told):
        all_families()


def test_a_family_that_is_not_proven_is_tried_and_is_nobodys_default(plain: Path) -> None:
    text = documented("toml").replace('purpose = "main"', 'purpose = "main"\nproven = false', 1)
    (plain / "space.toml").write_text(text, encoding="utf-8")
    assert len(legal_variants(problem())) == 18 * 4
    assert family_default(problem(), family_named("forward_plain")) is not None
    with pytest.raises(IllegalVariant, match="no kernel family can run"):
        default_variant(problem())


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("block_q * 2", "unknown name 'block_q' in 'block_q \\* 2'; known: .*block_m"),
        ("block_m *", "not an expression"),
        ("open('x')", "is not allowed in"),
    ],
    ids=["unknown name", "syntax", "a call"],
)
def test_a_wrong_expression_is_refused_in_words(plain: Path, expression: str, told: str) -> None:
    text = documented("toml").replace("block_m * head_dim * 4", expression, 1)
    (plain / "space.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=told):
        family_default(problem(), family_named("forward_plain"))


def test_an_unknown_family_is_refused_with_the_known_ones(plain: Path) -> None:
    with pytest.raises(InvalidInput, match="unknown kernel family 'forward_fast'; known: forward_plain"):
        family_named("forward_fast")
