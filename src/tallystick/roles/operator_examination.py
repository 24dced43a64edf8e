"""The auditor's side of a dispute down to one operator: what it asks to see, and where it finds the first false result."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tallystick.commit.state import CHUNK_BYTES, DTYPE_BYTES, EntrySummary, HeldState, StateSummary
from tallystick.commit.tensors import TensorDigest, digest_of
from tallystick.dispute.bounds.formulas import is_false, is_ordinary, readings_of
from tallystick.dispute.bounds.operands import stored_at
from tallystick.dispute.bounds.steps import StepFacts, formula_for
from tallystick.dispute.exchange import MOST_PARTS
from tallystick.dispute.objections import Objection
from tallystick.dispute.operator_list import ADAM, BATCH, END, LOAD, ROUND, SGD, STORE, Operator, Output
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.step_trace import KINDS, StepTrace, Value
from tallystick.numerics.kernels.measures import block_differences, block_square_sums
from tallystick.roles.operator_sources import Source, reader_of

NOISE = {"F32": 2.0**-13, "F64": 2.0**-40}  # of a result's rms; what differs by more is looked at first
PORTABLE = frozenset({ROUND, ADAM, SGD, LOAD, BATCH, "aten::bernoulli_"})
LOOKED_AT = 64
SHOWN_LIMIT = 1 << 26  # bytes of results that an auditor asks for at a time
SHOWN_FIRST = 1 << 20  # and the first time; then four times as many each time
BLOCK = 1 << 14  # elements compared at a time
THREADS = os.cpu_count() or 1


@dataclass(frozen=True)
class Wanted:
    """What an auditor asks the trainer to show: results by (leaf, output), and what a store writes at (leaf, 0)."""

    sources: tuple[Source, ...]


class Examination:
    """An honest auditor who has repeated the step looks for a false operator in the trainer's list.

    Where the list states the root of a result of its own, the auditor has that result; the others it asks for, in the
    list's order, few at first, as the first false operator ends it, and at most as many bytes at a time as ``most``.

    Attributes:
        own, theirs: the auditor's step with its results and roots; the trainer's operators.
        structure: first leaf whose structure is not its own.
        suspects: (leaf, output, element, by how much) where results differ.
        opened_bytes: of what it was shown.
        unknown: why an operator could not be evaluated, or None.
    """

    def __init__(
        self, own: StepTrace, theirs: Sequence[Operator], agreed: HeldState, most: int = SHOWN_LIMIT
    ) -> None:
        self.own, self.theirs, self.agreed, self.most = own, list(theirs), agreed, most
        self._next_most = min(SHOWN_FIRST, most)
        pairs = zip(own.operators, self.theirs, strict=False)
        self.structure = next((at for at, (a, b) in enumerate(pairs) if not a.has_structure_of(b)), None)
        if self.structure is None and len(own.operators) != len(self.theirs):
            self.structure = min(len(own.operators), len(self.theirs))
        self.suspects: list[tuple[int, int, int, float]] = []
        self._new: list[tuple[int, int, int, float]] = []
        self.opened_bytes = 0
        self.unknown: str | None = None
        self._checked = 0
        self._stored: dict[int, memoryview] = {}
        self._asked: list[Source] = []
        self.seen = StepTrace(self.theirs, {}, own.chunk, None)
        self._left: list[Source] = []
        for at in range(len(own.operators) if self.structure is None else self.structure):
            for number, (mine, stated) in enumerate(
                zip(own.operators[at].outputs, self.theirs[at].outputs, strict=True)
            ):
                if mine.tensor == stated.tensor:
                    self.seen.values[(at, number)] = own.values[(at, number)]
                else:
                    self._left.append((at, number))

    def show(self, shown: Sequence[memoryview | bytes]) -> None:
        """Take in what was asked for, in that order, each of the length that ``nbytes_of`` gives."""
        for source, data in zip(self._asked, shown, strict=True):
            self.opened_bytes += memoryview(data).nbytes
            op = self.theirs[source[0]]
            if op.name == STORE:
                self._stored[source[0]] = memoryview(data)
                continue
            tensor = op.outputs[source[1]].tensor
            array = np.frombuffer(data, dtype=KINDS[tensor.dtype])
            self.seen.values[source] = Value(source, tensor.dtype, tensor.elements, array)
            self._compare(source[0], source[1], op, self._own(source), array)
        self._asked = []

    def next(self, facts: StepFacts) -> Wanted | Objection | None:
        """Return what has to be shown next, or the objection to the first operator that is false; None if there is none."""
        if self._asked:
            return Wanted(tuple(self._asked))
        if (
            found := self._first_false(sorted(each for each in self._new if each[3] > 1.0), facts)
        ) is not None:
            return found
        self._new = []
        if self._left:
            return self._want(self._left)
        quiet = sorted((each for each in self.suspects if each[3] <= 1.0), key=lambda s: -s[3])[:LOOKED_AT]
        if (found := self._first_false(sorted(quiet), facts)) is not None:
            return found
        if self.structure is not None:
            return Objection(self.structure, structure=True)
        return self._at_the_end()

    def _want(self, left: list[Source]) -> Wanted:
        total = 0
        while (
            left
            and len(self._asked) < MOST_PARTS
            and (not self._asked or total + nbytes_of(self.theirs, left[0]) <= self._next_most)
        ):
            total += nbytes_of(self.theirs, left[0])
            self._asked.append(left.pop(0))
        self._next_most = min(4 * self._next_most, self.most)
        return Wanted(tuple(self._asked))

    def _own(self, source: Source) -> np.ndarray:
        op = self.own.operators[source[0]]
        if op.name == LOAD:
            return np.frombuffer(self.agreed.entries[op.module].data, dtype=KINDS[op.outputs[0].tensor.dtype])
        return self.own.array(source)

    def _first_false(
        self, suspects: Sequence[tuple[int, int, int, float]], facts: StepFacts
    ) -> Objection | None:
        for at, number, element, _ in suspects:
            self._checked += 1
            if self._checked > 8 * LOOKED_AT:
                break
            if self._is_false(at, number, element, facts):
                return Objection(at, number, element)
        return None

    def _compare(self, at: int, number: int, op: Operator, mine: np.ndarray, other: np.ndarray) -> None:
        if not mine.size:
            return
        dtype = op.outputs[number].tensor.dtype
        if op.name in PORTABLE or dtype not in NOISE or mine.dtype != other.dtype:
            if (stored := _first_apart(mine, other)) is not None:
                self._suspect(at, number, op, stored, math.inf)
            return
        where, largest = _largest_difference(mine, other)
        if not math.isfinite(largest):
            same = (mine == other) | (np.isnan(mine) & np.isnan(other))
            apart = np.flatnonzero(~same & ~(np.isfinite(mine) & np.isfinite(other)))
            if not apart.size:
                return
            where = int(apart[0])
        if largest == 0.0:
            return
        total = np.zeros(1)
        block_square_sums(mine, mine.size, total, THREADS)
        rms = math.sqrt(float(total[0]) / mine.size)
        measure = largest / rms if math.isfinite(rms) and rms > 0.0 else math.inf
        self._suspect(at, number, op, where, measure / NOISE[dtype])

    def _suspect(self, at: int, number: int, op: Operator, stored: int, measure: float) -> None:
        element = _logical(op.outputs[number], stored)
        if element is not None:
            self.suspects.append((at, number, element, measure))
            self._new.append(self.suspects[-1])

    def _is_false(self, at: int, number: int, element: int, facts: StepFacts) -> bool:
        op = self.theirs[at]
        if op.name in (LOAD, BATCH):
            return True  # the state is agreed upon, and the data is the job's
        read = reader_of(self.seen, at)
        stated = read(-1 - number, np.asarray([stored_at(op.outputs[number].view, element)]))[0].item()
        dtype = op.outputs[number].tensor.dtype
        try:
            points = readings_of(formula_for(op, number, element, read, facts))
        except (InvalidInput, ArithmeticError, LookupError, ValueError) as problem:
            self.unknown = self.unknown or str(problem)
            return False
        if not all(is_ordinary(point, dtype) for point in points):
            self.unknown = self.unknown or f"operator {op.name}: numbers that some machines do not have"
            return False
        return is_false(stated, points, dtype)

    def _at_the_end(self) -> Wanted | Objection | None:
        """Compare what the trainer stores with what its own operators gave, and with its claim."""
        for at, op in enumerate(self.theirs):
            try:
                found = self._at_a_store(at, op)
            except (InvalidInput, LookupError, TypeError, ValueError):  # its leaf cannot be read
                return Objection(at)
            if found is not None:
                return found
        return None

    def _at_a_store(self, at: int, op: Operator) -> Wanted | Objection | None:
        if op.name == STORE and op.attributes != self.own.operators[at].attributes and op.inputs:
            data = np.ascontiguousarray(self.seen.array(op.inputs[0].source))
            entry = EntrySummary.read(op.attributes["entry"], what="operator: entry")
            if entry.nbytes != data.nbytes:
                return Objection(at)
            bits = f"u{data.dtype.itemsize}"
            if at not in self._stored:
                made = digest_of(
                    entry.dtype, data.size, data.data if data.size else memoryview(b""), CHUNK_BYTES
                )
                if made.root == entry.tensor_root:
                    return None
                return self._want([(at, 0)])
            stored = np.frombuffer(self._stored[at], dtype=data.dtype)
            apart = np.flatnonzero(data.view(bits) != stored.view(bits))
            if apart.size:
                return Objection(at, 0, int(apart[0]))
        if op.name == END:
            stores = [each for each in self.theirs[:at] if each.name == STORE]
            if end_root(stores) != op.attributes["state_root"]:
                return Objection(at)
        return None


def nbytes_of(operators: Sequence[Operator], source: Source) -> int:
    """Return how long a result is, or what a store writes.

    Raises:
        InvalidInput: the list has no such result.
    """
    at, number = source
    if not 0 <= at < len(operators):
        raise InvalidInput(f"operator {at}: the list has {len(operators)}")
    op = operators[at]
    if op.name == STORE:
        return EntrySummary.read(op.attributes.get("entry"), what="operator: entry").nbytes
    if not 0 <= number < len(op.outputs):
        raise InvalidInput(f"operator {at}: has no output {number}")
    return op.outputs[number].tensor.nbytes


def verify_shown(operators: Sequence[Operator], source: Source, data: memoryview, chunk: int) -> None:
    """Return if ``data`` is the result that the list commits to at ``source``, or what a store writes there.

    Raises:
        InvalidInput, Mismatch: it is not.
    """
    if memoryview(data).nbytes != (wanted := nbytes_of(operators, source)):
        raise InvalidInput(
            f"operator {source[0]}: {wanted} bytes were asked for, {memoryview(data).nbytes} shown"
        )
    op = operators[source[0]]
    if op.name == STORE:
        entry = EntrySummary.read(op.attributes.get("entry"), what="operator: entry")
        stated = TensorDigest(entry.dtype, entry.nbytes // DTYPE_BYTES[entry.dtype], entry.tensor_root)
        chunk = CHUNK_BYTES
    else:
        stated = op.outputs[source[1]].tensor
    if digest_of(stated.dtype, stated.elements, memoryview(data), chunk).root != stated.root:
        raise Mismatch(f"operator {source[0]}: what was shown is not what the list commits to")


def _first_apart(mine: np.ndarray, other: np.ndarray) -> int | None:
    """Return the first element whose bits differ, None if all are equal."""
    bits = f"u{mine.dtype.itemsize}"
    a, b = mine.view(bits), other.view(bits)
    for at in range(0, a.size, BLOCK):
        here = a[at : at + BLOCK] != b[at : at + BLOCK]
        if here.any():
            return at + int(here.argmax())
    return None


def _largest_difference(mine: np.ndarray, other: np.ndarray) -> tuple[int, float]:
    """Return where two tensors of one float type differ most, and by how much; infinity where that is not a number."""
    whole_blocks = mine.size // BLOCK
    blocks, sums = np.zeros(whole_blocks + 1), np.zeros(whole_blocks + 1)
    if whole_blocks:
        end = whole_blocks * BLOCK
        block_differences(mine[:end], other[:end], BLOCK, blocks[:whole_blocks], sums[:whole_blocks], THREADS)
    if rest := mine.size - whole_blocks * BLOCK:
        block_differences(mine[-rest:], other[-rest:], rest, blocks[whole_blocks:], sums[whole_blocks:])
    worst = int(blocks.argmax())
    largest = float(blocks[worst])
    if largest == 0.0 or not math.isfinite(largest):
        return 0, largest
    here = slice(worst * BLOCK, (worst + 1) * BLOCK)
    return worst * BLOCK + int(np.abs(mine[here] - other[here]).argmax()), largest


def end_root(stores: Sequence[Operator]) -> str:
    """Return the state root over what stores write, hexadecimal."""
    return (
        StateSummary(
            tuple(EntrySummary.read(op.attributes["entry"], what="operator: entry") for op in stores)
        )
        .root()
        .hex()
    )


def _logical(output: Output, stored: int) -> int | None:
    """Return the row-order position of the element stored at a flat index, None if the view does not show it."""
    view = output.view
    at = stored - view.offset
    position = [0] * len(view.shape)
    for axis in sorted(range(len(view.shape)), key=lambda axis: -view.stride[axis]):
        if view.shape[axis] > 1 and view.stride[axis]:
            position[axis], at = divmod(at, view.stride[axis])
    if at or any(not 0 <= p < n for p, n in zip(position, view.shape, strict=True)):
        return None
    found = 0
    for p, n in zip(position, view.shape, strict=True):
        found = found * n + p
    return found
