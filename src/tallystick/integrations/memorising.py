"""Losses of single records under the committed states of a run: what ``fleet.provenance.memorisation`` judges (needs torch).

The job, its data and the states are those of the auditor's own replay; nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from tallystick.commit.encoding import digest
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.job import Batch, Job
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import batch_digest, session_batch, split_batch
from tallystick.fleet.provenance.memorisation import LEAST_RECORDS, Floats, MemoryLosses, spread
from tallystick.numerics.random import Key, permutation
from tallystick.roles.audit_report import Deviation
from tallystick.roles.replay import open_replay

if TYPE_CHECKING:
    from tallystick.integrations.run_replayer import RunReplayer

RECORDS_TAG = "tallystick/memory-records/1"
UNSEEN_PER_RECORD = 4  # unseen records for each claimed one of a segment


def measure_memory(
    replayer: RunReplayer,
    *,
    beacon: bytes,
    records: int = 64,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> MemoryLosses:
    """Return the losses of ``records`` of each segment's data, chosen by the beacon, and of unseen ones.

    Raises:
        InvalidInput: the job holds no records back, has too few, or cannot be built here.
        Mismatch: the data of a step that is looked at are not those of its record.
    """
    if records < LEAST_RECORDS:
        raise InvalidInput(f"memory: {records} records a segment; {LEAST_RECORDS} or more are needed")
    replay = open_replay(replayer.transcript.specification, replayer.source, device=replayer.device)
    if isinstance(replay, Deviation):
        raise InvalidInput(f"memory: the run cannot be opened here: {replay}")
    try:
        job, session = replay.job, replay.session
        if job.held_out is None:
            raise InvalidInput(
                "memory: the job holds no records back (Job.held_out), so there is nothing to compare with"
            )
        unseen = _cut(job.held_out())
        key = _key(replayer.transcript.root(), beacon, "unseen")
        order = [int(at) for at in permutation(key, len(unseen))]
        unseen = [unseen[at] for at in sorted(order[: UNSEEN_PER_RECORD * records])]
        segments = [
            _chosen(replayer, job, start, end, records, beacon) for start, end in pairwise(replayer.borders)
        ]
        rows: list[list[Floats]] = []
        for done, border in enumerate(replayer.borders):
            load_state(session, replayer.committed(border))
            rows.append([_losses(session, job, part) for part in (unseen, *segments)])
            progress(done + 1, len(replayer.borders))
    finally:
        replay.session.close()
    columns = [np.stack([row[at] for row in rows]) for at in range(len(segments) + 1)]
    return MemoryLosses(tuple(replayer.borders), tuple(columns[1:]), columns[0])


def _chosen(
    replayer: RunReplayer, job: Job, start: int, end: int, records: int, beacon: bytes
) -> list[Batch]:
    batches: dict[str, list[Batch]] = {}  # a batch that several steps visit counts once
    for step in range(start, end):
        batch = job.batch(step)
        found = batch_digest(batch)
        if found != replayer.transcript.record(step).batch:
            raise Mismatch(
                f"step {step}: the job's data are {found[:16]}.., the record has "
                f"{replayer.transcript.record(step).batch[:16]}.."
            )
        batches.setdefault(found, _cut(batch))
    parts = list(batches.values())
    sizes = [len(part) for part in parts]
    order = permutation(_key(replayer.transcript.root(), beacon, f"segment {start}"), sum(sizes))
    return [parts[b][r] for b, r in spread(sizes, records, [int(at) for at in order])]


def _cut(batch: Batch) -> list[Batch]:
    """The records of a batch, each as a batch of one."""
    sizes: set[int] = set()

    def note(value: object) -> None:
        if isinstance(value, torch.Tensor):
            sizes.add(value.shape[0] if value.dim() else 0)
        elif isinstance(value, dict):
            for item in value.values():
                note(item)
        elif isinstance(value, list | tuple):
            for item in value:
                note(item)

    note(batch)
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInput(
            f"memory: a batch whose tensors have {sorted(sizes)} records cannot be taken apart"
        )
    return split_batch(batch, sizes.pop())


def _losses(session: Session, job: Job, parts: Sequence[Batch]) -> Floats:
    was_training = session.model.training
    session.model.eval()
    try:
        with torch.no_grad():
            values = [float(job.loss(session.model, session_batch(session, part))) for part in parts]
    finally:
        session.model.train(was_training)
    return np.array(values, dtype=np.float64)


def _key(root: bytes, beacon: bytes, which: str) -> Key:
    seed = digest(RECORDS_TAG, root, beacon, which.encode("ascii"))
    return int.from_bytes(seed[:4], "little"), int.from_bytes(seed[4:8], "little")
