"""The table of grids: quantum and band of every site, its bytes, and what changes from step to step.

Format and rules: spec/rounding-log.md. Every value has one encoding; readers refuse a second one with InvalidInput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput
from tallystick.numerics.log import (
    MOST_RESIDUE_BITS,
    SparseEntries,
    encode,
    read_entries,
    skip_entries,
)
from tallystick.numerics.log_bytes import (
    LARGEST_EXPONENT,
    LARGEST_SCALE,
    Ints,
    Reader,
    check_key,
    encode_key,
    get_bits,
    put_bits,
    unzigzag,
    unzigzag_array,
    varint,
    zigzag,
    zigzag_array,
)

TABLE_VERSION = 1
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
    block's scale. residue_bits: 0 where the site's payload is sparse entries; else the bits of every
    element's residue, of which one is its parity: precision is 0, there are scales, and the band is at
    most ``residue_bits - 2`` octaves above the floor. scales: int16, one exponent per block, read-only;
    empty for a relative band, where delta is 2**band times the larger of old and new, and the quantum's
    floor follows from each element's old value as 2**(e(old) + band + 5), at least 2**-149: `floor` then
    has no effect and is -149 by convention. Raises InvalidInput for values outside their ranges.
    """

    precision: int
    band: int
    floor: int
    dithered: bool
    scales: npt.NDArray[np.int16]
    residue_bits: int

    def __init__(
        self,
        precision: int,
        band: int,
        floor: int,
        dithered: bool = False,
        scales: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        residue_bits: int = 0,
    ) -> None:
        _check_grid(precision, band, floor, dithered)
        if residue_bits:
            _check_residues(residue_bits, precision, band, floor, len(scales))
        object.__setattr__(self, "precision", int(precision))
        object.__setattr__(self, "band", int(band))
        object.__setattr__(self, "floor", int(floor))
        object.__setattr__(self, "dithered", bool(dithered))
        object.__setattr__(self, "scales", _checked_scales(scales, band, floor))
        object.__setattr__(self, "residue_bits", int(residue_bits))

    @property
    def fields(self) -> tuple[int, int, int, bool, int]:
        """Everything but the scales."""
        return (self.precision, self.band, self.floor, self.dithered, self.residue_bits)

    def with_scales(self, scales: Sequence[int] | npt.NDArray[np.integer]) -> SiteGrid:
        """The same grid with other scales."""
        return SiteGrid(
            self.precision, self.band, self.floor, self.dithered, scales, residue_bits=self.residue_bits
        )

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
            check_key("grid table", key, key[0])
        object.__setattr__(self, "sites", {key: self.sites[key] for key in sorted(self.sites)})

    def encode(self) -> bytes:
        """The one encoding of the whole table."""
        return bytes([TABLE_VERSION]) + GridTable().diff(self)

    @classmethod
    def decode(cls, data: bytes) -> GridTable:
        """The table that `encode` wrote. Raises InvalidInput for every other sequence of bytes."""
        reader = Reader(data, "grid table")
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
                changes += [encode_key(previous, key, 1), change]
                previous = key
        return varint(len(changes) // 2) + b"".join(changes)

    def apply(self, data: bytes) -> GridTable:
        """The table that `diff` led to. Raises InvalidInput unless self.diff(result) == data."""
        return self._after(Reader(data, "grid update"), data)

    def _after(self, reader: Reader, change: bytes) -> GridTable:
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
    reader = Reader(table, "grid table")
    reader.version(TABLE_VERSION)
    sizes: dict[SiteKey, int] = {}
    found = _step_to(reader, wanted, None, sizes)
    if update is None:
        return found
    return _step_to(Reader(update, "grid update"), wanted, found, sizes)


def _step_to(
    reader: Reader, wanted: SiteKey, old: SiteGrid | None, sizes: dict[SiteKey, int]
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
            skip_entries(reader, sizes.get(key, 0), reader.width())
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


def _read_change(reader: Reader, key: SiteKey, old: SiteGrid | None) -> SiteGrid | None:
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


def _grid_of(fields: tuple[int, int, int, bool, int], scales: npt.NDArray[np.integer]) -> SiteGrid:
    precision, band, floor, dithered, residue_bits = fields
    return SiteGrid(precision, band, floor, dithered, scales, residue_bits=residue_bits)


def _encode_fields(grid: SiteGrid) -> bytes:
    width = grid.residue_bits - 1 if grid.residue_bits else grid.precision
    head = bytes([bool(grid.residue_bits) << 7 | width << 1 | grid.dithered])
    return head + varint(zigzag(grid.band)) + varint(zigzag(grid.floor))


def _read_fields(reader: Reader) -> tuple[int, int, int, bool, int]:
    head = reader.byte("precision")
    band = unzigzag(reader.varint("band exponent"))
    floor = unzigzag(reader.varint("floor exponent"))
    width, coded = head >> 1 & 0x3F, bool(head >> 7)
    return 0 if coded else width, band, floor, bool(head & 1), width + 1 if coded else 0


def _encode_all_scales(scales: npt.NDArray[np.int16]) -> bytes:
    """Number of blocks; then, if any, the symbol width and every scale."""
    head = varint(scales.size)
    if not scales.size:
        return head
    symbols = zigzag_array(scales.astype(np.int64))
    width = max(1, int(symbols.max()).bit_length())
    bits = np.zeros(symbols.size * width, dtype=np.uint8)
    put_bits(bits, 0, symbols, width)
    return head + bytes([width]) + np.packbits(bits, bitorder="little").tobytes()


def _read_all_scales(reader: Reader) -> Ints:
    count = reader.varint("number of blocks")
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    width = reader.width()
    return unzigzag_array(get_bits(reader.bits(count * width), 0, count, width))


def _encode_changed_scales(old: npt.NDArray[np.int16], new: npt.NDArray[np.int16]) -> bytes:
    """Symbol width, then the changed blocks as entries whose symbol is zigzag(new - old) - 1."""
    change = new.astype(np.int64) - old
    at = np.flatnonzero(change)
    if not at.size:
        return b""
    symbols = zigzag_array(change[at]) - 1
    width = max(1, int(symbols.max()).bit_length())
    return bytes([width]) + encode(SparseEntries(new.size, width, at, symbols))


def _read_changed_scales(reader: Reader, old: npt.NDArray[np.int16]) -> Ints:
    entries = read_entries(reader, old.size, reader.width())
    scales = old.astype(np.int64)
    scales[entries.indexes] += unzigzag_array(entries.symbols + 1)
    return scales


def _check_residues(bits: int, precision: int, band: int, floor: int, scales: int) -> None:
    """Raises InvalidInput unless a grid of these numbers can be logged by residues."""
    if not 1 <= bits <= MOST_RESIDUE_BITS or precision or not scales or band > floor + bits - 2:
        raise InvalidInput(
            f"grid: residues have n bits, 1 to {MOST_RESIDUE_BITS}, precision 0, scales, and a band of at most floor + n - 2; "
            f"got {bits} bits, precision {precision}, {scales} scales, floor {floor} and band {band}"
        )


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
