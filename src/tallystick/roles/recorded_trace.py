"""A party's own record of a run, opened step by step: the states, logs and traces that a dispute asks for."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from tallystick.commit.encoding import digest
from tallystick.commit.state import HeldState, hold, summarise
from tallystick.commit.tensors import chunk_size
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.operator_trace import trace_step
from tallystick.execution.snapshot import copied_state, held_state, load_state, state_entries
from tallystick.execution.step import StepOutcome, under_log
from tallystick.execution.step_trace import StepTrace
from tallystick.roles.costs import Ledger, Spent
from tallystick.roles.replay import Replay, adopting
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory

UNOPENED_TAG = "tallystick/unopened-state/1"


class RecordedTrace:
    """One party's claims, from its run directory; positions are numbers of steps done.

    At checkpoints the claim is the committed root. In between the party repeats its segment from the checkpoint. Where that
    leads elsewhere than its own committed fingerprints, it cannot open what it committed to: the claim is then a digest of the
    fingerprint, which no state opens.

    Where the two runs part is known from their records before the first round, unless these lie. So a segment is repeated
    once: the states that bisection will ask for are hashed on the way, and those on both sides of the ``suspected`` step
    are kept. Asked for anything else, the party repeats the segment again.

    Attributes:
        suspected: first step after which the records of the two runs differ; None if they do not say.
        held: states at hand, by number of steps done.
        traces: whether the suspected step is traced operator by operator while it is repeated.
        traced: that list.
    """

    def __init__(
        self,
        directory: RunDirectory,
        transcript: Transcript,
        replay: Replay,
        party: Party,
        ledger: Ledger,
        *,
        suspected: int | None = None,
    ) -> None:
        self.directory, self.transcript, self.replay = directory, transcript, replay
        self.party: Party = party
        self.ledger, self.suspected = ledger, suspected
        self._roots = {c.steps_done: bytes.fromhex(c.state_root) for c in transcript.checkpoints()}
        self._repeated: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self.held: dict[int, HeldState] = {}
        self.traces = False
        self.traced: StepTrace | None = None
        self._activity: Literal["segment", "again"] = "segment"

    def commitment_at(self, index: int) -> bytes:
        """Return the 32 bytes this party claims for the state after ``index`` steps."""
        if index in self._roots:
            return self._roots[index]
        if index not in self._repeated:
            start = max(done for done in self._roots if done < index)
            end = min(done for done in self._roots if done > index)
            wanted = self._asked_for(start, end)
            self._repeat(start, wanted if index in wanted else set(range(start + 1, end)))
        return self._repeated[index]

    def _asked_for(self, start: int, end: int) -> set[int]:
        """Return the positions that bisection between two checkpoints asks for if the suspicion holds."""
        found: set[int] = set()
        if self.suspected is None or not start <= self.suspected < end:
            return found
        while end - start > 1:
            middle = (start + end) // 2
            found.add(middle)
            start, end = (middle, end) if middle <= self.suspected else (start, middle)
        return found

    def _repeat(self, start: int, wanted: set[int]) -> None:
        honest = self._load(start)
        last = max(wanted)
        if self.traces and self.suspected is not None and self.suspected >= start:
            last = max(last, min(self.suspected + 1, *(done for done in self._roots if done > start)))
        for step in range(start, last):
            honest = honest and self._follow(step)
            if step + 1 not in wanted:
                continue
            if honest:
                self._repeated[step + 1] = self._own_root(step + 1)
            else:
                self._repeated[step + 1] = digest(UNOPENED_TAG, self.transcript.record(step).leaf())
        self._activity = "again"

    def _is_kept(self, index: int) -> bool:
        return self.suspected is not None and index in (self.suspected, self.suspected + 1)

    def _own_root(self, index: int) -> bytes:
        """Return the root of the state that the session is in, and keep that state if it is wanted."""
        if index in self.held:
            return self.held[index].root
        session = self.replay.session
        with (
            self.ledger.charging(self.party, "roots"),
            ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash") as pool,
        ):
            if not self._is_kept(index):
                return summarise(state_entries(session), pool=pool, leaves=leaf_hashes).root()
            self.held[index] = held_state(session, pool)
            return self.held[index].root

    def _load(self, start: int) -> bool:
        with self.ledger.charging(self.party, "load" if self._activity == "segment" else "again"):
            state = self._committed(start)
            if state is None:
                return False
            try:
                load_state(self.replay.session, state.entries)
            except InvalidInput:
                return False
        return True

    def _committed(self, index: int) -> HeldState | None:
        """Return the state of a checkpoint, None if this party cannot open it."""
        if index not in self.held:
            try:
                state = self.directory.load_held(index, self._roots[index].hex())
            except (InvalidInput, Mismatch):
                state = self._made_again(index)
                if state is None:
                    return None
            else:
                if not self._is_kept(index):
                    return state
            self.held[index] = state
        return self.held[index]

    def _made_again(self, index: int) -> HeldState | None:
        """Return the state of a checkpoint whose file is lost, repeated from the one before; None if that is another one."""
        start = max((done for done in self._roots if done < index), default=None)
        if start is None or index in self._lost:
            return None
        if self._load(start) and all(self._follow(step) for step in range(start, index)):
            state = hold(copied_state(self.replay.session).values())
            if state.root == self._roots[index]:
                return state
        self._lost.add(index)
        return None

    def _follow(self, step: int) -> bool:
        """Repeat one step under this party's own log; whether it ends where the party's record says."""
        record = self.transcript.record(step)
        agreed = self.held.get(step)
        tracing = self.traces and step == self.suspected and self.traced is None and agreed is not None
        try:
            with self.ledger.charging(self.party, "traced" if tracing else self._activity):
                frame = self.directory.load_frames(self.transcript, step, step + 1)[step]
                if tracing and agreed is not None:
                    outcome = self._trace(record, frame, agreed)
                else:
                    clock = time.perf_counter(), time.process_time()
                    outcome, _ = self.replay.follow(record, frame)
                    passed = Spent(time.perf_counter() - clock[0], time.process_time() - clock[1])
                    self.ledger.steps.append(passed)
        except (InvalidInput, Mismatch, Nondeterminism):
            return False
        return f"{outcome.fingerprint:016x}" == record.fingerprint

    def _trace(self, record: StepRecord, frame: bytes, agreed: HeldState) -> StepOutcome:
        """Repeat the suspected step operator by operator; the state after it is kept as well."""
        session = self.replay.session
        context = session.following_context(frame)
        with adopting(session, record), under_log():
            traced = trace_step(
                session, self.replay.job, agreed, context,
                chunk=chunk_size(agreed.nbytes), keep=True,
            )  # fmt: skip
        assert traced.outcome is not None
        assert traced.after is not None
        self.traced = traced
        after, committed = traced.after, self._roots.get(record.step + 1, traced.after.root)
        if f"{traced.outcome.fingerprint:016x}" == record.fingerprint and after.root == committed:
            self.held[record.step + 1] = after
        return traced.outcome

    def traced_under(self, record: StepRecord) -> StepTrace | None:
        """Return the list of the suspected step, if it was made under a record with the same log, data and schedule."""
        own = self.transcript.record(record.step)
        same = (own.log, own.batch, own.schedule) == (record.log, record.batch, record.schedule)
        return self.traced if same and self.suspected == record.step else None

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return why this party cannot open its own last checkpoint up to ``index``, or None if it can."""
        start = max(done for done in self._roots if done <= index)
        try:
            self.directory.load_committed(start, self._roots[start].hex())
        except (InvalidInput, Mismatch) as problem:
            return str(problem)
        return None

    def witness_at(self, index: int) -> HeldState | None:
        """Return the state after ``index`` steps that opens this party's claim, or None if it cannot open it."""
        if index in self.held:
            return self.held[index]
        if index in self._roots:
            with self.ledger.charging(self.party, "load" if self._activity == "segment" else "again"):
                return self._committed(index)
        self._activity = "again"
        start = max(done for done in self._roots if done < index)
        if not self._load(start) or not all(self._follow(step) for step in range(start, index)):
            return None
        return hold(copied_state(self.replay.session).values())
