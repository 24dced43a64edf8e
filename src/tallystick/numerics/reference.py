"""The rounding rule in plain scalar Python: the executable form of spec/rounding.md.

Beside it stands the state's fingerprint, of spec/transcript.md 3.

Every kernel must agree with this file bit for bit. Each arithmetic operation below is one IEEE 754 binary64
operation, rounded to nearest even, in the order written; no fused multiply-add. Scaling by a power of two is
`ldexp`, which rounds at most once and only where the result is subnormal.

    record: x -> value on the grid, and (index, side) of each element closer than delta to a boundary
    follow: y -> value on the grid, taking the recorded side wherever one was recorded
    candidates: y -> both values of each element closer than delta to a boundary
    record_residues, follow_residues: the same values from a few bits an element, for grids down to 2 deltas and less
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tallystick.errors import InvalidInput

T_FIXED = 486260413 * 2.0**-30
"""Boundary position 0.4528..: off every simple fraction, for ties; inside [1/4, 3/4], for binade edges."""

SMALLEST_EXPONENT = -149
"""No quantum is finer than the spacing of FP32's subnormals, so a value on a grid with p <= 24 is an FP32."""

LARGEST_EXPONENT = 1000
"""No quantum is coarser than 2**1000, so that 2**E and 2**-E are normal binary64 numbers."""

FP32_LARGEST = (2.0 - 2.0**-23) * 2.0**127

SMALLEST_NORMAL_EXPONENT = -1022
"""Of a band: no distance but zero is smaller than 2**-1022, so a narrower one would mean the same."""

RELATIVE_EXPONENT = -47
"""Default band of state: 2**6 roundings of FP64, relative to the larger of old and new."""

CANCELLED = 5
"""With a quantum of at least 2**5 * 2**(e(old) + b), over 16 bands of old fit one (spec/rounding.md 2)."""

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / phi, odd: the weights of neighbouring elements in a fingerprint have nothing in common."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Allowed values around x: multiples of 2**exponent(x).

    `precision` p > 0 keeps p significant bits (24 = FP32); 0 means the same quantum everywhere. `floor` is
    the exponent below which the quantum never falls, at most 1000.
    """

    precision: int
    floor: int

    def __post_init__(self) -> None:
        if not 0 <= self.precision <= 53:
            raise InvalidInput(f"grid: precision {self.precision} is outside [0, 53]")
        if self.floor > LARGEST_EXPONENT:
            raise InvalidInput(f"grid: floor exponent {self.floor} is above {LARGEST_EXPONENT}")

    def exponent(self, x: float) -> int:
        """E(x), the exponent of the quantum at x."""
        smallest = max(self.floor, SMALLEST_EXPONENT)
        if self.precision == 0 or x == 0.0:
            return smallest
        return max(math.frexp(x)[1] - 1 - (self.precision - 1), smallest)


@dataclass(frozen=True, slots=True)
class Rounded:
    """One value on the grid and where the nearest boundary lies.

    With k = `cell` and E = `exponent`, the value is k or k + 1 quanta; the nearest boundary is at k + t +
    `boundary` quanta, `distance` quanta from x; `side` is 1 when x lies on its upper side, and then the value
    is k + boundary + 1 quanta, else k + boundary quanta.
    """

    value: float
    cell: float
    exponent: int
    boundary: int
    distance: float
    side: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A cell and its nearest boundary, as in `Rounded`; of the value, a follower lets the log decide."""

    cell: float
    exponent: int
    boundary: int
    distance: float
    side: int

    @property
    def reach(self) -> float:
        """Distance to the boundary as a number, not in quanta."""
        return math.ldexp(self.distance, self.exponent)


@dataclass(frozen=True, slots=True)
class LoggedElement:
    """A logged element: flat index, and 1 if the recorder's value lay on the upper side of its boundary."""

    index: int
    side: int


@dataclass(frozen=True, slots=True)
class ScaledBand:
    """delta = 2**(s + exponent), grid floor s + `floor`; s is the scale exponent of the element's block."""

    exponent: int
    floor: int
    scales: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelativeBand:
    """delta = 2**exponent * max(|new|, |old|), grid floor e(old) + exponent + 5.

    `olds` are the values that both parties held before, each within the range of FP32.
    """

    olds: tuple[float, ...]
    exponent: int = RELATIVE_EXPONENT


def dithered_position(word: int) -> float:
    """Boundary position of an element whose 32-bit random word is `word`: exact, and inside (0, 1)."""
    if not 0 <= word < 1 << 32:
        raise InvalidInput(f"dither: word {word} is outside [0, 2**32)")
    return (word + 0.5) * 2.0**-32


