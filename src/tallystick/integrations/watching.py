"""Repeats what a transcript's verifier asks for, with the auditor's own replay (needs torch).

replayer = RunReplayer(directory, find_source("digits"))
replayer.repeat(0, 20)            # exact under the log, else the ratio test
replayer.states({3, 4})           # the states that snapshots are matched with
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, StoreError
from tallystick.execution.job import JobSource
from tallystick.fleet.agent.chip_log import (
    ChipHead,
    LogLimits,
    NumberedFinding,
    read_log,
    snapshots_of,
    verify_log,
)
from tallystick.fleet.agent.chip_record import TORN, LoggedRecord, Snapshot
from tallystick.fleet.agent.memory import SnapshotOpening, verify_opening
from tallystick.fleet.attestation.assurance import Assurance, CheckedEvidence, derive_assurance
from tallystick.fleet.provenance.matcher import PageReader, SnapshotMatch, State, match_snapshot
from tallystick.fleet.provenance.memorisation import judge_memory
from tallystick.fleet.provenance.observation import ObservationPlan, attested_part
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
    Selected,
    choose_segments,
    judge_owner,
    judge_run,
)
from tallystick.integrations.memorising import measure_memory
from tallystick.integrations.run_replayer import RunReplayer, weights_distance
from tallystick.signing.keys import PublicKey
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import open_file

# -- an owner's chips and runs --------------------------------------------------------------------------


MOST_PROGRAMS = 64  # of a chip, whose memory is looked at; that of others stays unexplained
OF_PROGRAM = re.compile(r"[0-9]+/", re.ASCII)  # before a region's name, where several programs are observed


@dataclass(frozen=True)
class KnownChip:
    """What a verifier knows of a chip from elsewhere: its key, and heads from receipts, inspections, attestations.

    ``findings`` are what speaks against it besides its log: an inspection that it failed, evidence that does not hold.
    ``goes_on`` is whether its log may go on behind the record that was attested: what was written meanwhile costs no level.
    """

    key: PublicKey
    heads: tuple[ChipHead, ...] = ()
    evidence: CheckedEvidence = field(default_factory=CheckedEvidence)
    findings: tuple[NumberedFinding, ...] = ()
    goes_on: bool = False


@dataclass(frozen=True)
class Inquiry:
    """How an owner is verified: the beacon after the reports, how many segments, and what is plausible.

    ``memory_records`` of each segment are looked for in the model's memory, 0 for none. Without a ``plan`` of how the chips were
    to be observed nothing passes.
    """

    beacon: bytes
    random_segments: int = 2
    largest: int = 1
    search: int = 2000
    plausibility: Plausibility | None = None
    limits: LogLimits | None = None
    memory_records: int = 0
    plan: ObservationPlan | None = None


@dataclass
class TakenSnapshot:
    """A snapshot that waits for its match: of one program, or of several, whose regions have the number of theirs in front.

    Attributes:
        parts: by that number as it stands there (empty of one program), which run it was found to be of, and how.
        programs: all of those.
    """

    chip: str
    seq: int
    opening: SnapshotOpening
    event: Snapshot
    memory: PageReader
    parts: dict[str, tuple[str, SnapshotMatch]] = field(
        default_factory=dict[str, "tuple[str, SnapshotMatch]"]
    )

    def __post_init__(self) -> None:
        names = (region.name for region in self.opening.regions)
        found = sorted({"" if (at := OF_PROGRAM.match(name)) is None else at[0] for name in names})
        self.programs = found[:MOST_PROGRAMS]

    @property
    def is_done(self) -> bool:
        """Whether the memory of every program was found to be a declared run's."""
        return len(self.parts) == len(self.programs)

    @property
    def found(self) -> tuple[str, SnapshotMatch] | None:
        """Which run the first of its programs was found to be of, and how; what is nobody's counts over all of them."""
        if not self.parts:
            return None
        run, match = self.parts[min(self.parts)]
        explained = sum(match.size - match.unexplained_bytes for _, match in self.parts.values())
        torn = any(each.status == "torn" for _, each in self.parts.values())
        status = "torn" if torn else match.status
        return run, replace(match, status=status, unexplained_bytes=match.size - explained)


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
    logs = {ueid: read_chip(folder, ueid, chip, inquiry) for ueid, chip in known.items()}
    declared = folder.runs()
    replayers: dict[str, RunReplayer] = {}
    evidence: dict[str, RunEvidence] = {}
    for run in declared:
        open_run(run, source_of, replayers, evidence)
    taken = [item for ueid, (records, _, _) in logs.items() for item in openings_of(folder, ueid, records)]

    def each(do: Callable[[DeclaredRun, RunReplayer], None]) -> None:
        """Do something with every run; one whose copy fails here says nothing, and is no one's fault."""
        for run in declared:
            if run.name in replayers:
                try:
                    do(run, replayers[run.name])
                except (InvalidInput, Mismatch, StoreError, Nondeterminism) as problem:
                    evidence[run.name] = _unread(run, problem)
                    del replayers[run.name]

    progress(f"{owner}: matching snapshots")
    each(lambda run, replayer: match_claimed(run, replayer, taken))
    each(lambda run, replayer: match_anywhere(run, replayer, taken, inquiry.search))

    def examine(run: DeclaredRun, replayer: RunReplayer) -> None:
        progress(f"{owner}: repeating parts of {run.name}")
        evidence[run.name] = _examine(run, replayer, declared, taken, inquiry)

    each(examine)
    matches: dict[str, dict[int, tuple[str, SnapshotMatch] | None]] = {ueid: {} for ueid in known}
    for ueid, (records, _, _) in logs.items():
        matches[ueid] = {r.record.seq: None for r, _ in snapshots_of(records)}
    for item in taken:
        matches[item.chip][item.seq] = item.found
    doubtful = _doubtful(declared, evidence)
    views = [
        ChipView(
            ueid, *logs[ueid], matches[ueid], frozenset(seq for u, seq in doubtful if u == ueid), chip.evidence.attestation,
            chip.goes_on,
        )
        for ueid, chip in known.items()
    ]  # fmt: skip
    by_ueid = {view.ueid: view for view in views}
    verdicts = [
        judge_run(evidence[run.name], by_ueid, inquiry.plausibility, inquiry.plan) for run in declared
    ]
    shown = [evidence[run.name] for run in declared]
    return judge_owner(owner, views, verdicts, plan=inquiry.plan), views, shown


