"""Decisions about transcripts and the chips they explain; pure (spec/monitoring.md 5).

Which segments are repeated, what a repeated segment shows, and what all of it says about a run and its owner. Somebody
else repeats (``tallystick.integrations.watching``); here are the rules. Three claims stay apart:

    declared-run correctness     the training that was declared took place as declared
    declared-run completeness    every snapshot of the owner's chips belongs to a declared run
    fleet completeness           no chip is missing: for the registry and inspections to say, never for a transcript
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import digest, kind_of
from tallystick.commit.field_rules import At, Via
from tallystick.errors import InvalidInput
from tallystick.fleet.agent.chip_log import NumberedFinding, Severity, snapshots_of
from tallystick.fleet.agent.chip_record import LoggedPrecommit, LoggedRecord
from tallystick.fleet.attestation.assurance import MEANINGS, Assurance, Attestation
from tallystick.fleet.provenance.matcher import SnapshotMatch
from tallystick.fleet.provenance.memorisation import RunMemory
from tallystick.fleet.provenance.observation import (
    ObservationPlan,
    attested_part,
    chance_of_empty,
    check_observed,
    check_together,
    seconds_used,
    seconds_within,
    snapshots_within,
)
from tallystick.fleet.provenance.transcripts import Lineage, RunReport
from tallystick.numerics.random import permutation

SELECTION_TAG = "tallystick/segment-selection/1"
RATIO_LIMIT = 0.1
"""Of |W' - W| / |dW| where there is no log: honest replays have 0.02, or 0.07 at the finest rates, interpolation about 1."""
UNEXPLAINED_LIMIT = 0.0  # share of a snapshot's memory that may belong to nothing declared
LEAST_RANDOM = 1
LIKELY, UNLIKELY = 0.5, 0.01
"""Chances from which on it says nothing that no snapshot of a chip in use holds memory, or few."""

Answer = Literal["pass", "fail", "unknown"]
Method = Literal["exact", "ratio"]


@dataclass(frozen=True)
class Selected:
    """A segment to repeat, and why: ``random``, ``snapshot``, ``largest`` or ``memory``."""

    start: int
    end: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class SegmentOutcome:
    """What repeating a segment showed.

    Attributes:
        method: ``exact`` where the rounding log exists, else ``ratio``.
        verdict: ``match``, ``mismatch`` or ``cannot_reproduce``.
        distance, change: for the ratio test, L2 norms of W' - W and of the claimed update.
        text: the first deviation, or how close it was.
    """

    start: int
    end: int
    method: Method
    verdict: str
    text: str = ""
    distance: float | None = None
    change: float | None = None

    @property
    def ratio(self) -> float | None:
        """The distance over the change: 0 for two zeros, infinite for a change of zero that is not met."""
        if self.distance is None or self.change is None:
            return None
        if self.change == 0.0:
            return 0.0 if self.distance == 0.0 else math.inf
        return self.distance / self.change

    def fields(self) -> dict[str, object]:
        """Return the outcome as JSON."""
        names = ("start", "end", "method", "verdict", "ratio", "text")
        return {name: getattr(self, name) for name in names}


def choose_segments(
    borders: Sequence[int],
    *,
    run: str,
    beacon: bytes,
    random_segments: int,
    snapshots: Iterable[int] = (),
    changes: Mapping[tuple[int, int], float] | None = None,
    largest: int = 0,
    doubtful: Iterable[tuple[int, int]] = (),
) -> list[Selected]:
    """Return the segments to repeat, in order: random ones, those next to snapshots, of the largest updates, doubtful ones.

    The random ones follow from the run's root and a ``beacon`` that spoke after the report was committed, so that nobody
    could foresee them and anybody can choose them again. The largest alone are never enough: a forger makes those honestly.

    Raises:
        InvalidInput: no random segment, or no segments at all.
    """
    segments = list(pairwise(borders))
    if random_segments < LEAST_RANDOM or not segments:
        raise InvalidInput(
            f"segments: {random_segments} random ones of {len(segments)}; {LEAST_RANDOM} or more must be random"
        )
    reasons: dict[tuple[int, int], list[str]] = {}
    seed = digest(SELECTION_TAG, bytes.fromhex(run), beacon)
    key = (int.from_bytes(seed[:4], "little"), int.from_bytes(seed[4:8], "little"))
    for at in permutation(key, len(segments))[:random_segments]:
        reasons.setdefault(segments[int(at)], []).append("random")
    for step in sorted(set(snapshots)):
        for start, end in segments:
            if start < step <= end or start == step:
                reasons.setdefault((start, end), []).append("snapshot")
    ordered = sorted((changes or {}).items(), key=lambda item: (-item[1], item[0]))
    for segment, _ in ordered[:largest]:
        reasons.setdefault(segment, []).append("largest")
    for segment in sorted(set(doubtful) & set(segments)):
        reasons.setdefault(segment, []).append("memory")
    return [Selected(*segment, tuple(dict.fromkeys(why))) for segment, why in sorted(reasons.items())]


