"""tally bench monitor: what planning, drawing, simulating and keeping a registry of chips cost here."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.cli.options import AsJson, argument, option
from tallystick.cli.terminal import answer, say
from tallystick.errors import InvalidInput
from tallystick.reports.layout import BAD, GOOD

Parts = Annotated[
    list[str] | None, argument("[PART]...", "Any of plan, draw, simulate, registry; by default all.")
]
Events = Annotated[int, option("--events", "N", "Events of the registry.", least=4)]
Lot = Annotated[int, option("--lot", "N", "Chips in one deed.", least=1, most=10000)]
Chips = Annotated[int, option("--chips", "C", "Chips of plan and draw.", least=2000)]

PARTS = ("plan", "draw", "simulate", "registry")


@dataclass(frozen=True)
class Row:
    """One measurement against what it must reach; ``busy`` are seconds of this process, without waiting for others."""

    part: str
    measure: str
    value: float
    must: float
    unit: str
    busy: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is within what it must reach."""
        return self.value <= self.must

    def fields(self) -> dict[str, object]:
        """Return the row as plain data."""
        return {**vars(self), "met": self.met}


@dataclass(frozen=True)
class BenchPage:
    """All rows as a table."""

    rows: tuple[Row, ...]

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {"rows": [row.fields() for row in self.rows], "met": all(row.met for row in self.rows)}

    def __rich__(self) -> RenderableType:
        """Return the table."""
        table = Table(title="tally bench monitor", title_justify="left")
        for heading in ("part", "measure", "value", "busy", "must", "verdict"):
            table.add_column(heading, justify="right" if heading in ("value", "busy", "must") else "left")
        for row in self.rows:
            verdict = Text("met", style=GOOD) if row.met else Text("not met", style=BAD)
            busy = "" if row.busy is None else f"{row.busy:.3g} s"
            table.add_row(
                row.part,
                row.measure,
                f"{row.value:.3g} {row.unit}",
                busy,
                f"<= {row.must:g} {row.unit}",
                verdict,
            )
        return table


def monitor(
    part: Parts = None,
    events: Events = 1_000_000,
    lot: Lot = 1000,
    chips: Chips = 10_000_000,
    as_json: AsJson = False,
) -> int:
    """Measure planning, drawing, simulating and the registry; 1 if anything takes longer than it must."""
    chosen = part or list(PARTS)
    for name in chosen:
        if name not in PARTS:
            raise InvalidInput(f"part {name}: unknown; known are {', '.join(PARTS)}")
    rows: list[Row] = []
    measures: dict[str, Callable[[], list[Row]]] = {
        "plan": lambda: _plan(chips),
        "draw": lambda: _draw(chips),
        "simulate": _simulate,
        "registry": lambda: _registry(events, lot),
    }
    for name in chosen:
        say(f"  {name}")
        rows += measures[name]()
    answer(BenchPage(tuple(rows)), as_json=as_json)
    return 0 if all(row.met for row in rows) else 1


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - busy


def _plan(chips: int) -> list[Row]:
    from tallystick.fleet.sampling.planner import PlanQuestion, Stratum
    from tallystick.fleet.sampling.workload import make_plan

    question = PlanQuestion(9.9e24, (Stratum("fleet", chips, 8.64e19),), 0.1, 365.0, 30.0, 0.9)
    wall, busy = _timed(lambda: make_plan(question))
    return [Row("plan", f"a plan for {chips:,} chips", wall, 1.0, "s", busy)]


def _draw(chips: int) -> list[Row]:
    from tallystick.fleet.sampling.draw import DrawAnnouncement, DrawnStratum, draw_sample

    made = DrawAnnouncement(
        0, bytes(32), 1, 1, bytes(32), "bench", 1, 2, (DrawnStratum("fleet", chips, chips // 100),)
    )
    wall, busy = _timed(lambda: draw_sample(made, bytes(32)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return [
        Row("draw", f"a draw from {chips:,} chips", wall, 10.0, "s", busy),
        Row("draw", "memory at most, of the whole process", peak / 1e9, 2.0, "GB"),
    ]


def _simulate() -> list[Row]:
    from tallystick.fleet.sampling.fleet_year import play_years
    from tallystick.fleet.sampling.scenarios import all_scenarios
    from tallystick.fleet.sampling.simulate import play_all

    year = _timed(lambda: play_years(100_000, 1, seed=0))
    plays = _timed(lambda: play_all(all_scenarios(), trials=4000, seed=0))
    return [
        Row("simulate", "a year of 100,000 chips", year[0], 60.0, "s", year[1]),
        Row("simulate", f"{len(all_scenarios())} scenarios, 4,000 plays each", plays[0], 60.0, "s", plays[1]),
    ]


def _registry(events: int, lot: int) -> list[Row]:
    from tallystick.fleet.registry.facts import REGISTRY
    from tallystick.fleet.registry.industry import START, Industry, chip_name
    from tallystick.fleet.registry.ledger import RegistryLedger
    from tallystick.fleet.registry.state_index import chip_key

    chips = events // 4
    industry = Industry()
    entries = [*industry.beginning(), *industry.lives(chips, lot)]
    some = [chip_name(at * 7919 % chips) for at in range(200)]
    with tempfile.TemporaryDirectory(prefix="tallystick-registry-") as place:
        with RegistryLedger(Path(place) / "registry") as ledger:
            taken = _timed(lambda: ledger.append(entries, industry.keys[REGISTRY], now=START + len(entries)))
        with RegistryLedger(Path(place) / "registry") as ledger:
            first = _timed(lambda: ledger.find_chip(some[0]))
            looked = _timed(lambda: [ledger.find_chip(name) for name in some])
            proved = _timed(lambda: [ledger.prove_key(chip_key(name)) for name in some])
            sale = industry.sell(some[:1], "north", "south")
            added = _timed(lambda: ledger.append([sale], industry.keys[REGISTRY], now=START + len(entries)))
            again = _timed(ledger.rebuild)
    what = f"{4 * chips:,} events in {len(entries):,} deeds, signatures and rules checked"
    return [
        Row("registry", what, taken[0], 60.0, "s", taken[1]),
        Row("registry", "index made again from the log", again[0], 60.0, "s", again[1]),
        Row("registry", "first look-up after opening", 1e3 * first[0], 10.0, "ms"),
        Row("registry", "a look-up", 1e3 * looked[0] / len(some), 10.0, "ms"),
        Row("registry", "a proof", 1e3 * proved[0] / len(some), 10.0, "ms"),
        Row("registry", "one more deed and head", 1e3 * added[0], 1000.0, "ms"),
    ]
