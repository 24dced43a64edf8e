"""What was found out about owners and their chips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from tallystick.fleet.agent.chip_log import NumberedFinding, snapshots_of
from tallystick.fleet.provenance.observation import ObservationPlan, check_observed, date_of
from tallystick.fleet.provenance.owner_findings import status_of
from tallystick.fleet.provenance.verification import ChipView, OwnerVerdict, RunEvidence
from tallystick.reports.chart import Chart, Dots, linear, named
from tallystick.reports.layout import (
    ANSWERS,
    BAD,
    GOOD,
    UNSURE,
    DonePage,
    Heading,
    Page,
    Part,
    Pictures,
    Row,
    Rows,
    Table,
    Words,
    answered,
    counted,
    page,
    picked,
)
from tallystick.reports.memorisation import MemoryReport, power_in_words
from tallystick.reports.webpage import html

if TYPE_CHECKING:
    from tallystick.integrations.tracing import SnapshotTrace

DAY = 86_400_000  # ms
MOST_CHIPS = 32  # with a line of their own
STATUSES: Mapping[str, tuple[str, str]] = {
    "exact": ("good", "matches a step of a declared run"),
    "torn": ("unsure", "torn: matches two steps page by page"),
    "unexplained": ("bad", "belongs to no declared run"),
    "doubtful": ("5", "claimed for a step that could not be repeated"),
    "empty": ("quiet", "of no memory: nothing was registered"),
}
"""Of a snapshot: its colour and what it means."""
CLAIMS = (
    ("correct", "declared-run correctness"),
    ("complete", "declared-run completeness"),
    ("fleet", "fleet completeness"),
)
SEVERITIES = {"violation": BAD, "unknown": UNSURE, "note": ""}


@dataclass(frozen=True)
class OwnerReport:
    """One owner: the verdict, what it rests on, and how its chips were to be observed, if that was planned."""

    verdict: OwnerVerdict
    chips: Sequence[ChipView]
    evidence: Sequence[RunEvidence]
    plan: ObservationPlan | None = None

    def fields(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {
            **self.verdict.fields(),
            "chips": [
                {
                    "ueid": chip.ueid,
                    "assurance": chip.assurance.fields(),
                    "observed": self._observed(chip),
                    "records": len(chip.log),
                    "snapshots": [
                        {
                            "seq": seq,
                            "status": status_of(chip, seq),
                            "run": None if found is None else found[0],
                            "match": None if found is None else found[1].fields(),
                        }
                        for seq, found in sorted(chip.matches.items())
                    ],
                }
                for chip in self.chips
            ],
            "memory": {
                item.report.run: item.memory.fields() for item in self.evidence if item.memory is not None
            },
            "segments": [
                {**outcome.fields(), "run": item.report.run, "reasons": list(selected.reasons)}
                for item in self.evidence
                for selected, outcome in zip(item.selected, item.outcomes, strict=True)
            ],
        }

    def __rich__(self) -> Page:
        """Return the report for people."""
        return page(
            f"{self.verdict.owner}: {self.verdict.verdict}", ANSWERS[self.verdict.verdict], self.rows()
        )

    def rows(self) -> list[Row]:
        """Return the claims, what they rest on, and the findings."""
        verdict = self.verdict
        rows: list[Row] = [(name, answered(getattr(verdict, field))) for field, name in CLAIMS]
        counts = count_statuses(self.chips)
        told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
        rows.append(
            ("snapshots", f"{sum(counts.values())} on {counted(len(self.chips), 'chip')}: {told or 'none'}")
        )
        for item in self.evidence:
            if item.memory is not None:
                rows.append((f"memory {item.report.run[:9]}..", power_in_words(item.memory)))
            repeated = sum(outcome.end - outcome.start for outcome in item.outcomes)
            rows.append(
                (f"run {item.report.run[:12]}..", f"{repeated} of {item.report.steps} steps repeated")
            )
        if not self.evidence:
            rows.append(("runs", "none was declared"))
        rows.append(("assurance", f"L{verdict.assurance}, the least of its chips"))
        rows += [(f"chip {chip.ueid[-8:]}", self._chip_in_words(chip)) for chip in self.chips[:MOST_CHIPS]]
        if (more := len(self.chips) - MOST_CHIPS) > 0:
            rows.append(("chips", f"{more} more, in the JSON"))
        for found in all_findings(verdict):
            text = Text(f"{found.name}: {found.text}", style=SEVERITIES[found.severity])
            rows.append((f"finding {found.rule}", text))
        if not all_findings(verdict):
            rows.append(("findings", "none"))
        return [*rows, ("not covered", "; ".join(verdict.excluded))]

    def _observed(self, chip: ChipView) -> bool | None:
        """Whether a chip was observed as planned; None without a plan."""
        if self.plan is None:
            return None
        return bool(chip.log) and not check_observed(chip.ueid, chip.watched, chip.attested, self.plan)

    def _chip_in_words(self, chip: ChipView) -> str:
        """Return a chip's level, what the next one lacks, and whether it was observed in the time that was planned."""
        level, lacks = chip.assurance, "; ".join(chip.assurance.lacks)
        said = f"L{level.level}, {level.meaning}" + (f"; L{level.level + 1} lacks {lacks}" if lacks else "")
        if self.plan is None:
            return said
        asked = self.plan.of(chip.ueid)
        how = "observed" if self._observed(chip) else "not shown to be observed"
        return f"{said}; {how} from {date_of(asked.since)} until {date_of(asked.until)}"

    def parts(self) -> Iterator[Part]:
        """Return the owner's section of a page: the report for people, and pictures and tables that it has no room for."""
        verdict = self.verdict.verdict
        yield Heading(Text.assemble(f"{self.verdict.owner}: ", (verdict, ANSWERS[verdict])))
        yield Rows(self.rows())
        yield Heading("Snapshots over time", 3)
        yield Pictures([_timeline(self.chips)])
        yield Heading("Repeated segments", 3)
        segments = [
            (
                f"{outcome.start} to {outcome.end}", ", ".join(selected.reasons),
                Text(outcome.verdict, style=GOOD if outcome.verdict == "match" else BAD), outcome.text,
            )
            for item in self.evidence
            for selected, outcome in zip(item.selected, item.outcomes, strict=True)
        ]  # fmt: skip
        yield Table(("steps", "why", "verdict", ""), segments)
        yield Heading("Memory of the claimed data", 3)
        memories = [(item.report.run, item.memory) for item in self.evidence if item.memory is not None]
        for run, memory in memories:
            yield from MemoryReport(run, memory).parts()
        if not memories:
            yield Words("Was not asked for: nothing is known of it.")


