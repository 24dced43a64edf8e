"""What simulations found against what the planner claims: a page, JSON, and one HTML file with plots."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.fleet.sampling.fleet_year import CountedRate, FleetYears
from tallystick.fleet.sampling.simulate import AT_LEAST, CONFIDENCE, LIMIT, RocCurve, ScenarioOutcome
from tallystick.reports.layout import BAD, GOOD, QUIET, Row, counted, page
from tallystick.reports.panels import Axis, Chart, Interval, Line, svg
from tallystick.reports.webpage import drawing, heading, paragraph, table, webpage

COLUMNS = ("scenario", "chips", "drawn", "wanted", "claim", "found", "interval", "")
TENTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


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
            "disagreeing": self.disagreeing,
            "seed": self.seed,
            "trials": self.trials,
            "drawn": self.drawn,
            "confidence": CONFIDENCE,
            "scenarios": [_outcome_fields(outcome) for outcome in self.outcomes],
            "roc": [_curve_fields(curve) for curve in self.curves],
            "fleet": None if self.years is None else _years_fields(self.years),
            "seconds": self.seconds,
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally simulate`` prints."""
        return page(*self._headline(), self._rows(), *self._tables())

    def html(self) -> str:
        """Return one HTML file that says and shows all of it."""
        words, style = self._headline()
        parts = [
            paragraph(words, kind="good" if style == GOOD else "wrong"),
            paragraph("; ".join(f"{label} {text}" for label, text in self._rows()), kind="quiet"),
        ]
        if self.outcomes:
            parts += [heading("Detection against the planner's claim"), drawing(self._detection())]
            parts.append(
                table(
                    ("", *COLUMNS[:-1], "verdict", "what happens"),
                    [
                        (str(at), *_cells(out), _verdict(out), out.scenario.words)
                        for at, out in enumerate(self.outcomes, start=1)
                    ],
                    numbers=(0, 2, 3, 4, 5, 6, 7),
                    bad=[at for at, outcome in enumerate(self.outcomes) if not outcome.agrees],
                )
            )
            parts.append(
                paragraph(
                    "equals: the exact detection of this evader. at least: what the guaranteed plan promises "
                    "against every evader. limit: the exact detection of a plan that lacks something, stated "
                    "because it falls short of what was wanted.",
                    kind="quiet",
                )
            )
        if self.curves:
            parts += [heading("Coverage test: logs that are too empty"), drawing(self._roc())]
            parts.append(
                table(
                    ("log", "snapshots due", "suppressed", "area under the curve"),
                    [
                        (curve.name, f"{curve.expected:g}", f"{curve.suppressed:.0%}", f"{curve.area:.4f}")
                        for curve in self.curves
                    ],
                    numbers=(1, 2, 3),
                )
            )
        if self.years is not None:
            parts += [heading(f"{counted(self.years.years, 'year')} of {self.years.chips:,} chips")]
            parts.append(paragraph(_years_words(self.years)))
            parts.append(
                table(
                    ("what", "", "counted", "rate", "interval", "claim", "verdict"),
                    [(said.name, said.words, *_said(said)) for said in self.years.statements],
                    numbers=(2, 3, 4, 5),
                    bad=[at for at, said in enumerate(self.years.statements) if not said.agrees],
                )
            )
        return webpage("Compute monitoring, simulated", parts)

    # -- parts -------------------------------------------------------------------------------------

    def _headline(self) -> tuple[str, str]:
        wrong = self.disagreeing
        if wrong:
            return f"the simulation contradicts the planner: {', '.join(wrong)}", BAD
        return "every claim of the planner agrees with what was counted", GOOD

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

    def _tables(self) -> list[RenderableType]:
        shown: list[RenderableType] = []
        if self.outcomes:
            found = _table("Detection", COLUMNS)
            for outcome in self.outcomes:
                found.add_row(
                    *_cells(outcome), Text(_verdict(outcome), style=GOOD if outcome.agrees else BAD)
                )
            shown.append(found)
        if self.curves:
            roc = _table("Coverage test", ("log", "due", "suppressed", "area", ""))
            for curve in self.curves:
                fine = curve.agrees(CONFIDENCE)
                verdict = Text("agrees" if fine else "contradicts", style=GOOD if fine else BAD)
                roc.add_row(
                    curve.name, f"{curve.expected:g}", f"{curve.suppressed:.0%}", f"{curve.area:.4f}", verdict
                )
            shown.append(roc)
        if self.years is not None:
            title = f"{counted(self.years.years, 'year')} of {self.years.chips:,} chips"
            years = _table(title, ("what", "", "counted", "rate", "interval", "claim", ""))
            for said in self.years.statements:
                *cells, verdict = _said(said)
                years.add_row(
                    said.name, said.words, *cells, Text(verdict, style=GOOD if said.agrees else BAD)
                )
            shown += [years, Text(_years_words(self.years), style=QUIET)]
        return shown

    def _detection(self) -> str:
        places = len(self.outcomes)
        ticks = tuple(float(at) for at in range(1, places + 1))
        chart = Chart(
            "Found, with intervals; the bar is the claim",
            Axis("scenario, numbered as below", 0.0, places + 1.0, ticks),
            Axis("probability of detection", 0.0, 1.0, TENTHS),
            intervals=[
                Interval(float(at), out.rate, out.low, out.high, out.scenario.claim, out.agrees)
                for at, out in enumerate(self.outcomes, start=1)
            ],
        )
        return svg("Detection against the planner's claim", [chart])

    def _roc(self) -> str:
        chart = Chart(
            "ROC of the coverage test",
            Axis("false alarms", 0.001, 1.0, (0.001, 0.01, 0.1, 1.0), logarithmic=True),
            Axis("suppressed logs found", 0.0, 1.0, TENTHS),
            [
                Line(
                    f"{curve.name}: {curve.expected:g} due, {curve.suppressed:.0%} suppressed",
                    [*((max(alarm, 0.001), hit) for _, alarm, hit, _, _ in curve.points), (1.0, 1.0)],
                )
                for curve in self.curves
            ],
            legend=("a log that should hold few snapshots cannot show that they are missing",),
        )
        theory = Chart(
            "The same, as the Poisson distribution says",
            chart.x,
            chart.y,
            [
                Line(
                    curve.name,
                    [*((max(alarm, 0.001), hit) for _, _, _, alarm, hit in curve.points), (1.0, 1.0)],
                )
                for curve in self.curves
            ],
        )
        return svg("ROC of the coverage test", [chart, theory])


