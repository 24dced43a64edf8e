"""What a trainer writes of a run while it trains: documents, logs, checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, EntrySummary, StateSummary, summarise
from tallystick.errors import Nondeterminism
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.program import LocalProgram
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import StepOutcome
from tallystick.numerics.kernels import measures
from tallystick.run.documents import (
    RunStatement,
    Specification,
    StepRecord,
)
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.store.resumption import Resumption, find_resumption

APART = (
    1 << 26
)  # bytes copied so that a state can be hashed while the next step computes; else it is hashed at once


@dataclass(frozen=True)
class Progress:
    """What a progress display needs after each step.

    Attributes:
        step: the one that was done.
        steps: how many there will be; None where nobody knows.
        loss: of the step.
        log_bytes: of its log.
        is_passed: whether the step was passed over.
    """

    step: int
    steps: int | None
    loss: float | None
    log_bytes: int
    is_passed: bool = False


@dataclass
class Phases:
    """Seconds spent in each phase of recording or auditing, for people."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, phase: str, started: float) -> float:
        """Charge the time since ``started`` to ``phase`` and return the time now."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - started
        return now


@dataclass(frozen=True)
class _Commitment:
    """A checkpoint about to be written: one pass copies each tensor, hashes the copy and writes it."""

    directory: RunDirectory
    hashers: ThreadPoolExecutor
    step: int
    first: int
    outcome: StepOutcome
    frame: bytes

    def write(self, entries: list[Entry]) -> None:
        """Write the state and then the step's record, both lastingly.

        Raises:
            StoreError: the disk refuses.
            Nondeterminism: ``entries`` are not the state whose fingerprint the step ended with.
        """
        if not self.try_to_write(entries):
            raise Nondeterminism(
                f"step {self.step}: the state was changed after the step by something other than the next one; what changes it "
                "after the last step comes after finish()"
            )

    def try_to_write(self, entries: list[Entry]) -> bool:
        """Do so and return True; or return False, with no record written, where the fingerprint is another one.

        The bytes hashed are the bytes written, and their fingerprint is compared: a tensor that somebody writes to
        meanwhile cannot get into a commitment unnoticed.
        """
        names = sorted(entry.name for entry in entries if entry.dtype == "F32")
        ordinals = {name: ordinal for ordinal, name in enumerate(names)}
        found: list[EntrySummary] = []
        prints: list[int] = []

        def take(entry: Entry) -> Entry:
            still = Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
            found.extend(summarise([still], pool=self.hashers, leaves=leaf_hashes).entries)
            if entry.name in ordinals:
                values = np.frombuffer(still.data, dtype="<f4")
                prints.append(measures.fingerprint(values, ordinals[entry.name] << 40))
            return still

        self.directory.write_checkpoint(self.step + 1, entries, each=take)
        if sum(prints) % (1 << 64) != self.outcome.fingerprint:
            return False
        root = StateSummary(tuple(sorted(found, key=lambda entry: entry.name.encode()))).root().hex()
        record = step_record(self.step, self.outcome, self.frame, root)
        self.directory.append_step(self.first, self.frame, record, durable=True)
        return True


class RunWriter:
    """Writes one run: the specification and first state, then step after step.

    With ``overlap`` a committed state is hashed and written while the next step computes; nothing but the session's
    steps may then change the tensors. A loop of the user's own may do anything between two steps.
    """

    def __init__(
        self, session: Session, directory: RunDirectory, phases: Phases, *, overlap: bool = False
    ) -> None:
        self.session, self.directory, self.phases = session, directory, phases
        self._overlap = overlap
        self.specification: Specification | None = None
        self._committer = ThreadPoolExecutor(1, "tally-commit")
        self._hashers = ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash")
        self._committing: Future[bool] | None = None
        self._commitment: _Commitment | None = None
        self._entries: list[Entry] = []
        self._program: LocalProgram | None = None

    def begin(
        self,
        specification: Callable[[str, Program], Specification],
        program: LocalProgram,
        noted: Mapping[str, Entry] | None = None,
    ) -> None:
        """Commit the initial state, then write the files of ``program`` and the specification that names both.

        ``noted`` are entries of it as they were when its first step began, by name.
        """
        entries = [(noted or {}).get(entry.name, entry) for entry in state_entries(self.session)]
        committed, contents = program.collect()
        root = summarise(entries, pool=self._hashers, leaves=leaf_hashes).root().hex()
        self.specification, self._program = specification(root, committed), program
        self.directory.write_checkpoint(0, entries)
        self.directory.write_program(contents)
        self.directory.write_document(self.directory.specification_path, self.specification.encode())

    def take_up(
        self, specification: Specification, program: LocalProgram, root: str, kept: Resumption
    ) -> None:
        """Go on from the last state that is kept, ``root`` its root; only then is anything removed from the directory."""
        self.specification, self._program = specification, program
        load_state(self.session, self.directory.load_committed(kept.done, root))
        kept.cut_back()
        if specification != kept.specification:
            self.directory.write_document(self.directory.specification_path, specification.encode())

    def write_step(self, step: int, outcome: StepOutcome, frame: bytes, *, is_verified: bool = False) -> None:
        """Append one finished step; at a checkpoint commit the state first.

        Its program is verified before, unless it ``is_verified``: when the step ended.

        With overlap another thread does that. It is done before the optimizer changes a tensor (the session then calls
        ``wait``) and before the next record is written, so that a process that is killed leaves what it would leave
        without that thread.
        """
        assert self.specification is not None
        self.wait()
        if not is_verified:
            self.verify_program(step)
        clock = time.perf_counter()
        first = step - step % self.specification.checkpoint_every
        if not self.specification.is_checkpoint(step):
            record = step_record(step, outcome, frame, None)
            self.directory.append_step(first, frame, record, durable=False)
            self.phases.add("store", clock)
            return
        entries = state_entries(self.session, apart=APART) if self._overlap else None
        commitment = _Commitment(self.directory, self._hashers, step, first, outcome, frame)
        if entries is None:
            commitment.write(state_entries(self.session))
        else:
            self._committing = self._committer.submit(commitment.try_to_write, entries)
            self._commitment, self._entries = commitment, entries
            self.session.listeners.before_change = self.wait
        self.phases.add("commit", clock)

    def verify_program(self, step: int, *, whole: bool = False) -> None:
        """Return unless the program has loaded or read what is not committed to.

        Raises:
            OtherProgram: it has; by name.
        """
        if self.specification is not None and self._program is not None:
            self._program.verify_committed(self.specification.job.program, step, whole=whole)

    def wait(self) -> None:
        """Return when the last committed state is on the disk.

        Raises:
            StoreError: it cannot be written.
            Nondeterminism: it is no longer the state that the step ended with.
        """
        committing, self._committing = self._committing, None
        self.session.listeners.before_change = None
        if committing is None:
            return
        clock = time.perf_counter()
        if not committing.result():
            assert self._commitment is not None
            self._commitment.write(self._entries)  # a forward pass had put other values there for a while
        self._commitment, self._entries = None, []
        self.phases.add("commit", clock)

    def end_after(self, steps: int) -> None:
        """Have the run be one of so many steps, the last of which is not yet written: its state is committed then."""
        assert self.specification is not None
        self.specification = replace(self.specification, steps=steps)
        self.directory.write_document(self.directory.specification_path, self.specification.encode())

    def end_at_last_state(self) -> int:
        """End the run at its last committed state and write its statement; return how many steps it has then.

        It is a run of so many steps like any other. Without a committed state but the first nothing is changed, and 0 returned.
        """
        self.wait()
        kept = find_resumption(self.directory) if self.specification is not None else None
        if kept is None or kept.specification is None or not kept.done:
            return 0
        kept.cut_back()
        shorter = replace(kept.specification, steps=kept.done)
        self.directory.write_document(self.directory.specification_path, shorter.encode())
        self.finish()
        return kept.done

    def close(self) -> None:
        """Let the threads end, what they have begun included; of an error ``wait`` would tell."""
        self._committer.shutdown()
        self._hashers.shutdown()

    def finish(self) -> RunStatement:
        """Write the statement."""
        self.wait()
        self.close()
        self.verify_program(self.session.step, whole=True)
        statement = self.directory.load_partial().statement()
        self.directory.write_document(self.directory.statement_path, statement.encode())
        return statement


def step_record(step: int, outcome: StepOutcome, frame: bytes, root: str | None) -> StepRecord:
    """Return the record of one step."""
    return StepRecord(
        step=step,
        rank=0,
        micro_batches=outcome.micro_batches,
        batch=outcome.batch,
        log=frame_digest(frame),
        log_bytes=len(frame),
        loss=hex_float(outcome.loss),
        schedule=tuple(sorted((group, name, hex_float(value)) for group, name, value in outcome.schedule)),
        skipped=outcome.skipped,
        fingerprint=f"{outcome.fingerprint:016x}",
        state_root=root,
    )
