"""Integers, bits and site keys as the rounding log writes them (spec/rounding-log.md), and the strict reader of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput

Ints = npt.NDArray[np.int64]

LARGEST_WIDTH = 32
LARGEST_FIELD = (1 << 32) - 1
LARGEST_KIND = 8  # of a site
LARGEST_SCALE = 1100
LARGEST_EXPONENT = 1000
"""Of a quantum and of a band (spec/rounding.md): they and their reciprocals are normal binary64 numbers."""


class Reader:
    """A place in some bytes; every step names what it wanted and refuses to go past the end."""

    def __init__(self, data: bytes, what: str) -> None:
        self.what = what
        self._data = data
        self._at = 0

    @property
    def remaining(self) -> int:
        """Bytes that follow."""
        return len(self._data) - self._at

    def byte(self, name: str) -> int:
        """Return the next byte."""
        if not self.remaining:
            raise InvalidInput(f"{self.what}: ends where {name} should be (byte {self._at})")
        self._at += 1
        return self._data[self._at - 1]

    def version(self, expected: int) -> None:
        """Return if the next byte is the version that this reader knows."""
        version = self.byte("the version")
        if version != expected:
            raise InvalidInput(f"{self.what}: version {version}, this reader knows {expected}")

    def width(self) -> int:
        """Return the width of a symbol, in bits."""
        width = self.byte("the symbol width")
        if not 1 <= width <= LARGEST_WIDTH:
            raise InvalidInput(f"{self.what}: symbol width {width} is outside [1, {LARGEST_WIDTH}]")
        return width

    def varint(self, name: str) -> int:
        """An LEB128 integer below 2**63 in as few bytes as it needs."""
        if self._at < len(self._data) and self._data[self._at] < 0x80:
            self._at += 1
            return self._data[self._at - 1]
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte(name)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise InvalidInput(
                        f"{self.what}: {name} {value} is written with more bytes than it needs"
                    )
                return value
        raise InvalidInput(f"{self.what}: {name} is 2**63 or more")

    def key(self, previous: tuple[int, ...], tag_bits: int) -> tuple[int, ...]:
        """The next key in ascending order, as `encode_key` wrote it."""
        head = self.varint("site key")
        same = head & ((1 << tag_bits) - 1)
        key = [*previous[:same], previous[same] + (head >> tag_bits) + 1]
        key += [self.varint("site key") for _ in range(len(previous) - same - 1)]
        check_key(self.what, key, key[-2])
        return tuple(key)

    def peek(self, count: int) -> npt.NDArray[np.uint8]:
        """Up to `count` of the following bytes, without passing them."""
        length = min(count, self.remaining)
        return np.frombuffer(self._data, dtype=np.uint8, count=length, offset=self._at)

    def bits(self, count: int) -> npt.NDArray[np.uint8]:
        """The next `count` bits, one per element, having checked that the last byte is padded with zeros."""
        length = (count + 7) // 8
        if length > self.remaining:
            raise InvalidInput(f"{self.what}: needs {length} more bytes, {self.remaining} left")
        bits = np.unpackbits(self.peek(length), bitorder="little")
        if bits[count:].any():
            raise InvalidInput(f"{self.what}: padding bits of byte {self._at + length - 1} are not zero")
        self._at += length
        return bits

    def skip_bits(self, count: int) -> None:
        """Go past `count` bits that are there, having checked the padding as `bits` does."""
        length = (count + 7) // 8
        if count % 8 and self._data[self._at + length - 1] >> count % 8:
            raise InvalidInput(f"{self.what}: padding bits of byte {self._at + length - 1} are not zero")
        self._at += length

    def skip(self, bits: int) -> None:
        """Go past ``bits`` bits and their padding, unread."""
        length = (bits + 7) // 8
        if length > self.remaining:
            raise InvalidInput(f"{self.what}: needs {length} more bytes, {self.remaining} left")
        self._at += length

    def finish(self) -> None:
        """Return if nothing follows."""
        if self.remaining:
            raise InvalidInput(f"{self.what}: {self.remaining} bytes after the end")


def check_key(what: str, fields: Sequence[int], kind: int) -> None:
    """Return if the fields of a site's key are in range and its kind is one that there is."""
    if min(fields) < 0 or max(fields) > LARGEST_FIELD:
        raise InvalidInput(f"{what}: a field of {tuple(fields)} is outside [0, 2**32)")
    if kind > LARGEST_KIND:
        raise InvalidInput(f"{what}: kind {kind} is not one of 0..{LARGEST_KIND}")


def encode_key(previous: Sequence[int], key: Sequence[int], tag_bits: int) -> bytes:
    """Number of leading fields that stay, by how much the next one grows, then the others as they are."""
    same = next(i for i, (left, right) in enumerate(zip(previous, key, strict=True)) if left != right)
    head = (key[same] - previous[same] - 1) << tag_bits | same
    return varint(head) + b"".join(varint(each) for each in key[same + 1 :])


def varint(value: int) -> bytes:
    """Return an LEB128 integer in as few bytes as it needs."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> int:
    """Return the code of a signed integer: 0, -1, 1, -2, 2 as 0, 1, 2, 3, 4."""
    return 2 * value if value >= 0 else -2 * value - 1


def unzigzag(code: int) -> int:
    """Return the integer with this zigzag code."""
    return -(code + 1) // 2 if code & 1 else code // 2


def zigzag_array(values: Ints) -> Ints:
    """Return ``zigzag`` of each element."""
    return np.where(values >= 0, 2 * values, -2 * values - 1)


def unzigzag_array(codes: Ints) -> Ints:
    """Return ``unzigzag`` of each element."""
    return np.where(codes & 1, -(codes + 1) // 2, codes // 2)


def put_bits(bits: npt.NDArray[np.uint8], start: int, values: Ints, width: int) -> None:
    """Writes each value's `width` bits, least significant first, from bit `start` on."""
    cells = bits[start : start + values.size * width].reshape(values.size, width)
    for j in range(width):
        cells[:, j] = (values >> j) & 1


def get_bits(bits: npt.NDArray[np.uint8], start: int, count: int, width: int) -> Ints:
    """Return `count` values of `width` bits each, from bit `start` on, as `put_bits` wrote them."""
    cells = bits[start : start + count * width].reshape(count, width)
    values = np.zeros(count, dtype=np.int64)
    for j in range(width):
        values |= cells[:, j].astype(np.int64) << j
    return values