def _table(title: str, columns: tuple[str, ...]) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    right = {
        "chips",
        "drawn",
        "wanted",
        "claim",
        "found",
        "interval",
        "due",
        "suppressed",
        "area",
        "counted",
        "rate",
    }
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column != "")
    return made


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


def _verdict(outcome: ScenarioOutcome) -> str:
    if not outcome.agrees:
        return "contradicts"
    return "agrees, a limit" if outcome.scenario.kind == LIMIT else "agrees"


def _said(said: CountedRate) -> tuple[str, ...]:
    sign = {"at least": "≥", "at most": "≤", "equals": "="}[said.kind]
    return (
        f"{said.hits:,} of {said.trials:,}",
        f"{said.hits / max(1, said.trials):.4g}",
        f"{said.low:.3g} to {said.high:.3g}",
        f"{sign} {said.claim:.4g}",
        "agrees" if said.agrees else "contradicts",
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
        "name": scenario.name,
        "words": scenario.words,
        "kind": scenario.kind,
        "wanted": scenario.question.probability,
        "claim": scenario.claim,
        "found": outcome.found,
        "trials": outcome.trials,
        "rate": outcome.rate,
        "low": outcome.low,
        "high": outcome.high,
        "agrees": outcome.agrees,
        "chips": scenario.question.chips,
        "samples": [list(row) for row in scenario.samples],
    }


def _curve_fields(curve: RocCurve) -> dict[str, object]:
    return {
        "name": curve.name,
        "expected": curve.expected,
        "suppressed": curve.suppressed,
        "area": curve.area,
        "agrees": curve.agrees(CONFIDENCE),
        "points": [list(point) for point in curve.points],
    }


def _years_fields(years: FleetYears) -> dict[str, object]:
    return {
        "chips": years.chips,
        "owners": years.owners,
        "years": years.years,
        "inspected": years.inspected,
        "samples": list(years.samples),
        "snapshots": years.snapshots,
        "findings": dict(years.findings),
        "days_to_find": dict(years.days_to_find),
        "statements": [
            {
                "name": said.name,
                "words": said.words,
                "hits": said.hits,
                "trials": said.trials,
                "low": said.low,
                "high": said.high,
                "claim": said.claim,
                "kind": said.kind,
                "agrees": said.agrees,
            }
            for said in years.statements
        ],
    }
