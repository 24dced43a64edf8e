"""What the trainer opens of a disputed operator, read against what both parties committed to.

An opening is leaves of the list and chunks of results; elements are read from it and from nothing else. What does not fit
the commitments raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

import numpy as np

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES
from tallystick.commit.field_rules import Elsewhere, Embedded, Hex, Via
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import ChunkProof, EntrySummary
from tallystick.commit.tensors import OpenedChunk, TensorDigest, verify_opened
from tallystick.dispute.bounds.formulas import Indexes
from tallystick.dispute.bounds.operands import ARRAY, UnknownFormError
from tallystick.dispute.moves import items_in
from tallystick.dispute.operator_game import Move, Opened
from tallystick.dispute.operator_list import (
    STORE,
    EarlierLeaf,
    OpenedLeaf,
    Operator,
    verify_earlier,
)
from tallystick.errors import InvalidInput

NO_LEAF = OpenedLeaf(0, None, ())
OPENING_LIMIT = 1 << 26  # bytes of JSON
SHOWN_WHOLE = OPENING_LIMIT // 4
"""Bytes of all that an operator reads and gives that a trainer can open whole, whatever part of it is asked for."""
STORES_A_NODE = 16  # a power of two, so that the tree over the nodes is the tree over the stores


@dataclass(frozen=True)
class StateChunk(Document, what="dispute: state chunk"):
    """One chunk of a state's entry and its path to the state root."""

    proof: Annotated[ChunkProof, Embedded()]
    data: Annotated[bytes, Hex()]


def _source_rows(sources: Mapping[int, EarlierLeaf]) -> object:
    return [source.row() for _, source in sorted(sources.items())]


def _read_sources(value: object, what: str) -> Mapping[int, EarlierLeaf]:
    rows = [EarlierLeaf.read_row(item, what=what) for item in items_in(value, "sources")]
    if any(one.index >= after.index for one, after in pairwise(rows)):
        raise InvalidInput("dispute: sources must ascend")
    return {row.index: row for row in rows}


@dataclass(frozen=True)
class Opening(Document, what="dispute: opening", limit=OPENING_LIMIT):
    """What the trainer hands to the judge, and the judge reads.

    Attributes:
        leaf: the disputed leaf.
        sources: the leaves that its inputs come from, by leaf number.
        pieces: chunks by slot: inputs from 0 on, outputs of the operator itself at -1 - k.
        partials: of a long sum, each block's sum and magnitude.
        nodes: of the list's end, the roots over each 16 stores.
        state: chunks of the agreed state, where a load is disputed.
        stored: chunks of the state entry that a store writes.
    """

    leaf: Annotated[OpenedLeaf, Elsewhere()] = NO_LEAF
    sources: Annotated[Mapping[int, EarlierLeaf], Via(_source_rows, _read_sources)] = field(
        default_factory=dict[int, EarlierLeaf]
    )
    pieces: Mapping[int, tuple[OpenedChunk, ...]] = field(default_factory=dict[int, tuple[OpenedChunk, ...]])
    partials: Annotated[tuple[tuple[float, float], ...], Elsewhere()] = ()
    nodes: Annotated[tuple[bytes, ...], Elsewhere()] = ()
    state: tuple[StateChunk, ...] = ()
    stored: tuple[OpenedChunk, ...] = ()

    def with_move(self, moves: Sequence[Move]) -> Opening:
        """Return the opening with leaf, partial sums and nodes: they stand in the trainer's move."""
        said = next((move for move in moves if isinstance(move, Opened)), None)
        return (
            self if said is None else replace(self, leaf=said.leaf, partials=said.partials, nodes=said.nodes)
        )

    @property
    def nbytes(self) -> int:
        """What the judge reads of it."""
        total = self.leaf.nbytes + sum(source.nbytes for source in self.sources.values())
        total += sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)
        total += 16 * len(self.partials) + HASH_BYTES * len(self.nodes)
        total += sum(piece.nbytes for piece in self.stored)
        return total + sum(len(each.proof.encode()) + len(each.data) for each in self.state)


class UnopenedError(InvalidInput):
    """Something is read that was not opened."""


