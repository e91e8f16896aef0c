"""The small language of `space.toml`."""

from __future__ import annotations

import pytest

from tilewright.generator.errors import InvalidInput
from tilewright.generator.expression import evaluate, names_in

NAMES = {"a": 6, "b": 4, "name": "list", "flag": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a * b + 1", 25),
        ("a // b, -a", (1, -6)),
        ("a % b == 2 and not a < b", True),
        ("1 if name in ('list', 'scan') else 0", 1),
        ("4 <= a <= 6", True),
        ("4 <= b < a < 6", False),
        ("max(a, b) - min(a, b)", 2),
        ("flag or missing", True),
        ("2 ** 5 / 4", 8.0),
    ],
)
def test_values(text: str, value: object) -> None:
    assert evaluate(text, NAMES) == value


def test_names_that_are_mentioned() -> None:
    assert names_in("max(a, 2) if flag else 'b' in (name, 'a')") == {"a", "flag", "name"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a +", "not an expression"),
        ("missing + 1", "unknown name 'missing'"),
        ("__import__('os')", "is not allowed"),
        ("a.real", "is not allowed"),
        ("[x for x in a]", "is not allowed"),
        ("(lambda: 1)()", "is not allowed"),
    ],
)
def test_anything_else_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        evaluate(text, NAMES)
