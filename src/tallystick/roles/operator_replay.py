"""The disputed step made again: the trainer's list with what it claims, the judge's own, and its structure alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from tallystick.commit.state import CHUNK_BYTES, Entry, HeldState
from tallystick.commit.tensors import chunk_hashes, chunk_size, digest_of
from tallystick.dispute.bounds.steps import StepFacts
from tallystick.dispute.operator_list import (
    BATCH,
    END,
    LOAD,
    STORE,
    Operator,
    Output,
    base_of,
)
from tallystick.execution.operator_trace import trace_step
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import under_log
from tallystick.execution.step_trace import KINDS, StepTrace
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.roles.replay import Replay, adopting
from tallystick.run.documents import StepRecord


def list_base(agreed: HeldState, facts: StepFacts) -> tuple[bytes, int]:
    """Return what both lists of a step begin with, and the bytes in a chunk of its results' trees."""
    chunk = chunk_size(agreed.nbytes)
    specification, record = facts.specification.leaf(), facts.record.leaf()
    return base_of(agreed=agreed.root, specification=specification, record=record, chunk=chunk), chunk


def defend(
    replay: Replay,
    agreed: HeldState,
    frame: bytes,
    record: StepRecord,
    *,
    base: bytes,
    chunk: int,
    claimed_root: bytes,
    claimed: HeldState | None,
    made: StepTrace | None = None,
) -> TrainerSide:
    """Return the trainer's side: the step repeated as its own program does it, ending in the state it claims.

    ``made`` is its list, if the trainer made one while it repeated the segment.
    Where the claimed state can be opened and differs from what was computed, the results say what was claimed.

    Raises:
        InvalidInput, Nondeterminism: the trainer cannot repeat its own step.
    """
    trace = made
    if trace is None:
        session = replay.session
        load_state(session, agreed.entries)
        context = session.following_context(frame)
        with adopting(session, record), under_log():
            trace = trace_step(session, replay.job, agreed, context, chunk=chunk, keep=True)
    if trace.incomplete is None:
        trace.incomplete = _find_changed(trace)
    if trace.incomplete is None:
        _claim(trace, claimed_root, claimed)
    return TrainerSide(trace, base, agreed, claimed)


def _find_changed(trace: StepTrace) -> str | None:
    """Return which result is no longer what was hashed, in words: something wrote to it that torch does not see (numpy, say)."""
    for (at, number), value in trace.values.items():
        if value.hashes is None or value.data is None:
            continue
        data = np.ascontiguousarray(trace.array((at, number)))
        if chunk_hashes(data.data if data.size else memoryview(b""), trace.chunk) != value.hashes:
            return (
                f"operator {at}: output {number} was changed afterwards by something that torch does not see"
            )
    return None


def _claim(trace: StepTrace, root: bytes, claimed: HeldState | None) -> None:
    """Make the list end in the claimed state."""
    summary = {} if claimed is None else {entry.name: entry for entry in claimed.summary.entries}
    for at, op in enumerate(trace.operators):
        if op.name == STORE and op.module in summary:
            entry = summary[op.module]
            stated = op.attributes["entry"]
            if stated == entry.fields():
                continue
            trace.operators[at] = replace(op, attributes={"entry": entry.fields()})
            if op.inputs and claimed is not None:
                _override(trace, op.inputs[0].source, claimed.entries[op.module])
        elif op.name == END:
            trace.operators[at] = replace(op, attributes={"state_root": root.hex()})


def _override(trace: StepTrace, source: tuple[int, int], entry: Entry) -> None:
    """Make a result say what the claimed entry says, unless it is the agreed state's own."""
    op = trace.operators[source[0]]
    output = op.outputs[source[1]]
    if op.name in (LOAD, BATCH) or (entry.dtype, memoryview(entry.data).nbytes) != (
        output.tensor.dtype,
        output.tensor.nbytes,
    ):
        return
    data = np.frombuffer(bytes(entry.data), dtype=KINDS[entry.dtype])
    trace.values[source].data = data
    trace.values[source].hashes = None
    digested = digest_of(entry.dtype, data.size, data.data if data.size else memoryview(b""), trace.chunk)
    outputs = list(op.outputs)
    outputs[source[1]] = Output(digested, output.view)
    trace.operators[source[0]] = replace(op, outputs=tuple(outputs))


class _StoppedError(Exception):
    """What was looked for in a step is found."""


def own_step(replay: Replay, agreed: HeldState, frame: bytes, record: StepRecord, *, chunk: int) -> StepTrace:
    """Return the step with its list, results and their roots, repeated from the agreed state under the trainer's log.

    Raises:
        InvalidInput, Nondeterminism: this party cannot repeat the step.
    """
    session = replay.session
    load_state(session, agreed.entries)
    context = session.following_context(frame)
    with adopting(session, record), under_log():
        return trace_step(session, replay.job, agreed, context, chunk=chunk, keep=True)


def find_structure(replay: Replay, agreed: HeldState, record: Any, frame: bytes, at: int) -> bytes:
    """Return the structure of leaf ``at`` of the list that ``replay`` makes of a step; empty if it ends before."""
    found: list[bytes] = []

    def watch(number: int, op: Operator, results: Sequence[Tensor]) -> None:
        if number == at:
            found.append(op.structure)
            raise _StoppedError

    session = replay.session
    load_state(session, agreed.entries)
    try:
        with adopting(session, record), under_log():
            context = session.following_context(frame)
            trace_step(session, replay.job, agreed, context, chunk=CHUNK_BYTES, keep=False, watch=watch)
    except _StoppedError:
        pass
    return found[0] if found else b""
