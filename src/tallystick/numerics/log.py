"""Bytes of the rounding log: entries of one site, the frame of one step, and the table of grids.

Format and rules: spec/rounding-log.md. Every value has one encoding; readers refuse a second one, anything
cut short, and anything left over, with InvalidInput, and never allocate more than a constant times the bytes
they were given.

    SparseEntries   ascending (index, symbol) pairs of one site       encode, decode
    Parities        one bit for every element of one site             encode_parities, decode_parities
    Frame           the sites of one step that have something to say  encode_frame, decode_frame, find_site
    GridTable       quantum and band of every site, and its changes   encode, decode, diff, apply
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput
from tallystick.numerics import kernels

Ints = npt.NDArray[np.int64]

FRAME_VERSION = 1
TABLE_VERSION = 1
LARGEST_N = 1 << 48
LARGEST_WIDTH = 32
MANY = 16  # entries of a site from which on the compiled kernels are called
LARGEST_FIELD = (1 << 32) - 1
LARGEST_SCALE = 1100
LARGEST_EXPONENT = 1000
"""Of a quantum and of a band (spec/rounding.md): they and their reciprocals are normal binary64 numbers."""
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
    if count >= MANY and kernels.is_compiled():
        return _varint(count) + kernels.write_entries(entries.indexes, entries.symbols, k, entries.width)
    gaps = np.diff(entries.indexes, prepend=-1) - 1
    ends = np.cumsum((gaps >> k) + 1) - 1
    start = int(ends[-1]) + 1
    bits = np.zeros(start + count * (k + entries.width), dtype=np.uint8)
    bits[ends] = 1
    _put_bits(bits, start, gaps, k)
    _put_bits(bits, start + count * k, entries.symbols, entries.width)
    return _varint(count) + np.packbits(bits, bitorder="little").tobytes()


def decode(data: bytes, n: int, width: int) -> SparseEntries:
    """The entries that `encode` wrote for a site of n elements and `width` symbol bits.

    Raises InvalidInput for every other sequence of bytes. Memory is O(len(data)) whatever n and the count
    claim.
    """
    reader = _Reader(data, "entries")
    entries = _read_entries(reader, n, width)
    reader.finish()
    return entries


def encode_decision(band_exponent: int, entries: SparseEntries) -> bytes:
    """The payload of a decision site: zigzag band exponent (the band is 2**that), symbol width, entries."""
    if not len(entries):
        raise InvalidInput("decision: a site without entries is left out of the frame")
    _check_band(band_exponent)
    return _varint(_zigzag(band_exponent)) + bytes([entries.width]) + encode(entries)


def decode_decision(data: bytes, n: int, width: int) -> tuple[int, SparseEntries]:
    """Band exponent and entries of a decision site of n elements whose operator needs `width` symbol bits.

    Raises InvalidInput for every sequence of bytes that `encode_decision` would not have written.
    """
    band, stated, reader = _read_decision_head(data)
    if stated != width:
        raise InvalidInput(f"decision: symbol width is {stated}, the operator needs {width}")
    entries = _read_entries(reader, n, width)
    reader.finish()
    if not len(entries):
        raise InvalidInput("decision: a site without entries must be absent")
    return band, entries


def read_decision_head(data: bytes) -> tuple[int, int]:
    """Band exponent and symbol width of a decision site, for readers who do not know its number of elements."""
    band, width, _ = _read_decision_head(data)
    return band, width


def _read_decision_head(data: bytes) -> tuple[int, int, _Reader]:
    reader = _Reader(data, "decision")
    band = _unzigzag(reader.varint("band exponent"))
    _check_band(band)
    return band, reader.width(), reader


def _check_band(band: int) -> None:
    if not -LARGEST_SCALE <= band <= LARGEST_EXPONENT:
        raise InvalidInput(
            f"decision: band exponent {band} is outside [-{LARGEST_SCALE}, {LARGEST_EXPONENT}]"
        )


def _read_entries(reader: _Reader, n: int, width: int) -> SparseEntries:
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
    if count >= MANY and kernels.is_compiled():
        found = kernels.read_entries(reader.peek(reader.remaining), n, count, k, width)
        if found is not None:  # else what follows says what is wrong
            indexes, symbols, taken = found
            reader.skip_bits(taken)
            return SparseEntries.ascending(n, width, indexes, symbols)
    ends = _unary_ends(reader, count, longest=count + ((n - count) >> k))
    start = int(ends[-1]) + 1
    bits = reader.bits(start + count * (k + width))
    gaps = ((np.diff(ends, prepend=-1) - 1) << k) + _get_bits(bits, start, count, k)
    indexes = np.cumsum(gaps + 1) - 1
    if indexes[-1] >= n:
        raise InvalidInput(f"{reader.what}: index {indexes[-1]} in a site of {n} elements")
    return SparseEntries(n, width, indexes, _get_bits(bits, start + count * k, count, width))


def _unary_ends(reader: _Reader, count: int, longest: int) -> Ints:
    """Bit positions of the next `count` ones, which an honest writer places within `longest` bits."""
    window = reader.peek((longest + 7) // 8)
    ones = np.cumsum(np.bitwise_count(window), dtype=np.int64)
    last = int(np.searchsorted(ones, count))
    if last < window.size:
        ends = np.flatnonzero(np.unpackbits(window[: last + 1], bitorder="little"))[:count]
        if ends[-1] < longest:
            return ends
    raise InvalidInput(f"{reader.what}: the quotients of {count} gaps do not end within {longest} bits")


def _skip_entries(reader: _Reader, n: int, width: int) -> None:
    """Go past what `_read_entries` would read; only their length is checked."""
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


def _put_bits(bits: npt.NDArray[np.uint8], start: int, values: Ints, width: int) -> None:
    """Writes each value's `width` bits, least significant first, from bit `start` on."""
    cells = bits[start : start + values.size * width].reshape(values.size, width)
    for j in range(width):
        cells[:, j] = (values >> j) & 1