def judge_ratio(outcome: SegmentOutcome, limit: float = RATIO_LIMIT) -> SegmentOutcome:
    """Return the outcome of a ratio test with its verdict."""
    ratio = outcome.ratio
    assert ratio is not None
    good = ratio <= limit
    text = f"|W' - W| / |dW| is {ratio:.3g}, {'at most' if good else 'more than'} {limit:g}"
    return replace(outcome, method="ratio", verdict="match" if good else "mismatch", text=text)


@dataclass(frozen=True)
class ChipView:
    """What a verifier knows of one chip: its log, the findings on it, what it is worth, its snapshots' matches, what it attested.

    ``matches`` holds, by the snapshot's counter, the run's root and the match, or None where no declared run explains it.
    ``doubtful`` are those that the owner claims for steps which could not be repeated here. ``goes_on``: see ``KnownChip``.
    """

    ueid: str
    log: Sequence[LoggedRecord]
    findings: Sequence[NumberedFinding]
    assurance: Assurance
    matches: Mapping[int, tuple[str, SnapshotMatch] | None] = field(
        default_factory=dict[int, "tuple[str, SnapshotMatch] | None"]
    )
    doubtful: frozenset[int] = frozenset()
    attested: Attestation | None = None
    goes_on: bool = False

    @property
    def watched(self) -> Sequence[LoggedRecord]:
        """The log up to the record that the chip attested, where it may go on behind that; all of it counts for matches."""
        return attested_part(self.log, self.attested) if self.goes_on else self.log

    def of_run(self, run: str) -> dict[int, int | None]:
        """Return after how many steps of a run its snapshots are, by their counters."""
        found = ((seq, match) for seq, match in self.matches.items() if match is not None)
        return {seq: match.steps_done for seq, (root, match) in found if root == run}


@dataclass(frozen=True)
class RunEvidence:
    """Everything that was found out about one declared run.

    Attributes:
        report: as the developer signed it.
        problem: why the report does not bind the transcript, or None.
        outcomes: of the repeated segments; ``selected`` says why each.
        initial: for an initialised run, how the committed first weights compare with the job's own: a share of elements
            beyond rounding, None if it was not looked at.
        parent_state: for a continued run, whether the parent's committed state at that step is this run's first: None if the
            parent is not known.
        flop_counted: FLOP of the whole run, counted from the operators.
        other_setting: the first hyper-parameter in the first state that is not the job's own, None if all are.
        memory: what the committed states remember of the claimed data, None if it was not looked at.
    """

    report: RunReport
    problem: str | None
    selected: Sequence[Selected] = ()
    outcomes: Sequence[SegmentOutcome] = ()
    initial: float | None = None
    parent_state: bool | None = None
    flop_counted: int | None = None
    memory: RunMemory | None = None
    other_setting: str | None = None


@dataclass(frozen=True)
class Plausibility:
    """Bounds between FLOP and chip time: the most a chip does in a second, and the least share of it that a run uses."""

    flop_per_chip_second: float
    least_utilisation: float = 0.0


@dataclass(frozen=True)
class RunVerdict(Document, what="verdict on a run"):
    """What is said about one run: correctness of what was declared, with findings."""

    run: str
    correct: Answer
    findings: tuple[NumberedFinding, ...]


