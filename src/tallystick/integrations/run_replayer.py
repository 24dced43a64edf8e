"""A recorded run repeated for whoever inspects a chip: its weights at a time, its work, its data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import cast

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.job import JobSource
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import batch_digest, run_step
from tallystick.fleet.provenance.matcher import State
from tallystick.fleet.provenance.verification import (
    SegmentOutcome,
    judge_ratio,
)
from tallystick.roles.audit_report import Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.initial_state import find_other_setting
from tallystick.roles.replay import Replay, open_replay
from tallystick.run.transcript import check_cursor
from tallystick.store.files import RunDirectory

ROUNDING = (
    2.0**-20
)  # of a weight's size: how far two machines' initialisations may lie apart (vector libraries)


class RunReplayer:
    """One declared run, to be repeated in parts."""

    def __init__(self, directory: RunDirectory, source: JobSource, *, device: str = "cpu") -> None:
        """Read the transcript.

        Raises:
            InvalidInput, Mismatch: it is malformed or contradicts itself.
        """
        self.directory, self.source, self.device = directory, source, device
        self.transcript = directory.load_transcript()
        self.roots = {c.steps_done: c.state_root for c in self.transcript.checkpoints()}

    @property
    def borders(self) -> list[int]:
        """The committed states, as steps done."""
        return sorted(self.roots)

    def committed(self, steps_done: int) -> dict[str, Entry]:
        """Return a committed state."""
        return self.directory.load_committed(steps_done, self.roots[steps_done])

    @property
    def holds_back(self) -> bool:
        """Whether the job has records that no step visits."""
        return self.source.build(self.transcript.specification.job.settings).held_out is not None

    def changes(self) -> dict[tuple[int, int], float]:
        """Return the L2 size of the claimed update of every segment."""
        found: dict[tuple[int, int], float] = {}
        before = self.committed(self.borders[0])
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            after = self.committed(end)
            found[start, end] = weights_distance(before, after)
            before = after
        return found

    def repeat(self, start: int, end: int) -> SegmentOutcome:
        """Repeat the steps between two committed states: exactly under the log, or where it is lost by the ratio test."""
        try:
            self.directory.load_frames(self.transcript, start, end)
        except InvalidInput:
            return self._repeat_without_log(start, end)
        except Mismatch as problem:
            return SegmentOutcome(start, end, "exact", "mismatch", str(problem))
        report = audit(self.directory, self.source, steps=(start, end), device=self.device)
        first = report.first
        verdict = "mismatch" if report.verdict == "log_violation" else report.verdict
        text = "identical to the last bit" if first is None else str(first)
        return SegmentOutcome(start, end, "exact", verdict, text)

    def _repeat_without_log(self, start: int, end: int) -> SegmentOutcome:
        replay = self._open()
        if isinstance(replay, Deviation):
            return SegmentOutcome(start, end, "ratio", "cannot_reproduce", str(replay))
        try:
            before, stated = self.committed(start), self.committed(end)
            for at, state in ((start, before), (end, stated)):
                check_cursor(at, state)
            load_state(replay.session, before)
            for step in range(start, end):
                context = replay.session.recording_context(replay.session.table)
                outcome = run_step(replay.session, replay.job, context)
                context.finish()
                replay.session.settle(context)
                if outcome.batch != self.transcript.record(step).batch:
                    text = f"step {step}: the data are not those of the record"
                    return SegmentOutcome(start, end, "ratio", "mismatch", text)
            own = {entry.name: entry for entry in state_entries(replay.session)}
            distance, change = weights_distance(own, stated), weights_distance(before, stated)
        except (Mismatch, Nondeterminism, InvalidInput) as problem:
            return SegmentOutcome(start, end, "ratio", "mismatch", str(problem))
        finally:
            replay.session.close()
        return judge_ratio(SegmentOutcome(start, end, "ratio", "", "", distance, change))

    def states(self, wanted: Collection[int]) -> Iterator[State]:
        """Yield the states after the wanted numbers of steps, in order: committed ones, and others repeated from them.

        A state that cannot be repeated, because the segment's evidence is wrong or because of this machine, is left out;
        what is wrong with the segment ``repeat`` tells.

        Raises:
            InvalidInput: the job cannot be built here.
        """
        inside = sorted(step for step in set(wanted) if 0 <= step <= self.transcript.num_steps)
        replay: Replay | None = None
        at, broken = -1, -1
        try:
            for step in inside:
                start = max(border for border in self.borders if border <= step)
                if start == broken:
                    continue
                try:
                    if start == step:
                        yield step, self.committed(step)
                        continue
                    replay = self._open_once(replay)
                    if not start <= at < step:
                        state = self.committed(start)
                        check_cursor(start, state)
                        load_state(replay.session, state)
                        at = start
                    frames = self.directory.load_frames(self.transcript, at, step)
                    for number in range(at, step):
                        replay.follow(self.transcript.record(number), frames[number])
                except (InvalidInput, Mismatch, Nondeterminism):
                    at, broken = -1, start
                    continue
                at = step
                yield step, {entry.name: _still(entry) for entry in state_entries(replay.session)}
        finally:
            if replay is not None:
                replay.session.close()

    def initial_difference(self) -> float:
        """Return the share of the first weights that are not the job's own initialisation, up to rounding.

        Raises:
            InvalidInput: the job cannot be built here.
        """
        own, stated = self._own_beginning(), self.committed(0)
        total = wrong = 0
        for name, mine in own.items():
            if not name.startswith("model/") or mine.dtype != "F32":
                continue
            theirs = stated.get(name)
            a = np.frombuffer(mine.data, dtype="<f4").astype(np.float64)
            total += a.size
            if theirs is None or (theirs.dtype, theirs.shape) != (mine.dtype, mine.shape):
                wrong += a.size
                continue
            b = np.frombuffer(theirs.data, dtype="<f4").astype(np.float64)
            scale = np.sqrt(np.mean(a * a)) if a.size else 0.0
            wrong += int(np.count_nonzero(np.abs(a - b) > ROUNDING * np.maximum(np.abs(a), scale)))
        return wrong / max(total, 1)

    def other_setting(self, parent: Mapping[str, Entry] | None = None) -> str | None:
        """Return the first hyper-parameter of the first state that is neither the job's own nor, if given, the parent's.

        Optimizer and scheduler are looked at whole: a state says with which numbers the steps after it were computed, so
        repeating them shows nothing of where the numbers come from.

        Raises:
            InvalidInput: the job cannot be built here.
        """
        own, stated = self._own_beginning(), self.committed(0)
        found = find_other_setting(own, stated, parent)
        return None if found is None else found.text

    def flop(self) -> int:
        """Return the FLOP of the whole declared run: those of one step's operators, times the steps."""
        return (
            flop_per_step(self.source, self.transcript.specification.job.settings) * self.transcript.num_steps
        )

    def _own_beginning(self) -> dict[str, Entry]:
        """Return the state that the job itself builds before its first step, by entry name."""
        replay = self._open_once(None)
        try:
            return {entry.name: entry for entry in state_entries(replay.session)}
        finally:
            replay.session.close()

    def _open_once(self, replay: Replay | None) -> Replay:
        opened = replay or self._open()
        if isinstance(opened, Deviation):
            raise InvalidInput(f"run: cannot be repeated here: {opened}")
        return opened

    def _open(self) -> Replay | Deviation:
        return open_replay(self.transcript.specification, self.source, device=self.device)


