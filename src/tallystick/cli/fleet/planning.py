"""tally plan: how many chips to inspect; without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from tallystick.cli.options import AsJson, option
from tallystick.cli.terminal import answer
from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.planner import PlanQuestion, Stratum
from tallystick.fleet.sampling.workload import (
    LARGEST_FLEET_FILE,
    FleetFile,
    Plan,
    Workload,
    make_plan,
    parse_fleet,
)
from tallystick.reports.evasion import EvasionFigures, evasion_figures
from tallystick.reports.layout import GOOD, QUIET, UNSURE, Row, counted, page, share
from tallystick.store.files import read_whole, write_whole

Threshold = Annotated[
    float, option("--threshold-flop", "H", "FLOP of a run that must be found, after its first H.")
]
Chips = Annotated[
    float | None, option("--chips", "C", "Chips to draw from; or give a fleet file with strata.")
]
Rate = Annotated[
    float | None,
    option("--flop-per-chip-day", "A", "The most a chip does in a day, in any precision it supports."),
]
Snapshots = Annotated[
    float, option("--snapshots-per-day", "F", "Snapshots a chip takes per day in use, on average.")
]
RunDays = Annotated[float, option("--run-days", "T", "Days that the run takes.")]
PeriodDays = Annotated[float, option("--period-days", "TM", "Days between two inspections.")]
Probability = Annotated[
    float, option("--probability", "P", "With what probability such a run is to be found.")
]
FleetPath = Annotated[
    Path | None, option("--fleet", "FILE", "Strata, exempt chips, costs, risks and past rounds, as JSON.")
]

PlotFile = Annotated[
    Path | None,
    option("--plot", "FILE.svg", "Where to draw what longer and shorter runs would gain against Eq. 1."),
]


def register(app: typer.Typer) -> None:
    """Add ``tally plan`` to ``app``."""
    app.command()(plan)


def plan(
    threshold_flop: Threshold,
    snapshots_per_day: Snapshots,
    run_days: RunDays,
    period_days: PeriodDays,
    probability: Probability,
    chips: Chips = None,
    flop_per_chip_day: Rate = None,
    fleet: FleetPath = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> int:
    """Plan how many chips to inspect so that a large training run is found with a given probability."""
    if plot is not None and plot.suffix.lower() != ".svg":
        raise InvalidInput(f"--plot {plot}: only .svg files are drawn")
    given = (
        FleetFile()
        if fleet is None
        else parse_fleet(read_whole(fleet, limit=LARGEST_FLEET_FILE, what="a fleet file"))
    )
    question = PlanQuestion(
        threshold_flop,
        _strata(given, chips, flop_per_chip_day),
        snapshots_per_day,
        run_days,
        period_days,
        probability,
        given.risks.spoof,
        given.risks.tamper,
        given.losses_allowed,
    )
    figures = None
    if plot is not None:
        figures = evasion_figures(question)
        write_whole(plot, figures.svg().encode())
    answer(PlanPage(make_plan(question, given.inspection, given.rounds), figures, plot), as_json=as_json)
    return 0


@dataclass(frozen=True)
class PlanPage:
    """One plan as a page and as JSON."""

    plan: Plan
    figures: EvasionFigures | None = None
    plot_file: Path | None = None

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints; ``samples_per_year`` is Eq. 1's, null where no such run fits."""
        made, question = self.plan, self.plan.question
        published = made.published
        return {
            "samples_per_year": None if published is None else published.samples_per_year,
            "samples_per_period": None if published is None else published.samples_per_period[0],
            "inspectors": None if published is None else published.inspectors,
            "cost_per_year": None if published is None else published.cost_per_year,
            "currency": made.inspection.currency,
            "exact": None if made.exact is None else asdict(made.exact),
            "guaranteed": None if made.guaranteed is None else asdict(made.guaranteed),
            "best_detection": made.best_detection,
            "share_of_fleet": made.share_of_fleet,
            "endless_run_detection": made.endless_run_detection,
            "audited_separately": made.audited_separately,
            "exempt_flop": question.exempt_flop,
            "sampling_probability": question.sampling_probability,
            "strata": [stratum.name for stratum in question.monitored],
            "next_draws": [asdict(draw) for draw in made.next_draws],
            "warnings": list(made.warnings),
            "assumptions": list(made.assumptions),
            "exclusions": list(made.exclusions),
            "evasion": None if self.figures is None else self.figures.fields(),
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally plan`` prints."""
        made, question = self.plan, self.plan.question
        find = f"a run of {question.threshold_flop:.4g} FLOP with probability {question.probability:g}"
        if made.guaranteed is not None:
            headline, style = (
                f"{counted(made.guaranteed.samples_per_year, 'sample')} a year find {find}",
                GOOD,
            )
        else:
            headline, style = f"no number of samples finds {find}", UNSURE
        rows: list[Row] = []
        for label, load in (
            ("Eq. 1", made.published),
            ("exact", made.exact),
            ("guaranteed", made.guaranteed),
        ):
            rows.append((label, _line(load, question, made.inspection.currency)))
        rows.append(
            ("of the fleet", f"a run of {question.run_days:g} days takes {share(made.share_of_fleet)}")
        )
        rows.append(("at best", f"{made.best_detection:.6g}, every chip in every period"))
        if made.endless_run_detection is not None:
            rows.append(("longer runs", f"leave Eq. 1 with {made.endless_run_detection:.4g} at worst"))
        if made.audited_separately is not None:
            rows.append(("not pooled", f"{made.audited_separately:,} a year, each owner audited alone"))
        if self.figures is not None:
            least = f"{self.figures.least_published:.4f} of p is left where k <= 100 and b <= 0.2"
            rows.append(("evasion", f"{self.plot_file}; {least}"))
        for draw in made.next_draws:
            rows.append(
                (
                    "draw next",
                    f"{counted(draw.samples, 'chip')} of {draw.stratum}, {draw.catch_up:,} of them to catch up; "
                    f"{counted(draw.failures, 'failure')} to follow up, {draw.lost:,} lost",
                )
            )
        return page(
            headline,
            style,
            rows,
            *_listed("Warnings", made.warnings, UNSURE),
            *_listed("Assumptions", made.assumptions, QUIET),
            *_listed("Not covered", made.exclusions, QUIET),
        )


def _line(load: Workload | None, question: PlanQuestion, currency: str) -> str:
    if load is None:
        return "no answer"
    if len(load.samples_per_period) == len(question.monitored) and len(question.monitored) > 1:
        each = zip(load.samples_per_period, question.monitored, strict=True)
        drawn = ", ".join(f"{samples:,} {stratum.name}" for samples, stratum in each)
    else:
        drawn = f"{load.samples_per_period[0]:,.6g}"
    cost = "" if load.cost_per_year is None else f", {load.cost_per_year:,.0f} {currency}".rstrip()
    return (
        f"{load.samples_per_year:,} a year ({drawn} a period), {counted(load.inspectors, 'inspector')}{cost}; "
        f"found with {load.detection:.4g}"
    )


def _listed(title: str, words: Iterable[str], style: str) -> list[Text]:
    lines = [Text(f"  - {line}") for line in words]
    return [Text(title, style=style), *lines] if lines else []


def _strata(fleet: FleetFile, chips: float | None, rate: float | None) -> tuple[Stratum, ...]:
    if fleet.strata:
        if chips is not None or rate is not None:
            raise InvalidInput(
                "--chips, --flop-per-chip-day: the fleet file lists strata, which say the same; give one or the other"
            )
        return fleet.strata
    for name, value in (("--chips", chips), ("--flop-per-chip-day", rate)):
        if value is None:
            raise InvalidInput(f"{name}: is missing, and no fleet file lists strata")
    assert chips is not None and rate is not None
    if not chips.is_integer():
        raise InvalidInput(f"--chips {chips:g}: must be a whole number")
    return (Stratum("fleet", int(chips), rate),)