def _get_bits(bits: npt.NDArray[np.uint8], start: int, count: int, width: int) -> Ints:
    cells = bits[start : start + count * width].reshape(count, width)
    values = np.zeros(count, dtype=np.int64)
    for j in range(width):
        values |= cells[:, j].astype(np.int64) << j
    return values


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


# ---------------------------------------------------------------------------------------- parities of one site


@dataclass(frozen=True, eq=False, slots=True)
class Parities:
    """The parity of every element's multiple of its quantum, for a tensor with `n` > 0 elements.

    packed: uint8[ceil(n / 8)], element i in bit i % 8 of byte i // 8; the bits after the last element are zero.
    Raises InvalidInput where that does not hold.
    """

    n: int
    packed: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if not 1 <= self.n <= LARGEST_N:
            raise InvalidInput(f"parities: n {self.n} is outside [1, 2**48]")
        if self.packed.dtype != np.uint8 or self.packed.shape != ((self.n + 7) // 8,):
            raise InvalidInput(
                f"parities: {self.n} elements need {(self.n + 7) // 8} bytes, got {self.packed.dtype}{self.packed.shape}"
            )
        if self.n % 8 and int(self.packed[-1]) >> self.n % 8:
            raise InvalidInput(f"parities: padding bits of byte {self.packed.size - 1} are not zero")

    @classmethod
    def of(cls, bits: npt.NDArray[np.integer] | Sequence[int]) -> Parities:
        """The parities that stand in ``bits``, each 0 or 1, in flat order."""
        array = np.asarray(bits)
        return cls(array.size, np.packbits(array.astype(np.uint8), bitorder="little"))

    @property
    def bits(self) -> npt.NDArray[np.uint8]:
        """One 0 or 1 for each element, uint8[n]."""
        return np.unpackbits(self.packed, count=self.n, bitorder="little")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Parities):
            return NotImplemented
        return self.n == other.n and np.array_equal(self.packed, other.packed)

    def __hash__(self) -> int:
        return hash((self.n, self.packed.tobytes()))


