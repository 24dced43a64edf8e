"""The transcript: what a trainer states about a run, committed step by step (spec/transcript.md).

A run is three documents. The specification says what was to be computed, one record per step
(and rank) says what was, and the statement names the root of the Merkle tree over both:

    transcript = verify_transcript(specification_json, steps_jsonl, run_json)
    proof = transcript.prove_step(41)
    verify_step_proof(parse_step_proof(proof.encode()), transcript.root())

This module decides whether the documents agree with each other. It does not decide whether
the training took place: that is for whoever repeats it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tallystick.commit.encoding import canonical_json
from tallystick.commit.merkle import consistency_proof, inclusion_proof, leaf_hash
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import (
    RunStatement,
    Specification,
    StepRecord,
    parse_run_statement,
    parse_specification,
    parse_step_records,
)
from tallystick.run.proofs import ExtensionProof, SpecificationProof, StepProof

CURSOR = "document/cursor"  # entry of a state that says how many steps were done (spec/state-commitment.md)
GOLDEN = 0x9E3779B97F4A7C15
SLICE = 1 << 18  # elements of which a fingerprint is taken at a time


def state_fingerprint(entries: Mapping[str, Entry]) -> int:
    """Return the 64-bit fingerprint of a committed state's floating tensors (spec/transcript.md 3)."""
    total = 0
    floating = [entries[name] for name in sorted(entries, key=str.encode) if entries[name].dtype in _FLOATING]
    for ordinal, entry in enumerate(floating):
        values = np.frombuffer(entry.data, dtype=_FLOATING[entry.dtype])
        for first in range(0, values.size, SLICE):
            some = values[first : first + SLICE]
            bits = some.astype(np.uint64) << 16 if entry.dtype == "BF16" else some.astype("<f4").view("<u4")
            place = np.arange(some.size, dtype=np.uint64) + np.uint64((ordinal << 40) + first)
            weight = place * np.uint64(GOLDEN) | np.uint64(1)
            total += int(((bits.astype(np.uint64) + np.uint64(1)) * weight).sum(dtype=np.uint64))
    return total % (1 << 64)


_FLOATING = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2"}


def check_fingerprint(record: StepRecord, entries: Mapping[str, Entry]) -> None:
    """Return if the state that a record commits to is the one whose fingerprint it states.

    Raises:
        Mismatch: it is another: whoever signed the record contradicts themselves.
    """
    found = f"{state_fingerprint(entries):016x}"
    if found != record.fingerprint:
        raise Mismatch(
            f"step {record.step}: the committed state's fingerprint is {found}, the record says {record.fingerprint}",
            where=f"step {record.step}: state fingerprint",
            own=found,
            stated=record.fingerprint,
        )


def check_cursor(steps_done: int, entries: Mapping[str, Entry]) -> None:
    """Return if a committed state says that as many steps were done as the run has behind it there.

    The data, the random numbers and the calibrations of all steps after it follow from what it says.

    Raises:
        Mismatch: it says something else, or nothing.
    """
    found = entries.get(CURSOR)
    if found is None or bytes(found.data) != canonical_json({"step": steps_done}):
        said = "nothing" if found is None else repr(bytes(found.data)[:80])
        raise Mismatch(f"state after {steps_done} steps: its cursor says {said}")


@dataclass(frozen=True)
class StateCommitment:
    """A committed state: the hexadecimal root after ``steps_done`` steps."""

    steps_done: int
    state_root: str


