"""Repeats what a transcript's verifier asks for, with the auditor's own replay (needs torch).

replayer = RunReplayer(directory, find_source("digits"))
replayer.repeat(0, 20)            # exact under the log, else the ratio test
replayer.states({3, 4})           # the states that snapshots are matched with
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, StoreError
from tallystick.execution.job import JobSource
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import batch_digest, run_step
from tallystick.fleet.agent.chip_log import Finding, Head, Limits, read_log, snapshots_of, verify_log
from tallystick.fleet.agent.chip_record import TORN, LoggedRecord, Snapshot
from tallystick.fleet.agent.memory import Opening as SnapshotOpening
from tallystick.fleet.agent.memory import parse_opening as parse_snapshot_opening
from tallystick.fleet.agent.memory import verify_opening
from tallystick.fleet.attestation.assurance import Assurance, Evidence, derive_assurance
from tallystick.fleet.provenance.matcher import Match, PageReader, State, match_snapshot
from tallystick.fleet.provenance.memorisation import judge_memory
from tallystick.fleet.provenance.submission import DeclaredRun, OwnerFolder
from tallystick.fleet.provenance.transcripts import (
    verify_report,
)
from tallystick.fleet.provenance.verification import (
    ChipView,
    OwnerVerdict,
    Plausibility,
    RunEvidence,
    SegmentOutcome,
    choose_segments,
    judge_owner,
    judge_ratio,
    judge_run,
)
from tallystick.integrations.memorising import measure_memory
from tallystick.roles.audit_report import Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.initial_state import find_other_setting
from tallystick.roles.replay import Replay, open_replay
from tallystick.run.transcript import check_cursor
from tallystick.signing.keys import PublicKey
from tallystick.store.chips import ChipDirectory
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
                tape = replay.session.record_tape(replay.session.table)
                outcome = run_step(replay.session, replay.job, tape)
                tape.finish()
                replay.session.settle(tape)
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


# -- an owner's chips and runs --------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownChip:
    """What a verifier knows of a chip from elsewhere: its key, and heads from receipts, inspections, attestations."""

    key: PublicKey
    heads: tuple[Head, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True)
class Inquiry:
    """How an owner is verified: the beacon after the reports, how many segments, and what is plausible.

    ``memory_records`` of each segment are looked for in the model's memory, 0 for none.
    """

    beacon: bytes
    random_segments: int = 2
    largest: int = 1
    search: int = 2000
    plausibility: Plausibility | None = None
    limits: Limits | None = None
    memory_records: int = 0


@dataclass
class _Taken:
    """A snapshot that waits for its match."""

    chip: str
    seq: int
    opening: SnapshotOpening
    event: Snapshot
    memory: PageReader
    found: tuple[str, Match] | None = None


def verify_owner(
    owner: str,
    folder: OwnerFolder,
    known: Mapping[str, KnownChip],
    source_of: Callable[[str], JobSource],
    inquiry: Inquiry,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[OwnerVerdict, list[ChipView], list[RunEvidence]]:
    """Return the verdict on an owner, and what it rests on. ``known`` lists the chips (UEID) that are the owner's.

    Raises:
        InvalidInput, StoreError: what was handed over is malformed or missing.
    """
    logs = {ueid: _read_chip(folder, ueid, chip, inquiry.limits) for ueid, chip in known.items()}
    declared = folder.runs()
    replayers: dict[str, RunReplayer] = {}
    evidence: dict[str, RunEvidence] = {}
    for run in declared:
        try:
            replayer = RunReplayer(run.directory, source_of(run.directory.load_specification().job.path))
            verify_report(run.report, run.opening, replayer.transcript)
        except (Mismatch, InvalidInput) as problem:
            evidence[run.name] = RunEvidence(run.report, str(problem))
        else:
            replayers[run.name] = replayer
    progress(f"{owner}: matching snapshots")
    taken = [item for ueid, (records, _, _) in logs.items() for item in _openings(folder, ueid, records)]
    for run in declared:
        if run.name in replayers:
            _match_claimed(run, replayers[run.name], taken)
    for run in declared:
        if run.name in replayers and any(item.found is None and item.event.size for item in taken):
            _match_anywhere(run, replayers[run.name], taken, inquiry.search)
    for run in declared:
        if run.name in replayers:
            progress(f"{owner}: repeating parts of {run.name}")
            evidence[run.name] = _examine(run, replayers[run.name], declared, taken, inquiry)
    matches: dict[str, dict[int, tuple[str, Match] | None]] = {ueid: {} for ueid in known}
    for ueid, (records, _, _) in logs.items():
        matches[ueid] = {r.record.seq: None for r, _ in snapshots_of(records)}
    for item in taken:
        matches[item.chip][item.seq] = item.found
    doubtful = _doubtful(declared, evidence)
    views = [
        ChipView(ueid, log, found, level, matches[ueid], frozenset(seq for u, seq in doubtful if u == ueid))
        for ueid, (log, found, level) in logs.items()
    ]
    by_ueid = {view.ueid: view for view in views}
    verdicts = [judge_run(evidence[run.name], by_ueid, inquiry.plausibility) for run in declared]
    return judge_owner(owner, views, verdicts), views, [evidence[run.name] for run in declared]


def _doubtful(declared: Sequence[DeclaredRun], evidence: Mapping[str, RunEvidence]) -> set[tuple[str, int]]:
    """Return the snapshots (chip, counter) that are claimed for a segment whose repetition did not match."""
    found: set[tuple[str, int]] = set()
    for run in declared:
        failed = [o for o in evidence[run.name].outcomes if o.verdict != "match"]
        for ueid, seq, step in run.report.snapshots:
            if any(outcome.start < step <= outcome.end for outcome in failed):
                found.add((ueid, seq))
    return found


def _read_chip(
    folder: OwnerFolder, ueid: str, chip: KnownChip, limits: Limits | None
) -> tuple[list[LoggedRecord], list[Finding], Assurance]:
    path = folder.path / "chips" / ueid
    if not path.is_dir():
        missing = Finding(3, "no log", None, "the chip was not shown", "unknown")
        return [], [missing], derive_assurance([], [missing], chip.evidence)
    records, findings = read_log(ChipDirectory(path).frames(), chip.key)
    findings += verify_log(records, known=chip.heads, limits=limits)
    findings += [
        Finding(
            4,
            "another chip",
            r.record.seq,
            f"record {r.record.seq} is of chip {r.record.ueid.hex()}, {ueid} was asked for",
        )
        for r in records[:1]
        if r.record.ueid.hex() != ueid
    ]
    return records, findings, derive_assurance(records, findings, chip.evidence)


def _openings(folder: OwnerFolder, ueid: str, records: Sequence[LoggedRecord]) -> list[_Taken]:
    """Return the snapshots that the owner can open; one whose shard is lost stays unexplained."""
    found: list[_Taken] = []
    chip = ChipDirectory(folder.path / "chips" / ueid)
    for logged, event in snapshots_of(records):
        seq = logged.record.seq
        try:
            opening = parse_snapshot_opening(chip.opening(seq))
            verify_opening(opening, root=event.root, layout=event.layout, what=f"snapshot {seq}")
        except (StoreError, InvalidInput, Mismatch):
            continue
        found.append(_Taken(ueid, seq, opening, event, functools.partial(_read_at, chip.memory_path(seq))))
    return found


def _read_at(path: Path, start: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError:
        return b""


def _match_claimed(run: DeclaredRun, replayer: RunReplayer, taken: Sequence[_Taken]) -> None:
    """Match each snapshot with the step that the report says, and for a torn one the next."""
    claims = {(ueid, seq): step for ueid, seq, step in run.report.snapshots}
    waiting = [(claims[item.chip, item.seq], item) for item in taken if (item.chip, item.seq) in claims]
    wanted = {step for step, _ in waiting} | {step + 1 for step, item in waiting if item.event.flags & TORN}
    before: State | None = None
    for state in replayer.states(wanted):
        for step, item in waiting:
            if item.found is None and step in (state[0], state[0] - 1):
                pair = [before, state] if before is not None and before[0] == step else [state]
                _try(run, item, pair)
        before = state


def _match_anywhere(run: DeclaredRun, replayer: RunReplayer, taken: Sequence[_Taken], most: int) -> None:
    """Look for what is left among all states of a run, if it has no more than ``most``."""
    if replayer.transcript.num_steps > most:
        return
    before: State | None = None
    for state in replayer.states(range(replayer.transcript.num_steps + 1)):
        for item in taken:
            if item.found is None and item.event.size:
                torn = before is not None and item.event.flags & TORN
                _try(run, item, [before, state] if before is not None and torn else [state])
        before = state


def _try(run: DeclaredRun, item: _Taken, states: Sequence[State]) -> None:
    ranks = run.report.precommit.ranks
    if item.chip not in ranks or ranks.index(item.chip) >= len(run.opening.shards):
        return
    match = match_snapshot(item.opening, run.opening.shards[ranks.index(item.chip)], states, item.memory)
    if match.status != "unexplained":
        item.found = (run.report.run, match)


def _examine(
    run: DeclaredRun,
    replayer: RunReplayer,
    declared: Sequence[DeclaredRun],
    taken: Sequence[_Taken],
    inquiry: Inquiry,
) -> RunEvidence:
    shown = {(item.chip, item.seq) for item in taken}
    steps = [step for ueid, seq, step in run.report.snapshots if (ueid, seq) in shown]
    for item in taken:
        if (
            item.found is not None
            and item.found[0] == run.report.run
            and item.found[1].steps_done is not None
        ):
            steps.append(item.found[1].steps_done)
    memory = None
    if inquiry.memory_records and replayer.holds_back:
        memory = judge_memory(measure_memory(replayer, beacon=inquiry.beacon, records=inquiry.memory_records))
    selected = choose_segments(
        replayer.borders,
        run=run.report.run,
        beacon=inquiry.beacon,
        random_segments=inquiry.random_segments,
        snapshots=steps,
        changes=replayer.changes(),
        largest=inquiry.largest,
        doubtful=[(s.start, s.end) for s in memory.doubtful] if memory is not None else (),
    )
    outcomes = [replayer.repeat(segment.start, segment.end) for segment in selected]
    lineage = run.report.precommit.lineage
    initial = replayer.initial_difference() if lineage.kind == "initialised" else None
    parent = held = None
    if lineage.kind == "continued":
        mine = replayer.committed(0)
        for other in declared:
            if other.report.run == lineage.parent:
                theirs = other.directory.load_transcript()
                root = {c.steps_done: c.state_root for c in theirs.checkpoints()}.get(lineage.steps_done or 0)
                held = None if root is None else other.directory.load_committed(lineage.steps_done or 0, root)
                parent = held is not None and weights_distance(mine, held) == 0.0
    return RunEvidence(
        run.report,
        None,
        selected,
        outcomes,
        initial,
        parent,
        replayer.flop(),
        memory,
        replayer.other_setting(held),
    )
