"""What every test may count on: a cache directory that is not the user's, and markers for what a machine may lack."""

from __future__ import annotations

import pytest
import torch

from tilewright.generator import toolchain
from tilewright.generator.errors import ToolMissing


def _has_nvcc() -> bool:
    try:
        toolchain.cuda_toolkit()
    except ToolMissing:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot run, and say so in the summary."""
    missing = {
        "nvcc": None if _has_nvcc() else "no nvcc",
        "gpu": None if torch.cuda.is_available() and _has_nvcc() else "no CUDA device with nvcc",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels that several tests build are built once a session, and never in the user's own cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
