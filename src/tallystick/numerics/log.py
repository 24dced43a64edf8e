"""Bytes of the rounding log: entries and residues of one site, and the frame of one step.

Format and rules: spec/rounding-log.md. Every value has one encoding; readers refuse a second one, anything
cut short, and anything left over, with InvalidInput, and never allocate more than a constant times the bytes
they were given.

    SparseEntries   ascending (index, symbol) pairs of one site       encode, decode
    Residues        a few bits for every element of one site          encode_residues, decode_residues
    Frame           the sites of one step that have something to say  encode_frame, decode_frame, find_site
    GridTable       quantum and band of every site, and its changes   (grid_table)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput
from tallystick.numerics.kernels import log_entries, native
from tallystick.numerics.log_bytes import (
    LARGEST_EXPONENT,
    LARGEST_KIND,
    LARGEST_SCALE,
    LARGEST_WIDTH,
    Ints,
    Reader,
    check_key,
    encode_key,
    get_bits,
    put_bits,
    unzigzag,
    varint,
    zigzag,
)

FRAME_VERSION = 1
LARGEST_N = 1 << 48
MOST_RESIDUE_BITS = 8
MANY = 1  # entries of a site from which on the compiled kernels are called
GOLDEN_NUMERATOR = 63073
"""round(2**16 * -2 * ln((sqrt(5) - 1) / 2)): 2**k should lie in (1/2, 1] of this / 2**16 times n / count.

The best Rice parameter for geometric gaps is 1 + floor(log2(log(phi - 1) / log(1 - p))) (Kiely, IPN Progress
Report 42-159, 2004); with log(1 - p) close to -p that is floor(log2(0.9624 / p)).
"""


# ---------------------------------------------------------------------------------------- entries of one site


@dataclass(frozen=True, eq=False, slots=True)
class SparseEntries:
    """Symbols at ascending positions of a tensor with `n` elements.

    indexes: int64, strictly ascending, in [0, n). symbols: int64, same length, in [0, 2**width); 1 bit for
    rounding directions, 2 for below, equal, above, more for indexes. Raises InvalidInput where that does not
    hold.
    """

    n: int
    width: int
    indexes: Ints
    symbols: Ints

    def __post_init__(self) -> None:
        _check_shape(self.n, self.width)
        object.__setattr__(self, "indexes", _int64("indexes", self.indexes))
        object.__setattr__(self, "symbols", _int64("symbols", self.symbols))
        if self.indexes.size != self.symbols.size:
            raise InvalidInput(f"entries: {self.indexes.size} indexes and {self.symbols.size} symbols")
        if not self.indexes.size:
            return
        if self.indexes[0] < 0 or self.indexes[-1] >= self.n:
            raise InvalidInput(
                f"entries: indexes {self.indexes[0]}..{self.indexes[-1]} outside [0, {self.n})"
            )
        if np.any(self.indexes[1:] <= self.indexes[:-1]):
            raise InvalidInput("entries: indexes are not strictly ascending")
        if int(self.symbols.min()) < 0 or int(self.symbols.max()) >> self.width:
            raise InvalidInput(f"entries: a symbol is outside [0, 2**{self.width})")

    @classmethod
    def none(cls, n: int, width: int) -> SparseEntries:
        """No entry at all."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(n, width, nothing, nothing)

    @classmethod
    def ascending(cls, n: int, width: int, indexes: Ints, symbols: Ints) -> SparseEntries:
        """Entries of which a kernel has made sure what the constructor would check; int64, of one length."""
        made = object.__new__(cls)
        for name, value in (("n", n), ("width", width), ("indexes", indexes), ("symbols", symbols)):
            object.__setattr__(made, name, value)
        return made

    def __len__(self) -> int:
        return self.indexes.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseEntries):
            return NotImplemented
        return (
            (self.n, self.width) == (other.n, other.width)
            and np.array_equal(self.indexes, other.indexes)
            and np.array_equal(self.symbols, other.symbols)
        )

    def __hash__(self) -> int:
        return hash((self.n, self.width, self.indexes.tobytes(), self.symbols.tobytes()))


