"""One step repeated with one thing changed, to see whether that gives the state somebody stated.

The comparison is by the 64-bit fingerprint of the whole floating state, or by the committed root where the record has
none of its own to offer: a change that gives the stated fingerprint explains every bit of the step, not a part of it.
Chance does so once in 2**64 trials; somebody who forges a fingerprint to fit a false explanation explains it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.job import Batch
from tallystick.execution.operations import Watch, watching
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.hyperparameters import read_hyperparameters, set_hyperparameter
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import StepOutcome, run_step
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind, SparseEntries, decode_decision
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.roles.replay import Replay, adopting
from tallystick.run.documents import StepRecord

State = Mapping[str, Entry]
Change = Callable[[Replay], AbstractContextManager[None]]
Values = Mapping[tuple[int, str], float]  # hyper-parameters by group and name
Manner = Literal["follow", "obey", "record"]
"""How a step is rounded: by the log as its rules allow, by the log whatever its rules say, or by no log."""


@dataclass(frozen=True)
class Repeated:
    """What one repetition gave.

    Attributes:
        outcome: of the step.
        violations: what the log says against the rules, if this change is what was computed.
        entries: the state after it.
        makers: parameter to the operator that made its gradient; only where operators were watched.
    """

    outcome: StepOutcome
    violations: tuple[Violation, ...]
    entries: State
    makers: Mapping[str, str]


class Bench:
    """Repeats one step as often as wanted, each time from the same state under the same log.

    Attributes:
        tries: repetitions so far.
        problem: why the last one failed that did.
        before: the state before the step; its fingerprint is ``fingerprint``.
    """

    def __init__(self, replay: Replay, before: State, record: StepRecord, frame: bytes) -> None:
        self.replay, self.before, self.record, self.frame = replay, before, record, frame
        self.tries = 0
        self.problem = ""
        load_state(replay.session, before)
        self.fingerprint = f"{replay.session.state.fingerprint():016x}"

    def repeat(
        self,
        change: Change | None = None,
        *,
        record: StepRecord | None = None,
        frame: bytes | None = None,
        before: State | None = None,
        watch: Watch | None = None,
        manner: Manner = "follow",
    ) -> Repeated | None:
        """Return the step's result with ``change`` made; None if the step then fails or the log cannot be followed.

        ``before``, ``record`` and ``frame`` are another party's, by default the bench's own.
        """
        session, job = self.replay.session, self.replay.job
        stated = self.record if record is None else record
        self.tries += 1
        load_state(session, self.before if before is None else before)
        makers: dict[str, str] = {}

        def note_makers() -> None:
            if watch is not None:
                for name, p in session.parameters:
                    if p.grad is not None and p.grad.layout == torch.strided:
                        maker = watch.makers.get(p.grad.data_ptr())
                        if maker is not None:
                            makers[name] = str(maker)

        try:
            context = _context(session, self.frame if frame is None else frame, manner)
            if watch is not None:
                session.listeners.before_change = note_makers
            with ExitStack() as stack:
                stack.enter_context(adopting(session, stated))
                if change is not None:
                    stack.enter_context(change(self.replay))
                if watch is not None:
                    stack.enter_context(watching(session, job, watch))
                outcome = run_step(session, job, context)
            context.finish()
            session.settle(context)
        except (InvalidInput, Nondeterminism) as problem:
            self.problem = str(problem)
            return None
        finally:
            session.listeners.before_change = None
        violations = context.violations if isinstance(context, FollowingContext) else []
        return Repeated(outcome, tuple(violations), copied_state(self.replay), makers)

    def gives(self, change: Change) -> Repeated | None:
        """Return the repetition under ``change`` if it ends with the stated fingerprint, else None."""
        found = self.repeat(change)
        return found if found is not None and self.agrees(found) else None

    def agrees(self, found: Repeated) -> bool:
        """Whether ``found`` ends with the stated fingerprint."""
        return f"{found.outcome.fingerprint:016x}" == self.record.fingerprint


def _context(session: Session, frame: bytes, manner: Manner) -> FollowingContext | RecordingContext:
    if manner == "record":
        return session.recording_context(session.table)
    return session.following_context(frame, form=FollowingContext if manner == "follow" else _ObedientContext)


class _ObedientContext(FollowingContext):
    """Follows entries and headers that no honest log has, too: to see what a lying log leads to."""

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        assert self._decision is not None
        _, entries = decode_decision(self._decision, numel, width)
        return torch.from_numpy(entries.indexes).to(near.device), torch.from_numpy(entries.symbols).to(
            near.device
        )

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        grid = self.table.sites.get((kind, ordinal))
        if grid is None or not grid.scales.size or is_noise_only(grid) or grid.residue_bits:
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
            return
        # A band of half the smallest quantum puts every element within reach of its boundary.
        stated = self.table
        self.table = GridTable({**stated.sites, (kind, ordinal): replace(grid, band=grid.floor - 1)})
        try:
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        finally:
            self.table = stated

    def _check_scales(self, kind: Kind, ordinal: int, grid: SiteGrid, x: Tensor, name: str) -> None:
        del kind, ordinal, grid, x, name

    def _check_budget(self, grid: SiteGrid, entries: SparseEntries, x: Tensor, name: str) -> bool:
        del grid, entries, name
        return True


def copied_state(replay: Replay) -> State:
    """Return the session's state as entries of their own."""
    return {
        entry.name: Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
        for entry in state_entries(replay.session)
    }


