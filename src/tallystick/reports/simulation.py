"""What simulations found against what the planner claims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.text import Text

from tallystick.fleet.sampling.fleet_year import CountedRate, FleetYears
from tallystick.fleet.sampling.simulate import AT_LEAST, CONFIDENCE, LIMIT, RocCurve, ScenarioOutcome
from tallystick.reports.chart import Axis, Chart, Intervals, Line, hue_of, linear, logarithmic
from tallystick.reports.layout import (
    BAD,
    GOOD,
    QUIET,
    Cell,
    Heading,
    Page,
    Part,
    Pictures,
    Row,
    Rows,
    Table,
    Words,
    counted,
    picked,
)
from tallystick.reports.webpage import html

LEAST_ALARMS = 0.001  # where the logarithmic axis of false alarms begins
KINDS = (
    "equals: the exact detection of this evader. at least: what the guaranteed plan promises against every evader. limit: the "
    "exact detection of a plan that lacks something, stated because it falls short of what was wanted."
)


@dataclass(frozen=True)
class SimulationReport:
    """Outcomes of all scenarios, ROC curves of the coverage test, and whole years of one fleet."""

    seed: int
    trials: int
    drawn: float
    outcomes: tuple[ScenarioOutcome, ...]
    curves: tuple[RocCurve, ...]
    years: FleetYears | None
    seconds: float

    @property
    def disagreeing(self) -> list[str]:
        """Names of everything that the planner claims and the simulation contradicts."""
        names = [outcome.scenario.name for outcome in self.outcomes if not outcome.agrees]
        names += [curve.name for curve in self.curves if not curve.agrees(CONFIDENCE)]
        names += (
            [] if self.years is None else [said.name for said in self.years.statements if not said.agrees]
        )
        return names

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "agrees": not self.disagreeing,
            **picked(self, "disagreeing seed trials drawn seconds"),
            "confidence": CONFIDENCE,
            "scenarios": [_outcome_fields(outcome) for outcome in self.outcomes],
            "roc": [
                {**picked(curve, "name expected suppressed area points"), "agrees": curve.agrees(CONFIDENCE)}
                for curve in self.curves
            ],
            "fleet": None if self.years is None else _years_fields(self.years),
        }

    def __rich__(self) -> Page:
        """Return the report for people."""
        wrong = self.disagreeing
        words, style = "every claim of the planner agrees with what was counted", GOOD
        if wrong:
            words, style = f"the simulation contradicts the planner: {', '.join(wrong)}", BAD
        parts = [Rows(self._rows()), *self._detection(), *self._coverage(), *self._fleet()]
        return Page(words, style, parts, "Compute monitoring, simulated")

    def html(self) -> str:
        """Return one HTML file that says and shows all of it."""
        return html(self.__rich__())

    # -- parts -------------------------------------------------------------------------------------

    def _rows(self) -> list[Row]:
        rows: list[Row] = [
            ("seed", f"{self.seed}; the same seed gives the same numbers again"),
            ("trials", f"{self.trials:,} of each scenario"),
            ("intervals", f"Clopper-Pearson; all of a table hold together with probability {CONFIDENCE:g}"),
        ]
        if self.drawn < 1.0:
            rows.append(("drawn", f"{self.drawn:g} of the samples that the plan asks for"))
        rows.append(("took", f"{self.seconds:.1f} s"))
        return rows

    def _detection(self) -> Iterator[Part]:
        if not self.outcomes:
            return
        found = [
            (at + 0.5, out.rate, out.low, out.high, out.scenario.claim)
            for at, out in enumerate(self.outcomes)
        ]
        agreeing = [row for row, out in zip(found, self.outcomes, strict=True) if out.agrees]
        others = [row for row, out in zip(found, self.outcomes, strict=True) if not out.agrees]
        places = [(at + 0.5, f"{at + 1}") for at in range(len(found))]
        chart = Chart(
            "Found, with intervals; the bar is the claim", Axis("scenario, numbered as below", 0, len(found), places),
            linear("probability of detection", 0.0, 1.0),
            [Intervals("agrees" if agreeing else "", "0", agreeing), Intervals("contradicts" if others else "", "bad", others)],
        )  # fmt: skip
        columns = (
            "",
            "scenario",
            "chips",
            "drawn",
            "wanted",
            "claim",
            "found",
            "interval",
            "verdict",
            "what happens",
        )
        rows = [
            (f"{at}", *_cells(out), _verdict(out), out.scenario.words)
            for at, out in enumerate(self.outcomes, start=1)
        ]
        bad = [at for at, outcome in enumerate(self.outcomes) if not outcome.agrees]
        yield Heading("Detection against the planner's claim")
        yield Pictures([chart])
        yield Table(columns, rows, numbers=(0, 2, 3, 4, 5, 6, 7), page_only=(0, 9), bad=bad)
        yield Words(Text(KINDS, style=QUIET))

    def _coverage(self) -> Iterator[Part]:
        if not self.curves:
            return
        alarms, hits = (
            logarithmic("false alarms", LEAST_ALARMS, 1.0),
            linear("suppressed logs found", 0.0, 1.0),
        )
        counted_lines, expected = list[Line](), list[Line]()
        for at, curve in enumerate(self.curves):
            name = f"{curve.name}: {curve.expected:g} due, {curve.suppressed:.0%} suppressed"
            for lines, first in ((counted_lines, 1), (expected, 3)):
                points = [(max(point[first], LEAST_ALARMS), point[first + 1]) for point in curve.points]
                lines.append(Line(name, hue_of(at), [*points, (1.0, 1.0)]))
        note = "A log that should hold few snapshots cannot show that they are missing."
        rows = [
            (
                curve.name, f"{curve.expected:g}", f"{curve.suppressed:.0%}", f"{curve.area:.4f}",
                _colour("agrees" if curve.agrees(CONFIDENCE) else "contradicts", agrees=curve.agrees(CONFIDENCE)),
            )
            for curve in self.curves
        ]  # fmt: skip
        yield Heading("Coverage test: logs that are too empty")
        yield Pictures(
            [
                Chart("ROC of the coverage test", alarms, hits, counted_lines, [note]),
                Chart("The same, as the Poisson distribution says", alarms, hits, expected),
            ]
        )
        columns = ("log", "snapshots due", "suppressed", "area under the curve", "verdict")
        yield Table(columns, rows, numbers=(1, 2, 3))

    def _fleet(self) -> Iterator[Part]:
        years = self.years
        if years is None:
            return
        yield Heading(f"{counted(years.years, 'year')} of {years.chips:,} chips")
        yield Words(_years_words(years))
        yield Table(
            ("what", "", "counted", "rate", "interval", "claim", "verdict"),
            [(said.name, said.words, *_said(said)) for said in years.statements],
            numbers=(2, 3, 4, 5),
            bad=[at for at, said in enumerate(years.statements) if not said.agrees],
        )


def _colour(verdict: str, *, agrees: bool) -> Text:
    return Text(verdict, style=GOOD if agrees else BAD)


def _cells(outcome: ScenarioOutcome) -> tuple[str, ...]:
    scenario = outcome.scenario
    sign = "≥" if scenario.kind == AT_LEAST else "="
    return (
        scenario.name,
        f"{scenario.question.chips:,}",
        f"{max(sum(row) for row in scenario.samples):,}",
        f"{scenario.question.probability:g}",
        f"{sign} {scenario.claim:.4f}",
        f"{outcome.rate:.4f}",
        f"{outcome.low:.4f} to {outcome.high:.4f}",
    )


def _verdict(outcome: ScenarioOutcome) -> Text:
    words = "agrees, a limit" if outcome.scenario.kind == LIMIT else "agrees"
    return _colour(words if outcome.agrees else "contradicts", agrees=outcome.agrees)


def _said(said: CountedRate) -> tuple[Cell, ...]:
    sign = {"at least": "≥", "at most": "≤", "equals": "="}[said.kind]
    return (
        f"{said.hits:,} of {said.trials:,}",
        f"{said.hits / max(1, said.trials):.4g}",
        f"{said.low:.3g} to {said.high:.3g}",
        f"{sign} {said.claim:.4g}",
        _colour("agrees" if said.agrees else "contradicts", agrees=said.agrees),
    )


def _years_words(years: FleetYears) -> str:
    found = ", ".join(
        f"{name} after {days:.0f} days" for name, days in years.days_to_find if days is not None
    )
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in years.findings)
    return (
        f"{years.owners} owners, {years.snapshots:,} snapshots, {years.inspected:,} chips inspected "
        f"({' + '.join(str(count) for count in years.samples)} a period). "
        f"Findings: {kinds or 'none'}. First found on average: {found or 'never'}."
    )


def _outcome_fields(outcome: ScenarioOutcome) -> dict[str, object]:
    scenario = outcome.scenario
    return {
        **picked(scenario, "name words kind claim samples"),
        **picked(outcome, "found trials rate low high agrees"),
        "wanted": scenario.question.probability,
        "chips": scenario.question.chips,
    }


def _years_fields(years: FleetYears) -> dict[str, object]:
    return {
        **asdict(years),
        "findings": dict(years.findings),
        "days_to_find": dict(years.days_to_find),
        "statements": [{**asdict(said), "agrees": said.agrees} for said in years.statements],
    }
