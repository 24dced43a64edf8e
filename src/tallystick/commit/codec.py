"""Documents from classes: the annotations of a frozen dataclass say what its JSON object holds.

    @dataclass(frozen=True)
    class Visit(Document, form="tallystick/example/1", what="visit", limit=1 << 12):
        chip: Annotated[bytes, Hex()]
        at: Annotated[int, Least(0)]
        beacon: Annotated[int, At("beacon", "round")]

    Visit(b"a", 3, 4).encode()    ->  b'{"at":3,"beacon":{"round":4},"chip":"61","format":"tallystick/example/1"}'
    Visit.parse(data)             ->  the same Visit, or InvalidInput that names document, field and what stood there

What an annotation means:

    str, bool, int, X | None       as in JSON; None is null
    float                          text, C99 hexadecimal
    Literal["a", "b"]              one of these texts
    tuple[X, ...]                  a list
    tuple[X, Y]                    a list of two
    Mapping[str, X]                an object
    Mapping[int, X]                a list of [key, value], ascending
    Mapping[str, object], object   whatever stands there
    a ``Document``                 an object with its fields, or as ``Row`` says

Rules go beside the type, in ``Annotated`` (``commit.field_rules``).
What several fields must have in common stands in ``__post_init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from tallystick.commit.encoding import (
    INTEGER_LIMIT,
    Fields,
    canonical_json,
    hex_float,
    kind_of,
    parse_canonical_json,
    parse_hex,
    parse_hex_float,
    short,
)
from tallystick.commit.field_rules import (
    Ascii,
    At,
    Elsewhere,
    Embedded,
    Hex,
    Least,
    Match,
    Row,
    Size,
    Spare,
    Via,
)
from tallystick.errors import InvalidInput


class Document:
    """The base class of what is written as a JSON object: a frozen dataclass.

    Class arguments:
        form: what the field ``format`` says; None for an object inside others, which has no such field.
        what: names the document in errors.
        limit: most bytes that ``parse`` looks at.
        implied: properties that stand in the object too; a reader holds them against the fields.
    """

    _form: ClassVar[str | None] = None
    _what: ClassVar[str] = ""
    _limit: ClassVar[int] = 0
    _implied: ClassVar[tuple[str, ...]] = ()
    LOOSE: ClassVar[bool] = False  # whether a reader ignores what it does not know, as in-toto asks

    def __init_subclass__(
        cls, *, form: str | None = None, what: str = "", limit: int = 0, implied: tuple[str, ...] = ()
    ) -> None:
        super().__init_subclass__()
        cls._form, cls._what, cls._limit, cls._implied = form, what or cls.__name__, limit, implied

    def __post_init__(self) -> None:
        """Check every field's rule; a class with rules of its own calls this first."""
        _object_of(type(self)).check(self, self.label())

    @classmethod
    def about(cls) -> tuple[str, int]:
        """Return what errors call one, and the most bytes that ``parse`` looks at."""
        return cls._what, cls._limit

    def label(self) -> str:
        """Return what errors call this one."""
        return self._what

    def fields(self) -> dict[str, object]:
        """Return the JSON object."""
        said = _object_of(type(self)).write(self) | {name: getattr(self, name) for name in self._implied}
        return said if self._form is None else said | {"format": self._form}

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(self.fields())

    def row(self, word: str | None = None) -> list[object]:
        """Return the list of the fields, in order, behind ``word``."""
        return cast("list[object]", _row_of(type(self), word).write(self))

    @classmethod
    def read_row(cls, value: object, word: str | None = None, *, what: str | None = None) -> Self:
        """Return what such a list says.

        Raises:
            InvalidInput: it has another length or word, or an item is of another type or breaks its rule.
        """
        return _row_of(cls, word).read(value, what or cls._what)

    @classmethod
    def parse(cls, data: bytes, *, what: str | None = None) -> Self:
        """Return what ``data`` encodes; ``what`` names it in errors.

        Raises:
            InvalidInput: ``data`` is longer than the limit, or not what ``encode`` returns.
        """
        what = what or cls._what
        return cls.read(parse_canonical_json(data, what=what, limit=cls._limit), what=what)

    @classmethod
    def read(cls, value: object, *, what: str | None = None) -> Self:
        """Return what a JSON object says.

        Raises:
            InvalidInput: a field is missing, unknown, of another type, or breaks its rule.
        """
        what = what or cls._what
        shape, head = _object_of(cls), () if cls._form is None else ("format",)
        held = shape.fields_of(value, what, (*head, *cls._implied))
        if cls._form is not None:
            held.constant("format", cls._form)
        item = cls(**shape.read(held, what))
        for name in cls._implied:
            held.constant(name, getattr(item, name))
        return item


