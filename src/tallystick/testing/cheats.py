"""Cheats, to be caught: each makes a run (or a claim about one) that is false at a known step.

A cheat uses the honest machinery on a tampered job and then forges the transcript so that it
speaks of the honest one, as a cheating trainer would. Run one with::

    python -m tallystick.testing.cheats other_data --run DIR --job digits --policy fp32 --steps 60 --at 27
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, summarise
from tallystick.execution.job import Batch, Job, JobSource, find_source
from tallystick.execution.rounding import context
from tallystick.execution.step import batch_digest
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import find_candidates
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import Defence
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript, state_fingerprint
from tallystick.store.files import RunDirectory
from tallystick.testing.forged_entry import ForgedEntry, open_honest

Tamper = Callable[[Job], None]


class Cheat(Protocol):
    """One way of lying."""

    liar: ClassVar[str]

    def run(self, order: Order, out: RunDirectory) -> int:
        """Write the false run into ``out`` and return the step at which it is false."""
        ...

    def defence(self, source: JobSource) -> Defence:
        """Return the program with which the liar would defend its run operator by operator."""
        ...


@dataclass(frozen=True)
class TamperedSource(JobSource):
    """A source that looks like the honest one and builds something else."""

    tamper: Tamper = lambda job: None

    def build(self, settings: Mapping[str, str], seed: int = 0) -> Job:
        """Return the tampered job."""
        job = super().build(settings, seed)
        self.tamper(job)
        return job


def tampered(order: Order, tamper: Tamper) -> Order:
    """Return ``order`` with a job that ``tamper`` has changed in place, under the honest digest."""
    return replace(order, source=TamperedSource(order.source.path, order.source.source, tamper))


def honest_defence(source: JobSource) -> Defence:
    """Return the job itself as the trainer's program."""
    return lambda specification: open_honest(specification, source)


def tampered_defence(source: JobSource, tamper: Tamper) -> Defence:
    """Return a tampered job, under the honest digest, as the trainer's program."""
    return honest_defence(TamperedSource(source.path, source.source, tamper))


def _noting(job: Job) -> Callable[[], int]:
    """Return a function that gives the step whose data the job was last asked for: the one being run."""
    own, latest = job.batch, [0]

    def batch(step: int) -> Batch:
        latest[0] = step
        return own(step)

    job.batch = batch
    return lambda: latest[0]


def forge(directory: RunDirectory, edit: Callable[[StepRecord], StepRecord]) -> None:
    """Rewrite every record of a finished run and make its statement fit."""
    transcript = directory.load_transcript()
    forged = Transcript(transcript.specification, tuple(edit(record) for record in transcript.records))
    directory.write_document(directory.records_path, forged.encode_records())
    directory.write_document(directory.statement_path, forged.statement().encode())


def forge_state(directory: RunDirectory, done: int, entries: Mapping[str, Entry]) -> None:
    """Commit to other ``entries`` after ``done`` steps; root and fingerprint of the record are theirs."""
    directory.write_checkpoint(done, list(entries.values()))
    root, mark = summarise(entries.values()).root().hex(), f"{state_fingerprint(entries):016x}"
    forge(directory, lambda r: replace(r, state_root=root, fingerprint=mark) if r.step == done - 1 else r)


def claim_other_data(
    order: Order, out: RunDirectory, trained: Callable[[Callable[[int], Batch], int], Batch]
) -> None:
    """Train every step on ``trained(batch, step)`` and claim the job's own data, ``batch(step)``."""
    honest = order.source.build(order.settings, order.seed)

    def tamper(job: Job) -> None:
        job.batch = lambda step: trained(honest.batch, step)

    record(tampered(order, tamper), out)
    forge(out, lambda r: replace(r, batch=batch_digest(honest.batch(r.step))))


@dataclass(frozen=True)
class OtherData:
    """Trains one step on other data than the job's."""

    at: int
    liar: ClassVar[str] = "trainer"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record with another step's batch at ``at``, and claim the job's own."""
        return _with_batch(order, out, self.at, self._change)

    def _change(self, job: Callable[[int], Batch], batch: Batch) -> Batch:
        return job(self.at + 1_000_003)

    def defence(self, source: JobSource) -> Defence:
        """Return the job with the other batch."""
        return tampered_defence(source, _swapping(self.at, self._change))


@dataclass(frozen=True)
class PoisonedLabel:
    """Changes one label of one batch."""

    at: int
    liar: ClassVar[str] = "trainer"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record with one label changed at ``at``, and claim the job's own batch."""
        return _with_batch(order, out, self.at, lambda job, batch: _poisoned(batch))

    def defence(self, source: JobSource) -> Defence:
        """Return the job with the changed label."""
        return tampered_defence(source, _swapping(self.at, lambda job, batch: _poisoned(batch)))


