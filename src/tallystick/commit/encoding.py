"""Canonical bytes: one value has one encoding, and every digest names what it covers.

This room turns facts into bytes and bytes into 32-byte commitments; it knows nothing of
training, files or the network. This module holds the two encodings everything else uses:

    canonical_json({"b": 1, "a": [True, None]})   ->  b'{"a":[true,null],"b":1}'
    frame("tallystick/example/1", b"ab")          ->  u8 20 | tag | u64 2 | b"ab"

Floating-point numbers never appear in JSON: the caller writes ``hex_float(x)``, which is
exact and has one spelling.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from typing import TYPE_CHECKING, NoReturn, cast

from tallystick.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Collection

HASH_BYTES = 32  # SHA-256
INTEGER_LIMIT = 2**63  # integers are |n| < 2**63, so any language's signed 64-bit type holds them
DEPTH_LIMIT = 32  # nesting; far above any Tallystick format, far below every parser's own limit

_HEX = re.compile(r"[0-9a-f]*", re.ASCII)
_U64 = struct.Struct("<Q")


class _RefusedError(ValueError):
    """A JSON construct that canonical JSON does not have."""


def canonical_json(value: object) -> bytes:
    """Return the one encoding of ``value``: sorted keys, no whitespace, ASCII with escapes.

    ``value`` is built of str, bool, None, int with |n| < 2**63, list (or tuple) and dict with
    str keys, at most 32 deep. Keys are sorted by code point.

    Raises:
        InvalidInput: ``value`` holds anything else; a float or a lone surrogate, for example.
    """
    _must_be_encodable(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_canonical_json(data: bytes, *, what: str, limit: int) -> object:
    """Return the value whose canonical encoding is exactly ``data``, at most ``limit`` bytes.

    ``what`` names the document in messages.

    Raises:
        InvalidInput: ``data`` is longer, is not JSON, or is another spelling of its value
            (whitespace, key order, duplicate key, float, escape, trailing bytes).
    """
    if len(data) > limit:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {limit}")
    try:
        value: object = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_unique_keys,
            parse_float=_refuse_float,
            parse_int=_bounded_integer,
            parse_constant=_refuse_float,
        )
        again = canonical_json(value)
    except RecursionError as error:
        raise InvalidInput(f"{what}: nested deeper than {DEPTH_LIMIT}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what}: byte {error.start} is not ASCII") from error
    except (ValueError, InvalidInput) as error:
        raise InvalidInput(f"{what}: {error}") from error
    if again != data:
        raise InvalidInput(
            f"{what}: not the canonical encoding of its value ({_first_difference(data, again)})"
        )
    return value


def parse_json(data: bytes, *, what: str, limit: int) -> object:
    """Return the JSON value in ``data`` in any spelling: for documents that others write, or people.

    Which bytes were signed or named by a digest is for the caller to keep: this value does not give them back.

    Raises:
        InvalidInput: more than ``limit`` bytes, not UTF-8, not JSON, a key twice, a number that is no number or
            has over 20 digits, or nesting beyond ``DEPTH_LIMIT``.
    """
    if len(data) > limit:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {limit}")
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_int=_bounded_integer,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise InvalidInput(f"{what}: nested deeper than {DEPTH_LIMIT}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what}: byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise InvalidInput(f"{what}: not JSON ({error})") from error
    check_depth(value, what=what)
    return value


def is_same_json(stated: object, own: object) -> bool:
    """Return whether two JSON values are the same: true is not 1, and 1.0 is not 1, as they are to Python."""
    if isinstance(own, dict) and isinstance(stated, dict):
        mine, theirs = cast("dict[str, object]", own), cast("dict[str, object]", stated)
        return mine.keys() == theirs.keys() and all(is_same_json(theirs[name], mine[name]) for name in mine)
    if isinstance(own, list | tuple) and isinstance(stated, list | tuple):
        return len(own) == len(stated) and all(map(is_same_json, stated, own))
    return type(stated) is type(own) and stated == own


def check_depth(value: object, *, what: str, limit: int = DEPTH_LIMIT) -> None:
    """Return if lists and objects are nested at most ``limit`` deep; found out without recursion.

    Raises:
        InvalidInput: they are nested deeper.
    """
    row: list[object] = [value]
    for _ in range(limit):
        below: list[object] = []
        for item in row:
            if isinstance(item, dict):
                below += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                below += cast("list[object]", item)
        if not below:
            return
        row = below
    if any(isinstance(item, dict | list) for item in row):
        raise InvalidInput(f"{what}: nested deeper than {limit}")


def frame(tag: str, *parts: bytes | memoryview) -> bytes:
    """Return ``u8 len(tag) | tag | (u64 LE length | part) for each part``; injective in all arguments.

    Raises:
        InvalidInput: ``tag`` is empty, longer than 255 or not ASCII.
    """
    if not 0 < len(tag) < 256 or not tag.isascii():
        raise InvalidInput(f"domain tag {tag!r}: must be 1 to 255 ASCII characters")
    pieces: list[bytes | memoryview] = [bytes([len(tag)]), tag.encode("ascii")]
    for part in parts:
        n_bytes = part.nbytes if isinstance(part, memoryview) else len(part)
        pieces += [_U64.pack(n_bytes), part]
    return b"".join(pieces)


def digest(tag: str, *parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 of ``frame(tag, *parts)``: 32 bytes that name their domain and every length."""
    return hashlib.sha256(frame(tag, *parts)).digest()