def encode_parities(parities: Parities) -> bytes:
    """The one encoding of a site's parities: the packed bits."""
    return parities.packed.tobytes()


def decode_parities(data: bytes, n: int) -> Parities:
    """The parities that `encode_parities` wrote for a site of n elements. Raises InvalidInput for other bytes."""
    return Parities(n, np.frombuffer(data, dtype=np.uint8))


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


LAST_KIND = int(max(Kind))


@dataclass(frozen=True, order=True, slots=True)
class SiteAddress:
    """Where in a step a payload belongs; ordered by the four fields as written."""

    rank: int
    micro_batch: int
    kind: int
    ordinal: int

    def __post_init__(self) -> None:
        _check_key("site address", self.fields, self.kind)

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
    directory = [bytes([FRAME_VERSION]), _varint(len(frame.sites))]
    previous: tuple[int, ...] = (0, 0, 0, -1)
    for address, payload in frame.sites:
        directory += [_encode_key(previous, address.fields, 2), _varint(len(payload))]
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
    reader = _Reader(data, "frame")
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


# --------------------------------------------------------------------------------------------- table of grids

SiteKey = tuple[int, int]
"""(kind, ordinal) of a site; the same grid serves every rank and micro-batch."""


class _Change(IntEnum):
    """How a site differs between two tables."""

    REMOVED = 0
    SCALES = 1
    FIELDS = 2
    FIELDS_AND_SCALES = 3
    WHOLE = 4


@dataclass(frozen=True, init=False, eq=False, slots=True)
class SiteGrid:
    """Quantum and band of one site (spec/rounding.md): what the recorder used and the follower must use.

    precision: significant bits of a relative grid, or 0. band, floor: exponents d and f relative to the
    block's scale. parity: whether the site's payload is one parity for each element, not sparse entries; it needs
    precision 0, scales, and a floor above the band. scales: int16, one exponent per block, read-only; empty
    for a relative band, where delta is 2**band times the larger of old and new, and the quantum's floor
    follows from each element's old value as 2**(e(old) + band + 5), at least 2**-149: `floor` then has no
    effect and is -149 by convention. Raises InvalidInput for values outside their ranges.
    """

    precision: int
    band: int
    floor: int
    dithered: bool
    scales: npt.NDArray[np.int16]
    parity: bool

    def __init__(
        self,
        precision: int,
        band: int,
        floor: int,
        dithered: bool = False,
        scales: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        parity: bool = False,
    ) -> None:
        _check_grid(precision, band, floor, dithered)
        if parity and (precision or floor <= band or not len(scales)):
            raise InvalidInput(
                f"grid: parities need precision 0, scales and a floor above the band; got precision {precision}, "
                f"{len(scales)} scales, floor {floor} and band {band}"
            )
        object.__setattr__(self, "precision", int(precision))
        object.__setattr__(self, "band", int(band))
        object.__setattr__(self, "floor", int(floor))
        object.__setattr__(self, "dithered", bool(dithered))
        object.__setattr__(self, "scales", _checked_scales(scales, band, floor))
        object.__setattr__(self, "parity", bool(parity))

    @property
    def fields(self) -> tuple[int, int, int, bool, bool]:
        """Everything but the scales."""
        return (self.precision, self.band, self.floor, self.dithered, self.parity)

    def with_scales(self, scales: Sequence[int] | npt.NDArray[np.integer]) -> SiteGrid:
        """The same grid with other scales."""
        return SiteGrid(self.precision, self.band, self.floor, self.dithered, scales, parity=self.parity)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SiteGrid):
            return NotImplemented
        return self.fields == other.fields and np.array_equal(self.scales, other.scales)

    def __hash__(self) -> int:
        return hash((self.fields, self.scales.tobytes()))