@dataclass(frozen=True)
class FleetReport:
    """Several owners, how long it took, and where everything lies."""

    owners: Sequence[OwnerReport]
    seconds: float
    place: str
    facts: Mapping[str, object]

    def fields(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {
            "owners": [owner.fields() for owner in self.owners],
            "seconds": round(self.seconds, 1),
            "place": self.place,
            **self.facts,
        }

    def __rich__(self) -> Group:
        """Return the report for people."""
        end = Text(f"everything lies in {self.place}, took {self.seconds:.0f} s")
        return Group(*self.owners, self._summary("in short"), end)

    def page(self) -> bytes:
        """Return one HTML file without scripts or references to other files."""
        verdicts = [owner.verdict.verdict for owner in self.owners]
        gravest = next((each for each in ("fail", "unknown", "pass") if each in verdicts), "unknown")
        facts: list[Row] = [(name.replace("_", " "), str(value)) for name, value in self.facts.items()]
        parts = [self._summary(), *(part for owner in self.owners for part in owner.parts())]
        parts += [Heading("How this was done"), Rows(facts)]
        return html(Page(gravest, ANSWERS[gravest], parts, "Chips and declared runs")).encode()

    def _summary(self, title: str = "") -> Table:
        columns = ("owner", "verdict", "runs correct", "runs complete", "fleet complete", "assurance")
        rows = [
            (v.owner, *map(answered, (v.verdict, v.correct, v.complete, v.fleet)), f"L{v.assurance}")
            for v in (owner.verdict for owner in self.owners)
        ]
        return Table(columns, rows, title)


def count_statuses(chips: Sequence[ChipView]) -> dict[str, int]:
    """Return how many snapshots have each status."""
    counts = dict.fromkeys(STATUSES, 0)
    for chip in chips:
        for seq in chip.matches:
            counts[status_of(chip, seq)] += 1
    return counts


def all_findings(verdict: OwnerVerdict) -> list[NumberedFinding]:
    """Return the findings on an owner's runs, then those on its chips."""
    return [*(finding for run in verdict.runs for finding in run.findings), *verdict.findings]


def _timeline(chips: Sequence[ChipView]) -> Chart:
    """Return a row of dots for each chip, at the active time of its snapshots."""
    places: dict[str, list[tuple[float, float, float]]] = {status: [] for status in STATUSES}
    tips: dict[str, list[str]] = {status: [] for status in STATUSES}
    end = max((chip.log[-1].record.clocks.active for chip in chips if chip.log), default=0) or DAY
    for number, chip in enumerate(chips):
        for logged, _ in snapshots_of(chip.log):
            seq, found = logged.record.seq, chip.matches[logged.record.seq]
            status = status_of(chip, seq)
            step = "" if found is None else f", after step {found[1].steps_done}"
            places[status].append((logged.record.clocks.active / DAY, number + 0.5, 5))
            tips[status].append(f"record {seq}: {STATUSES[status][1]}{step}")
    marks = [
        Dots(words, hue, places[status], "dot", tips[status])
        for status, (hue, words) in STATUSES.items()
        if places[status]
    ]
    return Chart(
        "Snapshots of each chip over its active time", linear("days in use", 0.0, end / DAY),
        named("", [chip.ueid[-8:] for chip in chips]), marks,
    )  # fmt: skip


def traced_page(found: SnapshotTrace, what: str, seconds: float) -> DonePage:
    """Return what one snapshot, ``what``, was traced to in so many ``seconds``."""
    values: dict[str, object] = {
        **picked(found, "unexplained size named declared"),
        "parts": [
            {
                **picked(part, "program run root rank ranks"),
                "match": part.match.fields(),
                "slices": [piece.fields() for piece in part.match.slices],
            }
            for part in found.parts
        ],
        "unread": [{"run": name, "problem": problem} for name, problem in found.unread],
        "findings": [each.fields() for each in found.findings],
        "seconds": seconds,
    }
    runs = f"{counted(found.declared, 'declared run')}, of which {found.named:,} name the chip"
    after: list[Row] = [
        ("unexplained", f"{found.unexplained:,} of {found.size:,} bytes"),
        ("looked at", f"{runs}; {seconds:.2f} s"),
        *(("not read", f"{name}: {problem}") for name, problem in found.unread),
        *(("log", f"{each.rule} {each.name}: {each.text}") for each in found.findings),
    ]
    if not found.parts:
        text = "its memory is that of no state that these went through"
        return DonePage(f"{what}: unexplained", values, [("found", text), *after], UNSURE)
    rows: list[Row] = []
    for part in found.parts:
        steps = part.match.steps_done or 0
        torn = ", and the next, page by page" if part.match.status == "torn" else ""
        rows += [
            *([("program", part.program.rstrip("/"))] if part.program else []),
            ("run", f"{part.run}, {part.root}"),
            ("step", f"after {counted(steps, 'step')}{torn}"),
            ("rank", f"{part.rank} of {part.ranks}"),
            ("slices", f"{counted(len(part.match.slices), 'region')}, every byte the same"),
        ]
    exact = all(part.match.status == "exact" for part in found.parts) and not found.unexplained
    words = " and ".join(dict.fromkeys(f"{part.match.status} {part.run}" for part in found.parts))
    return DonePage(f"{what}: {words}", values, [*rows, *after], GOOD if exact else UNSURE)