def parse_hex(text: str, *, n_bytes: int, what: str) -> bytes:
    """Return the ``n_bytes`` bytes that ``text`` writes in lower-case hexadecimal.

    Raises:
        InvalidInput: another length, an upper-case digit, or no digit.
    """
    if len(text) != 2 * n_bytes or not _HEX.fullmatch(text):
        raise InvalidInput(f"{what}: must be {2 * n_bytes} lower-case hexadecimal digits, is {short(text)}")
    return bytes.fromhex(text)


def hex_float(value: float) -> str:
    """Return the exact text of ``value``: C99 hexadecimal, or ``inf``, ``-inf``, ``nan``."""
    return value.hex()


def parse_hex_float(text: str, *, what: str) -> float:
    """Return the float that ``hex_float`` writes as ``text``.

    Raises:
        InvalidInput: not a number, or another spelling of one (``0x1p0``, ``1.0``, ``Infinity``).
    """
    try:
        value = float.fromhex(text)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{what}: {short(text)} is not a hexadecimal float") from error
    if value.hex() != text:
        raise InvalidInput(f"{what}: {short(text)} must be written {value.hex()}")
    return value


class Fields:
    """A JSON object with exactly the named fields, read one by one with the type each must have.

        fields = Fields(value, what="claim", names=("at", "root"))
        Claim(fields.integer("at"), fields.text("root"))

    Every reader raises InvalidInput that names the document, the field and what stood there.
    """

    def __init__(self, value: object, *, what: str, names: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise InvalidInput(f"{what}: must be an object, is {kind_of(value)}")
        self._values = cast("dict[str, object]", value)
        self._what = what
        wanted = set(names)
        if self._values.keys() == wanted:
            return
        if missing := sorted(wanted - self._values.keys()):
            raise InvalidInput(f"{what}: field {missing[0]!r} is missing")
        if unknown := sorted(self._values.keys() - wanted):
            raise InvalidInput(f"{what}: field {short(unknown[0])} is unknown")

    def names(self) -> list[str]:
        """Return the names of all fields, in the object's order."""
        return list(self._values)

    def text(self, name: str) -> str:
        """Return a string."""
        value = self._values[name]
        return value if isinstance(value, str) else self._refuse(name, "a string")

    def optional_text(self, name: str) -> str | None:
        """Return a string, or None for null."""
        return None if self._values[name] is None else self.text(name)

    def integer(self, name: str) -> int:
        """Return an integer; true and false are not integers."""
        value = self._values[name]
        return (
            value
            if isinstance(value, int) and not isinstance(value, bool)
            else self._refuse(name, "an integer")
        )

    def boolean(self, name: str) -> bool:
        """Return true or false."""
        value = self._values[name]
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def constant(self, name: str, expected: str | int) -> None:
        """Return if the field is ``expected``."""
        value = self._values[name]
        if type(value) is not type(expected) or value != expected:
            self._refuse(name, repr(expected))

    def items(self, name: str) -> list[object]:
        """Return a list."""
        value = self._values[name]
        return cast("list[object]", value) if isinstance(value, list) else self._refuse(name, "a list")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self.items(name)
        texts = tuple(value for value in values if isinstance(value, str))
        return texts if len(texts) == len(values) else self._refuse(name, "a list of strings")

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers."""
        values = self.items(name)
        numbers = [value for value in values if type(value) is int]
        return tuple(numbers) if len(numbers) == len(values) else self._refuse(name, "a list of integers")

    def hashes(self, name: str) -> tuple[bytes, ...]:
        """Return a list of 32-byte hashes, written in hexadecimal."""
        what = f"{self._what}: {name}"
        return tuple(parse_hex(text, n_bytes=HASH_BYTES, what=what) for text in self.texts(name))

    def mapping(self, name: str) -> dict[str, object]:
        """Return an object whose fields are the caller's business."""
        value = self._values[name]
        return (
            cast("dict[str, object]", value) if isinstance(value, dict) else self._refuse(name, "an object")
        )

    def text_mapping(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings."""
        values = self.mapping(name)
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        return texts if len(texts) == len(values) else self._refuse(name, "an object of strings")

    def value(self, name: str) -> object:
        """Return whatever stands there."""
        return self._values[name]

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise InvalidInput(f"{self._what}: {name} must be {expected}, is {kind_of(self._values[name])}")


def parse_document(
    data: bytes, expected_format: str, *, what: str, limit: int, names: Collection[str]
) -> Fields:
    """Return the fields of a canonical JSON object whose field ``format`` says ``expected_format``.

    Args:
        data: the document's bytes, at most ``limit`` of them.
        expected_format: what the field ``format`` must be.
        what: names the document in messages.
        limit: most bytes that are looked at.
        names: every field of the object, ``format`` among them.

    Raises:
        InvalidInput: not canonical JSON, not an object with exactly these fields, or of another format.
    """
    fields = Fields(parse_canonical_json(data, what=what, limit=limit), what=what, names=names)
    fields.constant("format", expected_format)
    return fields


def _must_be_encodable(value: object) -> None:
    level: list[object] = [value]
    for depth in range(DEPTH_LIMIT + 1):
        inner: list[object] = []
        for item in level:
            kind = type(item)
            if kind is str:
                _must_be_unicode(cast("str", item))
            elif kind is int:
                if not -INTEGER_LIMIT < cast("int", item) < INTEGER_LIMIT:
                    raise InvalidInput("canonical JSON: an integer exceeds 63 bits")
            elif kind is list or kind is tuple or kind is dict:
                if depth == DEPTH_LIMIT:
                    raise InvalidInput(f"canonical JSON: nested deeper than {DEPTH_LIMIT}")
                inner += _values_in(cast("Collection[object]", item))
            elif item is not None and kind is not bool:
                raise InvalidInput(f"canonical JSON: has no form for {kind_of(item)}")
        if not inner:
            return
        level = inner


def _values_in(item: Collection[object]) -> Collection[object]:
    if not isinstance(item, dict):
        return item
    held = cast("dict[object, object]", item)
    for key in held:
        if type(key) is not str:
            raise InvalidInput(f"canonical JSON: key {kind_of(key)} must be a string")
        _must_be_unicode(key)
    return held.values()


def _must_be_unicode(text: str) -> None:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidInput(f"canonical JSON: {short(text)} holds a lone surrogate")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"duplicate key {short(key)}")
            seen.add(key)
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise _RefusedError(f"{short(text)} is no number")


def _refuse_float(text: str) -> NoReturn:
    raise _RefusedError(f"float {short(text)} must be a string of its hexadecimal form")


def _bounded_integer(text: str) -> int:
    # 20 characters hold every allowed integer; longer ones would cost quadratic time to convert.
    if len(text) > 20:
        raise _RefusedError("an integer exceeds 63 bits")
    return int(text)


def _first_difference(data: bytes, again: bytes) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(data, again, strict=False)) if a != b), min(len(data), len(again))
    )
    return f"first differs at byte {at}"


def kind_of(value: object) -> str:
    """Return a few words for a JSON value, for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return short(value)
    if isinstance(value, int):
        return str(value) if abs(value) < INTEGER_LIMIT else "an integer beyond 63 bits"
    return f"a {type(value).__name__}"


def short(text: str) -> str:
    """Return ``text`` in quotes and in ASCII, cut after 80 characters: for messages."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")
