"""Rendering: strict, the same everywhere, and readable."""

from __future__ import annotations

import dataclasses
import shutil
from importlib import resources
from pathlib import Path

import jinja2
import pytest

from tilewright.generator import render as render_module
from tilewright.generator.errors import IllegalVariant
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.space import default_variant
from tilewright.generator.variant import Kernel, kernel_of

PROBLEM = Problem("float32", 64, 1, 8, 8, 1024, 1024, "cpu", MaskClass(("window", "stride"), "w"))


def kernel(**changes: object) -> Kernel:
    problem = dataclasses.replace(PROBLEM, **changes)  # type: ignore[arg-type]
    return kernel_of(problem, default_variant(problem))


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_the_source_opens_with_what_it_is(target: str) -> None:
    rendered = render(kernel(target=target))
    for text in rendered.sources.values():
        head = "\n".join(text.splitlines()[:6])
        assert "generated: do not edit" in head
        assert rendered.digest in head
    main = next(text for name, text in rendered.sources.items() if name.startswith("kernel."))
    assert kernel(target=target).spec.name in main
    assert f"PyInit_{rendered.module_name}(" in "".join(rendered.sources.values())


def test_the_same_kernel_gives_the_same_text() -> None:
    assert render(kernel()) == render(kernel())


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"head_dim": 128}, {"mask": MaskClass(("bound",), "b")}, {"target": "sm_80"}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_compiled_in_changes_the_digest(change: dict[str, object]) -> None:
    assert render(kernel(**change)).digest != render(kernel()).digest


def test_lengths_do_not_change_the_digest() -> None:
    # New lengths must not compile anew.
    assert render(kernel(seqlen_q=77, seqlen_kv=99, batch=5)).digest == render(kernel()).digest


@pytest.mark.parametrize("target", ["cpu", "sm_75", "sm_90a"])
def test_sources_are_tidy(target: str) -> None:
    for text in render(kernel(target=target)).sources.values():
        lines = text.splitlines()
        assert text.endswith("\n")
        assert [n for n, line in enumerate(lines, 1) if line != line.rstrip()] == []
        assert [n for n, line in enumerate(lines, 1) if "\t" in line] == []
        assert [n for n, line in enumerate(lines, 1) if len(line) > 130] == []
        assert "\n\n\n" not in text
        assert "{{" not in text.replace("{{0", "")


def test_an_illegal_kernel_is_not_rendered() -> None:
    legal = kernel()
    spec = dataclasses.replace(legal.spec, block_m=33)
    with pytest.raises(IllegalVariant, match="block_m must be one of"):
        render(dataclasses.replace(legal, spec=spec))


def test_templates_of_another_directory_are_rendered(tmp_path: Path) -> None:
    shutil.copytree(str(resources.files("tilewright.templates")), tmp_path / "templates")
    device = tmp_path / "templates" / "_stages" / "device.cuh.jinja"
    asked = kernel(target="sm_80")
    assert render(asked, tmp_path / "templates") == render(asked)
    device.write_text(device.read_text().replace("ex2.approx.ftz.f32", "ex2.approx.f32"))
    patched = render(asked, tmp_path / "templates")
    assert "ex2.approx.f32" in patched.sources["device.cuh"]
    assert patched.digest != render(asked).digest


def test_an_undefined_name_in_a_template_is_an_error() -> None:
    template = render_module._environment().from_string("{{ no_such_name }}")
    with pytest.raises(jinja2.UndefinedError):
        template.render()
