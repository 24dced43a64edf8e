"""Write the test vectors of rounding, nearest, rounding-log, philox, fingerprint and optimizers.

Every expected value comes from exact fractions, strings of bits, struct and hashlib, straight from the spec
pages, or was published with Random123; nothing here imports the package. The vectors so test the package
against a second reading of its specification. Floats are hexadecimal strings.

    python scripts/vectors_numerics.py vectors
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from vector_cases import Case, write_cases

Cases = dict[str, tuple[str, Case]]
Pairs = dict[int, int]  # index to symbol
Site = tuple[
    Any, ...
]  # precision, band, floor, dithered, scales; and the bits of its residues, if it is logged by them
Table = dict[tuple[int, int], Site]

T = Fraction(486260413, 2**30)
LARGEST_FP32 = (2.0 - 2.0**-23) * 2.0**127


def write(root: Path) -> None:
    """Write every case of the rooms below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "rounding", rounding_cases())
    write_cases(root / "nearest", nearest_cases())
    write_cases(root / "rounding-log", log_cases() | dense_cases())
    write_cases(root / "philox", philox_cases())
    write_cases(root / "fingerprint", fingerprint_cases())
    write_cases(root / "optimizers", optimizer_cases())


# Rounding, in exact fractions (spec/rounding.md).


def quantum(x: float, precision: int, floor: int) -> Fraction:
    exponent = max(floor, -149)
    while precision and abs(Fraction(x)) >= Fraction(2) ** (exponent + precision):
        exponent += 1
    return Fraction(2) ** exponent


def cancelled(old: Fraction, band: int) -> int:
    """Return the floor exponent that an old value sets with a relative band."""
    exponent = -149
    while abs(old) * Fraction(2) ** (band + 5) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return exponent


def place(x: float, q: Fraction, t: Fraction) -> tuple[int, int, Fraction, int]:
    """Return the own value and the lower value at the nearest boundary, in quanta; its distance; the side."""
    z = Fraction(x) / q
    k = math.floor(z)
    r = z - k
    candidates = [(0, r - t, 1), (1, t + 1 - r, 0)] if r >= t else [(0, t - r, 0), (-1, r - t + 1, 1)]
    j, distance, side = min(candidates, key=lambda candidate: candidate[1])
    return k + (r >= t), k + j, distance * q, side