def round_element(x: float, grid: Grid, t: float = T_FIXED, *, index: int = 0) -> Rounded:
    """The value of x on the grid, with the boundary of each cell at t of its width.

    Raises InvalidInput naming `index` where x is not finite, x is beyond 2**1023 quanta, or a relative grid
    gives a value beyond the largest FP32.
    """
    place = _place(x, grid, t, index)
    value = _on_grid(place, place.side, grid, index)
    return Rounded(value, place.cell, place.exponent, place.boundary, place.distance, place.side)


def record(
    xs: Sequence[float], precision: int, band: ScaledBand | RelativeBand, words: Sequence[int] | None = None
) -> tuple[list[float], list[LoggedElement]]:
    """The rounded values of a tensor in flat order, and its log: elements closer than delta to a boundary.

    `words` holds one 32-bit dither word per element, or None for T_FIXED; dither needs precision 0. Raises
    InvalidInput for a value that cannot be rounded (by index) and for arguments that do not fit together.
    """
    _check_arguments(len(xs), precision, band, words)
    values: list[float] = []
    entries: list[LoggedElement] = []
    for i, x in enumerate(xs):
        rounded = round_element(x, _grid(i, len(xs), precision, band), _position(i, words), index=i)
        values.append(rounded.value)
        if math.ldexp(rounded.distance, rounded.exponent) < _delta(i, len(xs), x, band):
            entries.append(LoggedElement(i, rounded.side))
    return values, entries


def follow(
    ys: Sequence[float],
    entries: Sequence[LoggedElement],
    precision: int,
    band: ScaledBand | RelativeBand,
    words: Sequence[int] | None = None,
) -> tuple[list[float], list[int]]:
    """The recorder's values from this machine's `ys` and the log, and the indexes of entries in violation.

    An entry is a violation when y is 2 * delta or farther from the boundary nearest to it; it is not obeyed,
    and the element gets this machine's own rounding.
    """
    _check_arguments(len(ys), precision, band, words)
    _check_entries(entries, len(ys))
    sides = {entry.index: entry.side for entry in entries}
    values: list[float] = []
    violations: list[int] = []
    for i, y in enumerate(ys):
        grid = _grid(i, len(ys), precision, band)
        place = _place(y, grid, _position(i, words), i)
        side = place.side
        if i in sides:
            if place.reach < 2.0 * _delta(i, len(ys), y, band):
                side = sides[i]
            else:
                violations.append(i)
        values.append(_on_grid(place, side, grid, i))
    return values, violations


def record_residues(
    xs: Sequence[float], band: ScaledBand, words: Sequence[int] | None = None, bits: int = 1
) -> tuple[list[float], list[int]]:
    """The rounded values of a tensor on an absolute grid, and of each its multiple of the quantum modulo ``2**bits``.

    Raises InvalidInput as `record` does, and where delta is more than ``2**(bits - 2)`` quanta.
    """
    _check_residues(len(xs), band, words, bits)
    values: list[float] = []
    residues: list[int] = []
    for i, x in enumerate(xs):
        place = _place(x, _grid(i, len(xs), 0, band), _position(i, words), i)
        values.append(_beside(place, place.side, i))
        residues.append(_residue(place, bits))
    return values, residues


def follow_residues(
    ys: Sequence[float],
    residues: Sequence[int],
    band: ScaledBand,
    words: Sequence[int] | None = None,
    bits: int = 1,
) -> tuple[list[float], list[tuple[int, int]], list[int]]:
    """The recorder's values, the elements moved with how many quanta, and the indexes of those out of reach.

    The value taken is the multiple of that residue nearest to the own one; of two that are as near the one across the
    nearest boundary (on a tie, across the own one). Of one bit that boundary must be closer than delta; otherwise the
    element keeps its own rounding.
    """
    _check_residues(len(ys), band, words, bits)
    if len(residues) != len(ys) or any(not 0 <= each < 1 << bits for each in residues):
        raise InvalidInput(f"log: {len(residues)} residues of {bits} bits for {len(ys)} elements")
    values: list[float] = []
    moved: list[tuple[int, int]] = []
    violations: list[int] = []
    for i, y in enumerate(ys):
        place = _place(y, _grid(i, len(ys), 0, band), _position(i, words), i)
        steps = (residues[i] - _residue(place, bits)) % (1 << bits)
        if steps + place.side > 1 << bits - 1:  # the nearest boundary is below what lies on its upper side
            steps -= 1 << bits
        if steps and bits == 1 and not place.reach < _delta(i, len(ys), y, band):
            violations.append(i)
            steps = 0
        if steps:
            moved.append((i, steps))
        values.append(_beside(place, place.side + steps, i))
    return values, moved, violations


