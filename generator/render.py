"""From a `Kernel` to source text."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.generator.abi import arguments_of
from tilewright.generator.arch import arch_named
from tilewright.generator.errors import IllegalVariant
from tilewright.generator.family import family_named
from tilewright.generator.legality import derived_values, has_workspace, legality
from tilewright.generator.variant import Kernel

if TYPE_CHECKING:
    import jinja2

_FILES = {"cpp": ("kernel.cpp",), "cuda": ("kernel.cu", "device.cuh", "binding.cpp")}
_SHARED = ("device.cuh", "binding.cpp")
"""What is rendered from `_stages/`, the same template for every family."""

_PLACEHOLDER = "0" * 16


@dataclass(frozen=True, slots=True)
class Rendered:
    """The source of one kernel.

    sources: text by file name: `kernel.cpp`, or `kernel.cu`, the `device.cuh` that it includes and `binding.cpp`.
    language: `cpp` or `cuda`. digest: 16 hex digits of all the text; the module is called `tw_<digest>`.
    """

    kernel: Kernel
    sources: dict[str, str]
    language: str
    digest: str

    @property
    def module_name(self) -> str:
        return f"tw_{self.digest}"


def _cpp_bool(value: object) -> str:
    return "true" if value else "false"


def _tidy(text: str) -> str:
    """Macros end where they end: at most one blank line between parts, none at the end."""
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


@cache
def _environment(templates: Path | None = None) -> jinja2.Environment:
    import jinja2  # not needed to dispatch what is already built

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(templates or resources.files("tilewright.templates"))),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["cpp"] = _cpp_bool
    return environment


def render(kernel: Kernel, templates: Path | None = None) -> Rendered:
    """The source of `kernel`. The same kernel gives the same text on every machine.

    templates: a directory to render from instead of the package's own; spaces and rules stay the package's.
    Raises `IllegalVariant` with the reason when it may not exist.
    """
    reason = legality(kernel)
    if reason is not None:
        raise IllegalVariant(f"{kernel.spec.name} for {kernel.dtype} D{kernel.head_dim} on {kernel.arch}: {reason}")
    family, workspace = family_named(kernel.spec.family), has_workspace(kernel)
    context = {
        "kernel": kernel,
        "spec": kernel.spec,
        "family": family,
        "arch": arch_named(kernel.arch),
        "arguments": arguments_of(kernel.operation, workspace=workspace),
        "has_workspace": workspace,
        "digest": _PLACEHOLDER,
        **derived_values(kernel),
    }
    texts = {}
    for file in _FILES[family.language]:
        folder = "_stages" if file in _SHARED else family.name
        texts[file] = _tidy(_environment(templates).get_template(f"{folder}/{file}.jinja").render(context))
    whole = "".join(f"// {name}\n{text}" for name, text in sorted(texts.items()))
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    sources = {name: text.replace(_PLACEHOLDER, digest) for name, text in texts.items()}
    return Rendered(kernel, sources, family.language, digest)
