"""Where and how two states differ, tensor by tensor; no torch, nothing repeated.

These are facts about bytes. What may have caused them is for ``diagnosis.search``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tallystick.commit.state import Entry
from tallystick.numerics.ulps import NOT_A_NUMBER, Histogram, Words, histogram, ulp_distances

FLOATS: Mapping[str, str] = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
INTEGERS: Mapping[str, str] = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "u1",
}  # fmt: skip
PIECE = 1 << 20  # elements compared at a time
BUFFER = "/buffer/"
DOCUMENT = "document/"


@dataclass(frozen=True)
class Pair:
    """One element of a tensor as both sides have it.

    Attributes:
        element: flat index.
        index: the same by dimension.
        own, stated: values as text: floats hexadecimal, hence exact.
        ulps: distance in units in the last place; None for integers and where one is NaN.
    """

    element: int
    index: tuple[int, ...]
    own: str
    stated: str
    ulps: int | None


@dataclass(frozen=True)
class TensorDivergence:
    """One tensor that differs.

    Attributes:
        name, dtype, shape, elements: of the tensor.
        differing: elements that are not the same bit by bit.
        first: the first of them.
        worst: the one with the largest distance; ``first`` for integers.
        distances: of all elements; None for integers.
        relative: L2 norm of the difference over that of our own values; infinite if those are all zero, NaN if not finite.
        flushed: differing elements that are zero on one side and subnormal on the other.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    first: Pair
    worst: Pair
    distances: Histogram | None
    relative: float
    flushed: int

    @property
    def share(self) -> float:
        """Share of elements that differ."""
        return self.differing / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class StateDivergence:
    """Everything in which two states differ.

    Attributes:
        tensors: those that differ, in order of their names.
        odd: entries that only one side has, or that have another dtype or shape: name to (own form, stated form).
        documents: entries that are no tensors (configuration, cursor, grids ..) and differ.
        compared: tensors that both sides have in one form.
        elements: of those.
        names: their names.
    """

    tensors: tuple[TensorDivergence, ...]
    odd: Mapping[str, tuple[str, str]]
    documents: tuple[str, ...]
    compared: int
    elements: int
    names: tuple[str, ...] = ()

    @property
    def differing(self) -> int:
        """How many elements differ."""
        return sum(tensor.differing for tensor in self.tensors)

    @property
    def is_empty(self) -> bool:
        """Whether the states are the same."""
        return not (self.tensors or self.odd or self.documents)

    @property
    def leading(self) -> TensorDivergence | None:
        """The tensor to show first: of the parameters the one that differs most by share, else whatever differs."""
        order = sorted(self.tensors, key=lambda t: (_rank(t.name), -t.share, t.name))
        return order[0] if order else None


def _rank(name: str) -> int:
    if name.startswith("optimizer/"):
        return 1
    return 2 if BUFFER in name else 0


def compare(own: Mapping[str, Entry], stated: Mapping[str, Entry]) -> StateDivergence:
    """Return where ``stated`` differs from ``own``; the bytes of each entry must fit its dtype and shape."""
    tensors: list[TensorDivergence] = []
    odd: dict[str, tuple[str, str]] = {}
    documents: list[str] = []
    names: list[str] = []
    elements = 0
    for name in sorted(own.keys() | stated.keys()):
        mine, theirs = own.get(name), stated.get(name)
        if name.startswith(DOCUMENT):
            if mine is None or theirs is None or bytes(mine.data) != bytes(theirs.data):
                documents.append(name)
        elif mine is None or theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            odd[name] = (_form(mine), _form(theirs))
        else:
            names.append(name)
            elements += math.prod(mine.shape)
            found = compare_tensors(mine, theirs)
            if found is not None:
                tensors.append(found)
    return StateDivergence(tuple(tensors), odd, tuple(documents), len(names), elements, tuple(names))


def _form(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype}{list(entry.shape)}"