def judge_run(
    evidence: RunEvidence,
    chips: Mapping[str, ChipView],
    plausibility: Plausibility | None = None,
    plan: ObservationPlan | None = None,
) -> RunVerdict:
    """Return the verdict on a declared run. Unknown is never a pass; a failure outweighs what is unknown."""
    report = evidence.report
    if evidence.problem is not None:
        return RunVerdict(report.run, "fail", (NumberedFinding(101, "report", None, evidence.problem),))
    found: list[NumberedFinding] = []
    found += _check_precommit(report, chips)
    found += _check_segments(evidence)
    found += _check_memory(evidence)
    if evidence.other_setting is not None:
        found.append(NumberedFinding(114, "hyper-parameters", 0, f"first state: {evidence.other_setting}"))
    found += _check_lineage(evidence)
    found += _check_totals(evidence, chips, plausibility, plan)
    worst = {finding.severity for finding in found}
    correct: Answer = "fail" if "violation" in worst else "unknown" if "unknown" in worst else "pass"
    return RunVerdict(report.run, correct, tuple(found))


def _level(assurance: int) -> str:
    return f"L{assurance}"


def _read_level(value: object, what: str) -> int:
    if value not in (levels := [_level(at) for at in range(len(MEANINGS))]):
        raise InvalidInput(f"{what} must be one of {', '.join(levels)}, is {kind_of(value)}")
    return levels.index(cast("str", value))


@dataclass(frozen=True)
class OwnerVerdict(Document, what="verdict on an owner", implied=("verdict",)):
    """What is said about an owner: the three claims, the least assurance of its chips, what is excluded, and findings."""

    owner: str
    correct: Annotated[Answer, At("declared_run_correctness")]
    complete: Annotated[Answer, At("declared_run_completeness")]
    fleet: Annotated[Answer, At("fleet_completeness")]
    assurance: Annotated[int, Via(_level, _read_level)]
    runs: tuple[RunVerdict, ...]
    findings: tuple[NumberedFinding, ...]
    excluded: tuple[str, ...]

    @property
    def verdict(self) -> Answer:
        """``fail`` if anything failed; ``pass`` only if both claims on declared runs passed."""
        claims = (self.correct, self.complete)
        return (
            "fail" if "fail" in (*claims, self.fleet) else "pass" if claims == ("pass", "pass") else "unknown"
        )


def judge_owner(
    owner: str,
    chips: Sequence[ChipView],
    runs: Sequence[RunVerdict],
    *,
    plan: ObservationPlan | None = None,
    unexplained_limit: float = UNEXPLAINED_LIMIT,
) -> OwnerVerdict:
    """Return the verdict on an owner's chips and declared runs; without a ``plan`` nothing says that the chips were observed."""
    found: list[NumberedFinding] = []
    if plan is None and chips:
        text = "no plan says at what rate and over which time the chips were to be observed; what was not observed is unknown"
        found.append(NumberedFinding(115, "no plan", None, text, "unknown"))
    for chip in chips:
        found += [
            NumberedFinding(f.rule, f.name, f.seq, f"chip {chip.ueid[-8:]}: {f.text}", f.severity)
            for f in chip.findings
        ]
        if plan is not None:
            found += check_observed(chip.ueid, chip.watched, chip.attested, plan)
        found += _check_matches(chip, unexplained_limit, plan)
    if plan is not None:
        found += check_together([(chip.ueid, chip.watched, chip.attested) for chip in chips], plan)
    worst = {finding.severity for finding in found}
    complete: Answer = (
        "fail" if "violation" in worst else "unknown" if "unknown" in worst or not chips else "pass"
    )
    answers = {run.correct for run in runs}
    correct: Answer = "fail" if "fail" in answers else "unknown" if "unknown" in answers else "pass"
    excluded = (
        "chips that no registry lists, and those that were not shown",
        "memory between two snapshots",
        "the quality and rights of the data",
    )
    least = min((chip.assurance.level for chip in chips), default=0)
    return OwnerVerdict(owner, correct, complete, "unknown", least, tuple(runs), tuple(found), excluded)


# -- the rules, spec/monitoring.md 5 ----------------------------------------------------------------


