"""`tilewright check`: what it prints, what it fails on, and what it says when it is asked for the impossible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tilewright.cli import main
from tilewright.generator.errors import Outcome
from tilewright.generator.variant import Kernel
from tilewright.tuner import host_check
from tilewright.tuner.cases import HOST_SHAPES
from tilewright.tuner.host_check import CheckResult

LADDER = ("--family", "ladder", "--arch", "sm_80")


def _check(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["check", "--json", *arguments]) == code
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_kernels_are_executed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    document = _check(capsys, *LADDER, "--variants", "2", "--seed", "5", "--jobs", "1")
    assert document["archs"] == ["sm_80"]
    assert (document["failed"], document["left_out"], document["seed"]) == (0, 0, 5)
    assert 0 < document["pairs"]["covered"] < document["pairs"]["legal"]
    missing = document["pairs"]["legal"] - document["pairs"]["covered"]
    assert len(document["pairs"]["missing"]) == missing
    assert len(document["kernels"]) == 2
    for one in document["kernels"]:
        kernel = Kernel.from_dict(one["kernel"])
        assert (kernel.spec.family, kernel.arch, one["outcome"]) == ("ladder", "sm_80", "ok")
        assert set(one["case_ms"]) <= {shape.name for shape in HOST_SHAPES}
        assert len(one["case_ms"]) >= len(HOST_SHAPES) - 1  # a row may not fit
        assert all(ms > 0 for ms in one["case_ms"].values())


def _pretend(monkeypatch: pytest.MonkeyPatch, *, wrong: int = 0, cut: int = 0) -> None:
    """Have the first kernels fail and the last ones not be checked, without building any."""

    def checked(kernels: list[Kernel], **options: object) -> Iterator[CheckResult]:
        for number, kernel in enumerate(kernels[: len(kernels) - cut]):
            if number < wrong:
                yield CheckResult(kernel, Outcome.ILLEGAL, "case 'x', seed 0: [a race]; kernel.cu:212 in f", 1.25)
            else:
                yield CheckResult(kernel, Outcome.OK, "16 cases within bounds", 1.25, (("x", 20.0), ("y", 41.0)))

    monkeypatch.setattr(host_check, "check_kernels", checked)


def test_a_table_has_a_row_for_each_family_and_architecture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch)
    assert main(["check", "--arch", "sm_75", "--arch", "sm_80", "--family", "ladder", "--family", "forward_wmma"]) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in printed.splitlines() if "sm_" in line]
    assert [row[:2] for row in rows[:-1]] == [
        ["forward_wmma", "sm_75"], ["forward_wmma", "sm_80"], ["ladder", "sm_75"], ["ladder", "sm_80"],
    ]  # fmt: skip
    assert all(row[4:] == ["0", "30", "41", "1.2"] for row in rows[:-1])
    assert all(int(row[3]) == 2 * int(row[2]) for row in rows[:-1])
    assert "kernels right for sm_75, sm_80; " in printed
    covered, legal = printed.split("sm_80; ")[1].split(" legal")[0].split(" of ")
    assert covered == legal


def test_a_failure_is_told_in_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, wrong=1)
    assert main(["check", *LADDER]) == 1
    printed = capsys.readouterr().out
    assert "failed ladder/scan " in printed
    assert "illegal: case 'x', seed 0: [a race]; kernel.cu:212 in f" in printed
    assert _check(capsys, *LADDER, code=1)["failed"] == 1


def test_what_a_time_limit_leaves_out_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, cut=2)
    assert main(["check", *LADDER, "--time-limit", "9"]) == 1
    complaint = capsys.readouterr().err
    assert "2 of " in complaint
    assert "pairs were left out by --time-limit 9; allow more time" in complaint
    # Who asks for a few kernels has given up the pairs already.
    assert main(["check", *LADDER, "--time-limit", "9", "--variants", "4"]) == 0
    assert "2 of 4 kernels" in capsys.readouterr().err


def test_most_of_the_pairs_take_fewer_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch)
    whole, most = _check(capsys, *LADDER), _check(capsys, *LADDER, "--pairs", "80")
    assert whole["pairs"]["covered"] == whole["pairs"]["legal"] == most["pairs"]["legal"]
    assert 0.8 * most["pairs"]["legal"] <= most["pairs"]["covered"] < most["pairs"]["legal"]
    assert len(most["kernels"]) < len(whole["kernels"])
    assert most["left_out"] == 0


def test_a_time_limit_of_nothing_checks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    document = _check(capsys, *LADDER, "--time-limit", "0", code=1)
    assert document["kernels"] == []
    assert document["left_out"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--arch", "sm_99"), "unknown architecture 'sm_99'; known: cpu, sm_75"),
        (("--arch", "cpu"), "--arch must be a GPU's, got cpu; known: sm_75, "),
        (("--family", "forward"), "unknown kernel family 'forward'; known: forward_decode, "),
        (("--family", "forward_cpu"), "--family must be one of CUDA kernels, got forward_cpu; known: forward_decode, "),
        (("--variants", "0"), "--variants must be 1 or more, got 0"),
        (("--pairs", "0"), "--pairs must be above 0 and at most 100 percent, got 0"),
        (("--jobs", "0"), "--jobs must be 1 or more, got 0"),
        (("--seed", "-1"), "--seed must be 0 or more, got -1"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilewright: ")
    assert error.count("\n") == 1
    assert complaint in error
