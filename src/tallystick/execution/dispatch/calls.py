"""One call of a torch operator: the name that it has in the operator table, and its arguments by name or position."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tallystick.execution.dispatch.decisions import OperatorPass
from tallystick.execution.dispatch.table import EXACT, RANDOM

Operator = Any  # torch._ops.OpOverload; its stubs are private
Arguments = tuple[Any, ...]
Handler = Callable[[OperatorPass, Operator, Arguments, dict[str, Any]], Any]


@cache
def table_name(func: Operator) -> str:
    """Return the operator's name in the table: without overload, in-place forms as the others."""
    name = func._schema.name
    return (
        name[:-1]
        if name.endswith("_") and not name.endswith("__") and name not in RANDOM and name not in EXACT
        else name
    )


def argument_at(func: Operator, args: Arguments, kwargs: dict[str, Any], position: int) -> Any:
    """Return the argument that the schema has at ``position``, its default if it was not given."""
    argument = func._schema.arguments[position]
    return args[position] if len(args) > position else kwargs.get(argument.name, argument.default_value)


def argument_named(func: Operator, args: Arguments, kwargs: dict[str, Any], name: str) -> Any:
    """Return the argument called ``name``, its default if not given, None if ``func`` has none of that name."""
    position, default = declared(func, name)
    return args[position] if position < len(args) else kwargs.get(name, default)


def all_arguments(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments in the schema's order, defaults filled in."""
    expected = _names_and_defaults(func)
    if len(args) == len(expected):
        return args
    return (*args, *(kwargs.get(name, default) for name, default in expected[len(args) :]))


@cache
def _names_and_defaults(func: Operator) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in func._schema.arguments)


@cache
def declared(func: Operator, name: str) -> tuple[int, Any]:
    """Return position and default of an argument; a position that no call has, and None, if there is none of that name."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return position, argument.default_value
    return sys.maxsize, None


def widened(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
    """Return the arguments of a call with float32 tensors as float64, those excepted that ``func`` writes to."""
    if not (_is_narrow(args) or _is_narrow(kwargs.values())):
        return args, kwargs
    positions, names = _written(func)
    wide = tuple(value if at in positions else _wide(value) for at, value in enumerate(args))
    return wide, {name: value if name in names else _wide(value) for name, value in kwargs.items()}


@cache
def _written(func: Operator) -> tuple[frozenset[int], frozenset[str]]:
    """Return positions and names of the arguments that ``func`` writes to."""
    declared = func._schema.arguments
    written = [
        at for at, each in enumerate(declared) if each.alias_info is not None and each.alias_info.is_write
    ]
    return frozenset(written), frozenset(declared[at].name for at in written)


def _is_narrow(values: Any) -> bool:
    """Whether one of ``values`` is or holds a float32 tensor."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is torch.float32:
                return True
        elif isinstance(value, (tuple, list)) and _is_narrow(value):
            return True
    return False


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    if isinstance(value, (tuple, list)):
        return type(value)(_wide(item) for item in value)
    return value
