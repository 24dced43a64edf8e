"""What a document's field must be, beside its type: the marks that ``commit.codec`` reads in ``Annotated``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from tallystick.commit.encoding import HASH_BYTES, kind_of, parse_hex
from tallystick.errors import InvalidInput


@dataclass(frozen=True)
class Least:
    """A number is at least this."""

    least: int


@dataclass(frozen=True)
class Hex:
    """Bytes written in lower-case hexadecimal, or a text that is that; ``n_bytes`` of them, any number for None."""

    n_bytes: int | None = None


@dataclass(frozen=True)
class Ascii:
    """Bytes that are a text in ASCII: a document inside another one."""


@dataclass(frozen=True)
class Size:
    """A text, list or object has ``least`` to ``most`` characters or items."""

    least: int
    most: int


@dataclass(frozen=True)
class Match:
    """A text matches a pattern as a whole; ``words`` say what that is."""

    pattern: re.Pattern[str]
    words: str


@dataclass(frozen=True)
class At:
    """The field stands under these names, one inside the other, instead of under its own."""

    path: tuple[str, ...]

    def __init__(self, *path: str) -> None:
        object.__setattr__(self, "path", path)


@dataclass(frozen=True)
class Embedded:
    """A document stands in the other one as a text, its own encoding."""


@dataclass(frozen=True)
class Row:
    """A dataclass is the list of its fields, in order; behind a word, if ``word`` is given."""

    word: str | None = None


@dataclass(frozen=True)
class Spare:
    """The field is left out where it is empty; a document in which it stands and is empty is refused."""


@dataclass(frozen=True)
class Elsewhere:
    """The field is not in this document; what reads it takes the default."""


@dataclass(frozen=True)
class Via:
    """The field's own two ways: what it is in JSON, and back from JSON (a value, and what to call it in errors)."""

    write: Callable[[Any], object]
    read: Callable[[object, str], Any]


def hexed(parse: Callable[..., Any], *, most: int | None = None) -> Via:
    """Return the rule of what stands in hexadecimal, its own encoding; ``parse`` reads that, of ``most`` bytes at most."""

    def read(value: object, what: str) -> object:
        if not isinstance(value, str) or (most is not None and len(value) > 2 * most):
            limit = "" if most is None else f" of at most {most} bytes"
            raise InvalidInput(f"{what} must be hexadecimal{limit}, is {kind_of(value)}")
        return parse(parse_hex(value, n_bytes=len(value) // 2, what=what), what=what)

    return Via(lambda item: item.encode().hex(), read)


def _read_secret(value: object, what: str) -> bytes:
    if not isinstance(value, str) or len(value) != 2 * HASH_BYTES or value.strip("0123456789abcdef"):
        raise InvalidInput(f"{what} must be {2 * HASH_BYTES} lower-case hexadecimal digits")
    return bytes.fromhex(value)


Secret = Annotated[bytes, Via(bytes.hex, _read_secret)]  # 32 bytes that stand in no message
Signature = Annotated[bytes, Hex(), Size(0, 256)]
Hash = Annotated[bytes, Hex(HASH_BYTES)]
HashText = Annotated[str, Hex(HASH_BYTES)]
Whole = Annotated[int, Least(0)]
Positive = Annotated[int, Least(1)]
NotNegative = Annotated[float, Least(0)]
