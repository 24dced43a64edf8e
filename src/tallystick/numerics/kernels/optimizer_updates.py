"""Updates of Adam and SGD in compiled kernels (spec/optimizers.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from tallystick.numerics.kernels import native

BASES = ctypes.c_uint64 * 3


class Sgd(ctypes.Structure):
    """``Sgd`` of optimizers.c."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "decay", "momentum", "fresh", "ahead")),
        ("nesterov", ctypes.c_int32),
    )


class _Marks(ctypes.Structure):
    """``Marks`` of optimizers.c."""

    _fields_ = (("base", BASES), ("sum", ctypes.c_uint64))


Bases = tuple[int, ...]
"""Of the fingerprints wanted of parameter and state, in the order of the arguments; empty where none is."""


@dataclass(frozen=True)
class Update:
    """One tensor's update: where parameter, gradient and state lie, all contiguous and of ``n`` elements.

    Attributes:
        parameter, gradient: addresses, of one type.
        state: addresses of the optimizer's own, float32.
        type: of parameter and gradient: 0 for float32, 1 for float64.
        n: number of elements.
    """

    parameter: int
    gradient: int
    state: tuple[int, ...]
    type: int
    n: int


def adam(
    at: Update, numbers: ctypes.Array[ctypes.c_double], threads: int = 1, bases: Bases = ()
) -> tuple[bool, int]:
    """Update parameter and both moments.

    Return whether all results are finite as float32, and the sum of the fingerprints from ``bases`` on, modulo 2**64.
    ``numbers``: keep, decay, beta1, fresh1, beta2, fresh2, rate, unbias, eps (spec/optimizers.md 2).
    """
    update, here = native.library().tally_adam, ctypes.addressof(numbers)
    p, g, kind, (m, v) = at.parameter, at.gradient, at.type, at.state
    return _marked(
        lambda begin, end, marks: update(p, g, kind, m, v, here, begin, end, marks), at.n, threads, bases
    )


def sgd(at: Update, numbers: Sgd, threads: int = 1, bases: Bases = ()) -> tuple[bool, int]:
    """Update the parameter, and the momentum if there is one; see ``adam``."""
    update, here = native.library().tally_sgd, ctypes.addressof(numbers)
    p, g, kind, b = at.parameter, at.gradient, at.type, at.state[0] if at.state else None
    return _marked(
        lambda begin, end, marks: update(p, g, kind, b, here, begin, end, marks), at.n, threads, bases
    )


def _marked(
    update: Callable[[int, int, int | None], int], n: int, threads: int, bases: Bases
) -> tuple[bool, int]:
    def one(begin: int, end: int) -> tuple[int, int]:
        if not bases:
            return update(begin, end, None), 0
        marks = _Marks(BASES(*bases))
        return update(begin, end, ctypes.addressof(marks)), marks.sum

    if n <= native.CHUNK:
        good, total = one(0, n)
        return bool(good), total
    found = native.in_chunks(one, n, threads)
    return all(good for good, _ in found), sum(total for _, total in found) % (1 << 64)
