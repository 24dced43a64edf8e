"""The header of a safetensors file, read strictly: other readers may take the first of two entries of one name, or the last.

A header that passes says one thing to every reader: which bytes of the file are which tensor, and that none is left over.
"""

from __future__ import annotations

import math
from typing import IO, cast

from tallystick.commit.encoding import parse_json
from tallystick.commit.state import DTYPE_BYTES, RANK_LIMIT
from tallystick.errors import InvalidInput

HEADER_LIMIT = 1 << 25  # bytes; some 300,000 tensors
METADATA = "__metadata__"
FIELDS = frozenset({"data_offsets", "dtype", "shape"})


def check_tensor_file(file: IO[bytes], size: int, *, what: str) -> None:
    """Return if ``file``, of ``size`` bytes and read from its start, begins with a header that has one meaning.

    Raises:
        InvalidInput: a header too short or too long, no JSON, a key twice, a field too many or too few, metadata that
            is no text, or ranges that overlap, leave bytes out or are not what dtype and shape demand.
    """
    what = f"{what}: not a safetensors file"
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise InvalidInput(f"{what}: header must have 2 to {min(HEADER_LIMIT, size - 8)} bytes, has {length}")
    header = parse_json(file.read(length), what=f"{what}: header", limit=HEADER_LIMIT)
    if not isinstance(header, dict):
        raise InvalidInput(f"{what}: header must be an object")
    entries = cast("dict[str, object]", header)
    _check_metadata(entries.pop(METADATA, {}), what)
    ranges = sorted((*_range_of(entry, f"{what}: {name[:80]!r}"), name) for name, entry in entries.items())
    at = 0
    for start, end, name in ranges:
        if start != at:
            raise InvalidInput(
                f"{what}: {name[:80]!r} must begin at byte {at} of the tensors, begins at {start}"
            )
        at = end
    if at != size - 8 - length:
        raise InvalidInput(f"{what}: its tensors have {at} bytes, {size - 8 - length} follow the header")


def _check_metadata(value: object, what: str) -> None:
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: {METADATA} must be an object")
    for name, text in cast("dict[str, object]", value).items():
        if not isinstance(text, str):
            raise InvalidInput(f"{what}: {METADATA} must map text to text, {name[:80]!r} is no text")


def _range_of(value: object, what: str) -> tuple[int, int]:
    """Return where the bytes of one tensor begin and end."""
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    if fields.keys() != FIELDS:
        raise InvalidInput(
            f"{what}: must have the fields {', '.join(sorted(FIELDS))}, has {', '.join(sorted(fields))[:200] or 'none'}"
        )
    dtype, shape, offsets = fields["dtype"], _numbers(fields["shape"]), _numbers(fields["data_offsets"])
    if not isinstance(dtype, str) or shape is None or offsets is None or len(shape) > RANK_LIMIT:
        raise InvalidInput(f"{what}: dtype, shape or data_offsets is malformed")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidInput(f"{what}: data_offsets must be where it begins and ends, are {offsets[:3]}")
    start, end = offsets
    if dtype in DTYPE_BYTES and (needed := math.prod(shape) * DTYPE_BYTES[dtype]) != end - start:
        raise InvalidInput(f"{what}: {dtype} of shape {shape} has {needed} bytes, its range {end - start}")
    return start, end


def _numbers(value: object) -> list[int] | None:
    """Return a list of whole numbers from 0; None if ``value`` is something else."""
    if not isinstance(value, list):
        return None
    found = cast("list[object]", value)
    if any(type(number) is not int or number < 0 for number in found):
        return None
    return cast("list[int]", found)