Swap = Callable[[Callable[[int], Batch], Batch], Batch]


def _swapping(at: int, change: Swap) -> Tamper:
    def tamper(job: Job) -> None:
        own = job.batch
        job.batch = lambda step: change(own, own(step)) if step == at else own(step)

    return tamper


def _with_batch(order: Order, out: RunDirectory, at: int, change: Swap) -> int:
    honest = order.build().batch
    record(tampered(order, _swapping(at, change)), out)
    forge(out, lambda r: replace(r, batch=batch_digest(honest(r.step))))
    return at


def _poisoned(batch: Batch) -> Batch:
    """Return ``batch`` with the first entry of its last integer tensor moved to the next class."""
    found = [tensor for tensor in _tensors(batch) if not tensor.is_floating_point()]
    label = found[-1]
    changed = label.clone()
    first = changed.reshape(-1)[0].item()
    changed.reshape(-1)[0] = first + 1 if first + 1 <= int(changed.max()) else first - 1
    return _swapped(batch, label, changed)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _tensors(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, Mapping):
        return {key: _swapped(item, old, new) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_swapped(item, old, new) for item in value)
    if isinstance(value, list):
        return [_swapped(item, old, new) for item in value]
    return value


@dataclass(frozen=True)
class OtherRate:
    """Uses half as much again of the learning rate in one step."""

    at: int
    liar: ClassVar[str] = "trainer"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record with the rate raised at ``at``, and claim the honest rate."""
        honest: dict[int, float] = {}
        record(tampered(order, self._tamper(honest)), out)

        def edit(r: StepRecord) -> StepRecord:
            if r.step != self.at:
                return r
            schedule = tuple((g, n, hex_float(honest[g]) if n == "lr" else v) for g, n, v in r.schedule)
            return replace(r, schedule=schedule)

        forge(out, edit)
        return self.at

    def _tamper(self, honest: dict[int, float]) -> Tamper:
        def tamper(job: Job) -> None:
            now = _noting(job)

            def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                if now() == self.at:
                    for index, group in enumerate(optimizer.param_groups):
                        honest[index] = group["lr"]
                        group["lr"] *= 1.5

            def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                if now() == self.at:
                    for index, group in enumerate(optimizer.param_groups):
                        group["lr"] = honest[index]

            job.optimizer.register_step_pre_hook(before)
            job.optimizer.register_step_post_hook(after)

        return tamper

    def defence(self, source: JobSource) -> Defence:
        """Return the job with the raised rate."""
        return tampered_defence(source, self._tamper({}))


@dataclass(frozen=True)
class SkippedSteps:
    """Does not train for a few steps and claims to have done so."""

    at: int
    count: int = 3
    liar: ClassVar[str] = "trainer"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record without ``count`` optimizer steps from ``at`` on, and claim they were done."""
        honest_schedule: dict[int, Any] = {}
        skipped = range(self.at, self.at + self.count)
        record(tampered(order, self._tamper(honest_schedule)), out)
        transcript = out.load_transcript()
        usual = transcript.record(0).schedule

        def edit(r: StepRecord) -> StepRecord:
            if r.step not in skipped:
                return r
            now = {(g, n): v for g, n, v in honest_schedule[r.step]}
            return replace(r, skipped=False, schedule=tuple((g, n, now.get((g, n), v)) for g, n, v in usual))

        forge(out, edit)
        return self.at

    def _tamper(self, honest_schedule: dict[int, Any]) -> Tamper:
        skipped = range(self.at, self.at + self.count)

        def tamper(job: Job) -> None:
            step, now = job.optimizer.step, _noting(job)

            def lazy(*args: Any, **kwargs: Any) -> Any:
                if now() not in skipped:
                    return step(*args, **kwargs)
                honest_schedule[now()] = [
                    (i, n, hex_float(v))
                    for i, g in enumerate(job.optimizer.param_groups)
                    for n, v in sorted(g.items())
                    if isinstance(v, float)
                ]
                return None

            lazy._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess] # schedulers look for it
            job.optimizer.step = lazy

        return tamper

    def defence(self, source: JobSource) -> Defence:
        """Return the job that does not train for these steps."""
        return tampered_defence(source, self._tamper({}))


