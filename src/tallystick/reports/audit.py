"""What an audit, or the auditor's own claim, found.

A terminal and a page show what the JSON of an audit says, whoever wrote it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tallystick.reports.divergence import divergence_fields, divergence_page
from tallystick.reports.foreign import Foreign
from tallystick.reports.layout import (
    BAD,
    GOOD,
    QUIET,
    UNSURE,
    Cell,
    Page,
    Row,
    counted,
    duration,
    page,
    picked,
    share,
)
from tallystick.reports.sample import sample_fields, sample_rows

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence
    from tallystick.dispute.verdict import LogObjection
    from tallystick.roles.audit_report import AuditReport, SegmentResult

STYLES: Mapping[str, str] = {"match": GOOD, "mismatch": BAD, "log_violation": BAD}
"""Of a verdict; all others are UNSURE."""
DEVIATION = "step kind subject element own stated"
MOST_SEGMENTS = 4096
FEW = 3  # names shown of several
PARTIAL = "what several segments lead adds up, and only an audit of all steps bounds it"


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
        report, sample = self.report, self.report.sample
        first = report.first
        return {
            **picked(report, "verdict steps differing_elements profile"),
            "run": Path(report.directory).resolve().name,
            "first_step": None if first is None else first.step,
            "freedom": report.freedom.fields(),
            "sample": None if sample is None else sample_fields(sample, checked=self.publication_checked),
            "segments": [_segment_fields(segment) for segment in report.segments],
            "beginning": None if report.beginning is None else asdict(report.beginning),
            "first": None if first is None else picked(first, DEVIATION),
            "environment": {
                name: {"own": own, "trainer": trainer} for name, (own, trainer) in report.environment.items()
            },
            "divergence": None if self.divergence is None else divergence_fields(self.divergence),
            "seconds": {**report.phases.seconds, "total": self.total},
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally audit`` prints."""
        report, given = self.report, Foreign(self.fields())
        sample = (
            []
            if report.sample is None
            else sample_rows(report.sample, report.verdict, checked=self.publication_checked)
        )
        rows = [("run", report.directory), *audit_rows(given, sample)]
        rows.append(("time", f"{duration(report.phases.seconds)}; {self.total:.1f} s in all"))
        headline = audit_headline(given)
        whole = page(headline.plain, str(headline.style), rows)
        return whole if self.divergence is None else Group(whole, "", divergence_page(self.divergence))


def _segment_fields(segment: SegmentResult) -> dict[str, object]:
    deviations = [picked(deviation, DEVIATION) for deviation in segment.deviations]
    return {
        **picked(segment, "start end verdict first_step differing_elements elements"),
        "deviations": deviations,
    }


# -- what is shown ---------------------------------------------------------------------------------


def audit_headline(given: Foreign) -> Text:
    """Return the verdict and where it shows first, in its style."""
    verdict, first = given["verdict"].text(40) or "unknown", given["first"]
    words = verdict.replace("_", " ")
    style = STYLES.get(verdict, UNSURE)
    if verdict == "match":
        whole = "of the sample" if given["sample"] else "committed"
        every = f"every {whole} byte" if whole == "committed" else f"every byte {whole}"
        return Text(
            f"{words}: {counted(given['steps'].whole() or 0, 'step')} repeated, {every} is the same",
            style=style,
        )
    where = f" at step {first['step'].text()}: {_subject(first)}" if first else ""
    after = {
        "cannot_reproduce": " (nothing is said about the trainer)",
        "not_accepted": " (every byte follows from the log; nobody is accused)",
    }
    return Text(f"{words}{where}{after.get(verdict, '')}", style=style)


def audit_rows(given: Foreign, sample: Sequence[Row] = ()) -> list[Row]:
    """Return what an audit's JSON says: where it deviates, segments, ``sample``, freedom, first state, machines."""
    environment = [
        f"{Foreign(name).text(40)} {pair['own'].text(80)} (trainer: {pair['trainer'].text(80)})"
        for name, pair in given["environment"].members()
    ]
    rows: list[Row] = [
        ("profile", given["profile"].text()),
        *_first_rows(given["first"]),
        *_segment_rows(given),
        *sample,
        *_freedom_rows(given["freedom"], is_partial=_is_partial(given)),
        ("beginning", _beginning(given["beginning"])),
        ("environment", ", ".join(environment)),
    ]
    return [(label, text) for label, text in rows if text]


def _first_rows(first: Foreign) -> Iterator[Row]:
    if first:
        own, stated = ("accepted", "found") if first["kind"].text() == "not_accepted" else ("here", "trainer")
        yield "where", f"step {first['step'].text()}, {place_of(first)}"
        yield own, first["own"].readable()
        yield stated, first["stated"].readable()


def _segment_rows(given: Foreign) -> Iterator[Row]:
    segments = list(given["segments"].items(MOST_SEGMENTS))
    bad = [segment for segment in segments if segment["verdict"].text() != "match"]
    if segments:
        yield "segments", f"{len(segments) - len(bad)} of {len(segments)} match"
    for segment in bad:
        yield "", _segment_line(segment)
        deviations = list(segment["deviations"].items(MOST_SEGMENTS))
        if given["first"].value not in [deviation.value for deviation in deviations]:
            yield from (("", Text(f"  {_line(deviation)}", style=QUIET)) for deviation in deviations[:1])
        if len(deviations) > 1:
            more = counted(len(deviations) - 1, "more deviation")
            yield "", Text(f"  and {more}; --json lists them", style=QUIET)
    elements = sum(segment["elements"].whole() or 0 for segment in segments)
    if elements:
        yield (
            "states",
            f"{elements:,} elements of committed states compared, {given['differing_elements'].text()} differ",
        )