def _check_precommit(report: RunReport, chips: Mapping[str, ChipView]) -> list[NumberedFinding]:
    wanted = report.precommit.digest()
    found: list[NumberedFinding] = []
    for ueid in dict.fromkeys(report.precommit.ranks):
        chip = chips.get(ueid)
        if chip is None or not chip.log:
            found.append(
                NumberedFinding(
                    102, "chip not shown", None, f"chip {ueid[-8:]} of the run was not shown", "unknown"
                )
            )
            continue
        at = next(
            (
                r
                for r in chip.log
                if isinstance(r.record.event, LoggedPrecommit) and r.record.event.digest == wanted
            ),
            None,
        )
        first = next((s.record.seq for s, taken in snapshots_of(chip.log) if taken.run == wanted), None)
        matched = [seq for seq, steps in chip.of_run(report.run).items() if steps]
        if at is not None and matched and min(matched) < at.record.seq:
            text = f"chip {ueid[-8:]} logged it in record {at.record.seq}, and holds a state of the run in record {min(matched)}"
            found.append(NumberedFinding(102, "pre-commitment afterwards", at.record.seq, text))
        if at is None:
            found.append(
                NumberedFinding(102, "no pre-commitment", None, f"chip {ueid[-8:]} never logged the run's")
            )
        elif first is None:
            text = f"chip {ueid[-8:]} holds no snapshot of the run"
            found.append(NumberedFinding(103, "no snapshot", at.record.seq, text, "note"))
    if report.precommit.data is None:
        text = "the data were not committed before the run; they can have been chosen afterwards"
        found.append(NumberedFinding(104, "data not pre-committed", None, text, "unknown"))
    return found


def _check_segments(evidence: RunEvidence) -> list[NumberedFinding]:
    found: list[NumberedFinding] = []
    if not evidence.outcomes:
        return [
            NumberedFinding(105, "nothing repeated", None, "no segment of the run was repeated", "unknown")
        ]
    for outcome in evidence.outcomes:
        place = f"steps {outcome.start} to {outcome.end}"
        if outcome.verdict == "cannot_reproduce":
            found.append(
                NumberedFinding(105, "segment", outcome.start, f"{place}: {outcome.text}", "unknown")
            )
        elif outcome.verdict != "match":
            found.append(NumberedFinding(105, "segment", outcome.start, f"{place}: {outcome.text}"))
    return found


def _check_memory(evidence: RunEvidence) -> list[NumberedFinding]:
    """A doubtful segment accuses nobody; one that was repeated exactly needs no memory."""
    memory = evidence.memory
    if memory is None:
        return []
    if not memory.has_power:
        text = "the model remembers too little of single records to tell claimed data from unseen ones"
        return [NumberedFinding(113, "memorisation", None, text, "note")]
    exact = {(o.start, o.end) for o in evidence.outcomes if o.method == "exact" and o.verdict == "match"}
    return [
        NumberedFinding(
            113, "memorisation", s.start, str(s), "note" if (s.start, s.end) in exact else "unknown"
        )
        for s in memory.doubtful
    ]


def _check_lineage(evidence: RunEvidence) -> list[NumberedFinding]:
    lineage: Lineage = evidence.report.precommit.lineage
    if lineage.kind == "continued":
        parent = f"run {str(lineage.parent)[:16]}.. after {lineage.steps_done} steps"
        if evidence.parent_state is None:
            return [NumberedFinding(106, "lineage", 0, f"continues {parent}, which was not shown", "unknown")]
        if not evidence.parent_state:
            return [NumberedFinding(106, "lineage", 0, f"its first state is not that of {parent}")]
        return []
    if evidence.initial is None:
        return [
            NumberedFinding(
                107, "initialisation", 0, "the first weights were not compared with the job's own", "unknown"
            )
        ]
    if evidence.initial > 0.0:
        text = f"{100 * evidence.initial:.3g} % of the first weights are not those that the job initialises"
        return [NumberedFinding(107, "initialisation", 0, text)]
    return []


def _check_totals(
    evidence: RunEvidence,
    chips: Mapping[str, ChipView],
    plausibility: Plausibility | None,
    plan: ObservationPlan | None,
) -> list[NumberedFinding]:
    report, totals = evidence.report, evidence.report.totals
    found: list[NumberedFinding] = []
    counted = evidence.flop_counted
    if counted is not None and counted != totals.flop:
        text = f"{totals.flop:.6g} FLOP are stated, the operators of the declared steps have {counted:.6g}"
        found.append(NumberedFinding(108, "FLOP", None, text))
    if plausibility is None:
        return found
    ranks = [chips[u] for u in set(report.precommit.ranks) if u in chips]
    used = [seconds_used(chip.log, report.precommit.digest(), chip.of_run(report.run)) for chip in ranks]
    seconds = sum(most for _, most in used)
    most = seconds * plausibility.flop_per_chip_second
    if totals.flop > most:
        text = f"{totals.flop:.4g} FLOP are stated, the chips can have done {most:.4g} in {seconds:.6g} s"
        found.append(NumberedFinding(109, "implausible", None, text))
    # Of a chip whose hours nobody knows it may have stood still.
    hours = [None if plan is None else plan.use.get(chip.ueid) for chip in ranks]
    least = sum(
        time if known is None else min(time, 3600.0 * known)
        for (time, _), known in zip(used, hours, strict=True)
    )
    could = least * plausibility.flop_per_chip_second
    if totals.flop < could * plausibility.least_utilisation:
        text = (
            f"{totals.flop:.4g} FLOP in {least:.6g} s are {100 * totals.flop / could:.3g} % of what the chips can do; "
            f"{100 * plausibility.least_utilisation:g} % is the least that goes unasked"
        )
        severity: Severity = "unknown" if None in hours else "violation"
        found.append(NumberedFinding(109, "time unaccounted for", None, text, severity))
    return found