def open_run(
    run: DeclaredRun,
    source_of: Callable[[str], JobSource],
    replayers: dict[str, RunReplayer],
    evidence: dict[str, RunEvidence],
) -> None:
    """Open a declared run, or note why it says nothing: its report contradicts it, or nobody here can repeat it."""
    try:
        transcript = run.directory.load_transcript()
        verify_report(run.report, run.opening, transcript)
    except (Mismatch, InvalidInput) as problem:
        evidence[run.name] = RunEvidence(run.report, str(problem))
        return
    try:  # which job it is of is the reader's to know
        replayers[run.name] = RunReplayer(run.directory, source_of(transcript.specification.job.path))
    except (Mismatch, InvalidInput, StoreError, Nondeterminism) as problem:
        evidence[run.name] = _unread(run, problem)


def _unread(run: DeclaredRun, problem: Exception) -> RunEvidence:
    """Return that nothing of a run could be repeated, and why: all that is claimed of it is unknown."""
    whole = SegmentOutcome(0, run.report.steps, "exact", "cannot_reproduce", str(problem)[:300])
    return RunEvidence(run.report, None, (Selected(0, run.report.steps, ("not repeated",)),), (whole,))


def descends(run: DeclaredRun, declared: Sequence[DeclaredRun]) -> bool:
    """Whether a continued run's line of parents, as far as they were shown, comes to an end: none is its own ancestor."""
    by_root, seen = {each.report.run: each for each in declared}, {run.report.run}
    at: DeclaredRun | None = run
    while at is not None and at.report.precommit.lineage.kind == "continued":
        parent = str(at.report.precommit.lineage.parent)
        if parent in seen:
            return False
        seen.add(parent)
        at = by_root.get(parent)
    return True


def _doubtful(declared: Sequence[DeclaredRun], evidence: Mapping[str, RunEvidence]) -> set[tuple[str, int]]:
    """Return the snapshots (chip, counter) that are claimed for a segment whose repetition did not match."""
    found: set[tuple[str, int]] = set()
    for run in declared:
        failed = [o for o in evidence[run.name].outcomes if o.verdict != "match" or o.method != "exact"]
        for ueid, seq, step in run.report.snapshots:
            if any(outcome.start < step <= outcome.end for outcome in failed):
                found.add((ueid, seq))
    return found