@dataclass(frozen=True)
class Transcript:
    """A specification and the records that follow it, in order; perhaps of a run still going.

    Raises:
        InvalidInput: a record out of order or beyond the run, more micro-batches than the
            specification allows, a state root off a checkpoint or none at one, or ranks that
            state different roots.
    """

    specification: Specification
    records: tuple[StepRecord, ...]

    def __post_init__(self) -> None:
        for position, record in enumerate(self.records):
            check_record(self.specification, position, record)
        by_step = itertools.groupby(self.records, key=lambda record: record.step)
        for step, records in by_step:
            if len({record.state_root for record in records}) > 1:
                raise InvalidInput(f"step {step}: ranks state different state roots")

    @functools.cached_property
    def leaf_hashes(self) -> tuple[bytes, ...]:
        """The leaf hashes of the run tree: the specification's, then one for each record."""
        return (leaf_hash(self.specification.leaf()), *(leaf_hash(record.leaf()) for record in self.records))

    @property
    def num_steps(self) -> int:
        """The number of steps that every rank has recorded."""
        return len(self.records) // self.specification.world_size

    def root(self) -> bytes:
        """Return the root of the run tree."""
        return merkle_root(self.leaf_hashes)

    def record(self, step: int, rank: int = 0) -> StepRecord:
        """Return the record of ``step`` by ``rank``.

        Raises:
            InvalidInput: there is none.
        """
        return self.records[self._position(step, rank)]

    def checkpoints(self) -> tuple[StateCommitment, ...]:
        """Return the committed states in order, the initial state first."""
        first = StateCommitment(0, self.specification.initial_state)
        return (
            first,
            *(
                StateCommitment(record.step + 1, record.state_root)
                for record in self.records
                if record.rank == 0 and record.state_root is not None
            ),
        )

    def statement(self) -> RunStatement:
        """Return the statement of the finished run.

        Raises:
            InvalidInput: records are missing.
        """
        expected = self.specification.steps * self.specification.world_size
        if len(self.records) != expected:
            raise InvalidInput(f"transcript: the run has {expected} records, there are {len(self.records)}")
        return RunStatement(
            tree_size=1 + len(self.records),
            root=self.root().hex(),
            steps=self.num_steps,
            final_state=self.checkpoints()[-1].state_root,
        )

    def encode_records(self) -> bytes:
        """Return the bytes of steps.jsonl: each record and a newline."""
        return b"".join(record.encode() + b"\n" for record in self.records)

    def prove_step(self, step: int, rank: int = 0) -> StepProof:
        """Return the proof that the record of ``step`` by ``rank`` lies under the root.

        Raises:
            InvalidInput: there is no such record.
        """
        position = self._position(step, rank)
        return StepProof(
            record=self.records[position],
            world_size=self.specification.world_size,
            tree_size=len(self.leaf_hashes),
            path=tuple(inclusion_proof(self.leaf_hashes, 1 + position)),
        )

    def prove_specification(self) -> SpecificationProof:
        """Return the proof that the specification is leaf 0 under the root."""
        return SpecificationProof(len(self.leaf_hashes), tuple(inclusion_proof(self.leaf_hashes, 0)))

    def prove_extension(self, old_size: int) -> ExtensionProof:
        """Return the proof that this tree begins with its own first ``old_size`` leaves.

        Raises:
            InvalidInput: ``old_size`` is 0 or exceeds the number of leaves.
        """
        return ExtensionProof(
            old_size, len(self.leaf_hashes), tuple(consistency_proof(self.leaf_hashes, old_size))
        )

    def _position(self, step: int, rank: int) -> int:
        position = step * self.specification.world_size + rank
        if step < 0 or not 0 <= rank < self.specification.world_size or position >= len(self.records):
            raise InvalidInput(f"transcript: there is no record of step {step} by rank {rank}")
        return position


def verify_transcript(specification: bytes, records: bytes, statement: bytes) -> Transcript:
    """Return the transcript that the three documents make up, if they agree in everything.

    Not promised: that the steps were computed, or that the data is what the digests suggest.

    Raises:
        InvalidInput: a document is malformed, or a record is out of order or against the specification.
        Mismatch: the statement says something else than the documents.
    """
    # 1. The statement is well formed.
    stated = parse_run_statement(statement)
    # 2. The specification is well formed.
    specified = parse_specification(specification)
    # 3. Each record is well formed and stands on its own line.
    parsed = parse_step_records(records)
    # 4. The statement speaks of as many steps as the specification.
    _must_equal("steps", stated.steps, specified.steps, "specification")
    # 5. There is one record for each step and rank.
    _must_equal(
        "number of records", stated.tree_size - 1, specified.steps * specified.world_size, "specification"
    )
    _must_equal("number of records", stated.tree_size - 1, len(parsed), "steps.jsonl")
    # 6. Records are in order, within the specification, and hold a state root at checkpoints only.
    transcript = Transcript(specified, parsed)
    # 7. The last committed state is the stated final state.
    _must_equal("final state", stated.final_state, transcript.checkpoints()[-1].state_root, "last record")
    # 8. The root over the specification and all records is the stated root.
    _must_equal("root", stated.root, transcript.root().hex(), "tree over the documents")
    return transcript


def check_record(specification: Specification, position: int, record: StepRecord) -> None:
    """Return if a record is one that the specification allows at that position in steps.jsonl.

    Raises:
        InvalidInput: it is not; the message names the field and both values.
    """
    step, rank = divmod(position, specification.world_size)
    if (record.step, record.rank) != (step, rank):
        raise InvalidInput(
            f"transcript: record {position} must be step {step} rank {rank},"
            f" is step {record.step} rank {record.rank}"
        )
    if step >= specification.steps:
        raise InvalidInput(f"step {step}: the specification ends after {specification.steps} steps")
    if record.micro_batches > specification.accumulation:
        raise InvalidInput(
            f"step {step}: {record.micro_batches} micro-batches exceed the specification's"
            f" {specification.accumulation}"
        )
    if specification.is_checkpoint(step) and record.state_root is None:
        raise InvalidInput(f"step {step}: a checkpoint must have a state root")
    if not specification.is_checkpoint(step) and record.state_root is not None:
        raise InvalidInput(f"step {step}: is no checkpoint and must not have a state root")


def _must_equal(what: str, stated: object, found: object, where: str) -> None:
    if stated != found:
        raise Mismatch(
            f"run statement: {what} is {stated}, {where} says {found}",
            where=f"run statement: {what}",
            own=found,
            stated=stated,
        )
