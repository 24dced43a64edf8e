"""What a dispute costs: the parties' time beyond repeating a segment, and what the judge reads and spends by operator.

A trainer swaps the data of one step in the middle of a segment, an auditor disputes the run, and the game is played down to
the operator. Then the judge is asked about operators of every kind of an honest step of the same job, the largest of each.
All parties take turns on one machine; their time is kept apart (``roles.costs``).

A list's results are fresh memory, and what a first write to a page costs is the machine's matter: 0.1 s a GB on one that has
it ready, 3 s on a virtual one that fetches each page from its host. So the memory is touched before, where the process
was started with ``KEEP_FREED_MEMORY``, and the result says how much that was.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tallystick.commit.state import HeldState
from tallystick.dispute.bounds.steps import StepFacts, needs_log
from tallystick.dispute.operator_list import BATCH, END, STORE, Operator
from tallystick.dispute.rulings import Accusation, rule_on_operator
from tallystick.errors import TallyError
from tallystick.execution.job import Batch, Job, JobSource, find_source
from tallystick.execution.operator_trace import trace_step
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import batch_digest
from tallystick.numerics.policy import find_policy
from tallystick.roles.claim import write_claim
from tallystick.roles.costs import Ledger, Spent
from tallystick.roles.judge import dispute
from tallystick.roles.operator_replay import list_base
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.roles.recorded_trace import RecordedTrace
from tallystick.roles.replay import Replay, adopting, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import Specification, StepRecord
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory
from tallystick_bench.spending import beyond_segment, ledger_fields, parse_ledger, spent_fields, step_of

MOST_STEPS = 3.0  # wall clock of a dispute beyond repeating one segment, in steps
MOST_SHARE = (
    0.01  # of a step's time, and of the state's bytes: what the judge of one operator spends and reads
)
MOST_OF_A_KIND = 4  # leaves of one operator that are tried, the largest
TRIES = 5
KEEP_FREED_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=1099511627776"
}
"""With it glibc reuses what was freed in place of handing it back, which it reads when a process starts."""
STATES_TOUCHED = 12  # times the state's size: what both parties together hold at most
OF_AVAILABLE = 0.8  # of what the machine has available is touched at most
BLOCK = 1 << 28
Say = Callable[[str], None]


@dataclass(frozen=True)
class KindCost:
    """The most that judging one element of an operator of one kind took.

    Attributes:
        name: of the operator.
        leaves, tried: how many the list has, and how many of them were tried.
        seconds: of the slowest, each the median of several tries.
        nbytes: that were read for the largest, log and grids included where they are needed.
    """

    name: str
    leaves: int
    tried: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class DisputeCost:
    """What the dispute took.

    Attributes:
        job, policy, segment: what was disputed; steps between two checkpoints.
        ledger: every party's time.
        rounds: of bisection, by level.
        operators, state_bytes: leaves of the list, and size of the state.
        opened_bytes: results that the auditor asked the trainer for.
        kinds: the judge's work.
        loser, operator: how it ended, and at what.
        touched: bytes of memory that the process held before the dispute began.
    """

    job: str
    policy: str
    segment: int
    ledger: Ledger
    rounds: Mapping[str, int]
    operators: int
    state_bytes: int
    opened_bytes: int
    kinds: tuple[KindCost, ...]
    loser: str
    operator: str
    touched: int

    @property
    def beyond(self) -> Spent:
        """What the dispute took beyond repeating one segment, in steps."""
        spent, step = beyond_segment(self.ledger), step_of(self.ledger)
        return Spent(spent.wall / step.wall, spent.cpu / step.cpu)

    @property
    def share_of_time(self) -> float:
        """The most that judging one element takes, over a plain step's elapsed time."""
        return max(kind.seconds for kind in self.kinds) / step_of(self.ledger).wall

    @property
    def share_of_bytes(self) -> float:
        """The most that judging one element reads, over the state's size."""
        return max(kind.nbytes for kind in self.kinds) / self.state_bytes

    @property
    def is_met(self) -> bool:
        """Whether all three are within what they must be, and the trainer lost."""
        within = self.share_of_time <= MOST_SHARE and self.share_of_bytes <= MOST_SHARE
        return within and self.beyond.wall <= MOST_STEPS and self.loser == "trainer"

    def fields(self) -> dict[str, object]:
        """Return everything as a JSON object."""
        return {
            "beyond_segment_steps": spent_fields(self.beyond),
            "job": self.job,
            "kinds": [vars(kind) for kind in self.kinds],
            "loser": self.loser,
            "met": self.is_met,
            "must_share": MOST_SHARE,
            "must_steps": MOST_STEPS,
            "opened_bytes": self.opened_bytes,
            "operator": self.operator,
            "operators": self.operators,
            "policy": self.policy,
            "rounds": dict(self.rounds),
            "segment": self.segment,
            "share_of_bytes": self.share_of_bytes,
            "share_of_time": self.share_of_time,
            "spent": ledger_fields(self.ledger),
            "state_bytes": self.state_bytes,
            "step": spent_fields(step_of(self.ledger)),
            "touched_bytes": self.touched,
        }

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> DisputeCost:
        """Return what ``fields`` gave away; for the answer of a process that this program has started."""
        return cls(
            fields["job"], fields["policy"], fields["segment"], parse_ledger(fields["spent"], fields["step"]),
            fields["rounds"], fields["operators"], fields["state_bytes"], fields["opened_bytes"],
            tuple(KindCost(**each) for each in fields["kinds"]), fields["loser"], fields["operator"],
            fields["touched_bytes"],
        )  # fmt: skip


