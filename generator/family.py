"""`Family`: one folder under `templates/`, its `space.toml` read into data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MASK_FORMS
from tilewright.generator.variant import SHARED_AXES, AxisValue


@dataclass(frozen=True, slots=True)
class Family:
    """A kernel family: where it runs and the space of its variants. Every field is a key of `space.toml`.

    operation: what it computes. instructions: the instruction family an architecture must have.
    language: `cpp` or `cuda`. preference: which family's default is tried first, lowest first.
    purpose: `main` is tuned and dispatched; `ladder` is only benchmarked.
    dtypes: element types. mask_forms: legal ones, in the order that the default prefers them.
    axes: values of every axis but `mask_form`. derived: named expressions (see `legality.derived_values`).
    rules: (expression that must hold, reason when it does not). defaults: axis values, the first legal entry wins; one
    with a `mask_form` is for that form alone.
    problem_rules: the same of what also depends on lengths and on the numbers in the mask's structure (see
    `space.problem_names`).
    worth_rules: the same of what runs such a problem right and never pays: neither tried nor a default for it.
    cost: expression; variants are tried from the smallest. complexity: expression; between equals the smallest wins.
    proven: whether its defaults ran right through every case on a GPU of the project. Else they run nowhere untuned,
    and the tuner, which verifies on the spot what it measures, may choose it.
    workspace: whether its launches ask for scratch, where those of its operation do not anyway: all, none, or those of
    variants for which an expression holds (see `legality.has_workspace`).
    """

    name: str
    operation: str
    instructions: str
    language: str
    preference: int
    purpose: str
    dtypes: tuple[str, ...]
    mask_forms: tuple[str, ...]
    axes: Mapping[str, tuple[AxisValue, ...]]
    derived: Mapping[str, str]
    rules: tuple[tuple[str, str], ...]
    defaults: tuple[Mapping[str, AxisValue], ...]
    cost: str
    complexity: str
    problem_rules: tuple[tuple[str, str], ...] = ()
    worth_rules: tuple[tuple[str, str], ...] = ()
    proven: bool = True
    workspace: bool | str = False


def _read(name: str, text: str) -> Family:
    where = f"templates/{name}/space.toml"
    try:
        data: dict[str, Any] = tomllib.loads(text)
        family = Family(
            name=name,
            operation=data["operation"],
            instructions=data["instructions"],
            language=data["language"],
            preference=data["preference"],
            purpose=data["purpose"],
            dtypes=tuple(data["dtypes"]),
            mask_forms=tuple(data["mask_forms"]),
            axes={axis: tuple(values) for axis, values in data["axes"].items()},
            derived=dict(data.get("derived", {})),
            rules=tuple((rule["require"], rule["reason"]) for rule in data.get("rules", [])),
            defaults=tuple(data["defaults"]),
            cost=data["cost"],
            complexity=data["complexity"],
            problem_rules=tuple((rule["require"], rule["reason"]) for rule in data.get("problem_rules", [])),
            worth_rules=tuple((rule["require"], rule["reason"]) for rule in data.get("worth_rules", [])),
            proven=data.get("proven", True),
            workspace=data.get("workspace", False),
        )
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{where} is not TOML: {error}") from error
    except KeyError as error:
        raise InvalidInput(f"{where} lacks {error}") from error
    if family.language not in ("cpp", "cuda"):
        raise InvalidInput(f"{where}: language must be cpp or cuda, got {family.language}")
    if not isinstance(family.proven, bool):
        raise InvalidInput(f"{where}: proven must be true or false, got {family.proven!r}")
    if not isinstance(family.workspace, bool | str):
        raise InvalidInput(f"{where}: workspace must be true, false or an expression, got {family.workspace!r}")
    if family.purpose not in ("main", "ladder"):
        raise InvalidInput(f"{where}: purpose must be main or ladder, got {family.purpose}")
    unknown = [form for form in family.mask_forms if form not in MASK_FORMS]
    if unknown:
        raise InvalidInput(f"{where}: mask_forms must be among {', '.join(MASK_FORMS)}; got {', '.join(unknown)}")
    for axis in SHARED_AXES[1:]:
        if axis not in family.axes:
            raise InvalidInput(f"{where}: axes lacks {axis}")
    for default in family.defaults:
        if set(default) - {"mask_form"} != set(family.axes):
            raise InvalidInput(f"{where}: every entry of defaults must give {', '.join(family.axes)}; got {default}")
        if default.get("mask_form", family.mask_forms[0]) not in family.mask_forms:
            forms = ", ".join(family.mask_forms)
            raise InvalidInput(f"{where}: a default's mask_form must be among {forms}; got {default}")
    return family


@cache
def all_families() -> dict[str, Family]:
    """Every family that ships, by name, in order of preference."""
    folder = resources.files("tilewright.templates")
    found = []
    for entry in folder.iterdir():
        space = entry.joinpath("space.toml")
        if entry.is_dir() and space.is_file():
            found.append(_read(entry.name, space.read_text(encoding="utf-8")))
    return {family.name: family for family in sorted(found, key=lambda f: (f.preference, f.name))}


def family_named(name: str) -> Family:
    """The family called `name`; `InvalidInput` lists the known ones otherwise."""
    families = all_families()
    if name not in families:
        raise InvalidInput(f"unknown kernel family {name!r}; known: {', '.join(families)}")
    return families[name]
