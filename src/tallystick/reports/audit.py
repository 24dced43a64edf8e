"""What an audit, or the auditor's own claim, found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tallystick.commit.encoding import parse_hex_float
from tallystick.errors import InvalidInput
from tallystick.reports.divergence import DivergencePage, divergence_fields
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, Row, counted, duration, page, share
from tallystick.reports.sample import sample_fields, sample_rows

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence
    from tallystick.dispute.verdict import LogObjection
    from tallystick.roles.audit_report import AuditReport, Deviation, SegmentResult

STYLES: Mapping[str, str] = {
    "match": GOOD,
    "mismatch": BAD,
    "log_violation": BAD,
    "cannot_reproduce": UNSURE,
    "not_accepted": UNSURE,
}
WORDS: Mapping[str, str] = {
    "match": "match",
    "mismatch": "mismatch",
    "log_violation": "log violation",
    "cannot_reproduce": "cannot reproduce",
    "not_accepted": "not accepted",
}


@dataclass(frozen=True)
class AuditPage:
    """An audit's findings.

    Attributes:
        total: the whole audit's wall time in seconds.
        divergence: why it does not match.
        publication_checked: whether a log proof was held against what the sample's announcement says.
    """

    report: AuditReport
    total: float
    divergence: Divergence | None = None
    publication_checked: bool = False

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints; scripts rely on the names."""
        report = self.report
        first = report.first
        return {
            "run": Path(report.directory).resolve().name,
            "verdict": report.verdict,
            "first_step": None if first is None else first.step,
            "steps": report.steps,
            "differing_elements": report.differing_elements,
            "freedom": report.freedom.fields(),
            "profile": report.profile,
            "sample": None
            if report.sample is None
            else sample_fields(report.sample, checked=self.publication_checked),
            "segments": [_segment_fields(segment) for segment in report.segments],
            "beginning": None if report.beginning is None else asdict(report.beginning),
            "first": None if first is None else deviation_fields(first),
            "environment": {
                name: {"own": own, "trainer": trainer} for name, (own, trainer) in report.environment.items()
            },
            "divergence": None if self.divergence is None else divergence_fields(self.divergence),
            "seconds": {**report.phases.seconds, "total": self.total},
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally audit`` prints."""
        report = self.report
        rows: list[Row] = [("run", report.directory), ("profile", report.profile)]
        rows += _first_rows(report.first)
        rows += self._segment_rows()
        rows += (
            []
            if report.sample is None
            else sample_rows(report.sample, report.verdict, checked=self.publication_checked)
        )
        rows += self._freedom_rows()
        rows += _beginning_rows(report)
        if report.environment:
            rows.append(("environment", _environment(report.environment)))
        rows.append(("time", f"{duration(report.phases.seconds)}; {self.total:.1f} s in all"))
        whole = page(self._headline(), STYLES[report.verdict], rows)
        return whole if self.divergence is None else Group(whole, "", DivergencePage(self.divergence))

    def _headline(self) -> str:
        report = self.report
        steps = counted(report.steps, "step")
        if report.verdict == "match":
            whole = (
                "every committed byte is the same"
                if report.sample is None
                else "every byte of the sample is the same"
            )
            return f"match: {steps} repeated, {whole}"
        first = report.first
        where = "" if first is None else f" at step {first.step}: {_subject(first)}"
        if report.verdict == "cannot_reproduce":
            return f"cannot reproduce{where} (nothing is said about the trainer)"
        if report.verdict == "not_accepted":
            return f"not accepted{where} (every byte follows from the log; nobody is accused)"
        return f"{WORDS[report.verdict]}{where}"

    def _segment_rows(self) -> list[Row]:
        segments = self.report.segments
        bad = [segment for segment in segments if segment.verdict != "match"]
        elements = sum(segment.elements for segment in segments)
        differing = self.report.differing_elements
        rows: list[Row] = []
        if segments:
            rows.append(("segments", f"{len(segments) - len(bad)} of {len(segments)} match"))
        for segment in bad:
            rows.append(("", Text(_segment_line(segment), style=STYLES[segment.verdict])))
            if self.report.first not in segment.deviations:
                rows += [("", Text(f"  {_line(d)}", style=QUIET)) for d in segment.deviations[:1]]
            hidden = len(segment.deviations) - 1
            if hidden > 0:
                rows.append(
                    ("", Text(f"  and {counted(hidden, 'more deviation')}; --json lists them", style=QUIET))
                )
        if elements:
            compared = f"{elements:,} elements of committed states compared, {differing:,} differ"
            rows.append(("states", compared))
        return rows

    def _freedom_rows(self) -> list[Row]:
        freedom = self.report.freedom
        if not freedom.elements:
            return []
        bands = (
            ""
            if not freedom.widest_band_ratio
            else (f"; the widest band is {freedom.widest_band_ratio:g} times this machine's own")
        )
        silent = counted(freedom.silenced_parameters, "parameter")
        return [
            (
                "freedom",
                f"{share(freedom.fraction)} of {freedom.elements:,} roundings were near enough for a log to choose{bands}",
            ),
            (
                "moved",
                f"{freedom.moved:,} roundings by this log, of {freedom.move_budget:,} that noise explains at most "
                f"({freedom.expected_moves:.3g} expected), and {freedom.decisions_moved:,} decisions, "
                f"{freedom.decisions_far:,} of {freedom.decision_budget:,} farther than noise reaches",
            ),
            (
                "steer",
                f"{share(freedom.largest_move)} of a step's gradient by this log, {share(freedom.largest_steer)} within the "
                f"budget; all moves together {share(freedom.path_steer)} of the distance trained",
            ),
            ("silenced", f"{silent} with a gradient that is nothing but noise"),
        ]


@dataclass(frozen=True)
class ClaimPage:
    """The auditor's own run, written for a dispute.

    Attributes:
        run, claim: the trainer's and the auditor's run directory.
        profile: of the machine that repeated it.
        steps: how many were repeated.
        first_step: where the auditor left the trainer's log, or None.
        differing_elements: of the final states.
        root, trainer_root: hexadecimal roots of the two transcripts.
        seconds: wall time.
        objection: to the trainer's log of one step, or None.
    """

    run: str
    claim: str
    profile: str
    steps: int
    first_step: int | None
    differing_elements: int
    root: str
    trainer_root: str
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    objection: LogObjection | None = None

    @property
    def verdict(self) -> str:
        """``match`` if both roots are one and nothing deviated, else ``mismatch``."""
        return "match" if self.root == self.trainer_root and self.first_step is None else "mismatch"

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "run": self.run,
            "claim": self.claim,
            "verdict": self.verdict,
            "first_step": self.first_step,
            "steps": self.steps,
            "differing_elements": self.differing_elements,
            "freedom": None,
            "objection": None if self.objection is None else self.objection.fields(),
            "profile": self.profile,
            "root": self.root,
            "trainer_root": self.trainer_root,
            "seconds": dict(self.seconds),
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally audit --claim`` prints."""
        agree = self.verdict == "match"
        headline = (
            f"match: {counted(self.steps, 'step')} repeated, both sides have one root"
            if agree
            else f"mismatch: {'; '.join(self._differences())}"
        )
        rows: list[Row] = [
            ("run", self.run),
            ("claim", self.claim),
            ("profile", self.profile),
            ("own root", self.root),
            ("trainer's", self.trainer_root),
            ("final states", f"{self.differing_elements:,} elements differ"),
            *self._objection_rows(),
            ("time", duration(self.seconds)),
        ]
        if not agree:
            rows.append(("next", f"tally dispute run {self.run} {self.claim}"))
        return page(headline, STYLES[self.verdict], rows)

    def _differences(self) -> list[str]:
        roots = [] if self.root == self.trainer_root else ["the roots differ"]
        return roots + ([] if self.first_step is None else [f"first deviation at step {self.first_step}"])

    def _objection_rows(self) -> list[Row]:
        found = self.objection
        if found is None:
            return []
        where = found.site if found.element < 0 else f"{found.site}, element {found.element:,}"
        return [("objection", f"to the log of step {found.step}, {where}: {found.rule}")]


def deviation_fields(deviation: Deviation) -> dict[str, object]:
    """Return a deviation as JSON."""
    return {
        "step": deviation.step,
        "kind": deviation.kind,
        "subject": deviation.subject,
        "element": deviation.element,
        "own": deviation.own,
        "stated": deviation.stated,
    }


def _segment_fields(segment: SegmentResult) -> dict[str, object]:
    return {
        "start": segment.start,
        "end": segment.end,
        "verdict": segment.verdict,
        "first_step": segment.first_step,
        "differing_elements": segment.differing_elements,
        "elements": segment.elements,
        "deviations": [deviation_fields(deviation) for deviation in segment.deviations],
    }


def _segment_line(segment: SegmentResult) -> str:
    line = f"{segment.start}:{segment.end} {WORDS[segment.verdict]} from step {segment.first_step} on"
    if segment.differing_elements:
        line += f", {segment.differing_elements:,} elements differ at its end"
    return line


def _line(deviation: Deviation) -> str:
    if deviation.kind == "not_accepted":
        return (
            f"step {deviation.step}: {_subject(deviation)}: {deviation.stated}; accepted is {deviation.own}"
        )
    where = "" if deviation.element is None else f" element {deviation.element:,}"
    return (
        f"step {deviation.step}: {_subject(deviation)}{where} is {_readable(deviation.own)}, "
        f"the trainer says {_readable(deviation.stated)}"
    )


def _first_rows(first: Deviation | None) -> list[Row]:
    if first is None:
        return []
    where = _subject(first) if first.element is None else f"{_subject(first)}, element {first.element:,}"
    own, stated = ("accepted", "found") if first.kind == "not_accepted" else ("here", "trainer")
    return [
        ("where", f"step {first.step}, {where}"),
        (own, _readable(first.own)),
        (stated, _readable(first.stated)),
    ]


def _subject(deviation: Deviation) -> str:
    return deviation.subject.removeprefix(f"step {deviation.step}: ")


def _readable(value: str) -> str:
    """Return a hexadecimal float with its decimal form beside it, and anything else as it is."""
    try:
        number = parse_hex_float(value, what="value")
    except InvalidInput:
        return value
    return f"{value} ({number:.7g})"


def _beginning_rows(report: AuditReport) -> list[Row]:
    """What nobody compared: initial weights that this machine draws otherwise, and frozen ones that it rounds otherwise."""
    begin = report.beginning
    if begin is None or not (begin.other or begin.rounded):
        return []
    parts: list[str] = []
    if begin.other:
        parts.append(
            f"{begin.other:,} of {begin.trained:,} trained parameters are not those that the job builds here"
            + (f" ({_few(begin.others)})" if begin.others else "")
        )
    if begin.rounded:
        parts.append(f"{_few(begin.rounded)} differ from them in their last bits")
    return [("beginning", "; ".join(parts))]


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")


def _environment(differences: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name} {own} (trainer: {trainer})" for name, (own, trainer) in differences.items())