def touch_memory(wanted: int) -> int:
    """Write to ``wanted`` bytes of fresh memory, free them, and return how many bytes the process holds then.

    What the process has freed and kept counts as well; of what the machine has available, a part is left. 0 where the system
    does not say.
    """
    try:
        sizes = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(sizes["MemAvailable"].split()[0]) * 1024
        most = _resident() + int(OF_AVAILABLE * available)
        blocks = [np.ones(BLOCK, np.uint8) for _ in range(min(wanted, most) // BLOCK)]
        del blocks
        return _resident()
    except (OSError, KeyError):
        return 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_dispute(place: Path, job: str, policy: str, segment: int, say: Say) -> DisputeCost:
    """Record a false run of ``segment`` steps in ``place``, dispute it, and return what that took.

    Raises:
        TallyError: the dispute did not end at an operator.
    """
    source, false, run, claim = make_false_run(place, job, policy, segment, say)
    last = run.load_transcript().checkpoints()[-1]
    touched = touch_memory(STATES_TOUCHED * run.load_held(last.steps_done, last.state_root).nbytes)
    say(f"disputing, with {touched / 1e9:.1f} GB of memory at hand")
    result = dispute(run, claim, source, defence=lambda specification: _replay(specification, false))
    found = result.operator
    if found is None or found.loser is None or found.operator is None:
        raise TallyError(f"bench: the dispute did not end at an operator: {result.reason}")
    say("asking the judge about operators of every kind")
    kinds, agreed, operators = _judged(claim, source, segment // 2, say)
    return DisputeCost(
        job, policy, segment, result.ledger, result.rounds_per_level, operators, agreed.nbytes,
        found.cost.opened_bytes, kinds, result.loser, str(found.operator), touched,
    )  # fmt: skip


def make_false_run(
    place: Path, job: str, policy: str, segment: int, say: Say, settings: Mapping[str, str] | None = None
) -> tuple[JobSource, JobSource, RunDirectory, RunDirectory]:
    """Return the job, the trainer's, its run in ``place`` with the middle step on other data, and the auditor's claim."""
    source, at = find_source(job), segment // 2
    false = _Swapping(source.path, source.source, at)
    run, claim = RunDirectory(place / "run"), RunDirectory(place / "claim")
    order = Order(source, settings or {}, find_policy(policy), steps=segment, checkpoint_every=segment)
    say(f"recording {segment} steps of {job}, step {at} on other data")
    record(replace(order, source=false), run)
    honest = order.build().batch
    _restate(run, lambda each: replace(each, batch=batch_digest(honest(each.step))))
    say("repeating them as the auditor")
    write_claim(run, source, claim)
    return source, false, run, claim


@dataclass(frozen=True)
class _Swapping(JobSource):
    """A job that takes another step's data at step ``at``, under the honest digest."""

    at: int = 0

    def build(self, settings: Mapping[str, str], seed: int = 0) -> Job:
        job = super().build(settings, seed)
        own: Callable[[int], Batch] = job.batch
        job.batch = lambda step: own(step + 1_000_003 if step == self.at else step)
        return job


def _replay(specification: Specification, source: JobSource) -> Replay:
    replay = open_replay(specification, source)
    if not isinstance(replay, Replay):
        raise TallyError(f"bench: the job cannot be repeated: {replay}")
    return replay


def _restate(run: RunDirectory, edit: Callable[[StepRecord], StepRecord]) -> None:
    transcript = run.load_transcript()
    stated = Transcript(transcript.specification, tuple(edit(each) for each in transcript.records))
    run.write_document(run.records_path, stated.encode_records())
    run.write_document(run.statement_path, stated.statement().encode())


def _judged(
    claim: RunDirectory, source: JobSource, at: int, say: Say
) -> tuple[tuple[KindCost, ...], HeldState, int]:
    """Return the judge's work by kind, the state before the step, and the length of the step's list."""
    theirs = claim.load_transcript()
    replay = _replay(theirs.specification, source)
    try:
        agreed = RecordedTrace(claim, theirs, replay, "auditor", Ledger()).witness_at(at)
        if agreed is None:
            raise TallyError(f"bench: the state after {at} steps cannot be made again")
        stated, frame = theirs.record(at), claim.load_frames(theirs, at, at + 1)[at]
        facts = StepFacts(theirs.specification, stated, frame, bytes(agreed.entries["document/grids"].data))
        base, chunk = list_base(agreed, facts)
        load_state(replay.session, agreed.entries)
        context = replay.session.following_context(frame)
        with adopting(replay.session, stated):
            trace = trace_step(replay.session, replay.job, agreed, context, chunk=chunk, keep=True)
        kinds = tuple(_kinds(TrainerSide(trace, base, agreed, trace.after), facts, chunk, say))
        return kinds, agreed, len(trace.operators)
    finally:
        replay.session.close()


def _kinds(side: TrainerSide, facts: StepFacts, chunk: int, say: Say) -> Iterator[KindCost]:
    by_name: dict[str, list[int]] = {}
    for number, op in enumerate(side.trace.operators):
        if op.name == STORE and not op.inputs:
            continue  # a document is a matter of the whole step
        if op.outputs or op.name in (STORE, END):
            by_name.setdefault(op.name, []).append(number)
    rng = random.Random(11)
    for name, leaves in sorted(by_name.items()):
        largest = sorted(leaves, key=lambda number: -_size(side, side.trace.operators[number]))
        tried = largest[:MOST_OF_A_KIND]
        costs = [
            _judge(side, facts, chunk, number, Accusation(output, element))
            for number in tried
            for output, element in _elements(side.trace.operators[number], rng)
        ]
        found = KindCost(name, len(leaves), len(tried), max(c[0] for c in costs), max(c[1] for c in costs))
        say(f"  {name}: {1e3 * found.seconds:.2f} ms, {found.nbytes:,} bytes")
        yield found


def _size(side: TrainerSide, op: Operator) -> int:
    read = [side.trace.operators[each.source[0]].outputs[each.source[1]].tensor.nbytes for each in op.inputs]
    return sum(read) + sum(output.tensor.nbytes for output in op.outputs)


def _elements(op: Operator, rng: random.Random) -> Iterator[tuple[int, int]]:
    """One element of every output, somewhere within it."""
    if not op.outputs:
        yield 0, 0
    for output, result in enumerate(op.outputs):
        if result.view.numel:
            yield output, rng.randrange(result.view.numel)


def _judge(
    side: TrainerSide, facts: StepFacts, chunk: int, at: int, accusation: Accusation
) -> tuple[float, int]:
    """Return how long the judge takes over one element, and how many bytes it reads."""
    op = side.trace.operators[at]
    partials = side.partials(accusation, at, facts)
    if partials:
        accusation = replace(accusation, block=len(partials) // 2)
    elif nodes := side.nodes(at):
        accusation = replace(accusation, block=len(nodes) // 2)
    opening = side.open(accusation, at, facts)
    root = b"" if side.trace.after is None else side.trace.after.root
    batch = {op.module: side.trace.array((at, 0)).tobytes()} if op.name == BATCH else None
    agreed, claimed = side.leaves.commitment_at(at), side.leaves.commitment_at(at + 1)
    seconds: list[float] = []
    for _ in range(TRIES):
        own = replace(facts)  # a judge who has decoded nothing yet
        clock = time.perf_counter()
        finding = rule_on_operator(
            own, side.base, chunk, agreed=agreed, claimed=claimed, agreed_state=side.agreed.root,
            claimed_state=root, accusation=accusation, opening=opening, own_batch=batch,
        )  # fmt: skip
        seconds.append(time.perf_counter() - clock)
        if finding.fault == "faulty":
            raise TallyError(f"bench: an honest operator was blamed: {finding.reason}")
    nbytes = opening.nbytes + (len(facts.frame) + len(facts.grids) if needs_log(op) else 0)
    return statistics.median(seconds), nbytes + (0 if batch is None else sum(map(len, batch.values())))
