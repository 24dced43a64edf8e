"""The judge's rule on one operator: what the trainer opened against what honest arithmetic can have made.

Nothing here runs the step or needs torch. The judge reads the disputed leaf, the leaves that its inputs come from, the
chunks that the named element needs, and for a rounding site or a decision the step's log; everything is checked against
commitments that both parties stand by. An element that is a long sum is opened by partial sums, of which one is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, EntrySummary, verify_chunk
from tallystick.commit.tensors import TensorDigest, digest_of, verify_opened
from tallystick.dispute.bounds.formulas import Read, Sum, is_ordinary, is_right_partial, is_within
from tallystick.dispute.bounds.operands import ARRAY, UnknownFormError, stored_at
from tallystick.dispute.bounds.steps import StepFacts, formula_for, over_budget
from tallystick.dispute.openings import (
    SHOWN_WHOLE,
    STORES_A_NODE,
    OpenedReader,
    Opening,
    UnopenedError,
    nbytes_read,
    store_nodes,
    tensors_of,
    verify_pieces,
)
from tallystick.dispute.operator_list import (
    BATCH,
    END,
    LOAD,
    ROUND,
    STORE,
    Operator,
    parse_operator,
    verify_earlier,
    verify_opened_leaf,
)
from tallystick.errors import InvalidInput, Mismatch

Fault = Literal["faulty", "sound", "unknown"]


@dataclass(frozen=True)
class Accusation:
    """What an auditor says is false: one element of one output of the disputed operator, or the operator's structure.

    ``block`` names the partial sum that is false, where the element is a long sum, and the node where it is the list's end;
    -1 for what they make up.
    """

    output: int
    element: int
    block: int = -1
    structure: bool = False


@dataclass(frozen=True)
class OperatorFinding:
    """What the judge found.

    Attributes:
        fault: whether the trainer's operator is at fault.
        reason: why.
        is_shown: whether what was opened shows it to anybody. That an opening does not fit the commitments costs the trainer
            the game, and is the judge's word: whoever passes a record on could have spoilt the opening.
    """

    fault: Fault
    reason: str
    is_shown: bool = True


def rule_on_operator(
    facts: StepFacts,
    base: bytes,
    chunk: int,
    *,
    agreed: bytes,
    claimed: bytes,
    agreed_state: bytes,
    claimed_state: bytes,
    accusation: Accusation,
    opening: Opening,
    own_structure: bytes | None = None,
    own_batch: Mapping[str, bytes] | None = None,
) -> OperatorFinding:
    """Return whether the trainer's operator is at fault, given what the trainer opened.

    Args:
        facts: agreed facts of the step.
        base: what the lists begin with.
        chunk: bytes in a chunk of a result's tree.
        agreed: commitment before the disputed leaf.
        claimed: the trainer's commitment after it.
        agreed_state: root of the agreed state.
        claimed_state: root of the state that the trainer claims after the step.
        accusation: what the auditor named.
        opening: what the trainer opened.
        own_structure: the leaf's structure in the judge's own list, where structure is disputed; empty if the judge's list
            ends before.
        own_batch: the job's data for the step, by place, where that is disputed.
    """
    at = opening.leaf.index
    try:
        before, op = _open_leaf(base, opening, agreed, claimed)
    except Mismatch as problem:
        return OperatorFinding("faulty", f"the trainer cannot open operator {at}: {problem}", is_shown=False)
    except InvalidInput as problem:
        return OperatorFinding("faulty", f"operator {at}: is malformed: {problem}")
    if accusation.structure:
        return _structural(at, op, own_structure)
    if op is None:
        return OperatorFinding(
            "unknown", f"the trainer's list ends before operator {at}, and its structure was not disputed"
        )
    disputed = _Disputed(f"operator {at}, {op}", op, chunk, accusation, opening, before)
    try:
        return disputed.rule(facts, agreed_state, claimed_state, own_batch)
    except (UnknownFormError, ArithmeticError, LookupError, ValueError) as problem:
        return disputed.unknown(f"{problem}")  # no value, or none in the table
    except (InvalidInput, Mismatch) as problem:
        text = f"{disputed.where}: what the trainer opened does not fit: {problem}"
        return OperatorFinding("faulty", text, is_shown=False)


@dataclass(frozen=True)
class _Disputed:
    """A disputed operator, opened.

    Attributes:
        where: the operator in words.
        op: the operator.
        chunk: bytes in a chunk of a result's tree.
        accusation, opening: what the auditor named and what the trainer opened.
        before: root over the leaves before it.
    """

    where: str
    op: Operator
    chunk: int
    accusation: Accusation
    opening: Opening
    before: bytes

    def faulty(self, text: str) -> OperatorFinding:
        """Return that the trainer's operator is at fault."""
        return OperatorFinding("faulty", f"{self.where}: {text}")

    def sound(self, text: str) -> OperatorFinding:
        """Return that the operator is what it must be where the auditor says that it is not."""
        return OperatorFinding("sound", f"{self.where}: {text}")

    def unknown(self, text: str) -> OperatorFinding:
        """Return that nothing can be told."""
        return OperatorFinding("unknown", f"{self.where}: {text}")

    def rule(
        self,
        facts: StepFacts,
        agreed_state: bytes,
        claimed_state: bytes,
        own_batch: Mapping[str, bytes] | None,
    ) -> OperatorFinding:
        """Return what the opened operator shows.

        Raises:
            InvalidInput, Mismatch: what was opened does not fit.
            UnknownFormError, ArithmeticError, LookupError, ValueError: the table has no value for the operator.
        """
        op, chunk, opening = self.op, self.chunk, self.opening
        if opening.nodes and op.name != END:
            return self.faulty(f"is opened by {len(opening.nodes)} nodes, which open the list's end alone")
        if opening.partials and op.name in (END, LOAD, BATCH, STORE):
            return self.faulty(f"is opened by {len(opening.partials)} partial sums, and is no sum")
        if op.name == END:
            return self._end(claimed_state)
        if not op.outputs and op.name != STORE:
            return self.unknown("has no output")
        if op.name == BATCH:
            return self._batch(own_batch)
        if not opening.pieces:
            given = sum(output.tensor.nbytes for output in op.outputs)
            if given + nbytes_read(op, opening, self.before) > SHOWN_WHOLE:
                return self.unknown("reads and gives more than can be shown")
        tensors = tensors_of(op, opening, self.before)
        verify_pieces(opening, tensors, chunk)
        if op.name == LOAD:
            return self._load(agreed_state)
        if op.name == STORE:
            return self._store(tensors)
        if op.name == ROUND and (over := over_budget(op, facts)):
            return self.faulty(over)
        dtypes = {slot: tensor.dtype for slot, tensor in tensors.items()}
        return self._value(OpenedReader(op, chunk, opening.pieces, dtypes), facts)

    def _value(self, read: Read, facts: StepFacts) -> OperatorFinding:
        op, opening = self.op, self.opening
        output, element, block = self.accusation.output, self.accusation.element, self.accusation.block
        if not 0 <= output < len(op.outputs):
            return self.sound(f"has no output {output}")
        if not 0 <= element < op.outputs[output].view.numel:
            return self.sound(f"output {output} has no element {element}")
        dtype = op.outputs[output].tensor.dtype
        stated = read(-1 - output, np.asarray([stored_at(op.outputs[output].view, element)]))[0].item()
        try:
            formula = formula_for(op, output, element, read, facts)
        except UnopenedError:
            raise
        except InvalidInput as problem:  # what the list says of it is the job's, or its structure is disputed
            return self.unknown(f"{problem}")
        if opening.partials and not (isinstance(formula, Sum) and formula.num_blocks > 1):
            return self.faulty(f"is opened by {len(opening.partials)} partial sums, and is no long sum")
        if isinstance(formula, Sum):
            if formula.num_blocks > 1:
                if len(opening.partials) != formula.num_blocks:
                    return self.faulty(
                        f"{len(opening.partials)} partial sums open a sum of {formula.num_blocks}"
                    )
                if block >= 0:
                    if block >= formula.num_blocks:
                        return self.sound(f"has no partial sum {block}")
                    found = formula.block(*formula.bounds(block))
                    given = opening.partials[block]
                    if not is_right_partial(given, found):
                        return self.faulty(
                            f"partial sum {block} of element {element} is {found[0].hex()},"
                            f" the trainer says {given[0].hex()}"
                        )
                point = formula.total(opening.partials)
            else:
                point = formula.total(formula.partials())
        else:
            point = formula
        if not is_ordinary(point, dtype):
            raise UnknownFormError("numbers that some machines do not have")
        shown = f"element {element} of output {output}" if len(op.outputs) > 1 else f"element {element}"
        if is_within(stated, point, dtype):
            return self.sound(f"{shown} is {_text(stated)}, within what honest arithmetic gives")
        return self.faulty(f"{shown} must be {_text(point.value)}, the trainer has {_text(stated)}")

    def _load(self, root: bytes) -> OperatorFinding:
        op, chunk, opening, element = self.op, self.chunk, self.opening, self.accusation.element
        tensor = op.outputs[0].tensor
        width = np.dtype(ARRAY[tensor.dtype]).itemsize
        if not 0 <= element < tensor.elements:
            return self.sound(f"has no element {element}")
        at = element * width
        for proof, data in ((each.proof, each.data) for each in opening.state):
            verify_chunk(proof, data, root)
            if proof.entry.name == op.module and proof.chunk_index == at // CHUNK_BYTES:
                if (proof.entry.dtype, proof.entry.nbytes) != (tensor.dtype, tensor.nbytes):
                    return self.faulty("the agreed state has another form")
                own = data[at % CHUNK_BYTES :][:width]
                piece = next((p for p in opening.pieces.get(-1, ()) if p.index == at // chunk), None)
                if piece is None:
                    raise InvalidInput(f"chunk {at // chunk} is not there")
                stated = piece.data[at % chunk :][:width]
                if own == stated:
                    return self.sound(f"element {element} is that of the agreed state")
                return self.faulty(f"element {element} is {stated.hex()}, the agreed state has {own.hex()}")
        raise InvalidInput(f"chunk {at // CHUNK_BYTES} of the agreed state's {op.module} is not there")

    def _store(self, tensors: Mapping[int, TensorDigest]) -> OperatorFinding:
        op, chunk, opening, element = self.op, self.chunk, self.opening, self.accusation.element
        if not op.inputs:
            return self.unknown("a document is a matter of the whole step")
        entry = op.attributes.get("entry")
        if not isinstance(entry, dict):
            raise InvalidInput("the store names no entry")
        summary = EntrySummary.read(entry, what="operator: entry")
        tensor = tensors[0]
        if (summary.dtype, summary.nbytes) != (tensor.dtype, tensor.nbytes):
            return self.faulty(f"is stored as {summary.dtype} of {summary.nbytes} bytes")
        width = np.dtype(ARRAY[tensor.dtype]).itemsize
        at = element * width
        if not 0 <= at < tensor.nbytes:
            return self.sound(f"has no element {element}")
        verify_opened(
            TensorDigest(summary.dtype, tensor.elements, summary.tensor_root), CHUNK_BYTES, opening.stored
        )
        mine = next((p for p in opening.pieces.get(0, ()) if p.index == at // chunk), None)
        theirs = next((p for p in opening.stored if p.index == at // CHUNK_BYTES), None)
        if mine is None or theirs is None:
            raise InvalidInput(f"the chunks of element {element} are not there")
        own, written = mine.data[at % chunk :][:width], theirs.data[at % CHUNK_BYTES :][:width]
        if own == written:
            return self.sound(f"element {element} is what the step computed")
        return self.faulty(f"element {element} is stored as {written.hex()}, the step computed {own.hex()}")

    def _end(self, claimed: bytes) -> OperatorFinding:
        """The list must end in the state that the trainer claims, and its stores must make it up."""
        opening, before = self.opening, self.before
        at, block = opening.leaf.index, self.accusation.block
        stated = self.op.attributes.get("state_root")
        if stated != claimed.hex():
            return self.faulty(f"the list ends in state {_short(stated)}, the trainer claims {claimed.hex()}")
        held = {
            number: verify_earlier(earlier, before=at, root=before)
            for number, earlier in opening.sources.items()
        }
        first = next((number for number in sorted(held) if held[number].name == STORE), at)
        if first > 0 and (first - 1 not in held or held[first - 1].name == STORE):
            raise InvalidInput("where the stores begin is not shown")
        if len(opening.nodes) != -(-(at - first) // STORES_A_NODE):
            raise InvalidInput(f"{len(opening.nodes)} nodes open {at - first} stores")
        made = merkle_root(opening.nodes)
        if made != claimed:
            return self.faulty(f"the nodes make up state {made.hex()}, the trainer claims {claimed.hex()}")
        if block < 0:
            return self.sound("the nodes make up the claimed state")
        if block >= len(opening.nodes):
            return self.sound(f"has no node {block}")
        low = first + STORES_A_NODE * block
        numbers = range(low, min(low + STORES_A_NODE, at))
        if any(number not in held for number in numbers):
            raise InvalidInput(f"the stores below node {block} are not all there")
        if any(held[number].name != STORE for number in numbers):
            raise InvalidInput("something else stands between the stores and the end")
        own = store_nodes([held[number] for number in numbers])[0]
        if own == opening.nodes[block]:
            return self.sound(f"node {block} is that of its stores")
        return self.faulty(
            f"the stores make up node {block} as {own.hex()}, the trainer says {opening.nodes[block].hex()}"
        )

    def _batch(self, own: Mapping[str, bytes] | None) -> OperatorFinding:
        op = self.op
        if own is None:
            return self.unknown("the judge does not have the step's data")
        data = own.get(op.module)
        if data is None:
            return self.faulty("the job's data has no such tensor")
        tensor = op.outputs[0].tensor
        if len(data) != tensor.nbytes:
            return self.faulty(f"the committed data has {len(data)} bytes, the trainer used {tensor.nbytes}")
        if digest_of(tensor.dtype, tensor.elements, memoryview(data), self.chunk).root == tensor.root:
            return self.sound("is the committed data")
        return self.faulty("is not the committed data")


def _open_leaf(base: bytes, opening: Opening, agreed: bytes, claimed: bytes) -> tuple[bytes, Operator | None]:
    """Return the root over the leaves before the opened one, and its operator; None past the end of the list.

    Raises:
        Mismatch: the opening does not lead from the agreed commitment to the claimed one.
        InvalidInput: it does, and what it opens is no operator.
    """
    try:
        before = verify_opened_leaf(base, opening.leaf, agreed=agreed, claimed=claimed)
    except InvalidInput as problem:
        raise Mismatch(str(problem)) from problem
    return before, None if opening.leaf.leaf is None else parse_operator(opening.leaf.leaf)


def _structural(at: int, op: Operator | None, own: bytes | None) -> OperatorFinding:
    if own is None:
        return OperatorFinding("unknown", f"operator {at}: the judge has no list of its own")
    stated = b"" if op is None else op.structure
    name = "the end of the list" if op is None else str(op)
    if stated == own:
        return OperatorFinding("sound", f"operator {at}: {name} is what the job asks for there")
    wanted = str(parse_operator(_rooted(own))) if own else "the end of the list"
    return OperatorFinding(
        "faulty", f"operator {at}: the trainer has {name}, the job has {wanted}{_difference(op, own)}"
    )


def _rooted(structure: bytes) -> bytes:
    return structure.replace(b'"root":""', b'"root":"' + b"0" * 64 + b'"')


def _difference(op: Operator | None, own: bytes) -> str:
    if op is None or not own:
        return ""
    mine, theirs = parse_operator(_rooted(own)).fields(), op.fields()
    for name in ("name", "overload", "attributes", "inputs", "phase", "micro_batch", "module"):
        if mine[name] != theirs[name]:
            return f", which differs in its {name}: {_short(theirs[name])} for {_short(mine[name])}"
    return ", which differs in the form of its outputs"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 120 else text[:117] + "..."


def _text(value: float | int | bool) -> str:
    return value.hex() if isinstance(value, float) else str(value)