def _check_matches(chip: ChipView, limit: float, plan: ObservationPlan | None) -> list[NumberedFinding]:
    found: list[NumberedFinding] = []
    name = f"chip {chip.ueid[-8:]}"
    sizes = {r.record.seq: (event.size, event.run) for r, event in snapshots_of(chip.log)}
    others = set[int]() if plan is None else plan.of_others(chip.ueid, chip.log)
    matches = {seq: matched for seq, matched in sorted(chip.matches.items()) if seq not in others}
    unmatched = [seq for seq, matched in matches.items() if matched is None]
    empty = [seq for seq in unmatched if sizes[seq][0] == 0]
    doubtful = [seq for seq in unmatched if seq in chip.doubtful and seq not in empty]
    foreign = [seq for seq in unmatched if seq not in empty and seq not in doubtful]
    total = len(matches)

    def note(rule: int, what: str, seqs: list[int], text: str, severity: Severity) -> None:
        if seqs:
            shown = ", ".join(map(str, seqs[:5])) + (", .." if len(seqs) > 5 else "")
            whole = f"{name}: {len(seqs)} of {total} snapshots {text} (records {shown})"
            found.append(NumberedFinding(rule, what, seqs[0], whole, severity))

    note(110, "unexplained snapshot", foreign, "belong to no declared run", "violation")
    note(110, "unexplained snapshot", doubtful, "are claimed for steps that could not be repeated", "unknown")
    within = [seq for seq in empty if _is_within(seq, sizes)]
    note(112, "empty snapshot", within, "are of no memory at all, in the middle of a run", "unknown")
    outside = [seq for seq in empty if seq not in within]
    severity, more = _idleness(chip, empty, plan)
    note(112, "empty snapshot", outside, f"are of no memory at all, before or after a run; {more}", severity)
    for seq, matched in matches.items():
        if matched is not None and matched[1].unexplained_bytes > limit * matched[1].size:
            share = 100 * matched[1].unexplained_bytes / matched[1].size
            text = f"{name}: {share:.3g} % of the memory of snapshot {seq} belongs to nothing declared"
            found.append(NumberedFinding(111, "unexplained memory", seq, text))
    return found


def _idleness(chip: ChipView, empty: Sequence[int], plan: ObservationPlan | None) -> tuple[Severity, str]:
    """Return what snapshots of no memory outside of runs are, and why: nothing ran, if a meter or an inspection says so too."""
    hours = None if plan is None else plan.use.get(chip.ueid)
    if plan is None or hours is None:
        return "unknown", "no meter and no inspection says that the chip was not in use"
    plan = plan.of(chip.ueid)
    within = set(snapshots_within(chip.watched, plan))
    full = len(within.difference(empty))
    chance = chance_of_empty(full, len(within), hours, seconds_within(chip.watched, chip.attested, plan))
    text = f"{full} of {len(within)} hold any, of a chip in use for {hours:g} hours; chance {chance:.1e}"
    if chance < plan.limits.false_alarm:
        return "violation", text
    return ("unknown" if chance < (LIKELY if full == 0 else UNLIKELY) else "note"), text


def _is_within(seq: int, sizes: Mapping[int, tuple[int, bytes]]) -> bool:
    """Whether snapshots of memory under the same pre-commitment lie on both sides of this one."""
    run = sizes[seq][1]
    full = [other for other, (size, stated) in sizes.items() if size and stated == run]
    return bool(run) and bool(full) and min(full) < seq < max(full)