def candidates(
    ys: Sequence[float], precision: int, band: ScaledBand | RelativeBand, words: Sequence[int] | None = None
) -> list[tuple[int, float, float]]:
    """(index, lower, upper) of each element closer than delta to a boundary: the cell values beside it.

    On the conditions of spec/rounding.md 7, a machine with a value within the band of y rounds a listed
    element to one of the two, and any other one as y is rounded. A value listed may be beyond FP32. Raises
    InvalidInput for a y that is not finite or is beyond 2**1023 quanta, and for arguments that do not fit.
    """
    _check_arguments(len(ys), precision, band, words)
    found: list[tuple[int, float, float]] = []
    for i, y in enumerate(ys):
        grid = _grid(i, len(ys), precision, band)
        place = _place(y, grid, _position(i, words), i)
        if place.reach < _delta(i, len(ys), y, band):
            found.append((i, _beside(place, 0, i), _beside(place, 1, i)))
    return found


def fingerprint(tensors: Mapping[str, Sequence[float]]) -> int:
    """The 64-bit fingerprint of the floating state tensors, by entry name (spec/transcript.md 3).

    A locator, not a commitment: equal by accident with probability about 2**-64, on purpose at will. Raises
    InvalidInput for a value that is not an FP32 value.
    """
    total = 0
    for ordinal, name in enumerate(sorted(tensors, key=str.encode)):
        for i, value in enumerate(tensors[name]):
            weight = ((ordinal << 40) + i) * GOLDEN % (1 << 64) | 1
            total += (_fp32_bits(value, name, i) + 1) * weight
    return total % (1 << 64)


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Adam's numbers as a user gives them (spec/optimizers.md 2); `decoupled` is AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


