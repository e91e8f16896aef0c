"""`Environment`: what it says of this machine, and that every field of it is part of its key."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys

import pytest

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import environment as module
from tilewright.runtime.environment import Environment, cpu_threads, device_name

FIELDS = [f.name for f in dataclasses.fields(Environment)]


def test_the_current_cpu_environment_is_full_and_repeatable() -> None:
    import torch

    found = Environment.current("cpu", compiler="g++ 13.2")
    assert found == Environment.current("cpu", compiler="g++ 13.2")
    assert (found.arch, found.compiler, found.torch) == ("cpu", "g++ 13.2", torch.__version__)
    assert found.device == device_name("cpu")
    assert found.python == ".".join(platform.python_version_tuple()[:2])
    assert found.threads >= 1
    assert (found.driver, found.cuda) == ("", "")


@pytest.mark.gpu
def test_the_current_gpu_environment_names_the_gpu() -> None:
    import torch

    found = Environment.current("cuda")
    assert found.device == torch.cuda.get_device_name() == device_name("cuda:0")
    assert found.arch.startswith("sm_")
    assert found.driver
    assert found.threads == 0


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_in_the_key_and_comes_back(environment: Environment, field: str) -> None:
    changed = dataclasses.replace(environment, **{field: 64 if field == "threads" else "other"})
    assert changed.digest != environment.digest
    assert Environment.from_dict(changed.to_dict()) == changed


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": ""},
        {"device": "a\x1b[31mb"},
        {"torch": "x" * 1000},
        {"threads": -1},
        {"threads": 1.5},
        {"threads": True},
        {"driver": None},
        {"unknown": "x"},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_is_refused(environment: Environment, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Environment.from_dict({**environment.to_dict(), **wrong})


@pytest.mark.parametrize("target", ["tpu", "cuda:x", "cuda:-1", ""])
def test_an_unknown_target_is_named(target: str) -> None:
    with pytest.raises(InvalidInput, match=f"got {target}"):
        Environment.current(target)


def test_a_cuda_target_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidInput, match="no CUDA device"):
        Environment.current("cuda:0")


def test_an_index_past_the_last_gpu_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert module.cuda_index("cuda:1") == 1
    with pytest.raises(InvalidInput, match="2 CUDA device"):
        module.cuda_index("cuda:2")


def test_threads_follow_openmps_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert cpu_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "nonsense")
    allowed = cpu_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cpu_threads() == allowed >= 1


def test_winners_and_records_need_no_sql() -> None:
    script = (
        "import sys, tilewright.runtime.winners as w; w.shipped_winners(); "
        "assert not {'sqlalchemy', 'optuna', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
