"""What people write as tables, in JSON or TOML, read into the classes that say what stands there; strict.

    read_table(Stratum, {"name": "a", "chips": 5, "flop_per_chip_day": 1e19}, "strata[0]")  ->  Stratum("a", 5, 1e19)

A field without default must be there, and none that the class does not have. Unlike documents (``commit.codec``) such a file
has many spellings and no canonical form, and its numbers are written as people write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from tallystick.commit.field_rules import Via
from tallystick.errors import InvalidInput

T = TypeVar("T")
_KINDS: Mapping[object, tuple[str, type | UnionType]] = {
    str: ("a text", str), bool: ("true or false", bool), int: ("a whole number", int), float: ("a number", int | float),
}  # fmt: skip


def read_table(kind: type[T], value: object, what: str, *, whose: str = "") -> T:
    """Return the dataclass ``kind`` that the table ``value`` describes; ``whose`` names in errors who has no such field.

    Raises:
        InvalidInput: a field missing, unknown, of another type, or against a rule of the class.
    """
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: must be an object")
    held, hints = cast("dict[str, object]", value), get_type_hints(kind, include_extras=True)
    for each in fields(cast("Any", kind)):
        if each.name not in held and each.default is MISSING and each.default_factory is MISSING:
            raise InvalidInput(f"{what}: field {each.name!r} is missing")
    if unknown := sorted(set(held) - set(hints)):
        raise InvalidInput(f"{what}: field {ascii(unknown[0])[:80]} is unknown{whose}")
    read = {name: _read(hints[name], item, f"{what}: {name}") for name, item in held.items()}
    try:
        return kind(**read)
    except InvalidInput as problem:
        raise InvalidInput(f"{what}: {problem}") from None


def _read(kind: Any, value: object, what: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        for rule in args[1:]:
            if isinstance(rule, Via):
                return rule.read(value, what)
    if is_dataclass(kind):
        return read_table(cast("type[object]", kind), value, what)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise InvalidInput(f"{what} must be one of {', '.join(args)}, is {ascii(value)[:80]}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise InvalidInput(f"{what} must be a list, is {ascii(value)[:80]}")
        items = cast("list[object]", value)
        return tuple(_read(args[0], item, f"{what}[{at}]") for at, item in enumerate(items))
    if args:  # ``X | None``: what may be left out, not written as nothing
        return _read(args[0], value, what)
    words, types = _KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise InvalidInput(f"{what} must be {words}, is {ascii(value)[:80]}")
    try:
        return kind(value)
    except OverflowError:
        raise InvalidInput(f"{what} exceeds binary64") from None
