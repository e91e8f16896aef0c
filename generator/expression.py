"""Arithmetic written in a family's `space.toml`: only what is on the list below, compiled once."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

from tilewright.generator.errors import InvalidInput

_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.Pow),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.And, ast.Or, ast.Not, ast.USub),
)
_FUNCTIONS: dict[str, Any] = {"min": min, "max": max, "abs": abs}
_GLOBALS: dict[str, Any] = {"__builtins__": {}, **_FUNCTIONS}


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of `text`: numbers, strings, tuples, names, + - * / // % **, comparisons, and/or/not, `a if c else b`,
    `min`, `max`, `abs`. Raises `InvalidInput` on anything else and on an unknown name.
    """
    try:
        return eval(_compiled(text), _GLOBALS, names)  # every node was checked
    except NameError as error:
        known = ", ".join(sorted(names))
        raise InvalidInput(f"unknown name {error.name!r} in {text!r}; known: {known}") from error


@cache
def names_in(text: str) -> frozenset[str]:
    """The names that `text` mentions, functions left out; `InvalidInput` where it is not an expression."""
    return frozenset(_compiled(text).co_names) - _FUNCTIONS.keys()


@cache
def _compiled(text: str) -> CodeType:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise InvalidInput(f"not an expression: {text!r}: {error.msg}") from error
    _check(tree.body, text)
    return compile(tree, text, "eval")


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float | str):
            parts: list[ast.expr] = []
        case ast.Name():
            parts = []
        case ast.Tuple(elts=elements):
            parts = elements
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            parts = [left, right]
        case ast.UnaryOp(op=op, operand=operand) if isinstance(op, _OPERATORS):
            parts = [operand]
        case ast.BoolOp(values=values):
            parts = values
        case ast.IfExp(test=test, body=body, orelse=orelse):
            parts = [test, body, orelse]
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(isinstance(op, _OPERATORS) for op in ops):
            parts = [left, *comparators]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            parts = arguments
        case _:
            raise InvalidInput(f"{ast.unparse(node)!r} is not allowed in {text!r}")
    for part in parts:
        _check(part, text)