class Rounding:
    """One tensor's arguments; answers what record and follow must give."""

    def __init__(self, precision: int, band: Case, words: list[int] | None = None) -> None:
        self.arguments: Case = {"precision": precision, "band": band, "words": words}
        self.precision, self.band, self.words = precision, band, words

    def element(self, i: int, n: int, x: float) -> tuple[Fraction, Fraction, Fraction]:
        """Return quantum, boundary position and band of element i of n."""
        t = T if self.words is None else Fraction(2 * self.words[i] + 1, 2**33)
        if self.band["kind"] == "relative":
            old, exponent = Fraction(float.fromhex(self.band["olds"][i])), self.band["exponent"]
            floor = cancelled(old, exponent)
            larger = max(abs(Fraction(x)), abs(old))
            return quantum(x, self.precision, floor), t, larger * Fraction(2) ** exponent
        scale = self.band["scales"][i * len(self.band["scales"]) // n]
        floor, exponent = scale + self.band["floor"], scale + self.band["exponent"]
        return quantum(x, self.precision, floor), t, Fraction(2) ** exponent

    def record(self, xs: list[float]) -> tuple[list[float], list[list[int]]]:
        values: list[float] = []
        entries: list[list[int]] = []
        for i, x in enumerate(xs):
            q, t, delta = self.element(i, len(xs), x)
            own, _, distance, side = place(x, q, t)
            values.append(float(own * q))
            if distance < delta:
                entries.append([i, side])
        return values, entries

    def follow(self, ys: list[float], entries: list[list[int]]) -> tuple[list[float], list[int]]:
        sides = {entry[0]: entry[1] for entry in entries}
        values: list[float] = []
        violations: list[int] = []
        for i, y in enumerate(ys):
            q, t, delta = self.element(i, len(ys), y)
            own, lower, distance, _ = place(y, q, t)
            if i in sides and distance < 2 * delta:
                own = lower + sides[i]
            elif i in sides:
                violations.append(i)
            values.append(float(own * q))
        return values, violations

    def residues(self, xs: list[float], bits: int) -> tuple[list[float], list[int]]:
        """Return what record makes of xs on a grid with residues: values, and their multiples modulo 2**bits."""
        multiples = [place(x, *self.element(i, len(xs), x)[:2])[0] for i, x in enumerate(xs)]
        quanta = [self.element(i, len(xs), x)[0] for i, x in enumerate(xs)]
        return [float(m * q) for m, q in zip(multiples, quanta, strict=True)], [
            m % 2**bits for m in multiples
        ]

    def residue_case(
        self, xs: list[float], ys: list[float] | None = None, stated: list[int] | None = None, bits: int = 1
    ) -> Case:
        """Return what record makes of xs, and follow of ys with those residues, or with ``stated``."""
        values, residues = self.residues(xs, bits)
        seen, used = ys or xs, stated or residues
        followed: list[float] = []
        moved: list[list[int]] = []
        violations: list[int] = []
        for i, y in enumerate(seen):
            q, t, delta = self.element(i, len(seen), y)
            own, _, distance, side = place(y, q, t)
            towards = -1 if side else 1  # the nearest boundary lies there
            steps = min(
                (n for n in range(-(2**bits), 2**bits + 1) if (own + n) % 2**bits == used[i]),
                key=lambda n: (abs(n), n * towards < 0),
            )
            if steps and bits == 1 and distance >= delta:
                violations.append(i)
            elif steps:
                moved.append([i, steps])
                own += steps
            followed.append(float(own * q))
        return {
            "operation": "residues",
            **self.arguments,
            "bits": bits,
            "xs": hexes(xs),
            "values": hexes(values),
            "residues": residues,
            "ys": hexes(seen),
            "used": used,
            "followed": hexes(followed),
            "moved": moved,
            "violations": violations,
        }

    def case(
        self, xs: list[float], ys: list[float] | None = None, entries: list[list[int]] | None = None
    ) -> Case:
        """Return what record makes of xs, and follow of ys with that log, or with ``entries``."""
        values, logged = self.record(xs)
        seen, used = ys or xs, logged if entries is None else entries
        followed, violations = self.follow(seen, used)
        return {
            "operation": "record-and-follow",
            **self.arguments,
            "xs": hexes(xs),
            "values": hexes(values),
            "entries": logged,
            "ys": hexes(seen),
            "used": used,
            "followed": hexes(followed),
            "violations": violations,
        }


def hexes(values: list[float]) -> list[str]:
    return [value.hex() for value in values]


def scaled(exponent: int, floor: int, *scales: int) -> Case:
    return {"kind": "scaled", "exponent": exponent, "floor": floor, "scales": list(scales)}


def relative(*olds: float, exponent: int = -47) -> Case:
    return {"kind": "relative", "exponent": exponent, "olds": hexes(list(olds))}


WHOLE = scaled(-6, 0, 0)


def narrow_case(exponent: int, floor: int, x: Fraction, y: Fraction) -> Case:
    """The boundary of the word is at -2**-33 quanta, x a band below it, y just below it and rounded to it.

    Exact fractions would log the first x and keep y below: what counts is binary64, where r = z + 1 has 53 bits.
    """
    quantum = Fraction(2) ** floor
    boundary = -Fraction(1, 2**33)
    words = [2**32 - 1]
    case = Rounding(0, scaled(exponent, floor, 0), words).case(
        [float((boundary + x) * quantum)], [float((boundary + y) * quantum)]
    )
    assert case["followed"] == case["values"] == [(-float(quantum)).hex()]
    return {**case, "entries": [], "used": [], "followed": [(0.0).hex()]}


def rounding_cases() -> Cases:
    t, step = float(T), 2.0**-6
    edges = [sign * (1 + offset * 2.0**-25) for sign in (1, -1) for offset in (-2, -1, -0.2, 0, 0.2, 1, 2)]
    words = philox_words((1, 2), 0, 12)
    tiny = [2.0**-149, 2.0**-150, 0.4 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, -(2.0**-150), 1e-300]
    ends = [0, 2**32 - 1, 0, 2**32 - 1, 0]
    lost = scaled(-20, -5, -1100)
    return {
        "absolute-grid": (
            "Quantum 1: on the boundary (rounds up), just under it, near it from both sides, at the ends of a"
            " cell and inside, for both signs.",
            Rounding(0, WHOLE).case([t, t - 2.0**-54, 0.45, 0.46, 0.0, 0.5, 1.0, -0.54, -0.56, -1.0, -2.5]),
        ),
        "follow-across-a-boundary": (
            "Every y lies across a boundary from its x, by less than delta; the log brings each back.",
            Rounding(0, WHOLE).case(
                [0.45, 0.46, 3.45, 3.46, -0.55, -0.545], [0.455, 0.45, 3.455, 3.45, -0.545, -0.55]
            ),
        ),
        "out-of-reach": (
            "Three entries ask for the upper side. The boundary is closer than 2 delta, exactly 2 delta away,"
            " and far: the first is obeyed, the others are violations and keep the own rounding.",
            Rounding(0, WHOLE).case(
                [0.43, 0.42, 0.1], [t - 1.99 * step, t - 2 * step, 0.1], [[0, 1], [1, 1], [2, 1]]
            ),
        ),
        "tie-of-two-boundaries": (
            "Half a quantum above its boundary a value is as far from the next one; the own one is taken.",
            Rounding(0, scaled(-1, -1, 0)).case([(t + 0.5) / 2, (t + 0.5 + 2.0**-20) / 2, (t + 1.5) / 2]),
        ),
        "binade-edge": (
            "FP32 around 1 and -1, where the quantum doubles; y is 0.9 delta on, for some across the edge.",
            Rounding(24, scaled(-27, -40, 0)).case(edges, [x + 0.9 * 2.0**-27 for x in edges]),
        ),
        "fp32-subnormals": (
            "The quantum stops at 2**-149: the smallest subnormal, parts of it, the largest subnormal, the"
            " smallest normal number, and far less than all.",
            Rounding(24, relative(*[0.0] * 7)).case(tiny),
        ),
        "floor-takes-over": (
            "Floor 2**-20 on a 24-bit grid: up to 16 the floor is the quantum, from 16 on the ulp is.",
            Rounding(24, scaled(-30, -20, 0)).case([1e-7, 0.3, 15.9999999, 16.0, 16.0000001, 33.3, -1e-6]),
        ),
        "negative-zero": (
            "Whatever rounds to zero becomes +0.0, from either side.",
            Rounding(0, WHOLE).case([-0.0, 0.0, -(2.0**-1074), -0.3, 0.3]),
        ),
        "structural-ties": (
            "Halves, thirds, quarters and tenths of a quantum lie off the fixed boundary and are not logged.",
            Rounding(0, WHOLE).case([0.5, 1.5, -2.5, 1 / 3, 2 / 3, 0.1, 0.9, 0.25, 0.75]),
        ),
        "relative-band": (
            "Delta is 2**-47 of the larger of old and new: of two equal values only the one with a large old"
            " value is logged.",
            Rounding(24, relative(1.0, 16.0)).case([1.0 + (t + 2.0**-22) * 2.0**-23] * 2),
        ),
        **cancellations(),
        **residue_cases(),
        "dithered": (
            "One boundary position per element, from the first 12 words of stream (1, 2).",
            Rounding(0, scaled(-4, -1, 0), words).case([0.37 * i - 2.0 for i in range(12)]),
        ),
        "dither-ends": (
            "The smallest and the largest boundary position, 2**-33 and 1 - 2**-33.",
            Rounding(0, scaled(-8, 0, 0), ends).case([0.0, 0.0, 2.0**-33, -(2.0**-33), 0.999]),
        ),
        "rows-have-their-own-scale": (
            "Six elements in three blocks with scales 0, -10 and 3: quantum and band follow the row.",
            Rounding(0, scaled(-5, 0, 0, -10, 3)).case([0.3, 1.45, 0.3, 0.00244, 3.0, 11.62]),
        ),
        "band-below-binary64": (
            "2**(s + d) is below every binary64 number and the quantum is 2**-149: only a value exactly on a"
            " boundary is logged.",
            Rounding(0, lost).case([t * 2.0**-149, 0.45 * 2.0**-149, 1.0]),
        ),
        "huge-multiples": (
            "On a quantum of 2**-149 ordinary numbers are multiples beyond every integer type; they come out"
            " as they went in.",
            Rounding(0, lost).case([1.0, -3.5, 1e-3, 2.0**100]),
        ),
        "huge-dithered-multiples": (
            "Odd multiples beyond 2**53, near the boundary of the cell below: logged, and still they come out"
            " as they went in.",
            Rounding(0, scaled(-8, 0, 0), [2**32 - 1] * 3).case([2.0**53 + 2, -(2.0**53) - 2, 2.0**60]),
        ),
        "narrow-dithered-band": (
            "A band of 2**-13 quanta; x is not logged, y (1 - 2**-40) bands above it. The follower has another value.",
            narrow_case(-13, 0, Fraction(1, 2**54) - Fraction(1, 2**13), -Fraction(1, 2**54)),
        ),
        "narrower-dithered-band": (
            "A band of 2**-16 quanta, x exactly a band from its boundary. The follower has another value.",
            narrow_case(-18, -2, -Fraction(1, 2**16), -Fraction(1, 2**56)),
        ),
        "far-dithered-multiples": (
            "A false log asks for the upper side: below 2**53 that is one quantum up, beyond it the multiple is"
            " rounded to an even one.",
            Rounding(0, scaled(-8, 0, 0), [0] * 6).case(
                [float(2**52 - 1), float(2**52 + 1), 2.0**53, 2.0**53 + 2, 2.0**54, -(2.0**53)],
                entries=[[i, 1] for i in range(6)],
            ),
        ),
        "largest-fp32-followed": (
            "y by itself would round beyond the largest FP32 value; the log brings it back.",
            Rounding(24, relative(LARGEST_FP32, exponent=-28)).case(
                [LARGEST_FP32 + (t - 0.01) * 2.0**104], [LARGEST_FP32 + (t + 0.01) * 2.0**104]
            ),
        ),
        "largest-fp32": (
            "The largest FP32 value, and a quarter of an ulp more.",
            Rounding(24, relative(*[0.0] * 3)).case(
                [LARGEST_FP32, LARGEST_FP32 * (1 + 2.0**-26), -LARGEST_FP32]
            ),
        ),
        **refused_roundings(),
    }


def residue_cases() -> Cases:
    """Sites logged by a few bits an element (spec/rounding.md 10)."""
    t, half, quarter = float(T), scaled(-1, 0, 0), scaled(-2, 0, 0)
    words = philox_words((1, 2), 0, 12)
    ramp = [0.37 * i - 2.0 for i in range(12)]
    rows = [1.0] * 4 + [2.0**-10] * 4 + [8.0] * 4

    def refuse(why: str, reason: str, band: Case, xs: list[float], used: list[int]) -> tuple[str, Case]:
        case = {
            "operation": "residues",
            **Rounding(0, band).arguments,
            "bits": 1,
            "xs": hexes(xs),
            "used": used,
        }
        return why, {**case, "error": "InvalidInput", "reason": reason}

    return {
        "parity-example": (
            "The worked example of spec/rounding.md 10.",
            Rounding(0, half).residue_case([0.45, 3.46, -0.55, 0.8], [0.75, 3.1, -0.5, 1.25]),
        ),
        "parity-ties": (
            "y half a quantum from both boundaries of its cell, and a little to either side. The band is half a"
            " quantum: a violation, then across the upper boundary, then across the own one.",
            Rounding(0, half).residue_case(
                [0.0, 2.0, 0.0], [t + 0.5, t + 0.5 + 2.0**-20, t + 0.5 - 2.0**-20]
            ),
        ),
        "parity-out-of-reach": (
            "The band is a quarter of the quantum: a boundary closer than that, at that distance, and far.",
            Rounding(0, quarter).residue_case([1.0] * 3, [t - 0.2499, t - 0.25, 0.1]),
        ),
        "parity-two-quanta-off": (
            "1.02 quanta apart the follower ends two quanta away, and nothing shows it; 0.49 apart it does not.",
            Rounding(0, half).residue_case([0.44, 0.44], [1.46, 0.93]),
        ),
        "parity-zeros": (
            "Zeros are even, of either sign; -0.3 rounds to zero; -1 is odd.",
            Rounding(0, half).residue_case([0.0, -0.0, -0.3, -1.0, -2.0]),
        ),
        "parity-powers-of-two": (
            "Both sides of powers of two: an absolute grid has no edge there.",
            Rounding(0, scaled(-4, -3, 0)).residue_case(
                [
                    sign * 2.0**e * (1 + off)
                    for e in (-3, 0, 2)
                    for off in (-(2.0**-30), 0, 2.0**-30)
                    for sign in (1, -1)
                ]
            ),
        ),
        "parity-dithered": (
            "One boundary position per element, y up to 0.9 of the band away.",
            Rounding(0, scaled(-2, -1, 0), words).residue_case(
                ramp, [x + 0.225 * (-1) ** i for i, x in enumerate(ramp)]
            ),
        ),
        "parity-rows": (
            "Six elements in three blocks with scales 0, -10 and 3.",
            Rounding(0, scaled(-2, -1, 0, -10, 3)).residue_case(
                [0.3, 1.45, 0.0003, 0.00244, 3.0, 11.62], [0.5, 1.25, 0.0005, 0.0023, 1.5, 12.5]
            ),
        ),
        "parity-huge-multiples": (
            "Up to 2**53 every whole number of quanta has its parity, beyond it all are even.",
            Rounding(0, half).residue_case([2.0**53 - 1, 1 - 2.0**53, 2.0**53, 2.0**53 + 2, 2.0**60]),
        ),
        "residues-example": (
            "Two bits: y up to one and a half quanta away.",
            Rounding(0, scaled(-2, -2, 0)).residue_case(
                [0.1, 0.36, -0.6, 1.0], [0.36, 0.1, -0.3, 0.66], bits=2
            ),
        ),
        "residues-ties": (
            "Two quanta away on either side: across the nearest boundary, and half a quantum from both across the own one.",
            Rounding(0, scaled(-1, 0, 0)).residue_case(
                [1.0] * 3, [t + 0.1, t + 0.9, t + 0.5], [3, 3, 3], bits=2
            ),
        ),
        "residues-rows-dithered": (
            "Three bits, rows with scales 0, -10 and 3, boundaries of their own, y up to 3.4 quanta away.",
            Rounding(0, scaled(-2, -3, 0, -10, 3), words).residue_case(
                [x * s for x, s in zip(ramp, rows, strict=True)],
                [(x + 0.425 * (-1) ** i) * s for i, (x, s) in enumerate(zip(ramp, rows, strict=True))],
                bits=3,
            ),
        ),
        "residues-eight-bits": (
            "The most: 0 to 255, y up to 127.4 quanta away, and 129 where the nearest of that residue is another.",
            Rounding(0, scaled(-2, -3, 0)).residue_case(
                [0.1, -0.2, 15.9, -31.9, 3.0], [16.0, -16.1, 0.0, -16.0, 3.0 + 129 / 8], bits=8
            ),
        ),
        "residues-out-of-reach": (
            "1.6 quanta away the follower ends four quanta from the recorder, and nothing shows it.",
            Rounding(0, half).residue_case([0.0, 0.0], [1.9, 2.1], bits=2),
        ),
        "parity-wide-band_fail": refuse(
            "The quantum is not at least two bands.",
            "band exponent -2 is above -1 octaves over the floor's -2",
            scaled(-2, -2, 0),
            [0.25, 0.75],
            [0, 1],
        ),
        "parity-too-few_fail": refuse(
            "One bit for each element.", "1 residues of 1 bits for 2 elements", half, [0.25, 0.75], [0]
        ),
        "parity-not-a-bit_fail": refuse(
            "A parity is 0 or 1.", "2 residues of 1 bits for 2 elements", half, [0.25, 0.75], [0, 2]
        ),
        "parity-not-a-number_fail": refuse(
            "NaN is neither even nor odd.", "element 1: nan is not finite", half, [0.25, math.nan], [0, 1]
        ),
    }


def cancellations() -> Cases:
    """New values small beside the old ones: the quantum is 2**(e(old) + b + 5), not an ulp of the new."""
    t = float(T)
    q = 2.0**-42  # of old = 1 and b = -47; delta is q / 32
    near = [(k + t + off) * q for k in (0, 1, 5, -1, -6) for off in (-0.01, 0.01)]
    noise = [sign * 0.9 * q / 32 for _ in near for sign in (1, -1)]
    olds = [2.0 - 2.0**-23, 2.0, 2.0 + 2.0**-22, -2.0, -1.5]
    low = [2.0**-108, 2.0**-107, 2.0**-106, 2.0**-149, 0.0]
    marks = [2.0**-18 + mark * q for mark in (t - 1, 0, 2 * t)]
    marks += [-(2.0**-18) + mark * q for mark in (t, 0, 2 * (t - 1))]
    seam = [mark + off * q for mark in marks for off in (-0.01, 0.01)]
    return {
        "cancellation": (
            "Old values of 1: the quantum is 2**-42, 32 deltas, however small the new value. Every y is 0.9"
            " delta from its x, on the other side of the boundary.",
            Rounding(24, relative(*[1.0] * len(near))).case(
                near, [x + d for x, d in zip(near, noise, strict=False)]
            ),
        ),
        "cancellation-complete": (
            "Nothing is left on one side, noise of 0.9 delta on the other: both round to zero, unlogged.",
            Rounding(24, relative(1.0, -1.0, 1.0)).case(
                [0.0, 0.9 * q / 32, -0.0], [0.9 * q / 32, 0.0, -0.9 * q / 32]
            ),
        ),
        "cancellation-example": (
            "The second worked example of spec/rounding.md.",
            Rounding(24, relative(1.0, 1.0, 1.0)).case(
                [0.45 * q, 7.47 * q, 0.0], [0.46 * q, 7.44 * q, -0.02 * q]
            ),
        ),
        "cancellation-seam": (
            "From 2**-18 of the old value on an ulp is more than the floor: values beside that edge, the last"
            " boundary before it and the first one after it, and y across.",
            Rounding(24, relative(*[1.0] * len(seam))).case(
                seam, [x + d for x, d in zip(seam, noise * 2, strict=False)]
            ),
        ),
        "cancellation-by-binade": (
            "The floor doubles where the old value reaches a power of two, whatever its sign.",
            Rounding(24, relative(*olds)).case([1.48 * q] * len(olds), [1.49 * q] * len(olds)),
        ),
        "cancellation-of-small-values": (
            "Down to old values of 2**-107 the floor stays at 2**-149; the quantum is never finer.",
            Rounding(24, relative(*low)).case([1.48 * 2.0**-149] * len(low)),
        ),
        "cancellation-twelve-bits": (
            "Precision 12 and b = -16, the widest band with more than 16 deltas to the quantum.",
            Rounding(12, relative(1.0, 3.0, 3.0, exponent=-16)).case(
                [0.44 * 2.0**-11, 0.48 * 2.0**-10, 1.0], [0.47 * 2.0**-11, 0.44 * 2.0**-10, 1.0 + 2.0**-15]
            ),
        ),
        "cancellation-out-of-reach": (
            "Entries ask for the upper side of a cancelled value, just within 2 delta, and at 2 delta: the"
            " second is a violation.",
            Rounding(24, relative(1.0, 1.0)).case(
                [0.43 * q, 0.1 * q], [(t - 1.99 / 32) * q, (t - 2 / 32) * q], [[0, 1], [1, 1]]
            ),
        ),
    }


def refused_roundings() -> Cases:
    def refuse(
        why: str, reason: str, xs: list[float], arguments: Rounding, used: Any = None
    ) -> tuple[str, Case]:
        case = {"operation": "record" if used is None else "follow", **arguments.arguments}
        return why, {**case, "xs": hexes(xs), "used": used, "error": "InvalidInput", "reason": reason}

    two = [0.25, 0.75]
    fp32, whole = Rounding(24, relative(0.0, 0.0)), Rounding(0, WHOLE)
    return {
        "not-a-number_fail": refuse(
            "NaN has no place on a grid.", "element 1: nan is not finite", [0.0, math.nan], fp32
        ),
        "infinity_fail": refuse(
            "Nor has an infinity.", "element 0: -inf is not finite", [-math.inf, 0.0], whole
        ),
        "rounds-beyond-fp32_fail": refuse(
            "Finite in binary64, and a 24-bit grid carries it to 2**128.",
            "is beyond the largest FP32 value",
            [0.0, LARGEST_FP32 * (1 + 2.0**-24)],
            fp32,
        ),
        "dither-on-relative-grid_fail": refuse(
            "Dither is for absolute grids.", "needs an absolute grid", two, Rounding(24, WHOLE, [0, 1])
        ),
        "too-few-dither-words_fail": refuse(
            "One word for each element.", "1 words for 2 elements", two, Rounding(0, WHOLE, [0])
        ),
        "blocks-do-not-divide_fail": refuse(
            "Blocks are rows of one size.",
            "3 blocks do not divide 2",
            two,
            Rounding(0, scaled(-6, 0, 0, 0, 0)),
        ),
        "band-not-below-scale_fail": refuse(
            "A band's exponent is negative.", "exponent 0 is not negative", two, Rounding(0, scaled(0, 4, 0))
        ),
        "old-not-a-number_fail": refuse(
            "An old value that is no number gives neither band nor floor.",
            "element 1: old value nan is not within the range of FP32",
            two,
            Rounding(24, relative(0.0, math.nan)),
        ),
        "old-infinite_fail": refuse(
            "With an infinite old value everything would cancel.",
            "element 0: old value inf is not within the range of FP32",
            two,
            Rounding(24, relative(math.inf, 0.0)),
        ),
        "old-beyond-fp32_fail": refuse(
            "State is FP32 values, before the step too.",
            "element 1: old value -3.402823669209385e+38 is not within the range of FP32",
            two,
            Rounding(24, relative(LARGEST_FP32, -(2.0**128))),
        ),
        "old-infinite-followed_fail": refuse(
            "The follower refuses it as the recorder does.",
            "element 1: old value -inf is not within the range of FP32",
            two,
            Rounding(24, relative(0.0, -math.inf)),
            [],
        ),
        "too-few-old-values_fail": refuse(
            "One old value for each element.", "1 old values for 2 elements", two, Rounding(24, relative(0.0))
        ),
        "followed-beyond-fp32_fail": refuse(
            "The log asks for the upper side of the last boundary of FP32.",
            "is beyond the largest FP32 value",
            [0.0, LARGEST_FP32 + (float(T) - 0.01) * 2.0**104],
            Rounding(24, relative(0.0, LARGEST_FP32, exponent=-28)),
            [[1, 1]],
        ),
        "entry-twice_fail": refuse(
            "Indexes ascend strictly.", "index 1 after 1", two, whole, [[1, 0], [1, 1]]
        ),
        "entry-beyond-the-tensor_fail": refuse(
            "Indexes stay inside.", "index 2 after -1", two, whole, [[2, 0]]
        ),
        "side-not-a-bit_fail": refuse("A side is 0 or 1.", "side 2 of element 0", two, whole, [[0, 2]]),
    }


# The log, as strings of bits (spec/rounding-log.md).


def varint(value: int) -> bytes:
    digits: list[int] = []
    while True:
        digits.append(value % 128)
        value //= 128
        if not value:
            return bytes([digit + 128 for digit in digits[:-1]] + digits[-1:])


def zigzag(value: int) -> int:
    return 2 * value if value >= 0 else -2 * value - 1


def field(value: int, width: int) -> str:
    """Return ``width`` bits, the least significant first."""
    return "".join("1" if value >> bit & 1 else "0" for bit in range(width))


def packed(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


def entries_bytes(n: int, width: int, pairs: Pairs) -> bytes:
    if not pairs:
        return b"\x00"
    ratio, k = n * 63073 // (len(pairs) * 65536), 0
    while 2 ** (k + 1) <= ratio:
        k += 1
    gaps = [index - before - 1 for before, index in zip([-1, *pairs], pairs, strict=False)]
    unary = "".join("0" * (gap // 2**k) + "1" for gap in gaps)
    remainders = "".join(field(gap % 2**k, k) for gap in gaps)
    return varint(len(pairs)) + packed(unary + remainders + "".join(field(s, width) for s in pairs.values()))


def key_bytes(before: tuple[int, ...], key: tuple[int, ...]) -> bytes:
    same = 0
    while before[same] == key[same]:
        same += 1
    head = (key[same] - before[same] - 1) * (4 if len(key) == 4 else 2) + same
    return varint(head) + b"".join(varint(value) for value in key[same + 1 :])


def frame_bytes(sites: dict[tuple[int, int, int, int], bytes]) -> bytes:
    data, before = b"\x01" + varint(len(sites)), (0, 0, 0, -1)
    for address, payload in sites.items():
        data += key_bytes(before, address) + varint(len(payload))
        before = address
    return data + b"".join(sites.values())


def fields_bytes(site: Site) -> bytes:
    precision, band, floor, dithered = site[:4]
    head = 128 + 2 * (site[5] - 1) if site[5:] else 2 * precision
    return bytes([head + dithered]) + varint(zigzag(band)) + varint(zigzag(floor))


def site_change(old: Site | None, new: Site | None) -> bytes:
    if new is None:
        return b"\x00"
    scales = new[4]
    if old is None or len(old[4]) != len(scales):
        data = b"\x04" + fields_bytes(new) + varint(len(scales))
        if not scales:
            return data
        width = max(1, max(map(zigzag, scales)).bit_length())
        return data + bytes([width]) + packed("".join(field(zigzag(scale), width) for scale in scales))
    moved = {i: zigzag(b - a) - 1 for i, (a, b) in enumerate(zip(old[4], scales, strict=True)) if a != b}
    other = old[:4] + old[5:] != new[:4] + new[5:]
    data = bytes([2 * other + bool(moved)]) + (fields_bytes(new) if other else b"")
    if moved:
        width = max(1, max(moved.values()).bit_length())
        data += bytes([width]) + entries_bytes(len(scales), width, moved)
    return data


def change_bytes(old: Table, new: Table) -> bytes:
    data, before, count = b"", (0, -1), 0
    for key in sorted({**old, **new}):
        if old.get(key) != new.get(key):
            data += key_bytes(before, key) + site_change(old.get(key), new.get(key))
            before, count = key, count + 1
    return varint(count) + data


def entries_case(n: int, width: int, pairs: Pairs) -> Case:
    data = entries_bytes(n, width, pairs).hex()
    symbols = list(pairs.values())
    return {
        "operation": "entries",
        "n": n,
        "width": width,
        "indexes": list(pairs),
        "symbols": symbols,
        "data": data,
    }


def decision_case(band: int, n: int, width: int, pairs: Pairs) -> Case:
    case = entries_case(n, width, pairs)
    data = varint(zigzag(band)) + bytes([width]) + bytes.fromhex(case["data"])
    return {**case, "operation": "decision", "band": band, "data": data.hex()}


def residues_case(values: list[int], bits: int = 1) -> Case:
    planes = [packed("".join(str(value >> j & 1) for value in values)) for j in range(bits)]
    data = b"".join(planes).hex()
    return {"operation": "parities", "n": len(values), "bits": bits, "residues": values, "data": data}


def frame_case(sites: dict[tuple[int, int, int, int], bytes]) -> Case:
    listed = [[list(address), payload.hex()] for address, payload in sites.items()]
    return {"operation": "frame", "sites": listed, "data": frame_bytes(sites).hex()}


def table_json(table: Table) -> list[Case]:
    names = ("precision", "band", "floor", "dithered", "scales", "residue_bits")
    return [{"key": list(key), **dict(zip(names, site, strict=False))} for key, site in sorted(table.items())]


def table_case(table: Table) -> Case:
    return {
        "operation": "table",
        "sites": table_json(table),
        "data": (b"\x01" + change_bytes({}, table)).hex(),
    }


def change_case(old: Table, new: Table) -> Case:
    data = change_bytes(old, new).hex()
    return {"operation": "change", "old": table_json(old), "new": table_json(new), "data": data}


TABLE: Table = {
    (3, 0): (0, -16, -5, True, (-3, -4, -12, -3)),
    (3, 1): (0, -16, -5, True, (-7,)),
    (4, 0): (24, -47, 0, False, ()),
}
PARITY: Site = (0, -4, -3, True, (2, 0))
EXAMPLE = {17: 1, 300: 0, 301: 1}


# Rounding to the nearest (spec/rounding.md 9), and the dense form (spec/rounding-log.md 9).


def nearest_place(x: float, grid: Case) -> tuple[Fraction, int, Fraction, int, Fraction]:
    """Return quantum, cell of the magnitude, distance to the boundary, whether it rounds up, and the band."""
    q = quantum(x, grid["b_r"] - 8, max(grid["scale"] + grid["floor"], -149 + 32 - grid["b_r"]))
    k = math.floor(abs(Fraction(x)) / q)
    rest = abs(Fraction(x)) / q - k
    up = int(rest > Fraction(1, 2) or (rest == Fraction(1, 2) and k % 2 == 1))
    delta = Fraction(2) ** (grid["scale"] + grid["band"])
    if grid["tau"] is not None:
        delta = max(delta, (Fraction(1, 2) - Fraction(grid["tau"])) * q)
    return q, k, abs(rest - Fraction(1, 2)) * q, up, delta


def nearest_case(grid: Case, xs: list[float], ys: list[float], extra: list[list[int]] | None = None) -> Case:
    values: list[float] = []
    entries: list[list[int]] = []
    for i, x in enumerate(xs):
        q, k, distance, up, delta = nearest_place(x, grid)
        sign = -1 if x < 0 else 1
        values.append(float(sign * (k + up) * q))
        if distance < delta:
            entries.append([i, up if sign > 0 else 1 - up])
    used = sorted(entries + (extra or []))
    sides = {entry[0]: entry[1] for entry in used}
    followed: list[float] = []
    violations: list[int] = []
    for i, y in enumerate(ys):
        q, k, distance, up, delta = nearest_place(y, grid)
        sign = -1 if y < 0 else 1
        if i in sides and distance < delta:
            up = sides[i] if sign > 0 else 1 - sides[i]
        elif i in sides and distance >= 2 * delta:
            violations.append(i)
        followed.append(float(sign * (k + up) * q))
    return {
        "operation": "nearest", "grid": grid, "xs": hexes(xs), "values": hexes(values), "entries": entries, "used": used,
        "ys": hexes(ys), "followed": hexes(followed), "violations": violations,
    }  # fmt: skip


def nearest_cases() -> Cases:
    grid: Case = {"b_r": 32, "scale": 0, "band": -40, "floor": -36, "tau": None}
    ties = [1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-24 + 2.0**-30, 2.0**-37]
    away = [x - 2.0**-41 for x in ties]
    eps26 = 2.0**-17
    edge = [2.0, 2.0 - 2.0**-52, 2.0 - 2.0**-25, 2.0 + 2.0**-23, 2.0 - 2.0**-24, 4.0 + 2.0**-51]
    low: Case = {**grid, "scale": -140, "floor": -20, "band": -24}
    fixed: Case = {**grid, "b_r": 26, "tau": "1/4"}
    quarter = [1 + (k + f) * eps26 for k in range(3) for f in (0.2, 0.3, 0.7, 0.8)]

    def refuse(why: str, reason: str, x: float, **more: Any) -> tuple[str, Case]:
        case = {"operation": "nearest", "grid": {**grid, **more}, "xs": hexes([1.0, x])}
        return why, {**case, "error": "InvalidInput", "reason": reason}

    return {
        "example": (
            "The worked example of spec/rounding.md 9, followed from just below.",
            nearest_case(grid, ties, away),
        ),
        "negative": (
            "The same below zero: sides are those of the value, not of its magnitude.",
            nearest_case(grid, [-x for x in ties], [-x for x in away]),
        ),
        "edges": ("Both sides of powers of two.", nearest_case(grid, edge, edge)),
        "zeros": (
            "Zeros are positive and never near.",
            nearest_case(grid, [0.0, -0.0, 2.0**-60, -(2.0**-60)], [-0.0, 0.0, 0.0, 2.0**-61]),
        ),
        "subnormal": (
            "Below the smallest normal FP32 value the spacing stays 2^-149.",
            nearest_case(
                low,
                [2.0**-149, 1.5 * 2.0**-149, 2.5 * 2.0**-149, 2.0**-150, 2.0**-151],
                [0.0, 2.0**-149, 2.0**-148, 2.0**-149, 0.0],
            ),
        ),
        "26-bits": (
            "Quanta of 2^-17, threshold a quarter of one: every second element is logged.",
            nearest_case(fixed, quarter, [x + 0.05 * eps26 for x in quarter]),
        ),
        "one-band-off": (
            "Between one band and two an entry is not obeyed and no violation; at two it is one.",
            nearest_case(
                grid,
                [1.0] * 3,
                [1 + 2.0**-24 - d * 2.0**-40 for d in (0.5, 1.5, 2.0)],
                [[0, 1], [1, 1], [2, 1]],
            ),
        ),
        "infinity_fail": refuse("Not finite.", "element 1: inf is not finite", math.inf),
        "beyond-fp32_fail": refuse(
            "Rounds beyond FP32.", "is beyond the largest FP32 value", LARGEST_FP32 * (1 + 2.0**-24)
        ),
        "25-bits_fail": refuse("b_r goes from 26 to 32.", "b_r 25 is outside", 1.0, b_r=25),
        "band-too-wide_fail": refuse(
            "Four bands to a quantum.", "above a quarter of the floor", 1.0, band=-37
        ),
        "tau-below-a-quarter_fail": refuse("A threshold is at least 1/4.", "above a quarter", 1.0, tau="0"),
    }


def dense_cases() -> Cases:
    def case(trits: list[int]) -> Case:
        padded = trits + [0] * (-len(trits) % 5)
        data = bytes(sum(3**j * padded[i + j] for j in range(5)) for i in range(0, len(padded), 5))
        at = [i for i, trit in enumerate(trits) if trit != 1]
        return {
            "operation": "dense",
            "n": len(trits),
            "indexes": at,
            "symbols": [trits[i] // 2 for i in at],
            "data": data.hex(),
        }

    def refuse(why: str, reason: str, n: int, data: str) -> tuple[str, Case]:
        return why, {"operation": "dense", "n": n, "data": data, "error": "InvalidInput", "reason": reason}

    return {
        "dense-example": ("The example of spec/rounding-log.md 9.", case([1, 2, 1, 1, 0, 1, 1])),
        "dense-empty": ("A site without elements.", case([])),
        "dense-all": ("Every element logged.", case([2, 0, 2, 2, 0, 0, 0, 2, 2, 2])),
        "dense-short_fail": refuse("A byte is missing.", "1 bytes, a site of 7 elements has 2", 7, "2b"),
        "dense-long_fail": refuse("A byte is left over.", "3 bytes, a site of 7 elements has 2", 7, "2b0400"),
        "dense-byte-above-242_fail": refuse("243 codes, no more.", "byte 1 is 243", 10, "2bf3"),
        "dense-padding_fail": refuse(
            "What follows the last element is zero.", "after the last element are not zero", 7, "2b0d"
        ),
    }


def log_cases() -> Cases:
    every_kind = {(0, 0, kind, 0): bytes([kind + 1]) for kind in range(8)} | {(0, 0, 8, 0): b"\x01"}
    largest = 2**32 - 1
    ranks = {(1, 0, 0, 0): b"r", (1, 7, 2, 300): b"m" * 200, (largest, largest, 7, largest): b"end"}
    limits: Table = {(3, 0): (53, -1100, -1100, False, (-1100, 1100)), (3, 1): (0, -1, 1100, False, (-1100,))}
    moved: Site = (0, -16, -5, True, (-3, -5, -12, -2))
    example = {(0, 0, 3, 5): b"\x01\x02", (0, 0, 3, 6): b"\x01\x08", (0, 1, 4, 0): b"\x01\x04"}
    return {
        "entries-none": ("No entry: one zero byte, whatever the tensor.", entries_case(1_000_000, 1, {})),
        "entries-example": ("The worked example of spec/rounding-log.md.", entries_case(1000, 1, EXAMPLE)),
        "entries-ends": ("The first and the last element.", entries_case(4096, 1, {0: 1, 4095: 0})),
        "entries-all": ("Every element: Rice parameter 0.", entries_case(9, 1, {i: i % 2 for i in range(9)})),
        "entries-one-of-one": ("A site of a single element.", entries_case(1, 1, {0: 1})),
        "entries-decisions": (
            "Two-bit symbols: below 0, equal 1, above 2.",
            entries_case(500, 2, {3: 0, 77: 2, 78: 1}),
        ),
        "entries-indexes": ("Symbols of 32 bits.", entries_case(64, 32, {5: 0xDEADBEEF, 60: 0xFFFFFFFF})),
        "entries-far-apart": (
            "One entry at the end of a site of 2**40 elements.",
            entries_case(2**40, 1, {2**40 - 1: 1}),
        ),
        "decision-example": (
            "The worked example of spec/rounding-log.md.",
            decision_case(-17, 100, 2, {3: 0, 9: 2}),
        ),
        "decision-smallest-band": ("Band exponent -1100.", decision_case(-1100, 8, 1, {0: 1})),
        "decision-largest-band": ("Band exponent 1000.", decision_case(1000, 8, 2, {7: 1})),
        "decision-indexes": (
            "A choice among 2**20, as an index.",
            decision_case(-3, 64, 20, {63: 2**20 - 1}),
        ),
        "parities-example": (
            "The worked example of spec/rounding-log.md.",
            residues_case([1, 0, 1, 1, 0, 0, 0, 0, 1, 1]),
        ),
        "parities-one": ("A site of one element.", residues_case([1])),
        "parities-whole-bytes": ("No padding.", residues_case([0, 1] * 8)),
        "residues-packed": (
            "Three bits an element: three planes.",
            residues_case([5, 0, 7, 1, 2, 3, 4, 6, 1, 5], 3),
        ),
        "table-residues": (
            "A gradient with residues of four bits, and one of two on a finer grid.",
            table_case({(3, 0): (0, -2, -2, True, (2, 0), 4), (3, 1): (0, -2, -2, True, (2,), 2)}),
        ),
        "change-bits": (
            "The same grid with more bits.",
            change_case({(3, 0): (0, -2, -2, True, (2, 0), 2)}, {(3, 0): (0, -2, -2, True, (2, 0), 5)}),
        ),
        "table-parity": (
            "A gradient with parities: the top bit of the first field; and one without.",
            table_case({(3, 0): (*PARITY, 1), (3, 1): (0, -9, -3, True, (2,))}),
        ),
        "change-to-parity": (
            "The same band, quantum and scales, another code; and back.",
            change_case({(3, 0): (*PARITY, 1), (3, 1): PARITY}, {(3, 0): PARITY, (3, 1): (*PARITY, 1)}),
        ),
        "frame-empty": ("A step with nothing to say: two bytes.", frame_case({})),
        "frame-example": ("The worked example of spec/rounding-log.md.", frame_case(example)),
        "frame-ranks": (
            "Every kind, two more ranks, the largest fields.",
            frame_case({**every_kind, **ranks}),
        ),
        "table-empty": ("No site.", table_case({})),
        "table-example": ("The worked example of spec/rounding-log.md.", table_case(TABLE)),
        "table-limits": ("Smallest and largest scales, bands and floors.", table_case(limits)),
        "change-none": ("Equal tables: one zero byte.", change_case(TABLE, TABLE)),
        "change-example": ("Two of four scales move by one.", change_case(TABLE, {**TABLE, (3, 0): moved})),
        "change-band": (
            "Another band, the same scales.",
            change_case(TABLE, {**TABLE, (4, 0): (24, -46, 0, False, ())}),
        ),
        "change-band-and-scale": (
            "Another band and another scale of one site.",
            change_case(TABLE, {**TABLE, (3, 1): (0, -15, -5, True, (-8,))}),
        ),
        "change-blocks": (
            "Another number of blocks: the site is written whole.",
            change_case(TABLE, {**TABLE, (3, 1): (0, -16, -5, True, (-7, -7))}),
        ),
        "change-added": (
            "A new site between two that stay.",
            change_case(TABLE, {**TABLE, (3, 9): (14, -20, -30, False, (0,))}),
        ),
        "change-all-removed": ("Every site leaves.", change_case(TABLE, {})),
        **refused_logs(),
    }


def refused_logs() -> Cases:
    cases: Cases = {}

    def refuse(name: str, why: str, reason: str, data: str, **more: Any) -> None:
        operation = name.partition("-")[0]
        case = {"operation": operation, **more, "data": data, "error": "InvalidInput", "reason": reason}
        cases[f"{name}_fail"] = (why, case)

    def entries(name: str, why: str, reason: str, data: str, n: int = 1000) -> None:
        refuse(f"entries-{name}", why, reason, data, n=n, width=1)

    good = entries_bytes(1000, 1, EXAMPLE).hex()
    entries("cut", "The last byte is missing.", "3 entries need 30 bits, 3 bytes left", good[:-2])
    entries("extended", "A byte follows the end.", "1 bytes after the end", good + "00")
    entries("empty", "Not even a count.", "ends where count should be", "")
    entries("padding", "The last bit, which is padding, is set.", "padding bits of byte 4", good[:-2] + "d0")
    entries("long-varint", "The count 3 in two bytes.", "more bytes than it needs", "8300" + good[2:])
    entries("count-exceeds-site", "More entries than elements.", "count 3 exceeds the 2 elements", good, n=2)
    entries("index-exceeds-site", "The gap leads past the end.", "index 7 in a site of 5", "010e", n=5)
    entries("endless-unary", "No quotient ever ends.", "do not end within", "01" + "00" * 40)
    huge = "ffffffffff3f"
    entries("huge-count", "A count of 2**41 - 1 in nine bytes.", "entries need", huge + "555555", n=2**48)

    def parities(name: str, why: str, reason: str, data: str, n: int = 10) -> None:
        refuse(f"parities-{name}", why, reason, data, n=n, bits=1)

    parities("cut", "The last byte is missing.", "10 elements of 1 bits need 2 bytes", "0d")
    parities("extended", "A byte follows the end.", "10 elements of 1 bits need 2 bytes", "0d0300")
    parities("padding", "A bit after the last element is set.", "padding bits of byte 1 of a plane", "0d07")
    parities("none", "A site without elements has no payload.", "n 0 is outside", "", n=0)

    def decision(name: str, why: str, reason: str, data: str, width: int = 2) -> None:
        refuse(f"decision-{name}", why, reason, data, n=100, width=width)

    decided = "2102028f82"
    decision("width", "The operator's symbols have another width.", "the operator needs 1", decided, width=1)
    decision("empty", "No entry: the site should be absent.", "without entries must be absent", "210200")
    decision("cut", "The last byte is missing.", "2 entries need 16 bits, 1 bytes left", decided[:-2])
    decision("extended", "A byte follows the end.", "1 bytes after the end", decided + "00")
    decision("no-width", "Nothing but a band.", "ends where the symbol width", "21")
    decision("narrow-band", "A band of 2**-1101.", "band exponent -1101 is outside", "9911028f82")
    decision("wide-band", "A band of 2**1001.", "band exponent 1001 is outside", "d20f02028f82")
    decision(
        "long-band", "The exponent in more bytes than it needs.", "more bytes than it needs", "a10002028f82"
    )
    refuse("frame-version", "A version nobody knows.", "version 2", "0200")
    refuse(
        "frame-empty-payload", "A site with nothing to say is absent.", "has an empty payload", "0101030000"
    )
    refuse("frame-cut", "Payloads shorter than stated.", "add up to 2, 1 bytes follow", "01010302ff")
    refuse("frame-extended", "Payloads longer than stated.", "add up to 1, 2 bytes follow", "01010301ff00")
    refuse("frame-unknown-kind", "Kinds are 0 to 8.", "kind 9 is not one of", "010122000100")
    refuse("table-unknown-kind", "A site of kind 9.", "kind 9 is not one of", "0101100004305d0000")
    refuse("frame-huge-count", "2**41 - 1 sites in eight bytes.", "sites need at least", f"01{huge}00")
    refuse("frame-large-field", "An ordinal of 2**32.", "outside [0, 2**32)", "0101838080804001ff")
    refuse("table-dithered-relative", "Dither at 24 bits.", "needs an absolute grid", "0101040004315d0000")
    refuse("table-parity-relative", "Parities at 24 bits.", "got 25 bits", "0101040004b05d00010100")
    refuse("table-parity-no-scales", "Parities without scales.", "0 scales", "0101040004810705" + "00")
    refuse(
        "table-parity-fine",
        "A quantum of one band.",
        "a band of at most floor + n - 2",
        "010104000481070701040d",
    )
    refuse("table-wide-symbols", "Scales wider than need be.", "canonical", "0101040004305d00010201")
    refuse("table-huge-blocks", "2**41 - 1 blocks.", "more bytes", f"0101040004305d00{huge}01ff")
    refuse("table-far-scale", "A scale of -2048.", "scales -2048..-2048", "0101040004305d00010cff0f")
    old = {"old": table_json(TABLE)}
    refuse("change-of-nothing", "Fields that are as they were.", "canonical", "01060002305d00", **old)
    refuse("change-removes-absent", "No such site.", "which the table does not hold", "01060100", **old)
    refuse("change-cut", "Fields that do not come.", "ends where precision", "01060002", **old)
    refuse("change-unknown", "Changes are 0 to 4.", "change 5 of site", "01060005", **old)
    return cases


# Philox 4x32-10 and what is drawn from it (spec/random.md).


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b // 2**32 ^ c[1] ^ k[0], b % 2**32, a // 2**32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def philox_words(key: tuple[int, int], start: int, count: int) -> list[int]:
    def word(i: int) -> int:
        return philox([i // 4 % 2**32, i // 4 // 2**32, 0, 0], list(key))[i % 4]

    return [word(i) for i in range(start, start + count)]


def wide_words(key: tuple[int, int], start: int, count: int) -> list[int]:
    words = philox_words(key, 2 * start, 2 * count)
    return [low + high * 2**32 for low, high in zip(words[::2], words[1::2], strict=True)]


def stream_key(use: Case) -> tuple[int, int]:
    def u64(value: int) -> bytes:
        return value.to_bytes(8, "little")

    tag = b"tallystick/random-stream/1"
    parts = [u64(use["seed"]), use["purpose"].encode("ascii")]
    parts += [u64(use[name]) for name in ("step", "rank", "micro_batch", "call")]
    message = bytes([len(tag)]) + tag + b"".join(u64(len(part)) + part for part in parts)
    first = hashlib.sha256(message).digest()
    return int.from_bytes(first[:4], "little"), int.from_bytes(first[4:8], "little")


PUBLISHED = {  # Random123, tests/kat_vectors: counter, key, output
    "published-zeros": ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    "published-ones": ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
    "published-pi": (
        "243f6a8885a308d313198a2e03707344",
        "a4093822299f31d0",
        "d16cfe0994fdcceb5001e42024126ea1",
    ),
}
# Standard normal quantiles to 17 digits, from the error function of mpmath at 50 digits.
QUANTILES = {
    2.0**-33: -6.3379577545537895,
    1e-8: -5.612001244174789,
    1e-3: -3.0902323061678136,
    0.075: -1.439531470938456,
    0.5: 0.0,
    0.6: 0.2533471031357997,
    0.925: 1.4395314709384561,
    0.999: 3.090232306167813,
}


# The coefficients of spec/random.md 4 as that page prints them.
CENTRE = (
    (
        "0x1.b18d91e9eef75p+1",
        "0x1.0a4888b1a436ep+7",
        "0x1.ece5d2213c0ccp+10",
        "0x1.ad1d8cd4ee71dp+13",
        "0x1.66c3e869b752ap+15",
        "0x1.06c1c55b78f20p+16",
        "0x1.052d26b2e45e4p+15",
        "0x1.39a296f7d925ep+11",
    ),
    (
        "0x1.0000000000000p+0",
        "0x1.5281b386e1ab5p+5",
        "0x1.5797efdc8b3f7p+9",
        "0x1.512322e75c89fp+12",
        "0x1.4b772d5d65266p+14",
        "0x1.3317caa64f4bep+15",
        "0x1.c0e457cb1ae76p+14",
        "0x1.46a7eca984b69p+12",
    ),
)
SHOULDER = (
    (
        "0x1.6c665fde9526ap+0",
        "0x1.2857748cab19bp+2",
        "0x1.713f71462256ap+2",
        "0x1.d2ecb1a3d02c4p+1",
        "0x1.453cc085375b2p+0",
        "0x1.ef2abb9b85c37p-3",
        "0x1.744eb6c45ec67p-6",
        "0x1.9615ac0b7ace9p-11",
    ),
    (
        "0x1.0000000000000p+0",
        "0x1.06cefbb46a449p+1",
        "0x1.ad278e6526633p+0",
        "0x1.61292f23385c9p-1",
        "0x1.2f5123394f040p-3",
        "0x1.f207a7eab17bfp-7",
        "0x1.1f18cbfdf2728p-11",
        "0x1.20d3f686439e4p-30",
    ),
)
TAIL = (
    (
        "0x1.aa1b1c13ee526p+2",
        "0x1.5daea6e875003p+2",
        "0x1.c8ea6461fa445p+0",
        "0x1.2fad9315255cfp-2",
        "0x1.b2b41193b4ee7p-6",
        "0x1.45c1908425345p-10",
        "0x1.c6ec6cc59e02ap-16",
        "0x1.afb74d693bf93p-23",
    ),
    (
        "0x1.0000000000000p+0",
        "0x1.331d34fc7d77fp-1",
        "0x1.186eb183443fbp-3",
        "0x1.e76f93215462ap-7",
        "0x1.9c8bc979dc5d7p-11",
        "0x1.35c2c496374bfp-16",
        "0x1.31446f740b9e0p-23",
        "0x1.269bff1f8c190p-49",
    ),
)
SEAMS = [
    0.075,
    0.07499999999999998,
    0.925,
    0.9250000000000003,
    0.5,
    0.3,
    1.3887943864964e-11,
    1.4e-11,
    1e-300,
    2.0**-33,
]


def natural_logarithm(x: float) -> float:
    """The page's own, in binary64 without fused operations."""
    m, e = math.frexp(x)
    if m < float.fromhex("0x1.6a09e667f3bcdp-1"):
        m, e = 2.0 * m, e - 1
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    h = 1.0 / 25.0
    for i in range(23, 2, -2):
        h = h * square + 1.0 / i
    high, low = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
    return e * high + (2.0 * s + (e * low + 2.0 * s * square * h))


def normal_quantile(u: float) -> float:
    """AS 241 as spec/random.md 4 writes it."""

    def ratio(pair: tuple[tuple[str, ...], tuple[str, ...]], x: float) -> float:
        found: list[float] = []
        for coefficients in pair:
            value = 0.0
            for text in reversed(coefficients):
                value = value * x + float.fromhex(text)
            found.append(value)
        return found[0] / found[1]

    q = u - 0.5
    if abs(q) <= 0.425:
        return q * ratio(CENTRE, 0.180625 - q * q)
    r = math.sqrt(-natural_logarithm(min(u, 1.0 - u)))
    far = ratio(SHOULDER, r - 1.6) if r <= 5.0 else ratio(TAIL, r - 5.0)
    return -far if q < 0.0 else far


def philox_cases() -> Cases:
    def split(text: str) -> list[int]:
        return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]

    cases: Cases = {}
    for name, (counter, cipher_key, output) in PUBLISHED.items():
        assert philox(split(counter), split(cipher_key)) == split(output)
        block = {"counter": split(counter), "key": split(cipher_key), "output": split(output)}
        cases[name] = ("Published with Random123.", {"operation": "block", **block})
    use: Case = {"seed": 1, "purpose": "example", "step": 2, "rank": 0, "micro_batch": 0, "call": 3}
    last: Case = {"seed": 2**64 - 1, "purpose": "", "step": 0, "rank": 2**32, "micro_batch": 7, "call": 0}
    key = stream_key(use)
    cases["stream-key"] = (
        "The worked example of spec/random.md.",
        {"operation": "key", **use, "key": list(key)},
    )
    cases["stream-key-limits"] = (
        "An empty purpose and large numbers.",
        {"operation": "key", **last, "key": list(stream_key(last))},
    )

    def drawn(name: str, why: str, operation: str, start: int, values: list[Any], **more: Any) -> None:
        case = {"operation": operation, "key": list(key), "start": start, "count": len(values), **more}
        cases[name] = (why, {**case, "values": values})

    far = 2**34 + 3
    drawn("words", "The first ten words.", "words", 0, philox_words(key, 0, 10))
    drawn("words-inside", "From the middle of a block.", "words", 6, philox_words(key, 6, 5))
    drawn("words-far", "Counters beyond 32 bits.", "words", far, philox_words(key, far, 6))
    halves = [(word + 0.5) / 2**32 for word in philox_words(key, 0, 6)]
    drawn("uniform", "Odd multiples of 2**-33.", "uniform01", 0, hexes(halves))
    threshold = math.ceil(Fraction(0.9) * 2**32)
    kept = [word < threshold for word in philox_words(key, 0, 40)]
    drawn("bernoulli", "Keep with nine tenths.", "bernoulli", 0, kept, p=(0.9).hex())
    integers = [-5 + word * 15 // 2**64 for word in wide_words(key, 2, 12)]
    drawn("randint", "Integers in [-5, 10).", "randint", 2, integers, low=-5, high=10)
    whole = [word - 2**63 for word in wide_words(key, 0, 4)]
    drawn("randint-all", "All of int64.", "randint", 0, whole, low=-(2**63), high=2**63)
    wide = wide_words(key, 0, 20)
    drawn("permutation", "Twenty positions.", "permutation", 0, sorted(range(20), key=wide.__getitem__))
    normals = [normal_quantile(half) for half in [(word + 0.5) / 2**32 for word in philox_words(key, 0, 64)]]
    drawn("normal", "By the page's own arithmetic, bit for bit.", "normal", 0, hexes(normals))
    cases["normal-exact"] = (
        "At the seams of the three approximations and far beyond what a stream gives, bit for bit.",
        {"operation": "normal-at", "u": hexes(SEAMS), "values": hexes([normal_quantile(u) for u in SEAMS])},
    )
    cases["normal-quantiles"] = (
        "Both sides of the seams of the three approximations, to a relative 4e-15.",
        {"operation": "quantiles", "u": hexes(list(QUANTILES)), "values": hexes(list(QUANTILES.values()))},
    )
    cases.update(refused_draws())
    return cases


def refused_draws() -> Cases:
    place: Case = {"key": [0, 0], "start": 0, "count": 1}
    use: Case = {"seed": -1, "purpose": "example", "step": 0, "rank": 0, "micro_batch": 0, "call": 0}
    refused = {
        "probability_fail": (
            "Above one.",
            {"operation": "bernoulli", **place, "p": (1.5).hex()},
            "probability 1.5",
        ),
        "empty-range_fail": (
            "[3, 3).",
            {"operation": "randint", **place, "low": 3, "high": 3},
            "[3, 3) is empty",
        ),
        "past-the-stream_fail": (
            "Streams end at word 2**63.",
            {"operation": "words", **place, "start": 2**63},
            "outside [0, 2**63)",
        ),
        "negative-seed_fail": ("Seeds are not negative.", {"operation": "key", **use}, "seed -1 is outside"),
        "purpose_fail": (
            "ASCII only.",
            {"operation": "key", **use, "seed": 0, "purpose": "\u00e9"},
            "is not ASCII",
        ),
    }
    return {
        name: (why, {**case, "error": "InvalidInput", "reason": reason})
        for name, (why, case, reason) in refused.items()
    }


# Fingerprints of states (spec/transcript.md 3).


def fingerprint(tensors: dict[str, list[float]]) -> int:
    total = 0
    for ordinal, name in enumerate(sorted(tensors, key=lambda name: name.encode())):
        for i, value in enumerate(tensors[name]):
            weight = (ordinal * 2**40 + i) * 0x9E3779B97F4A7C15 % 2**64
            (bits,) = struct.unpack("<I", struct.pack("<f", value))
            total += (bits + 1) * (weight + 1 - weight % 2)
    return total % 2**64


def fingerprint_case(tensors: dict[str, list[float]]) -> Case:
    listed = {name: hexes(values) for name, values in tensors.items()}
    return {
        "operation": "fingerprint",
        "tensors": listed,
        "fingerprint": f"{fingerprint(tensors):016x}",
    }


# Optimizers (spec/optimizers.md): every operation in exact fractions, then to the nearest binary64.


def b64(exact: Fraction) -> Fraction:
    """The binary64 value nearest to an exact one, ties to even."""
    return Fraction(exact.numerator / exact.denominator)  # Python's true division of integers rounds once


def root(exact: Fraction) -> Fraction:
    """The binary64 value nearest to a square root: no root of a binary64 value lies on a tie."""
    if not exact:
        return Fraction(0)
    shift = 2 * (600 + exact.denominator.bit_length())
    return b64(Fraction(math.isqrt((exact.numerator << shift) // exact.denominator), 1 << (shift // 2)))


def b32(exact: Fraction) -> float:
    """The binary32 value nearest to an exact one, ties to even."""
    exponent = -149
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    return float(round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def power(base: Fraction, exponent: int) -> Fraction:
    result = Fraction(1)
    while exponent:
        if exponent % 2:
            result = b64(result * base)
        base, exponent = b64(base * base), exponent // 2
    return result


ADAM_NAMES = ("lr", "beta1", "beta2", "eps", "weight_decay")
SGD_NAMES = ("lr", "momentum", "dampening", "weight_decay")


def adam_case(
    numbers: tuple[float, ...], decoupled: bool, step: int, rows: list[tuple[float, float, float, float]]
) -> Case:
    lr, beta1, beta2, eps, wd = map(Fraction, numbers)
    one, out = Fraction(1), list[tuple[float, float, float]]()
    keep = b64(one - b64(lr * wd)) if decoupled else one
    decay = Fraction(0) if decoupled else wd
    rate = b64(lr / b64(one - power(beta1, step)))
    unbias = b64(one / root(b64(one - power(beta2, step))))
    for p, g, m, v in (map(Fraction, row) for row in rows):
        y = b64(g + b64(decay * p))
        x = b64(p * keep)
        mean = b64(b64(beta1 * m) + b64(b64(one - beta1) * y))
        square = b64(b64(beta2 * v) + b64(b64(one - beta2) * b64(y * y)))
        down = b64(b64(root(square) * unbias) + eps)
        out.append((b32(b64(x - b64(b64(rate * mean) / down))), b32(mean), b32(square)))
    return {
        "operation": "adam",
        **dict(zip(ADAM_NAMES, hexes(list(numbers)), strict=True)),
        "decoupled": decoupled,
        "step": step,
        "before": [hexes(list(row)) for row in rows],
        "after": [hexes(list(row)) for row in out],
    }


def sgd_case(
    numbers: tuple[float, ...], nesterov: bool, rows: list[tuple[float, float, float | None]]
) -> Case:
    lr, momentum, dampening, wd = map(Fraction, numbers)
    out: list[tuple[float, float | None]] = []
    for p, g, buffer in rows:
        y = b64(Fraction(g) + b64(wd * Fraction(p)))
        held: Fraction | None = None
        if momentum:
            fresh = b64(1 - dampening)
            held = y if buffer is None else b64(b64(momentum * Fraction(buffer)) + b64(fresh * y))
            y = b64(y + b64(momentum * held)) if nesterov else held
        out.append((b32(b64(Fraction(p) - b64(lr * y))), None if held is None else b32(held)))
    optional = [[None if x is None else x.hex() for x in row] for row in [*rows, *out]]
    return {
        "operation": "sgd",
        **dict(zip(SGD_NAMES, hexes(list(numbers)), strict=True)),
        "nesterov": nesterov,
        "before": optional[: len(rows)],
        "after": optional[len(rows) :],
    }


def singles(*values: float) -> tuple[float, ...]:
    return tuple(b32(Fraction(value)) for value in values)


def optimizer_cases() -> Cases:
    small = 2.0**-149
    rows: list[Any] = [
        singles(0.1, 0.01, 0.0, 0.0),
        singles(-1.7, -3e-4, 2e-4, 1e-7),
        singles(1.0, 0.0, 0.0, 0.0),
        singles(0.0, -0.25, 0.3, 0.5),
        singles(small, -small, 3 * small, small),
        singles(1e17, 1e18, -1e18, 1e36),
        singles(-3.5e-3, 7e-12, 1e-11, 1e-22),
    ]
    held: list[Any] = [row[:3] for row in rows]
    fresh: list[Any] = [(*row[:2], None) for row in rows]
    standard = (1e-3, 0.9, 0.999, 1e-8, 0.0)
    decayed = (3e-4, 0.9, 0.95, 1e-8, 0.1)
    refuse = {"error": "InvalidInput", "reason": "beyond the largest FP32 value"}
    refused = dict(sgd_case((1.0, 0.0, 0.0, 0.0), False, [(1.0, 1.0, None)]).items())
    refused |= {"before": [[LARGEST_FP32.hex(), (-(2.0**103)).hex(), None]], **refuse}
    del refused["after"]
    return {
        "adam-first-step": (
            "Adam's first step on plain values, a zero gradient, subnormals and large values.",
            adam_case(standard, False, 1, rows),
        ),
        "adam-decay": ("Weight decay goes into the gradient.", adam_case(decayed, False, 2, rows)),
        "adamw": ("Weight decay shrinks the parameter first.", adam_case(decayed, True, 2, rows)),
        "adamw-late": (
            "Step 1001: the powers of the betas take sixteen multiplications.",
            adam_case((1e-3, 0.9, 0.999, 1e-8, 0.01), True, 1001, rows),
        ),
        "sgd": ("No momentum: no state.", sgd_case((0.1, 0.0, 0.0, 5e-4), False, fresh)),
        "sgd-first-momentum": (
            "The first momentum is the gradient, dampening or not.",
            sgd_case((0.1, 0.9, 0.5, 1e-4), False, fresh),
        ),
        "sgd-momentum": ("A later step with dampening.", sgd_case((0.1, 0.9, 0.1, 1e-4), False, held)),
        "sgd-nesterov": ("Nesterov's variant.", sgd_case((0.1, 0.9, 0.0, 1e-4), True, held)),
        "sgd-overflow_fail": (
            "Half an ulp beyond the largest value is a tie, and goes to infinity.",
            refused,
        ),
    }


def fingerprint_cases() -> Cases:
    def refuse(why: str, reason: str, **tensors: list[float]) -> tuple[str, Case]:
        listed = {name: hexes(values) for name, values in tensors.items()}
        return why, {"operation": "fingerprint", "tensors": listed, "error": "InvalidInput", "reason": reason}

    ends = [0.0, -0.0, 2.0**-149, -(2.0**-126), LARGEST_FP32, -LARGEST_FP32, math.inf, -math.inf]
    ramp = [float(i * i - 40) * 2.0**-7 for i in range(37)]
    return {
        "worked-example": (
            "The worked example of spec/transcript.md.",
            fingerprint_case({"a": [1.0, -2.0], "b": [0.5]}),
        ),
        "no-tensor": ("A state without floating tensors.", fingerprint_case({})),
        "by-name": (
            "Tensors stand in the order of their names' UTF-8 bytes, not of their listing: B, a, a.1, a1,"
            " e-acute, a Greek letter, one beyond U+FFFF.",
            fingerprint_case(
                {
                    "\U0001f600": [6.0],
                    "\u03b1": [5.0],
                    "a1": [3.0],
                    "\u00e9": [4.0],
                    "a": [1.0],
                    "a.1": [2.0],
                    "B": [0.0],
                }
            ),
        ),
        "an-empty-tensor-counts": (
            "The same values as the worked example; an empty tensor between them takes an ordinal.",
            fingerprint_case({"a": [1.0, -2.0], "ab": [], "b": [0.5]}),
        ),
        "zeros-at-the-end-count": (
            "The worked example with a zero more.",
            fingerprint_case({"a": [1.0, -2.0, 0.0], "b": [0.5]}),
        ),
        "ends-of-fp32": (
            "Both zeros, subnormals, the largest values, infinities.",
            fingerprint_case({"ends": ends}),
        ),
        "longer": ("Two tensors of 37 elements.", fingerprint_case({"x": ramp, "y": ramp[::-1]})),
        "not-fp32_fail": refuse(
            "0.1 is no FP32 value.", "y: element 1: 0.1 is not an FP32 value", x=[0.5], y=[0.5, 0.1]
        ),
        "beyond-fp32_fail": refuse(
            "2**128 neither.",
            "x: element 0: 3.402823669209385e+38 is beyond the largest FP32 value",
            x=[2.0**128],
        ),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
