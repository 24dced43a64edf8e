"""The forms of what stands in questions and answers of conformance (spec/vectors.md 1), and how they are read."""

from __future__ import annotations

from collections.abc import Sequence

from tallystick.evidence.conformance import Json, Schema

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
HEX: Schema = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
HASH: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
REAL: Schema = {
    "type": "string",
    "pattern": "^(-?0x[01]\\.[0-9a-f]{13}p[+-][0-9]+|-?0x0\\.0p\\+0|-?inf|nan)$",
}
CONTENT: Schema = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 1,
    "properties": {"hex": HEX, "text": TEXT, "painted": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


def listed(of: Schema, size: int | None = None) -> Schema:
    """Return the schema of a list, of ``size`` items if it is given."""
    sized = {} if size is None else {"minItems": size, "maxItems": size}
    return {"type": "array", "items": of, **sized}


def optional(of: Schema) -> Schema:
    """Return the schema of a value or null."""
    return {"anyOf": [of, {"type": "null"}]}


HEXES, HASHES, REALS, INTEGERS = listed(HEX), listed(HASH), listed(REAL), listed(INTEGER)
PAIRS = listed(listed(INTEGER, 2))
BAND: Schema = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["scaled", "relative"]},
        "exponent": INTEGER,
        "floor": INTEGER,
        "scales": INTEGERS,
        "olds": REALS,
    },
    "required": ["kind", "exponent"],
    "additionalProperties": False,
}


def content(data: Json) -> bytes:
    """Return the bytes that a question writes as hexadecimal, as ASCII text or as a painted length."""
    ((form, value),) = data.items()
    if form == "painted":
        return (bytes(range(251)) * (value // 251 + 1))[:value]
    return bytes.fromhex(value) if form == "hex" else value.encode("ascii")


def floats(values: Sequence[str]) -> list[float]:
    """Return the numbers that hexadecimal floats write."""
    return [float.fromhex(value) for value in values]


def reals(values: Sequence[float]) -> list[str]:
    """Return hexadecimal floats."""
    return [float(value).hex() for value in values]