def _segment_line(segment: Foreign) -> Cell:
    verdict, differing = segment["verdict"].text(40), segment["differing_elements"].whole()
    line = f"{segment['start'].text()}:{segment['end'].text()} {verdict.replace('_', ' ')}"
    line += f" from step {segment['first_step'].text()} on"
    line += f", {differing:,} elements differ at its end" if differing else ""
    return Text(line, style=STYLES.get(verdict, UNSURE))


def _line(deviation: Foreign) -> str:
    where = f"step {deviation['step'].text()}: {place_of(deviation)}"
    if deviation["kind"].text() == "not_accepted":
        return f"{where}: {deviation['stated'].text()}; accepted is {deviation['own'].text()}"
    return f"{where} is {deviation['own'].readable()}, the trainer says {deviation['stated'].readable()}"


def place_of(deviation: Foreign) -> str:
    """Return what deviates: a tensor, record field or log site, and the element."""
    element = deviation["element"].text()
    return _subject(deviation) + (f", element {element}" if element else "")


def _subject(deviation: Foreign) -> str:
    return deviation["subject"].text().removeprefix(f"step {deviation['step'].value}: ")


def _is_partial(given: Foreign) -> bool:
    """Return whether an audit left out steps before the last that it repeated."""
    segments = [
        (part["start"].whole(), part["end"].whole()) for part in given["segments"].items(MOST_SEGMENTS)
    ]
    end: int | None = 0
    for start, then in segments:
        if start != end:
            return True
        end = then
    return False


def _freedom_rows(freedom: Foreign, *, is_partial: bool) -> Iterator[Row]:
    """Return what a log could have chosen, and what this one did choose, as far as the JSON says it.

    With ``is_partial`` also that no segment's audit bounds what several lead together (docs/threat-model.md).
    """

    def shared(name: str) -> str:
        part = freedom[name].number()
        return "no bounded share" if part is None else share(part)

    fraction, widest = freedom["fraction"].number(), freedom["widest_band_ratio"].number()
    said = {name: item.text() for name, item in freedom.members()}
    if fraction is not None and freedom["elements"].value != 0:
        of = f" of {said['elements']}" if "elements" in said else " of"
        bands = f"; the widest band is {widest:g} times this machine's own" if widest else ""
        yield "freedom", f"{share(fraction)}{of} roundings were near enough for a log to choose{bands}"
    if freedom["elements"].value == 0 or "moved" not in said:
        return
    words = f"{said['moved']} roundings by this log"
    words += f", of {said['move_budget']} that noise explains at most" if "move_budget" in said else ""
    expected = freedom["expected_moves"].number()
    words += f" ({expected:.3g} expected)" if expected is not None else ""
    if "decisions_moved" in said:
        far = f"{said.get('decisions_far')} of {said.get('decision_budget')}"
        words += f", and {said['decisions_moved']} decisions, {far} farther than noise reaches"
    yield "moved", words
    if "largest_move" in said:
        words = f"{shared('largest_move')} of a step's gradient by this log, {shared('largest_steer')} within the budget; "
        words += f"the weights were led by {shared('path_steer')} of the distance trained"
        yield "steer", words + (f"; {PARTIAL}" if is_partial else "")
    silent = freedom["silenced_parameters"].whole()
    if silent is not None:
        yield "silenced", f"{counted(silent, 'parameter')} with a gradient that is nothing but noise"


def _beginning(begin: Foreign) -> str:
    """Return what nobody compared: weights that this machine draws otherwise, and frozen ones that it rounds otherwise."""
    parts: list[str] = []
    if begin["other"].whole():
        others = _few(begin["others"])
        parts.append(
            f"{begin['other'].text()} of {begin['trained'].text()} trained parameters begin with other bits than this machine "
            "draws: they are the trainer's word" + (f" ({others})" if others else "")
        )
    rounded = _few(begin["rounded"])
    return "; ".join([*parts, *([f"{rounded} differ from them in their last bits"] if rounded else [])])


def _few(names: Foreign) -> str:
    found = [name.text() for name in names.items(FEW + 1)]
    return ", ".join(found[:FEW]) + (", .." if len(found) > FEW else "")


# -- claims ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimPage:
    """The auditor's own run, written for a dispute.

    Attributes:
        run, claim: the trainer's and the auditor's run directory.
        profile: of the machine that repeated it.
        steps: how many were repeated.
        first_step: where the auditor left the trainer's log, or None.
        differing_elements: of the final states; None where the trainer's is not there.
        root, trainer_root: hexadecimal roots of the two transcripts.
        seconds: wall time.
        objection: to the trainer's log of one step, or None.
        program: the command that was followed; empty of a job.
    """

    run: str
    claim: str
    profile: str
    steps: int
    first_step: int | None
    differing_elements: int | None
    root: str
    trainer_root: str
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    objection: LogObjection | None = None
    program: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """``match`` if both roots are one and nothing deviated, else ``mismatch``."""
        return "match" if self.root == self.trainer_root and self.first_step is None else "mismatch"

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            **picked(
                self,
                "run claim verdict first_step steps differing_elements profile root trainer_root seconds",
            ),
            "freedom": None,
            "objection": None if self.objection is None else self.objection.fields(),
        }

    def _final_states(self) -> str:
        differing = self.differing_elements
        return "the trainer's is not there" if differing is None else f"{differing:,} elements differ"

    def __rich__(self) -> Page:
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
            ("final states", self._final_states()),
            *self._objection_rows(),
            ("time", duration(self.seconds)),
        ]
        if not agree:
            rest = ["--", *self.program] if self.program else []
            rows.append(("next", shlex.join(["tally", "dispute", "run", self.run, self.claim, *rest])))
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