def compare_tensors(own: Entry, stated: Entry) -> TensorDivergence | None:
    """Return how two tensors of one dtype and shape differ, or None if every bit is the same."""
    a, b = _values(own), _values(stated)
    floating = a.dtype.kind == "f"
    unit = np.uint64(1 << 16 if own.dtype == "BF16" else 1)
    bits = f"<u{a.dtype.itemsize}"
    tiny = float(np.finfo(a.dtype.str).tiny) if floating else 0.0
    differing, flushed, first, worst, largest = 0, 0, -1, -1, -1
    distances: list[Histogram] = []
    off = size = 0.0
    for start, x, y in _pieces(a, b):
        at = np.flatnonzero(x.view(bits) != y.view(bits))
        if first < 0 and at.size:
            first = start + int(at[0])
        differing += int(at.size)
        if not floating:
            continue
        far = _distances(x, y, unit)
        distances.append(histogram([far]))
        if at.size:
            top = at[int(far[at].argmax())]
            if int(far[top]) > largest:
                largest, worst = int(far[top]), start + int(top)
            near = (np.abs(x[at]) < tiny) & (np.abs(y[at]) < tiny) & ((x[at] == 0) != (y[at] == 0))
            flushed += int(near.sum())
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
            off += float(np.square(wide - y.astype(np.float64)).sum())
            size += float(np.square(wide).sum())
    if not differing:
        return None
    worst = first if worst < 0 else worst
    total = (
        Histogram(tuple(map(sum, zip(*(part.counts for part in distances), strict=True))))
        if floating
        else None
    )
    ratio = math.sqrt(off) / math.sqrt(size) if size > 0 else math.inf
    return TensorDivergence(
        own.name, own.dtype, tuple(own.shape), int(a.size), differing,
        _pair(a, b, first, own.shape, unit), _pair(a, b, worst, own.shape, unit), total,
        ratio if floating else math.nan, flushed,
    )  # fmt: skip


def _values(entry: Entry) -> npt.NDArray[np.generic]:
    """The elements as numbers; bfloat16 as the float32 numbers they are; formats numpy lacks as bytes."""
    if entry.dtype == "BF16":
        return (np.frombuffer(entry.data, dtype="<u2").astype(np.uint32) << np.uint32(16)).view("<f4")
    return np.frombuffer(entry.data, dtype=FLOATS.get(entry.dtype) or INTEGERS.get(entry.dtype, "u1"))


def _distances(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic], unit: np.uint64) -> Words:
    far = ulp_distances(x, y)
    return np.where(far == NOT_A_NUMBER, far, far // unit)


def _pieces(
    a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]
) -> Iterator[tuple[int, npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    for start in range(0, a.size, PIECE):
        yield start, a[start : start + PIECE], b[start : start + PIECE]


def _pair(
    a: npt.NDArray[np.generic],
    b: npt.NDArray[np.generic],
    element: int,
    shape: tuple[int, ...],
    unit: np.uint64,
) -> Pair:
    x, y = a[element : element + 1], b[element : element + 1]
    index = tuple(int(i) for i in np.unravel_index(element, shape)) if shape else ()
    if a.dtype.kind != "f":
        return Pair(element, index, str(x[0]), str(y[0]), None)
    far = _distances(x, y, unit)[0]
    ulps = None if far == NOT_A_NUMBER else int(far)
    return Pair(element, index, float(x[0]).hex(), float(y[0]).hex(), ulps)


@dataclass(frozen=True)
class UpdateDifference:
    """How the stated change of the parameters relates to our own, over one step.

    Attributes:
        factor: of the multiple of our own change that is nearest to the stated one.
        residual: L2 norm of what that multiple leaves over, relative to the larger of both changes.
        own, stated: L2 norms of both changes.
        still: parameters that stated did not change although we did.
    """

    factor: float
    residual: float
    own: float
    stated: float
    still: int


def relate_updates(
    before: Mapping[str, Entry], own: Mapping[str, Entry], stated: Mapping[str, Entry]
) -> UpdateDifference | None:
    """Return how the parameters' changes relate, or None if we changed none or a form does not fit."""
    dot = mine = theirs = 0.0
    still = 0
    parts: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = []
    for name, entry in own.items():
        if not name.startswith("model/") or BUFFER in name or entry.dtype not in FLOATS:
            continue
        if name not in before or name not in stated or stated[name].shape != entry.shape:
            return None
        kind = FLOATS[entry.dtype]
        start = np.frombuffer(before[name].data, dtype=kind).astype(np.float64)
        a = np.frombuffer(entry.data, dtype=kind) - start
        b = np.frombuffer(stated[name].data, dtype=kind) - start
        dot, mine, theirs = dot + float(a @ b), mine + float(a @ a), theirs + float(b @ b)
        still += bool(a.any() and not b.any())
        parts.append((a, b))
    if not mine > 0.0 or not math.isfinite(theirs):
        return None
    factor = dot / mine
    left = sum(float(np.square(b - factor * a).sum()) for a, b in parts)
    scale = max(mine, theirs)
    return UpdateDifference(factor, math.sqrt(left / scale), math.sqrt(mine), math.sqrt(theirs), still)