# -- inside: a shape writes a value of one type as JSON, and reads it back; the text names it in errors


def _fine(item: Any, what: str) -> None:
    """Have no rule."""


@dataclass(frozen=True)
class _Shape:
    write: Callable[[Any], object]
    read: Callable[[object, str], Any]
    check: Callable[[Any, str], None] = _fine


@dataclass(frozen=True)
class _Member:
    """A dataclass's field: its name there, its shape, and whether it is left out where it is empty."""

    attribute: str
    shape: _Shape
    spare: bool


@dataclass(frozen=True)
class _Object:
    """Members by name, each a field or an object that holds more of them."""

    members: dict[str, _Member | _Object]
    loose: bool = False

    def fields_of(self, value: object, what: str, extra: tuple[str, ...] = ()) -> Fields:
        """Return the fields of the object ``value``, which must have those of the members and ``extra``."""
        there = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        spare = (name for name, each in self.members.items() if isinstance(each, _Member) and each.spare)
        names = {*self.members, *extra} - {name for name in spare if name not in there}
        if self.loose and isinstance(value, dict):
            value = {name: held for name, held in there.items() if name in names}
        return Fields(value, what=what, names=names)

    def write(self, item: object) -> dict[str, object]:
        said: dict[str, object] = {}
        for name, member in self.members.items():
            if isinstance(member, _Object):
                said[name] = member.write(item)
                continue
            value = getattr(item, member.attribute)
            if value or not member.spare:
                said[name] = member.shape.write(value)
        return said

    def check(self, item: object, what: str) -> None:
        for name, member in self.members.items():
            if isinstance(member, _Object):
                member.check(item, f"{what}: {name}")
            elif member.shape.check is not _fine:
                member.shape.check(getattr(item, member.attribute), f"{what}: {name}")

    def read(self, held: Fields, what: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in held.names():
            if (member := self.members.get(name)) is None:
                continue
            value, inside = held.value(name), f"{what}: {name}"
            if isinstance(member, _Object):
                found |= member.read(member.fields_of(value, inside), inside)
                continue
            found[member.attribute] = member.shape.read(value, inside)
            if member.spare and not found[member.attribute]:
                raise InvalidInput(f"{inside} must be left out where it is empty")
        return found


@cache
def _object_of(cls: type[Document]) -> _Object:
    top = _Object({}, cls.LOOSE)
    for name, hint in _hints(cls).items():
        if Elsewhere() in (rules := _rules(hint)):
            continue
        path = next((rule.path for rule in rules if isinstance(rule, At)), (name,))
        place = top
        for step in path[:-1]:
            inner = place.members.setdefault(step, _Object({}, cls.LOOSE))
            if not isinstance(inner, _Object):
                raise TypeError(f"{cls.__name__}.{name}: {step} is a field of its own")
            place = inner
        place.members[path[-1]] = _Member(name, _shape_of(hint), Spare() in rules)
    return top


def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _rules(hint: Any) -> tuple[object, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _shape_of(hint: Any, outer: tuple[object, ...] = ()) -> _Shape:
    rules = (*_rules(hint), *outer)
    for rule in rules:
        if isinstance(rule, Via):
            return _Shape(rule.write, rule.read)
    kind = get_args(hint)[0] if _rules(hint) else hint
    shape = _kind_of(kind, rules)
    sizes = [rule for rule in rules if isinstance(rule, Size) and get_origin(kind) not in (Union, UnionType)]
    return _sized(shape, sizes[0]) if sizes else shape


def _kind_of(kind: Any, rules: tuple[object, ...]) -> _Shape:
    origin, args = get_origin(kind), get_args(kind)
    if kind is object:
        return _Shape(_same, lambda value, what: value)
    if kind in _READERS:
        return _scalar(kind, rules)
    if origin is Literal:
        return _Shape(_same, lambda value, what: _one_of(value, args, what))
    if origin in (Union, UnionType):
        return _either(args, rules)
    if origin is tuple:
        return (
            _list(_shape_of(args[0])) if args[1:] == (...,) else _row([_shape_of(arg) for arg in args], tuple)
        )
    if origin is Mapping:
        return (_numbered if args[0] is int else _mapping)(args[0], _shape_of(args[1]))
    if isinstance(kind, type) and issubclass(kind, Document):
        for rule in rules:
            if isinstance(rule, Row):
                return _row_of(kind, rule.word)
        if Embedded() in rules:
            return _Shape(
                lambda item: item.encode().decode("ascii"),
                lambda value, what: kind.parse(_ascii(value, what), what=what),
            )
        return _Shape(kind.fields, lambda value, what: kind.read(value, what=what))
    raise TypeError(f"{kind}: has no form in a document")


def _same(item: object) -> object:
    return item


def _refuse(what: str, expected: str, value: object) -> NoReturn:
    raise InvalidInput(f"{what} must be {expected}, is {kind_of(value)}")


def _text(value: object, what: str) -> str:
    return value if isinstance(value, str) else _refuse(what, "a string", value)


def _integer(value: object, what: str) -> int:
    return value if type(value) is int else _refuse(what, "an integer", value)


def _boolean(value: object, what: str) -> bool:
    return value if isinstance(value, bool) else _refuse(what, "true or false", value)


def _items(value: object, what: str) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else _refuse(what, "a list", value)


def _real(value: object, what: str) -> float:
    return parse_hex_float(_text(value, what), what=what)


def _bytes(value: object, what: str) -> bytes:
    text = _text(value, what)
    return parse_hex(text, n_bytes=len(text) // 2, what=what)


_READERS: dict[Any, Callable[[object, str], Any]] = {
    str: _text, bool: _boolean, int: _integer, float: _real, bytes: _bytes,
}  # fmt: skip
_WRITERS: dict[Any, Callable[[Any], object]] = {float: hex_float, bytes: bytes.hex}
_NAMES: dict[Any, str] = {str: "a string", bool: "true or false", int: "an integer", type(None): "null"}


def _scalar(kind: Any, rules: tuple[object, ...]) -> _Shape:
    if Ascii() in rules:
        return _Shape(lambda item: item.decode("ascii"), _ascii)
    checks = [_CHECKS[type(rule)](rule) for rule in rules if type(rule) in _CHECKS]

    def check(item: object, what: str) -> None:
        for each in checks:
            each(item, what)

    return _Shape(_WRITERS.get(kind, _same), _READERS[kind], check if checks else _fine)


def _ascii(value: object, what: str) -> bytes:
    text = _text(value, what)
    return text.encode("ascii") if text.isascii() else _refuse(what, "in ASCII", value)


def _least(rule: Least) -> Callable[[Any, str], None]:
    def check(found: float, what: str) -> None:
        if not found >= rule.least or (isinstance(found, int) and found >= INTEGER_LIMIT):
            allowed = f"{rule.least} to 2**63 - 1" if isinstance(found, int) else f"at least {rule.least}"
            raise InvalidInput(f"{what} must be {allowed}, is {found}")

    return check


def _hex(rule: Hex) -> Callable[[Any, str], None]:
    def check(found: str | bytes, what: str) -> None:
        text = found.hex() if isinstance(found, bytes) else found
        parse_hex(text, n_bytes=len(text) // 2 if rule.n_bytes is None else rule.n_bytes, what=what)

    return check


def _match(rule: Match) -> Callable[[Any, str], None]:
    def check(found: str, what: str) -> None:
        if not rule.pattern.fullmatch(found):
            _refuse(what, rule.words, found)

    return check


_CHECKS: dict[type, Callable[[Any], Callable[[Any, str], None]]] = {Least: _least, Hex: _hex, Match: _match}


def _one_of(value: object, allowed: tuple[object, ...], what: str) -> object:
    if type(value) is not str or value not in allowed:
        _refuse(what, f"one of {', '.join(map(str, allowed))}", value)
    return value


def _either(args: tuple[Any, ...], rules: tuple[object, ...]) -> _Shape:
    """A type or null; or one of several scalars."""
    others = [arg for arg in args if arg is not type(None)]
    if len(others) == 1:
        inner = _shape_of(others[0], rules)
        return _Shape(
            lambda item: None if item is None else inner.write(item),
            lambda value, what: None if value is None else inner.read(value, what),
            lambda item, what: None if item is None else inner.check(item, what),
        )

    def read(value: object, what: str) -> object:
        return (
            value if type(value) in args else _refuse(what, " or ".join(_NAMES[arg] for arg in args), value)
        )

    return _Shape(_same, read)


def _list(item: _Shape) -> _Shape:
    def read(value: object, what: str) -> object:
        return tuple(item.read(each, f"{what}[{at}]") for at, each in enumerate(_items(value, what)))

    def check(items: Iterable[Any], what: str) -> None:
        for at, each in enumerate(items):
            item.check(each, f"{what}[{at}]")

    quiet = item.check is _fine
    return _Shape(lambda items: [item.write(each) for each in items], read, _fine if quiet else check)


def _row(
    shapes: list[_Shape],
    make: Callable[[list[Any]], object],
    word: str | None = None,
    names: list[str] | None = None,
) -> _Shape:
    """A list of fixed length, each item of its own type; of an object's attributes ``names``, or a tuple."""
    first = [] if word is None else [word]

    def write(item: Any) -> object:
        parts = item if names is None else [getattr(item, name) for name in names]
        return [*first, *(shape.write(part) for shape, part in zip(shapes, parts, strict=True))]

    def read(value: object, what: str) -> object:
        items = _items(value, what)
        if len(items) != len(first) + len(shapes) or items[: len(first)] != first:
            begins = f" that begins with {word!r}" if word else ""
            raise InvalidInput(
                f"{what} must be a list of {len(first) + len(shapes)}{begins}, has {len(items)}"
            )
        parts = zip(shapes, items[len(first) :], strict=True)
        return make([shape.read(part, f"{what}[{at}]") for at, (shape, part) in enumerate(parts)])

    def check(item: Any, what: str) -> None:
        if names is None:  # a document has checked itself
            for at, (shape, part) in enumerate(zip(shapes, item, strict=True)):
                shape.check(part, f"{what}[{at}]")

    return _Shape(write, read, check)


@cache
def _row_of(cls: type, word: str | None) -> _Shape:
    hints = _hints(cls)
    return _row([_shape_of(hint) for hint in hints.values()], lambda row: cls(*row), word, list(hints))


def _mapping(key: Any, item: _Shape) -> _Shape:
    """An object; with exactly the keys that a literal type names."""
    keys = get_args(key) if get_origin(key) is Literal else None

    def read(value: object, what: str) -> object:
        if not isinstance(value, dict):
            _refuse(what, "an object", value)
        held = cast("dict[str, object]", value)
        if keys is not None:
            Fields(held, what=what, names=keys)
        return {name: item.read(each, f"{what}: {short(name)}") for name, each in held.items()}

    def check(items: Mapping[str, Any], what: str) -> None:
        for name, each in items.items():
            item.check(each, f"{what}: {short(name)}")

    return _Shape(lambda items: {name: item.write(each) for name, each in items.items()}, read, check)


def _numbered(key: Any, item: _Shape) -> _Shape:
    rows = _list(_row([_scalar(key, ()), item], tuple))

    def read(value: object, what: str) -> object:
        found = dict(cast("tuple[tuple[int, Any], ...]", rows.read(value, what)))
        if list(found) != sorted(found) or len(found) != len(_items(value, what)):
            raise InvalidInput(f"{what} must ascend")
        return found

    return _Shape(lambda items: rows.write(sorted(items.items())), read)


def _sized(shape: _Shape, rule: Size) -> _Shape:
    def check(item: Sized, what: str) -> None:
        if not rule.least <= (n := len(item)) <= rule.most:
            unit = "characters" if isinstance(item, str) else "bytes" if isinstance(item, bytes) else "items"
            raise InvalidInput(f"{what} must have {rule.least} to {rule.most} {unit}, has {n}")
        shape.check(item, what)

    def read(value: object, what: str) -> object:
        if isinstance(value, list) and len(cast("list[object]", value)) > rule.most:
            check(cast("list[object]", value), what)  # before its items are looked at
        return shape.read(value, what)

    return _Shape(shape.write, read, check)
