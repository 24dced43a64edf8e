"""Updates of Adam and SGD in compiled kernels (spec/optimizers.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from tallystick.numerics.kernels import native
from tallystick.numerics.kernels.native import Floats


class Sgd(ctypes.Structure):
    """``Sgd`` of optimizers.c."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "decay", "momentum", "fresh", "ahead")),
        ("nesterov", ctypes.c_int32),
    )


class _Marks(ctypes.Structure):
    """``Marks`` of optimizers.c."""

    _fields_ = (("base", ctypes.c_uint64 * 3), ("sum", ctypes.c_uint64))


Bases = tuple[int, ...]
"""Of the fingerprints wanted of parameter and state, in the order of the arguments; empty where none is."""


def adam(
    p: Floats,
    g: Floats,
    m: Floats,
    v: Floats,
    numbers: tuple[float, ...],
    threads: int = 1,
    bases: Bases = (),
) -> tuple[bool, int]:
    """Update ``p``, ``m`` and ``v`` by ``g``, all of one length.

    Return whether all results are finite as float32, and the sum of the fingerprints from ``bases`` on, modulo 2**64.
    ``numbers``: keep, decay, beta1, fresh1, beta2, fresh2, rate, unbias, eps (spec/optimizers.md 2). ``m`` and ``v``
    are float32.
    """
    library, given = native.library(), (ctypes.c_double * 9)(*numbers)
    here = ctypes.addressof(given)
    kind, at = _check_optimizer(p, g, m, v), [native.address(array) for array in (p, g, m, v)]
    return _marked(
        lambda a, b, marks: library.tally_adam(at[0], at[1], kind, at[2], at[3], here, a, b, marks),
        p.size, threads, bases,
    )  # fmt: skip


def sgd(
    p: Floats, g: Floats, b: Floats | None, numbers: Sgd, threads: int = 1, bases: Bases = ()
) -> tuple[bool, int]:
    """Update ``p``, and the float32 momentum ``b`` if there is one, by ``g``; see ``adam``."""
    library, here = native.library(), ctypes.addressof(numbers)
    kind = _check_optimizer(p, g, *(() if b is None else (b,)))
    at = native.address(p), native.address(g), None if b is None else native.address(b)
    return _marked(
        lambda begin, end, marks: library.tally_sgd(at[0], at[1], kind, at[2], here, begin, end, marks),
        p.size, threads, bases,
    )  # fmt: skip


def _marked(
    update: Callable[[int, int, int | None], int], n: int, threads: int, bases: Bases
) -> tuple[bool, int]:
    def one(begin: int, end: int) -> tuple[int, int]:
        if not bases:
            return update(begin, end, None), 0
        marks = _Marks((ctypes.c_uint64 * 3)(*bases))
        return update(begin, end, ctypes.addressof(marks)), marks.sum

    found = native.in_chunks(one, n, threads)
    return all(good for good, _ in found), sum(total for _, total in found) % (1 << 64)


def _check_optimizer(p: Floats, g: Floats, *held: Floats) -> int:
    """Return the type of parameter and gradient."""
    if any(not array.flags.c_contiguous or array.size != p.size for array in (p, g, *held)):
        raise ValueError("arrays of different lengths, or not contiguous")
    if g.dtype != p.dtype or any(array.dtype != np.float32 for array in held):
        raise TypeError(f"{p.dtype} parameter, {g.dtype} gradient; they must be alike, and the state float32")
    return native.type_of(p)