@dataclass(frozen=True)
class EditedWeights:
    """Trains honestly and then changes a few weights of the final state."""

    at: int = -1
    liar: ClassVar[str] = "trainer"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record honestly, edit the last checkpoint, and claim its root."""
        record(order, out)
        last = out.load_transcript().num_steps
        entries = out.load_checkpoint(last)
        weights = [name for name in sorted(entries) if name.startswith("model/") and "/buffer/" not in name]
        name = max(weights, key=lambda each: len(entries[each].data))
        values = np.frombuffer(bytes(entries[name].data), dtype="<f4").copy()
        values[:5] += np.float32(0.01)
        entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())
        root = summarise(entries.values()).root().hex()
        out.write_checkpoint(last, list(entries.values()))
        forge(out, lambda r: replace(r, state_root=root) if r.step == last - 1 else r)
        return last - 1

    def defence(self, source: JobSource) -> Defence:
        """Return the job: the edit came after it."""
        return honest_defence(source)


def claim_path(out: RunDirectory) -> RunDirectory:
    """Return where a lying auditor's claim about the run in ``out`` lies."""
    return RunDirectory(out.path.with_name(f"{out.path.name}-claim"))


@dataclass(frozen=True)
class LyingAuditor:
    """An auditor who accuses an honest trainer of a wrong step."""

    at: int
    liar: ClassVar[str] = "auditor"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record honestly into ``out``; write a false claim beside it, into ``OUT-claim``."""
        record(order, out)
        claim = claim_path(out)
        shutil.rmtree(claim.path, ignore_errors=True)
        write_claim(out, order.source, claim)

        def edit(r: StepRecord) -> StepRecord:
            if r.step < self.at:
                return r
            root = None if r.state_root is None else f"{int(r.state_root, 16) ^ 1:064x}"
            return replace(r, fingerprint=f"{int(r.fingerprint, 16) ^ 1:016x}", state_root=root)

        forge(claim, edit)
        return self.at

    def defence(self, source: JobSource) -> Defence:
        """Return the job: the trainer is honest."""
        return honest_defence(source)


CHEATS: Mapping[str, Callable[[int], Cheat]] = {
    "other_data": OtherData,
    "poisoned_label": PoisonedLabel,
    "other_rate": OtherRate,
    "skipped_steps": SkippedSteps,
    "edited_weights": EditedWeights,
    "forged_entry": ForgedEntry,
    "lying_auditor": LyingAuditor,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one cheat from the command line and print the step of the crime."""
    parser = argparse.ArgumentParser(prog="python -m tallystick.testing.cheats", description=__doc__)
    parser.add_argument("name", choices=sorted(CHEATS))
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--job", default="digits")
    parser.add_argument("--policy", default="fp32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at", type=int, default=27)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(arguments)
    settings = dict(text.split("=", 1) for text in given.set)
    order = Order(
        find_source(given.job),
        settings,
        find_policy(given.policy),
        steps=given.steps,
        checkpoint_every=given.checkpoint_every,
    )
    print(CHEATS[given.name](given.at).run(order, RunDirectory(given.run)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())


class OtherWay:
    """Rounds one gradient element of some steps to its other acceptable value; the log says so, or nothing of it."""

    def __init__(self, steps: Sequence[int], *, keeps_entry: bool) -> None:
        self.keeps_entry, self.step, self.left = keeps_entry, -1, set(steps)
        self.own = context.round_recorded

    def __call__(
        self, x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None = None, key: Key = NO_KEY, name: str = "tensor"
    ) -> SparseEntries:  # fmt: skip
        """Round as a recorder does (``round_recorded``), and turn the first element with an entry."""
        before = x.clone()
        entries = self.own(x, grid, out=out, old=old, key=key, name=name)
        if self.step not in self.left or "gradient" not in name:
            return entries
        near = find_candidates(before, grid, key=key)
        both = np.isin(near.index, entries.indexes)
        if not both.any():
            return entries
        at = int(np.flatnonzero(both)[0])
        flat, index = out.view(-1), int(near.index[at])
        flat[index] = float(near.upper[at] if float(flat[index]) == near.lower[at] else near.lower[at])
        self.left.remove(self.step)
        if self.keeps_entry:
            return entries
        kept = entries.indexes != index
        return SparseEntries.ascending(entries.n, 1, entries.indexes[kept], entries.symbols[kept])


def record_turned(
    order: Order, run: RunDirectory, turned: Sequence[int], false_from: int, *, keeps_entry: bool
) -> None:
    """Record a run of ``digits`` in which an element of the steps ``turned`` goes its other way.

    All labels from step ``false_from`` on are others, under the honest digests.
    """
    honest, turning = (
        order.source.build(order.settings, order.seed),
        OtherWay(turned, keeps_entry=keeps_entry),
    )

    def other(job: Job) -> None:
        def batch(step: int) -> Batch:
            turning.step = step
            x, y = honest.batch(step)
            return x, (y + 1) % 10 if step >= false_from else y

        job.batch = batch

    context.round_recorded = turning
    try:
        record(tampered(order, other), run)
    finally:
        context.round_recorded = turning.own
    if turning.left:
        raise AssertionError(f"no element of steps {sorted(turning.left)} lies near a boundary")
    forge(run, lambda each: replace(each, batch=batch_digest(honest.batch(each.step))))