def rice_parameter(n: int, count: int) -> int:
    """The remainder width k of the gaps of `count` > 0 entries among n elements; derived, never stored."""
    return max(0, ((n * GOLDEN_NUMERATOR) // (count * 65536)).bit_length() - 1)


def encode(entries: SparseEntries) -> bytes:
    """The one encoding of a site's entries; one zero byte when there are none."""
    count = len(entries)
    if count == 0:
        return b"\0"
    k = rice_parameter(entries.n, count)
    if count >= MANY and native.is_compiled():
        return varint(count) + log_entries.write_entries(entries.indexes, entries.symbols, k, entries.width)
    gaps = np.diff(entries.indexes, prepend=-1) - 1
    ends = np.cumsum((gaps >> k) + 1) - 1
    start = int(ends[-1]) + 1
    bits = np.zeros(start + count * (k + entries.width), dtype=np.uint8)
    bits[ends] = 1
    put_bits(bits, start, gaps, k)
    put_bits(bits, start + count * k, entries.symbols, entries.width)
    return varint(count) + np.packbits(bits, bitorder="little").tobytes()


def decode(data: bytes, n: int, width: int) -> SparseEntries:
    """The entries that `encode` wrote for a site of n elements and `width` symbol bits.

    Raises InvalidInput for every other sequence of bytes. Memory is O(len(data)) whatever n and the count
    claim.
    """
    reader = Reader(data, "entries")
    entries = read_entries(reader, n, width)
    reader.finish()
    return entries


def encode_decision(band_exponent: int, entries: SparseEntries) -> bytes:
    """The payload of a decision site: zigzag band exponent (the band is 2**that), symbol width, entries."""
    if not len(entries):
        raise InvalidInput("decision: a site without entries is left out of the frame")
    _check_band(band_exponent)
    return varint(zigzag(band_exponent)) + bytes([entries.width]) + encode(entries)


def decode_decision(data: bytes, n: int, width: int) -> tuple[int, SparseEntries]:
    """Band exponent and entries of a decision site of n elements whose operator needs `width` symbol bits.

    Raises InvalidInput for every sequence of bytes that `encode_decision` would not have written.
    """
    band, stated, reader = _read_decision_head(data)
    if stated != width:
        raise InvalidInput(f"decision: symbol width is {stated}, the operator needs {width}")
    entries = read_entries(reader, n, width)
    reader.finish()
    if not len(entries):
        raise InvalidInput("decision: a site without entries must be absent")
    return band, entries


def read_decision_head(data: bytes) -> tuple[int, int]:
    """Band exponent and symbol width of a decision site, for readers who do not know its number of elements."""
    band, width, _ = _read_decision_head(data)
    return band, width


def _read_decision_head(data: bytes) -> tuple[int, int, Reader]:
    reader = Reader(data, "decision")
    band = unzigzag(reader.varint("band exponent"))
    _check_band(band)
    return band, reader.width(), reader


def _check_band(band: int) -> None:
    if not -LARGEST_SCALE <= band <= LARGEST_EXPONENT:
        raise InvalidInput(
            f"decision: band exponent {band} is outside [-{LARGEST_SCALE}, {LARGEST_EXPONENT}]"
        )


def read_entries(reader: Reader, n: int, width: int) -> SparseEntries:
    """Return the entries that follow in ``reader``, as ``encode`` writes them after the width. Raises InvalidInput."""
    _check_shape(n, width)
    count = reader.varint("count")
    if count > n:
        raise InvalidInput(f"{reader.what}: count {count} exceeds the {n} elements of the site")
    if count == 0:
        return SparseEntries.none(n, width)
    k = rice_parameter(n, count)
    if count * (1 + k + width) > 8 * reader.remaining:
        bits = count * (1 + k + width)
        raise InvalidInput(f"{reader.what}: {count} entries need {bits} bits, {reader.remaining} bytes left")
    if count >= MANY and native.is_compiled():
        found = log_entries.read_entries(reader.peek(reader.remaining), n, count, k, width)
        if found is not None:  # else what follows says what is wrong
            indexes, symbols, taken = found
            reader.skip_bits(taken)
            return SparseEntries.ascending(n, width, indexes, symbols)
    ends = _unary_ends(reader, count, longest=count + ((n - count) >> k))
    start = int(ends[-1]) + 1
    bits = reader.bits(start + count * (k + width))
    gaps = ((np.diff(ends, prepend=-1) - 1) << k) + get_bits(bits, start, count, k)
    indexes = np.cumsum(gaps + 1) - 1
    if indexes[-1] >= n:
        raise InvalidInput(f"{reader.what}: index {indexes[-1]} in a site of {n} elements")
    return SparseEntries(n, width, indexes, get_bits(bits, start + count * k, count, width))


def _unary_ends(reader: Reader, count: int, longest: int) -> Ints:
    """Bit positions of the next `count` ones, which an honest writer places within `longest` bits."""
    window = reader.peek((longest + 7) // 8)
    ones = np.cumsum(np.bitwise_count(window), dtype=np.int64)
    last = int(np.searchsorted(ones, count))
    if last < window.size:
        ends = np.flatnonzero(np.unpackbits(window[: last + 1], bitorder="little"))[:count]
        if ends[-1] < longest:
            return ends
    raise InvalidInput(f"{reader.what}: the quotients of {count} gaps do not end within {longest} bits")


def skip_entries(reader: Reader, n: int, width: int) -> None:
    """Go past what `read_entries` would read; only their length is checked."""
    count = reader.varint("count")
    if count > n:
        raise InvalidInput(f"{reader.what}: count {count} exceeds the {n} elements of the site")
    if count == 0:
        return
    k = rice_parameter(n, count)
    longest = count + ((n - count) >> k)
    left = count
    for at, byte in enumerate(reader.peek((longest + 7) // 8).tobytes()):
        ones = byte.bit_count()
        if ones < left:
            left -= ones
            continue
        rest = byte
        for _ in range(left - 1):
            rest &= rest - 1
        end = 8 * at + (rest & -rest).bit_length()
        reader.skip(end + count * (k + width))
        return
    raise InvalidInput(f"{reader.what}: the quotients of {count} gaps do not end within {longest} bits")


def _check_shape(n: int, width: int) -> None:
    if not 0 <= n <= LARGEST_N:
        raise InvalidInput(f"entries: n {n} is outside [0, 2**48]")
    if not 1 <= width <= LARGEST_WIDTH:
        raise InvalidInput(f"entries: width {width} is outside [1, {LARGEST_WIDTH}]")


def _int64(what: str, values: npt.NDArray[np.integer]) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise InvalidInput(f"entries: {what} are {array.dtype}{array.shape}, not a row of int64")
    return array.astype(np.int64, copy=False)


# ---------------------------------------------------------------------------------------- residues of one site


@dataclass(frozen=True, eq=False, slots=True)
class Residues:
    """Every element's multiple of its quantum modulo ``2**bits``, for a tensor with `n` > 0 elements; of one bit its parity.

    planes: uint8[bits, ceil(n / 8)], bit j of element i in bit i % 8 of byte i // 8 of plane j; the bits after the last
    element are zero. Raises InvalidInput where that does not hold.
    """

    n: int
    planes: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if not 1 <= self.n <= LARGEST_N:
            raise InvalidInput(f"residues: n {self.n} is outside [1, 2**48]")
        plane, planes = (self.n + 7) // 8, self.planes
        if (
            planes.dtype != np.uint8
            or planes.ndim != 2
            or planes.shape[1] != plane
            or not 1 <= planes.shape[0] <= MOST_RESIDUE_BITS
        ):
            raise InvalidInput(
                f"residues: {self.n} elements need 1 to {MOST_RESIDUE_BITS} planes of {plane} bytes, "
                f"got {planes.dtype}{planes.shape}"
            )
        if self.n % 8 and (planes[:, -1] >> self.n % 8).any():
            raise InvalidInput(f"residues: padding bits of byte {plane - 1} of a plane are not zero")

    @classmethod
    def of(cls, values: npt.NDArray[np.integer] | Sequence[int], bits: int = 1) -> Residues:
        """The residues ``values``, each from 0 to ``2**bits - 1``, in flat order."""
        array = np.asarray(values).astype(np.uint8)
        planes = [np.packbits(array >> j & 1, bitorder="little") for j in range(bits)]
        return cls(array.size, np.stack(planes))

    @property
    def bits(self) -> int:
        """Bits of each element."""
        return self.planes.shape[0]

    @property
    def values(self) -> npt.NDArray[np.uint8]:
        """One residue for each element, uint8[n]."""
        found = np.zeros(self.n, dtype=np.uint8)
        for j, plane in enumerate(self.planes):
            found |= np.unpackbits(plane, count=self.n, bitorder="little") << j
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Residues):
            return NotImplemented
        return self.n == other.n and np.array_equal(self.planes, other.planes)

    def __hash__(self) -> int:
        return hash((self.n, self.planes.tobytes()))


def encode_residues(residues: Residues) -> bytes:
    """The one encoding of a site's residues: plane after plane."""
    return residues.planes.tobytes()


def decode_residues(data: bytes, n: int, bits: int) -> Residues:
    """The residues that `encode_residues` wrote for a site of n elements. Raises InvalidInput for other bytes."""
    plane = (n + 7) // 8
    if len(data) != bits * plane:
        raise InvalidInput(
            f"residues: {n} elements of {bits} bits need {bits * plane} bytes, got {len(data)}"
        )
    return Residues(n, np.frombuffer(data, dtype=np.uint8).reshape(bits, plane))


# ------------------------------------------------------------------------------------------ frame of one step


class Kind(IntEnum):
    """What a site is; the third field of its address."""

    GRID = 0
    DECISION = 1
    LOSS = 2
    GRADIENT = 3
    STATE = 4
    BUFFER = 5
    ACTIVATION = 6
    ACTIVATION_GRADIENT = 7
    CALIBRATION = 8


assert max(Kind) == LARGEST_KIND

CALIBRATED = b"\x01"  # the one payload of kind CALIBRATION: the noise was measured before a step where that was not due


@dataclass(frozen=True, order=True, slots=True)
class SiteAddress:
    """Where in a step a payload belongs; ordered by the four fields as written."""

    rank: int
    micro_batch: int
    kind: int
    ordinal: int

    def __post_init__(self) -> None:
        check_key("site address", self.fields, self.kind)

    @property
    def fields(self) -> tuple[int, int, int, int]:
        """The four numbers, in the order of the bytes."""
        return (self.rank, self.micro_batch, self.kind, self.ordinal)


@dataclass(frozen=True, slots=True)
class Frame:
    """The log of one step: payloads by address, strictly ascending, none empty."""

    sites: tuple[tuple[SiteAddress, bytes], ...] = ()

    def __post_init__(self) -> None:
        fields = [address.fields for address, _ in self.sites]
        for at, (left, right) in enumerate(pairwise(fields)):
            if not left < right:
                raise InvalidInput(
                    f"frame: {self.sites[at + 1][0]} after {self.sites[at][0]} is not ascending"
                )
        for address, payload in self.sites:
            if not payload:
                raise InvalidInput(f"frame: {address} has an empty payload")

    @classmethod
    def of(cls, payloads: Mapping[SiteAddress, bytes]) -> Frame:
        """The frame of these payloads, put in order."""
        return cls(tuple(sorted(payloads.items(), key=lambda site: site[0].fields)))

    def __iter__(self) -> Iterator[tuple[SiteAddress, bytes]]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def find(self, address: SiteAddress) -> bytes | None:
        """The payload at an address, or None where the site had nothing to say."""
        at = bisect_left(self.sites, address.fields, key=lambda site: site[0].fields)
        if at < len(self.sites) and self.sites[at][0] == address:
            return self.sites[at][1]
        return None

    def entries(self, address: SiteAddress, n: int, width: int) -> SparseEntries:
        """The entries of a site of n elements; an absent site has none, and a present one must have some."""
        payload = self.find(address)
        if payload is None:
            return SparseEntries.none(n, width)
        entries = decode(payload, n, width)
        if not len(entries):
            raise InvalidInput(f"frame: {address} is present and has no entries")
        return entries


def encode_frame(frame: Frame) -> bytes:
    """The one encoding of a step's log: version, directory, payloads; two bytes when it is empty."""
    directory = [bytes([FRAME_VERSION]), varint(len(frame.sites))]
    previous: tuple[int, ...] = (0, 0, 0, -1)
    for address, payload in frame.sites:
        directory += [encode_key(previous, address.fields, 2), varint(len(payload))]
        previous = address.fields
    return b"".join([*directory, *(payload for _, payload in frame.sites)])


def decode_frame(data: bytes) -> Frame:
    """The frame that `encode_frame` wrote. Raises InvalidInput for every other sequence of bytes."""
    directory, offset = _read_directory(data)
    sites: list[tuple[SiteAddress, bytes]] = []
    for address, length in directory:
        sites.append((address, bytes(data[offset : offset + length])))
        offset += length
    return Frame(tuple(sites))


def find_site(data: bytes, address: SiteAddress) -> bytes | None:
    """The payload of one site of an encoded frame, or None; reads the directory and that payload only."""
    directory, offset = _read_directory(data)
    for each, length in directory:
        if each == address:
            return bytes(data[offset : offset + length])
        offset += length
    return None


def _read_directory(data: bytes) -> tuple[list[tuple[SiteAddress, int]], int]:
    """Addresses and payload lengths, and where the payloads start; the lengths add up to the rest."""
    reader = Reader(data, "frame")
    reader.version(FRAME_VERSION)
    count = reader.varint("number of sites")
    if 3 * count > reader.remaining:
        raise InvalidInput(f"frame: {count} sites need at least {3 * count} bytes, {reader.remaining} left")
    directory: list[tuple[SiteAddress, int]] = []
    previous: tuple[int, ...] = (0, 0, 0, -1)
    total = 0
    for _ in range(count):
        previous = reader.key(previous, 2)
        length = reader.varint("payload length")
        if length == 0:
            raise InvalidInput(f"frame: site {previous} has an empty payload")
        directory.append((SiteAddress(*previous), length))
        total += length
    if total != reader.remaining:
        raise InvalidInput(f"frame: payload lengths add up to {total}, {reader.remaining} bytes follow")
    return directory, len(data) - total