@dataclass(frozen=True, slots=True)
class SgdRule:
    """SGD's numbers as a user gives them (spec/optimizers.md 3)."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


def whole_power(base: float, exponent: int) -> float:
    """Powers with whole exponents >= 0, in the one order of multiplications that spec/optimizers.md 2 writes."""
    result = 1.0
    for bit in bin(exponent)[:1:-1]:
        if bit == "1":
            result *= base
        base *= base
    return result


def adam(rule: AdamRule, step: int, p: float, g: float, m: float, v: float) -> tuple[float, float, float]:
    """(parameter, exp_avg, exp_avg_sq) of one element after step `step`, counted from 1.

    Raises InvalidInput where one of them is not a finite FP32 value.
    """
    rate = rule.lr / (1.0 - whole_power(rule.beta1, step))
    unbias = 1.0 / math.sqrt(1.0 - whole_power(rule.beta2, step))
    keep, decay = 1.0, rule.weight_decay
    if rule.decoupled:
        keep, decay = 1.0 - rule.lr * rule.weight_decay, 0.0
    y = g + decay * p
    mean = rule.beta1 * m + (1.0 - rule.beta1) * y
    square = rule.beta2 * v + (1.0 - rule.beta2) * (y * y)
    if square < 0.0:
        raise InvalidInput(f"exp_avg_sq: {square!r} is negative")
    down = math.sqrt(square) * unbias + rule.eps
    if down == 0.0:
        raise InvalidInput(f"parameter: {rate * mean!r} / 0 is not finite")
    return _single(p * keep - (rate * mean) / down), _single(mean), _single(square)


def sgd(rule: SgdRule, p: float, g: float, buffer: float | None) -> tuple[float, float | None]:
    """(parameter, momentum buffer) of one element; None is a buffer that holds nothing yet, or is not kept.

    Raises InvalidInput where one of them is not a finite FP32 value.
    """
    y = g + rule.weight_decay * p
    held: float | None = None
    if rule.momentum != 0.0:
        held = y if buffer is None else rule.momentum * buffer + (1.0 - rule.dampening) * y
        y = y + rule.momentum * held if rule.nesterov else held
    return _single(p - rule.lr * y), None if held is None else _single(held)


def _single(x: float) -> float:
    """The FP32 value nearest to x, ties to even, -0.0 as +0.0."""
    if not math.isfinite(x) or abs(x) >= FP32_LARGEST + math.ldexp(1.0, 103):
        raise InvalidInput(f"{x!r} is beyond the largest FP32 value {FP32_LARGEST!r}")
    exponent = -149 if x == 0.0 else max(math.frexp(x)[1] - 24, -149)
    return math.ldexp(float(round(math.ldexp(x, -exponent))), exponent) + 0.0


def block_of(index: int, numel: int, n_blocks: int) -> int:
    """The block of a flat index: rows along dimension 0, or the whole tensor when there is one block."""
    return index // (numel // n_blocks)


def _place(x: float, grid: Grid, t: float, index: int) -> _Place:
    if not math.isfinite(x):
        raise InvalidInput(f"element {index}: {x} is not finite and has no place on a grid")
    exponent = grid.exponent(x)
    z = _scaled(x, -exponent, index)
    cell = float(math.floor(z))
    return _Place(cell, exponent, *_nearest_boundary(z - cell, t))


def _nearest_boundary(r: float, t: float) -> tuple[int, float, int]:
    """(j, distance, side) of the boundary nearest to r among t - 1, t, t + 1; on a tie, t."""
    if r >= t:
        own, other = r - t, (t + 1.0) - r
        return (0, own, 1) if own <= other else (1, other, 0)
    own, other = t - r, (r + 1.0) - t
    return (0, own, 0) if own <= other else (-1, other, 1)


def _scaled(x: float, exponent: int, index: int) -> float:
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        raise InvalidInput(f"element {index}: {x!r} is beyond 2**1023 quanta of 2**{-exponent}") from None


def _on_grid(place: _Place, side: int, grid: Grid, index: int) -> float:
    """The value on that side of the boundary, within FP32 on a relative grid."""
    value = _beside(place, side, index)
    if grid.precision > 0 and abs(value) > FP32_LARGEST:
        raise InvalidInput(f"element {index}: {value!r} is beyond the largest FP32 value {FP32_LARGEST!r}")
    return value


def _beside(place: _Place, side: int, index: int) -> float:
    """The value of the cell on that side of the boundary, with -0.0 made +0.0."""
    cell = place.cell + (place.boundary + side)
    try:
        return math.ldexp(cell, place.exponent) + 0.0
    except OverflowError:
        raise InvalidInput(
            f"element {index}: {cell!r} quanta of 2**{place.exponent} overflow binary64"
        ) from None


def _residue(place: _Place, bits: int) -> int:
    """The multiple of the quantum that the own value is, modulo ``2**bits``."""
    return int((place.cell + (place.boundary + place.side)) % float(1 << bits))


def _grid(index: int, numel: int, precision: int, band: ScaledBand | RelativeBand) -> Grid:
    if isinstance(band, RelativeBand):
        return Grid(precision, _cancelled(band.olds[index], band.exponent, index))
    return Grid(precision, band.scales[block_of(index, numel, len(band.scales))] + band.floor)


def _cancelled(old: float, band: int, index: int) -> int:
    """The floor exponent that an old value sets: below it, what is left of a cancellation is noise."""
    if not abs(old) <= FP32_LARGEST:
        raise InvalidInput(f"element {index}: old value {old!r} is not within the range of FP32")
    return SMALLEST_EXPONENT if old == 0.0 else math.frexp(old)[1] - 1 + band + CANCELLED


def _delta(index: int, numel: int, new: float, band: ScaledBand | RelativeBand) -> float:
    if isinstance(band, RelativeBand):
        larger = max(abs(new), abs(band.olds[index]))
        return math.ldexp(larger, max(band.exponent, SMALLEST_NORMAL_EXPONENT))
    exponent = band.scales[block_of(index, numel, len(band.scales))] + band.exponent
    return math.ldexp(1.0, max(exponent, SMALLEST_NORMAL_EXPONENT))


def _position(index: int, words: Sequence[int] | None) -> float:
    return T_FIXED if words is None else dithered_position(words[index])


def _check_arguments(
    numel: int, precision: int, band: ScaledBand | RelativeBand, words: Sequence[int] | None
) -> None:
    if words is not None and precision != 0:
        raise InvalidInput(f"dither: needs an absolute grid (precision 0), got precision {precision}")
    if words is not None and len(words) != numel:
        raise InvalidInput(f"dither: {len(words)} words for {numel} elements")
    if band.exponent >= 0:
        raise InvalidInput(f"band: exponent {band.exponent} is not negative")
    if isinstance(band, RelativeBand):
        if len(band.olds) != numel:
            raise InvalidInput(f"band: {len(band.olds)} old values for {numel} elements")
    elif numel and (not band.scales or numel % len(band.scales)):
        raise InvalidInput(f"band: {len(band.scales)} blocks do not divide {numel} elements")


def _check_residues(numel: int, band: ScaledBand, words: Sequence[int] | None, bits: int) -> None:
    _check_arguments(numel, 0, band, words)
    if band.exponent > band.floor + bits - 2:
        raise InvalidInput(
            f"residues of {bits} bits: band exponent {band.exponent} is above {bits - 2} octaves over the floor's {band.floor}"
        )


def _check_entries(entries: Sequence[LoggedElement], numel: int) -> None:
    previous = -1
    for entry in entries:
        if not previous < entry.index < numel:
            raise InvalidInput(f"log: index {entry.index} after {previous} in a tensor of {numel} elements")
        if entry.side not in (0, 1):
            raise InvalidInput(f"log: side {entry.side} of element {entry.index} is neither 0 nor 1")
        previous = entry.index


def _fp32_bits(value: float, name: str, index: int) -> int:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        raise InvalidInput(f"{name}: element {index}: {value!r} is beyond the largest FP32 value") from None
    if struct.unpack("<f", packed)[0] != value and not math.isnan(value):
        raise InvalidInput(f"{name}: element {index}: {value!r} is not an FP32 value")
    return int.from_bytes(packed, "little")