class OpenedReader:
    """Reads elements from opened chunks, and nothing else."""

    def __init__(
        self,
        op: Operator,
        chunk: int,
        pieces: Mapping[int, tuple[OpenedChunk, ...]],
        stored: Mapping[int, str],
    ) -> None:
        self._op, self._chunk, self._stored = op, chunk, stored
        self._pieces = {slot: {piece.index: piece.data for piece in held} for slot, held in pieces.items()}

    def __call__(self, slot: int, flat: Indexes) -> np.ndarray:
        """Return the elements at flat indexes.

        Raises:
            UnopenedError: a chunk was not opened.
            UnknownFormError: elements of that dtype, or read as another one, are not in the table.
        """
        dtype = self._stored.get(slot)
        if dtype is None:
            raise UnopenedError(f"opening: slot {slot} is not there")
        if dtype not in ARRAY:
            raise UnknownFormError(f"operator {self._op.name}: {dtype} is not in the table")
        width = np.dtype(ARRAY[dtype]).itemsize
        held = self._pieces.get(slot, {})
        at = np.asarray(flat, dtype=np.int64) * width
        number = at // self._chunk
        found = np.empty(at.size, dtype=ARRAY[dtype])
        for index in np.unique(number):
            if int(index) not in held:
                raise UnopenedError(f"opening: chunk {int(index)} of slot {slot} is not there")
            data = np.frombuffer(held[int(index)], dtype=ARRAY[dtype])
            here = number == index
            found[here] = data[(at[here] - int(index) * self._chunk) // width]
        return widened(found, dtype, self._op.inputs[slot].dtype if slot >= 0 else dtype)


def widened(found: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """Return elements as the operator reads them: a wider float than stored is exact.

    Raises:
        UnknownFormError: they are read as anything else, or are truths that are neither 0 nor 1.
    """
    if stored == "BOOL" and bool((found > 1).any()):
        raise UnknownFormError("operator: reads a truth that is neither 0 nor 1")
    if stored == wanted:
        return found
    if (stored, wanted) == ("F32", "F64"):
        return found.astype(np.float64)
    raise UnknownFormError(f"operator: reads {stored} as {wanted}")


def tensors_of(op: Operator, opening: Opening, before: bytes) -> dict[int, TensorDigest]:
    """Return what each slot's leaf commits to, having checked the leaves: an input's source, or output k at -1 - k.

    Inputs of which nothing is opened are left out, but for a store's. ``before`` is the root over the leaves before this one.

    Raises:
        InvalidInput, Mismatch: a leaf is not there, does not lie under ``before``, or is shorter than what is read of it.
    """
    found = {-1 - number: output.tensor for number, output in enumerate(op.outputs)}
    read: dict[int, Operator] = {}
    for slot in range(len(op.inputs)):
        if slot in opening.pieces or op.name == STORE:
            number = op.inputs[slot].source[0]
            if number not in read:
                read[number] = _source(slot, number, opening, before)
            found[slot] = _read_by(op, slot, read[number])
    return found


def nbytes_read(op: Operator, opening: Opening, before: bytes) -> int:
    """Return the bytes of what an operator reads, as often as it does, as far as the leaves are opened that it comes from.

    Raises:
        InvalidInput, Mismatch: as ``tensors_of``.
    """
    slots = [slot for slot, operand in enumerate(op.inputs) if operand.source[0] in opening.sources]
    read = {number: _source(0, number, opening, before) for number in {op.inputs[s].source[0] for s in slots}}
    return sum(_read_by(op, slot, read[op.inputs[slot].source[0]]).nbytes for slot in slots)


def _source(slot: int, number: int, opening: Opening, before: bytes) -> Operator:
    earlier = opening.sources.get(number)
    if earlier is None or earlier.index != number:
        raise InvalidInput(f"opening: leaf {number}, where input {slot} comes from, is not there")
    return verify_earlier(earlier, before=opening.leaf.index, root=before)


def _read_by(op: Operator, slot: int, source: Operator) -> TensorDigest:
    number, output = op.inputs[slot].source
    if output >= len(source.outputs):
        raise InvalidInput(f"opening: leaf {number} has no output {output}")
    if op.inputs[slot].view.last >= source.outputs[output].tensor.elements:
        raise InvalidInput(f"input {slot} reads beyond the end of leaf {number}")
    return source.outputs[output].tensor


def verify_pieces(opening: Opening, tensors: Mapping[int, TensorDigest], chunk: int) -> None:
    """Return if every opened chunk is part of its slot's tensor, ``tensors_of`` gave these.

    Raises:
        InvalidInput, Mismatch: it is not, or there is no such slot.
    """
    for slot, pieces in opening.pieces.items():
        if slot not in tensors:
            raise InvalidInput(f"opening: the operator has no slot {slot}")
        verify_opened(tensors[slot], chunk, pieces)


def store_nodes(stores: Sequence[Operator]) -> tuple[bytes, ...]:
    """Return the roots over each ``STORES_A_NODE`` of what stores write; their tree is the state tree.

    Raises:
        InvalidInput: a leaf writes no entry.
    """
    leaves = [
        EntrySummary.read(each.attributes.get("entry"), what="operator: entry").digest() for each in stores
    ]
    return tuple(merkle_root(leaves[at : at + STORES_A_NODE]) for at in range(0, len(leaves), STORES_A_NODE))


def stores_opened(first: int, end: int, block: int) -> list[int]:
    """Return which leaves open node ``block``: those of the stores below it, the first store, and the leaf before that."""
    low = first + STORES_A_NODE * block
    below = range(low, min(low + STORES_A_NODE, end)) if block >= 0 else range(0)
    return sorted({first - 1, first, *below} & set(range(end)))
