"""Architectures as data."""

from __future__ import annotations

import pytest

from tilewright.generator.arch import all_archs, arch_distance, arch_named, arch_of_capability
from tilewright.generator.errors import InvalidInput


def test_the_promised_architectures_are_there() -> None:
    promised = ["cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]
    assert [name for name in promised if name not in all_archs()] == []


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"unknown architecture 'sm_55'; known: cpu, sm_75, .*sm_120"):
        arch_named("sm_55")


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "sm_75"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((9, 0), "sm_90a"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_device_gets_the_newest_code_it_runs(capability: tuple[int, int], name: str) -> None:
    assert arch_of_capability(*capability).name == name


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (10, 3), (13, 0)])
def test_a_device_without_code_is_refused(capability: tuple[int, int]) -> None:
    # sm_100a is specific to 10.0: its code does not run on 10.3.
    with pytest.raises(InvalidInput, match="no known architecture runs on compute capability"):
        arch_of_capability(*capability)


def test_flags_name_the_architecture_itself() -> None:
    assert arch_named("sm_90a").nvcc_flags == ("-gencode=arch=compute_90a,code=sm_90a",)
    assert arch_named("sm_90a").torch_arch == "9.0a"
    assert arch_named("cpu").nvcc_flags == ()


def test_distance_orders_neighbours() -> None:
    names = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"]
    assert sorted(names, key=lambda name: arch_distance("sm_86", name))[:2] == ["sm_86", "sm_89"]
    assert arch_distance("cpu", "sm_80") == float("inf")
