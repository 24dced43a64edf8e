"""tally simulate: play fleets and evaders against the planner's claims; without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.options import AsJson, Seed, argument, option
from tallystick.cli.terminal import TaskDisplay, answer, say
from tallystick.errors import InvalidInput
from tallystick.store.files import write_whole

Names = Annotated[
    list[str] | None, argument("[SCENARIO]...", "Only these scenarios; by default all of them.")
]
Trials = Annotated[int, option("--trials", "N", "Plays of each scenario.", least=1)]
Chips = Annotated[int, option("--chips", "C", "Chips of the fleet whose years are played.")]
Years = Annotated[int, option("--years", "N", "Years of that fleet; 0 for none.", least=0)]
Page = Annotated[Path | None, option("--html", "FILE.html", "Where to write the report with its plots.")]
Drawn = Annotated[
    float,
    option("--drawn", "SHARE", "Draw only this share of what the plan asks for, to see it contradicted."),
]


def register(app: typer.Typer) -> None:
    """Add ``tally simulate`` to ``app``."""
    app.command()(simulate)


def simulate(
    scenario: Names = None,
    trials: Trials = 4000,
    chips: Chips = 100_000,
    years: Years = 20,
    seed: Seed = 0,
    drawn: Drawn = 1.0,
    html: Page = None,
    as_json: AsJson = False,
) -> int:
    """Play fleets of honest and evading owners against the planner's claims; 1 if a claim is contradicted."""
    from tallystick.fleet.sampling.fleet_year import must_be_playable, play_years
    from tallystick.fleet.sampling.scenarios import find_scenarios
    from tallystick.fleet.sampling.simulate import play_all, play_roc
    from tallystick.reports.simulation import SimulationReport

    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(f"--html {html}: only .html files are written")
    started, names = time.perf_counter(), scenario or []
    chosen = find_scenarios(names)
    if years and not names:
        must_be_playable(chips, years)
    with TaskDisplay("simulate") as shown:
        outcomes = play_all(chosen, trials=trials, seed=seed, drawn=drawn, progress=shown)
        # One chip for a month and for a year, twenty chips drawn together, at f = 0.1; suppression from a tenth to all.
        logs = () if names else (
            ("a month, all", 3.0, 1.0), ("a month, half", 3.0, 0.5), ("a year, half", 36.5, 0.5),
            ("a year, a fifth", 36.5, 0.2), ("20 chips a year, a fifth", 730.0, 0.2),
            ("20 chips a year, a tenth", 730.0, 0.1),
        )  # fmt: skip
        curves = tuple(play_roc(*log, trials=max(trials, 1000), seed=seed) for log in logs)
        fleet = None
        if years and not names:
            fleet = play_years(chips, years, seed=seed, drawn=drawn, progress=shown)
    report = SimulationReport(
        seed, trials, drawn, outcomes, curves, fleet, round(time.perf_counter() - started, 2)
    )
    if html is not None:
        write_whole(html, report.html().encode())
        say(f"{html}: written")
    answer(report, as_json=as_json)
    return 1 if report.disagreeing else 0