# -- changes ---------------------------------------------------------------------------------------


def optimizer_skipped() -> Change:
    """Leave the optimizer's step out; forward and backward pass run."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        optimizer = replay.job.optimizer
        step = optimizer.step

        def lazy(*_: Any, **__: Any) -> None:
            return None

        lazy._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess] # schedulers look for it
        optimizer.step = lazy  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            optimizer.step = step

    return change


def batch_of(step: int) -> Change:
    """Take the job's batch of another step."""
    return batch_changed(lambda batch_at, _: batch_at(step))


def batch_changed(edit: Callable[[Callable[[int], Batch], int], Batch]) -> Change:
    """Take what ``edit`` makes of the job's batches and the step's number."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        job, own = replay.job, replay.job.batch
        job.batch = lambda step: edit(own, step)
        try:
            yield
        finally:
            job.batch = own

    return change


def hyperparameters(values: Values) -> Change:
    """Give the optimizer other numbers for this one step."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        session = replay.session
        adopt = session.listeners.schedule
        before: dict[tuple[int, str], float] = {}

        def force(own: list[tuple[int, str, float]]) -> None:
            if adopt is not None:
                adopt(own)
            for group, name, value in read_hyperparameters(session.optimizer):
                if (group, name) in values:
                    before[(group, name)] = value
                    set_hyperparameter(session.optimizer, group, name, values[(group, name)])

        def restore(*_: Any) -> None:
            for (group, name), value in before.items():
                set_hyperparameter(session.optimizer, group, name, value)

        handle = session.optimizer.register_step_post_hook(restore)
        session.listeners.schedule = force
        try:
            yield
        finally:
            session.listeners.schedule = adopt
            handle.remove()

    return change


def without_clipping() -> Change:
    """Leave gradients as long as they are."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        limit, replay.job.clip_norm = replay.job.clip_norm, None
        try:
            yield
        finally:
            replay.job.clip_norm = limit

    return change


class _ShiftedStream(RandomStream):
    def __init__(self, seed: int, shift: int) -> None:
        super().__init__(seed)
        self._shift = shift

    def start(self, step: int, rank: int, micro_batch: int) -> None:
        super().start(max(step + self._shift, 0), rank, micro_batch)


def random_stream(seed: int, shift: int = 0) -> Change:
    """Draw the random numbers of another seed, or of the step that comes ``shift`` later."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        with replay.session.drawing(_ShiftedStream(seed, shift)):
            yield

    return change


def dropout_off() -> Change:
    """Let every dropout module pass everything through."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        found = [m for m in replay.job.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]  # pyright: ignore[reportPrivateUsage]
        rates = [module.p for module in found]
        for module in found:
            module.p = 0.0
        try:
            yield
        finally:
            for module, rate in zip(found, rates, strict=True):
                module.p = rate

    return change


def denormals_flushed() -> Change:
    """Flush subnormal numbers to zero, as a processor does when told to, in this thread and those that torch starts."""

    @contextmanager
    def change(replay: Replay) -> Generator[None]:
        del replay
        if not torch.set_flush_denormal(True):
            raise Nondeterminism("this processor cannot be told to flush subnormal numbers")
        try:
            yield
        finally:
            torch.set_flush_denormal(False)

    return change


def integer_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of whole numbers in a batch, in order."""
    found: list[Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_floating_point() and value.dtype != torch.bool:
                found.append(value)
        elif isinstance(value, Mapping):
            for key in sorted(value):
                walk(value[key])
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)

    walk(batch)
    return found


def one_number_changed(which: int, element: int, value: int) -> Change:
    """Change one whole number of the batch: a label, say."""

    def edit(batch_at: Callable[[int], Batch], step: int) -> Batch:
        batch = batch_at(step)
        old = integer_tensors(batch)[which]
        new = old.clone()
        new.reshape(-1)[element] = value

        def swap(item: Any) -> Any:
            if item is old:
                return new
            if isinstance(item, Mapping):
                return {key: swap(part) for key, part in item.items()}
            if isinstance(item, tuple):
                parts = [swap(part) for part in item]
                return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
            return [swap(part) for part in item] if isinstance(item, list) else item

        return swap(batch)

    return batch_changed(edit)
