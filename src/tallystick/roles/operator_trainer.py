"""The trainer's side of a dispute down to one operator: what it shows, opens and answers (spec/dispute.md 4 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, Entry, HeldState
from tallystick.commit.tensors import OpenedChunk, open_chunks
from tallystick.dispute.bounds.formulas import Indexes, Point, Sum
from tallystick.dispute.bounds.operands import stored_at
from tallystick.dispute.bounds.steps import StepFacts, formula_for
from tallystick.dispute.openings import Opening, StateChunk, store_nodes, stores_opened
from tallystick.dispute.operator_game import (
    Committed,
)
from tallystick.dispute.operator_list import (
    BATCH,
    END,
    LEAF_LIMIT,
    LOAD,
    STORE,
    EarlierLeaf,
    OpenedLeaf,
    Operator,
    OperatorList,
)
from tallystick.dispute.rulings import Accusation
from tallystick.errors import InvalidInput
from tallystick.execution.step_trace import KINDS, StepTrace
from tallystick.roles.operator_sources import Source, reader_of

State = Mapping[str, Entry]


class TrainerSide:
    """The trainer at level three: its list, and everything it opens."""

    def __init__(
        self, trace: StepTrace, base: bytes, agreed: HeldState, claimed: HeldState | None = None
    ) -> None:
        self.trace, self.base, self.agreed = trace, base, agreed
        self.claimed: State = {} if claimed is None else claimed.entries
        self.leaves = OperatorList(base, [operator.encode() for operator in trace.operators])
        longest = max(map(len, self.leaves.leaves), default=0)
        if longest > LEAF_LIMIT and trace.incomplete is None:
            trace.incomplete = f"an operator has {longest} bytes in the list, at most {LEAF_LIMIT} are read"

    @property
    def committed(self) -> Committed:
        """The commitment to the whole list."""
        return Committed(len(self.leaves.leaves), merkle_root(self.leaves.hashes))

    def read(self, at: int) -> Callable[[int, Indexes], np.ndarray]:
        """Return a reader of the inputs and outputs of operator ``at``."""
        return reader_of(self.trace, at)

    def show(self, source: Source) -> memoryview:
        """Return the bytes of a result, or of the state entry that leaf ``source`` stores."""
        if self.trace.operators[source[0]].name == STORE:
            return self.stored_data(source[0])
        data = np.ascontiguousarray(self.trace.array(source))
        return data.data.cast("B") if data.size else memoryview(b"")

    def partials(self, accusation: Accusation, at: int, facts: StepFacts) -> tuple[tuple[float, float], ...]:
        """Return the partial sums of the accused element, none if it is no long sum."""
        found = self._formula(accusation, at, facts, self.read(at))
        return tuple(found.partials()) if isinstance(found, Sum) and found.num_blocks > 1 else ()

    def _formula(
        self, accusation: Accusation, at: int, facts: StepFacts, read: Callable[[int, Indexes], np.ndarray]
    ) -> Point | Sum | None:
        if accusation.structure or at >= len(self.trace.operators):
            return None
        op = self.trace.operators[at]
        if not op.outputs or op.name in (LOAD, BATCH, STORE, END):
            return None
        try:
            return formula_for(op, accusation.output, accusation.element, read, facts)
        except (InvalidInput, ArithmeticError, LookupError, ValueError):
            return None

    def open(self, accusation: Accusation, at: int, facts: StepFacts) -> Opening:
        """Return what the judge needs for the accused element."""
        leaf = self.leaves.witness_at(at)
        if accusation.structure or at >= len(self.trace.operators):
            return Opening(leaf)
        op = self.trace.operators[at]
        wanted: dict[int, set[int]] = {}
        read = self.read(at)

        def noting(slot: int, flat: Indexes) -> np.ndarray:
            stored = self._stored(op, slot)
            width = np.dtype(KINDS[stored]).itemsize
            numbers = np.unique(np.asarray(flat, dtype=np.int64) * width // self.trace.chunk)
            wanted.setdefault(slot, set()).update(int(number) for number in numbers)
            return read(slot, flat)

        partials: tuple[tuple[float, float], ...] = ()
        state: tuple[StateChunk, ...] = ()
        stored: tuple[OpenedChunk, ...] = ()
        if op.name == END:
            return self._open_end(leaf, accusation, at)
        if not self._has(op, accusation):  # then the leaf and the source of a store show that
            return Opening(
                leaf, self._earlier({each.source[0] for each in op.inputs if op.name == STORE}, at)
            )
        if op.name == LOAD:
            noting(-1, np.asarray([accusation.element]))
            number = accusation.element * np.dtype(KINDS[op.outputs[0].tensor.dtype]).itemsize // CHUNK_BYTES
            proof = self.agreed.open(op.module, number)
            held = memoryview(self.agreed.entries[op.module].data).cast("B")
            state = (StateChunk(proof, bytes(held[number * CHUNK_BYTES :][:CHUNK_BYTES])),)
        elif op.name == STORE and op.inputs:
            noting(0, np.asarray([accusation.element]))
            number = accusation.element * np.dtype(KINDS[self._stored(op, 0)]).itemsize // CHUNK_BYTES
            stored = open_chunks(self.stored_data(at), CHUNK_BYTES, [number])
        elif op.outputs and op.name != BATCH:
            position = stored_at(op.outputs[accusation.output].view, accusation.element)
            noting(-1 - accusation.output, np.asarray([position]))
            found = self._formula(accusation, at, facts, noting)
            if isinstance(found, Sum):
                if found.num_blocks > 1:
                    partials = self.partials(accusation, at, facts)
                    if 0 <= accusation.block < found.num_blocks:
                        found.block(*found.bounds(accusation.block))
                else:
                    found.partials()
        pieces: dict[int, tuple[OpenedChunk, ...]] = {}
        for slot, numbers in sorted(wanted.items()):
            source = (at, -1 - slot) if slot < 0 else op.inputs[slot].source
            data = self.trace.array(source)
            view = np.ascontiguousarray(data).data if data.size else memoryview(b"")
            pieces[slot] = open_chunks(view, self.trace.chunk, numbers, self.trace.hashes(source))
        sources = {op.inputs[slot].source[0] for slot in wanted if slot >= 0}
        earlier = self._earlier(sources, at)
        return Opening(leaf, earlier, pieces, partials, state=state, stored=stored)

    def _has(self, op: Operator, accusation: Accusation) -> bool:
        """Whether an operator has the output and element that the auditor names."""
        if op.name == STORE:
            source, output = op.inputs[0].source if op.inputs else (0, 0)
            return (
                not op.inputs
                or accusation.element < self.trace.operators[source].outputs[output].tensor.elements
            )
        number = 0 if op.name in (LOAD, BATCH) else accusation.output
        if number >= len(op.outputs):
            return not op.outputs
        held = op.outputs[number]
        return accusation.element < (held.tensor.elements if op.name == LOAD else held.view.numel)

    def stored_data(self, at: int) -> memoryview:
        """Return the bytes that the state entry of a store has."""
        op = self.trace.operators[at]
        held = self.claimed.get(op.module)
        if held is not None:
            return memoryview(held.data).cast("B")
        data = self.trace.array(op.inputs[0].source)
        return np.ascontiguousarray(data).data.cast("B")

    def _stored(self, op: Operator, slot: int) -> str:
        if slot < 0:
            return op.outputs[-1 - slot].tensor.dtype
        number, output = op.inputs[slot].source
        return self.trace.operators[number].outputs[output].tensor.dtype

    def _earlier(self, numbers: set[int], at: int) -> dict[int, EarlierLeaf]:
        return {number: self.leaves.open_earlier(number, at) for number in sorted(numbers)}

    def nodes(self, at: int) -> tuple[bytes, ...]:
        """Return what opens leaf ``at`` if it is the list's end: the nodes over its stores; else nothing."""
        return nodes_of(self.trace.operators, at)

    def _open_end(self, leaf: OpenedLeaf, accusation: Accusation, at: int) -> Opening:
        wanted = stores_opened(_first_store(self.trace.operators, at), at, accusation.block)
        return Opening(leaf, self._earlier(set(wanted), at), nodes=self.nodes(at))


def nodes_of(operators: Sequence[Operator], at: int) -> tuple[bytes, ...]:
    """Return the nodes over the stores before leaf ``at`` if it is the end of a list, else nothing."""
    if at >= len(operators) or operators[at].name != END:
        return ()
    return store_nodes(operators[_first_store(operators, at) : at])


def _first_store(operators: Sequence[Operator], at: int) -> int:
    first = at
    while first and operators[first - 1].name == STORE:
        first -= 1
    return first