@dataclass(frozen=True, slots=True)
class GridTable:
    """The grid of every site of a run at one step, by (kind, ordinal); part of the committed state."""

    sites: Mapping[SiteKey, SiteGrid] = field(default_factory=dict[SiteKey, SiteGrid])

    def __post_init__(self) -> None:
        for key in self.sites:
            _check_key("grid table", key, key[0])
        object.__setattr__(self, "sites", {key: self.sites[key] for key in sorted(self.sites)})

    def encode(self) -> bytes:
        """The one encoding of the whole table."""
        return bytes([TABLE_VERSION]) + GridTable().diff(self)

    @classmethod
    def decode(cls, data: bytes) -> GridTable:
        """The table that `encode` wrote. Raises InvalidInput for every other sequence of bytes."""
        reader = _Reader(data, "grid table")
        reader.version(TABLE_VERSION)
        return cls()._after(reader, data[1:])

    def diff(self, new: GridTable) -> bytes:
        """What changes from this table to `new`, the payload of a grid site; one zero byte for nothing."""
        changes: list[bytes] = []
        previous: SiteKey = (0, -1)
        for key in sorted({**self.sites, **new.sites}):
            before, after = self.sites.get(key), new.sites.get(key)
            change = b"" if before is after else _encode_change(before, after)
            if change:
                changes += [_encode_key(previous, key, 1), change]
                previous = key
        return _varint(len(changes) // 2) + b"".join(changes)

    def apply(self, data: bytes) -> GridTable:
        """The table that `diff` led to. Raises InvalidInput unless self.diff(result) == data."""
        return self._after(_Reader(data, "grid update"), data)

    def _after(self, reader: _Reader, change: bytes) -> GridTable:
        count = reader.varint("number of sites")
        if 2 * count > reader.remaining:
            least = 2 * count
            raise InvalidInput(f"{reader.what}: {count} sites need {least} bytes, {reader.remaining} left")
        sites = dict(self.sites)
        previous: tuple[int, ...] = (0, -1)
        for _ in range(count):
            previous = reader.key(previous, 1)
            key = (previous[0], previous[1])
            grid = _read_change(reader, key, sites.pop(key, None))
            if grid is not None:
                sites[key] = grid
        reader.finish()
        new = GridTable(sites)
        if self.diff(new) != change:
            raise InvalidInput(f"{reader.what}: the same change has another, canonical encoding")
        return new


def find_grid(table: bytes, update: bytes | None, wanted: SiteKey) -> SiteGrid | None:
    """The grid of one site in an encoded table, after an update if there is one, or None; the rest is stepped over.

    For a judge who is asked about one site: much quicker than decoding the table. What is stepped over is not checked,
    so a table or an update that ``GridTable`` refuses may pass here. Raises InvalidInput where the site cannot be read.
    """
    reader = _Reader(table, "grid table")
    reader.version(TABLE_VERSION)
    sizes: dict[SiteKey, int] = {}
    found = _step_to(reader, wanted, None, sizes)
    if update is None:
        return found
    return _step_to(_Reader(update, "grid update"), wanted, found, sizes)


def _step_to(
    reader: _Reader, wanted: SiteKey, old: SiteGrid | None, sizes: dict[SiteKey, int]
) -> SiteGrid | None:
    """Read changes up to the one of ``wanted``; ``sizes`` are the numbers of blocks by site, kept up to date."""
    found = old
    previous: tuple[int, ...] = (0, -1)
    for _ in range(reader.varint("number of sites")):
        previous = reader.key(previous, 1)
        key = (previous[0], previous[1])
        if key == wanted:
            found = _read_change(reader, key, old)
            sizes[key] = 0 if found is None else found.scales.size
            continue
        op = reader.byte("change")
        if op > _Change.WHOLE:
            raise InvalidInput(f"{reader.what}: change {op} of site {key} is not one of 0..4")
        if op & _Change.FIELDS or op == _Change.WHOLE:
            _read_fields(reader)
        if op == _Change.WHOLE:
            count = sizes[key] = reader.varint("number of blocks")
            reader.skip(count * reader.width() if count else 0)
        elif op & _Change.SCALES:
            _skip_entries(reader, sizes.get(key, 0), reader.width())
    return found


def _encode_change(old: SiteGrid | None, new: SiteGrid | None) -> bytes:
    """Op byte and body of one site's change; empty when there is none."""
    if new is None:
        return bytes([_Change.REMOVED])
    if old is None or old.scales.size != new.scales.size:
        return bytes([_Change.WHOLE]) + _encode_fields(new) + _encode_all_scales(new.scales)
    fields = b"" if old.fields == new.fields else _encode_fields(new)
    scales = _encode_changed_scales(old.scales, new.scales)
    op = (_Change.FIELDS if fields else 0) | (_Change.SCALES if scales else 0)
    return bytes([op]) + fields + scales if op else b""


def _read_change(reader: _Reader, key: SiteKey, old: SiteGrid | None) -> SiteGrid | None:
    op = reader.byte("change")
    if op > _Change.WHOLE:
        raise InvalidInput(f"{reader.what}: change {op} of site {key} is not one of 0..4")
    if op == _Change.WHOLE:
        return _grid_of(_read_fields(reader), _read_all_scales(reader))
    if old is None:
        raise InvalidInput(f"{reader.what}: change {op} of site {key}, which the table does not hold")
    if op == _Change.REMOVED:
        return None
    fields = _read_fields(reader) if op & _Change.FIELDS else old.fields
    scales = _read_changed_scales(reader, old.scales) if op & _Change.SCALES else old.scales
    return _grid_of(fields, scales)


def _grid_of(fields: tuple[int, int, int, bool, bool], scales: npt.NDArray[np.integer]) -> SiteGrid:
    precision, band, floor, dithered, parity = fields
    return SiteGrid(precision, band, floor, dithered, scales, parity=parity)


def _encode_fields(grid: SiteGrid) -> bytes:
    head = bytes([grid.parity << 7 | grid.precision << 1 | grid.dithered])
    return head + _varint(_zigzag(grid.band)) + _varint(_zigzag(grid.floor))


def _read_fields(reader: _Reader) -> tuple[int, int, int, bool, bool]:
    head = reader.byte("precision")
    band = _unzigzag(reader.varint("band exponent"))
    floor = _unzigzag(reader.varint("floor exponent"))
    return head >> 1 & 0x3F, band, floor, bool(head & 1), bool(head >> 7)


def _encode_all_scales(scales: npt.NDArray[np.int16]) -> bytes:
    """Number of blocks; then, if any, the symbol width and every scale."""
    head = _varint(scales.size)
    if not scales.size:
        return head
    symbols = _zigzag_array(scales.astype(np.int64))
    width = max(1, int(symbols.max()).bit_length())
    bits = np.zeros(symbols.size * width, dtype=np.uint8)
    _put_bits(bits, 0, symbols, width)
    return head + bytes([width]) + np.packbits(bits, bitorder="little").tobytes()


def _read_all_scales(reader: _Reader) -> Ints:
    count = reader.varint("number of blocks")
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    width = reader.width()
    return _unzigzag_array(_get_bits(reader.bits(count * width), 0, count, width))


def _encode_changed_scales(old: npt.NDArray[np.int16], new: npt.NDArray[np.int16]) -> bytes:
    """Symbol width, then the changed blocks as entries whose symbol is zigzag(new - old) - 1."""
    change = new.astype(np.int64) - old
    at = np.flatnonzero(change)
    if not at.size:
        return b""
    symbols = _zigzag_array(change[at]) - 1
    width = max(1, int(symbols.max()).bit_length())
    return bytes([width]) + encode(SparseEntries(new.size, width, at, symbols))


def _read_changed_scales(reader: _Reader, old: npt.NDArray[np.int16]) -> Ints:
    entries = _read_entries(reader, old.size, reader.width())
    scales = old.astype(np.int64)
    scales[entries.indexes] += _unzigzag_array(entries.symbols + 1)
    return scales


def _check_grid(precision: int, band: int, floor: int, dithered: bool) -> None:
    if not 0 <= precision <= 53:
        raise InvalidInput(f"grid: precision {precision} is outside [0, 53]")
    if not -LARGEST_SCALE <= band < 0:
        raise InvalidInput(f"grid: band exponent {band} is outside [-{LARGEST_SCALE}, -1]")
    if not -LARGEST_SCALE <= floor <= LARGEST_SCALE:
        raise InvalidInput(f"grid: floor exponent {floor} is outside [-{LARGEST_SCALE}, {LARGEST_SCALE}]")
    if dithered and precision:
        raise InvalidInput(f"grid: dither needs an absolute grid (precision 0), got precision {precision}")


def _checked_scales(
    scales: Sequence[int] | npt.NDArray[np.integer], band: int, floor: int
) -> npt.NDArray[np.int16]:
    array = np.asarray(scales)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(f"grid: scales are {array.dtype}{array.shape}, not a row of integers")
    if array.size:
        smallest, largest = int(array.min()), int(array.max())
        if smallest < -LARGEST_SCALE or largest > LARGEST_SCALE:
            raise InvalidInput(
                f"grid: scales {smallest}..{largest} outside [-{LARGEST_SCALE}, {LARGEST_SCALE}]"
            )
        if largest + max(floor, band) > LARGEST_EXPONENT:
            raise InvalidInput(
                f"grid: scale {largest} with floor {floor} and band {band} exceeds 2**{LARGEST_EXPONENT}"
            )
    narrow = array.astype(np.int16)
    narrow.flags.writeable = False
    return narrow


# ------------------------------------------------------------------------------------------ integers and keys


class _Reader:
    """A place in some bytes; every step names what it wanted and refuses to go past the end."""

    def __init__(self, data: bytes, what: str) -> None:
        self.what = what
        self._data = data
        self._at = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def byte(self, name: str) -> int:
        if not self.remaining:
            raise InvalidInput(f"{self.what}: ends where {name} should be (byte {self._at})")
        self._at += 1
        return self._data[self._at - 1]

    def version(self, expected: int) -> None:
        version = self.byte("the version")
        if version != expected:
            raise InvalidInput(f"{self.what}: version {version}, this reader knows {expected}")

    def width(self) -> int:
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
        """The next key in ascending order, as `_encode_key` wrote it."""
        head = self.varint("site key")
        same = head & ((1 << tag_bits) - 1)
        key = [*previous[:same], previous[same] + (head >> tag_bits) + 1]
        key += [self.varint("site key") for _ in range(len(previous) - same - 1)]
        _check_key(self.what, key, key[-2])
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
        length = (bits + 7) // 8
        if length > self.remaining:
            raise InvalidInput(f"{self.what}: needs {length} more bytes, {self.remaining} left")
        self._at += length

    def finish(self) -> None:
        if self.remaining:
            raise InvalidInput(f"{self.what}: {self.remaining} bytes after the end")


def _check_key(what: str, fields: Sequence[int], kind: int) -> None:
    if min(fields) < 0 or max(fields) > LARGEST_FIELD:
        raise InvalidInput(f"{what}: a field of {tuple(fields)} is outside [0, 2**32)")
    if kind > LAST_KIND:
        raise InvalidInput(f"{what}: kind {kind} is not one of 0..{LAST_KIND}")


def _encode_key(previous: Sequence[int], key: Sequence[int], tag_bits: int) -> bytes:
    """Number of leading fields that stay, by how much the next one grows, then the others as they are."""
    same = next(i for i, (left, right) in enumerate(zip(previous, key, strict=True)) if left != right)
    head = (key[same] - previous[same] - 1) << tag_bits | same
    return _varint(head) + b"".join(_varint(each) for each in key[same + 1 :])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> int:
    return 2 * value if value >= 0 else -2 * value - 1


def _unzigzag(code: int) -> int:
    return -(code + 1) // 2 if code & 1 else code // 2


def _zigzag_array(values: Ints) -> Ints:
    return np.where(values >= 0, 2 * values, -2 * values - 1)


def _unzigzag_array(codes: Ints) -> Ints:
    return np.where(codes & 1, -(codes + 1) // 2, codes // 2)