def read_chip(
    folder: OwnerFolder, ueid: str, chip: KnownChip, inquiry: Inquiry
) -> tuple[list[LoggedRecord], list[NumberedFinding], Assurance]:
    """Return the log that an owner shows of a chip, what is wrong with it, and what level of assurance it has."""
    path, problem = folder.path / "chips" / ueid, "the chip was not shown"
    frames: list[bytes] | None = None
    if path.is_dir():
        try:
            frames = list(ChipDirectory(path).frames())
        except (InvalidInput, StoreError) as broken:
            problem = f"the log that was shown cannot be read: {str(broken)[:200]}"
    if frames is None:
        missing = NumberedFinding(3, "no log", None, problem, "unknown")
        return [], [missing, *chip.findings], derive_assurance([], [missing], chip.evidence)
    records, findings = read_log(frames, chip.key)
    limits, plan = inquiry.limits, inquiry.plan
    if limits is not None and plan is not None and ueid in plan.begins:
        limits = replace(limits, rate=None)  # before that another owner's plan was asked
    findings += chip.findings
    findings += verify_log(records, known=chip.heads, limits=limits)
    findings += [
        NumberedFinding(
            4,
            "another chip",
            r.record.seq,
            f"record {r.record.seq} is of chip {r.record.ueid.hex()}, {ueid} was asked for",
        )
        for r in records[:1]
        if r.record.ueid.hex() != ueid
    ]
    part = attested_part(records, chip.evidence.attestation) if chip.goes_on else records
    return records, findings, derive_assurance(part, findings, chip.evidence)


def openings_of(folder: OwnerFolder, ueid: str, records: Sequence[LoggedRecord]) -> list[TakenSnapshot]:
    """Return the snapshots that the owner can open; one whose shard is lost stays unexplained."""
    found: list[TakenSnapshot] = []
    chip = ChipDirectory(folder.path / "chips" / ueid)
    for logged, event in snapshots_of(records):
        seq = logged.record.seq
        try:
            opening = SnapshotOpening.parse(chip.opening(seq))
            verify_opening(opening, root=event.root, layout=event.layout, what=f"snapshot {seq}")
        except (StoreError, InvalidInput, Mismatch):
            continue
        found.append(
            TakenSnapshot(ueid, seq, opening, event, functools.partial(read_at, chip.memory_path(seq)))
        )
    return found


def read_at(path: Path, start: int, size: int) -> bytes:
    """Return bytes of a file that somebody handed over; none where it is no file that can be read."""
    try:
        with open_file(path, what="memory of a snapshot") as file:
            file.seek(start)
            return file.read(size)
    except (OSError, StoreError, InvalidInput):
        return b""


def match_claimed(run: DeclaredRun, replayer: RunReplayer, taken: Sequence[TakenSnapshot]) -> None:
    """Match each snapshot with the step that the report says, and for a torn one the next."""
    claims = {(ueid, seq): step for ueid, seq, step in run.report.snapshots}
    waiting = [(claims[item.chip, item.seq], item) for item in taken if (item.chip, item.seq) in claims]
    wanted = {step for step, _ in waiting} | {step + 1 for step, item in waiting if item.event.flags & TORN}
    before: State | None = None
    for state in replayer.states(wanted):
        for step, item in waiting:
            if not item.is_done and step in (state[0], state[0] - 1):
                is_torn = item.event.flags & TORN and before is not None and before[0] == step
                pair = [before, state] if before is not None and is_torn else [state]
                _try(run, item, pair)
        before = state


def match_anywhere(
    run: DeclaredRun, replayer: RunReplayer, taken: Sequence[TakenSnapshot], most: int
) -> None:
    """Look for what is left, if anything is, among all states of a run, if it has no more than ``most``."""
    if replayer.transcript.num_steps > most or all(item.is_done or not item.event.size for item in taken):
        return
    before: State | None = None
    for state in replayer.states(range(replayer.transcript.num_steps + 1)):
        for item in taken:
            if not item.is_done and item.event.size:
                torn = before is not None and item.event.flags & TORN
                _try(run, item, [before, state] if before is not None and torn else [state])
        before = state


def _try(run: DeclaredRun, item: TakenSnapshot, states: Sequence[State]) -> None:
    ranks = run.report.precommit.ranks
    if item.chip not in ranks or ranks.index(item.chip) >= len(run.opening.shards):
        return
    pieces = run.opening.shards[ranks.index(item.chip)]
    for program in item.programs:
        if program not in item.parts:
            named = [replace(piece, region=program + piece.region) for piece in pieces]
            match = match_snapshot(item.opening, named, states, item.memory)
            if match.status != "unexplained":
                item.parts[program] = (run.report.run, match)


def _examine(
    run: DeclaredRun,
    replayer: RunReplayer,
    declared: Sequence[DeclaredRun],
    taken: Sequence[TakenSnapshot],
    inquiry: Inquiry,
) -> RunEvidence:
    shown = {(item.chip, item.seq) for item in taken}
    steps = [step for ueid, seq, step in run.report.snapshots if (ueid, seq) in shown]
    found = (part for item in taken for part in item.parts.values())
    steps += [
        match.steps_done for of, match in found if of == run.report.run and match.steps_done is not None
    ]
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
    if not descends(run, declared):
        parent = False  # it cannot have begun with what came of it
    elif lineage.kind == "continued":
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