def flop_per_step(source: JobSource, settings: Mapping[str, str]) -> int:
    """Return the FLOP of the forward and backward pass of step 0, counted operator by operator (a multiply-add is two)."""
    job = source.build(settings)
    with FlopCounterMode(display=False) as counter:
        job.loss(job.model, job.batch(0)).backward()
    return int(counter.get_total_flops())


def tokens_per_step(source: JobSource, settings: Mapping[str, str]) -> int:
    """Return the tokens of step 0's batch (elements of its first integer matrix), or its records where it has none."""
    parts: list[torch.Tensor] = []

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            parts.append(value)
        elif isinstance(value, Mapping):
            for item in cast("Mapping[str, object]", value).values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in cast("list[object]", value):
                visit(item)

    visit(source.build(settings).batch(0))
    for tensor in parts:
        if not tensor.is_floating_point() and tensor.dim() == 2:
            return tensor.numel()
    return parts[0].shape[0] if parts and parts[0].dim() else 0


def batch_digests(source: JobSource, settings: Mapping[str, str], steps: int, seed: int) -> list[str]:
    """Return the digest of every step's data, before anything is trained."""
    job = source.build(settings, seed)
    return [batch_digest(job.batch(step)) for step in range(steps)]


def weights_distance(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> float:
    """Return the L2 distance of two states' parameters and floating buffers; infinite where they have other forms."""
    total = 0.0
    for name in a.keys() | b.keys():
        if not name.startswith("model/"):
            continue
        mine, theirs = a.get(name), b.get(name)
        if mine is None or theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return math.inf
        if mine.dtype == "F32":
            x = np.frombuffer(mine.data, dtype="<f4").astype(np.float64)
            y = np.frombuffer(theirs.data, dtype="<f4").astype(np.float64)
            total += float(np.sum((x - y) ** 2))
    return math.sqrt(total)


def _still(entry: Entry) -> Entry:
    return Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
