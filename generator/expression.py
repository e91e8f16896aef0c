"""Arithmetic written in a family's `space.toml`, evaluated without Python's `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tilewright.generator.errors import InvalidInput

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


@cache
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InvalidInput(f"not an expression: {text!r}: {error.msg}") from error


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of `text`: numbers, strings, tuples, names, + - * / // % **, comparisons, and/or/not, `a if c else b`,
    `min`, `max`, `abs`. Raises `InvalidInput` on anything else and on an unknown name.
    """
    return _value(_parse(text), names, text)


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> Any:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float | str | bool):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise InvalidInput(f"unknown name {name!r} in {text!r}; known: {', '.join(sorted(names))}")
            return names[name]
        case ast.Tuple(elts=elements):
            return tuple(_value(e, names, text) for e in elements)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, names, text), _value(right, names, text))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names, text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names, text)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(v, names, text) for v in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_value(v, names, text) for v in values)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, names, text) else orelse, names, text)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            at = _value(left, names, text)
            for op, comparator in zip(ops, comparators, strict=True):
                following = _value(comparator, names, text)
                if type(op) not in _COMPARE or not _COMPARE[type(op)](at, following):
                    return False
                at = following
            return True
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(a, names, text) for a in args))
    raise InvalidInput(f"{ast.unparse(node)!r} is not allowed in {text!r}")
