"""The text form of a mask: a small parser from `(causal() & block_mask(#0, 64, 64))` to a tree."""

from __future__ import annotations

import re
from functools import lru_cache

from tilewright.generator.errors import InvalidInput

Argument = int | str
"""An integer, `#0` for a tensor by its index, or a bare word."""

Tree = tuple[str, tuple["Tree | Argument", ...]]
"""(`&` or `|` or a constructor's name, its operands or arguments)."""

_TOKEN = re.compile(r"\s*(?:(-?\d+)|(#\d+)|([A-Za-z_]\w*)|([()&|,]))")


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> Tree:
    """The tree of a mask's `spec`; `&` binds tighter than `|`, as in Python.

    Raises `InvalidInput` naming the column where the text stops making sense.
    """
    reader = _Reader(text)
    tree = reader.union()
    reader.finish()
    return tree


class _Reader:
    """Recursive descent over the tokens of one spec."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def peek(self) -> str:
        found = _TOKEN.match(self.text, self.position)
        return found.group(0).strip() if found else ""

    def take(self, expected: str = "") -> str:
        found = _TOKEN.match(self.text, self.position)
        word = found.group(0).strip() if found else ""
        if found is None or (expected and word != expected):
            self.fail(f"expected {expected or 'a mask'}")
        assert found is not None
        self.position = found.end()
        return word

    def fail(self, problem: str) -> None:
        rest = self.text[self.position :].strip()[:20] or "the end"
        raise InvalidInput(
            f"cannot read the mask {self.text!r}: {problem} at column {self.position}, got {rest!r}"
            "; masks are written as causal(), sliding_window(32, 32) | global_stride(512), ..."
        )

    def finish(self) -> None:
        if self.text[self.position :].strip():
            self.fail("expected & or | or the end")

    def union(self) -> Tree:
        tree = self.intersection()
        while self.peek() == "|":
            self.take()
            tree = ("|", (tree, self.intersection()))
        return tree

    def intersection(self) -> Tree:
        tree = self.primary()
        while self.peek() == "&":
            self.take()
            tree = ("&", (tree, self.primary()))
        return tree

    def primary(self) -> Tree:
        if self.peek() == "(":
            self.take()
            tree = self.union()
            self.take(")")
            return tree
        if not self.peek().isidentifier():
            self.fail("expected a mask")
        return self.take(), self.arguments()

    def arguments(self) -> tuple[Argument, ...]:
        self.take("(")
        values: list[Argument] = []
        while self.peek() != ")":
            if values:
                self.take(",")
            word = self.take()
            if word in "()&|,":
                self.fail("expected an integer, a tensor (#0) or a word")
            values.append(int(word) if word.lstrip("-").isdigit() else word)
        self.take(")")
        return tuple(values)
