"""tally bench monitor: what planning, drawing, simulating and keeping a registry of chips cost here."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from tallystick.cli.options import AsJson, argument, flag, option
from tallystick_bench.table import PartRow, measure_parts

LEAST_DEEDS = 2000.0  # a second, where a million events in lots of 1,000 chips take no 60 s

Parts = Annotated[
    list[str] | None, argument("[PART]...", "Any of plan, draw, simulate, registry, fleets; by default all.")
]
Events = Annotated[int, option("--events", "N", "Events of the registry.", least=4)]
Lot = Annotated[int, option("--lot", "N", "Chips in one deed.", least=1, most=10000)]
MadeOnly = Annotated[
    bool, flag("--made-only", "Events of the registry: each chip is made, and nothing else.")
]
Chips = Annotated[int, option("--chips", "C", "Chips of plan and draw.", least=2000)]
Fleets = Annotated[int, option("--fleets", "N", "Honest fleets that are played and verified.", least=1)]
Seed = Annotated[int, option("--seed", "N", "The first fleet's seed.", least=0)]


def monitor(
    part: Parts = None,
    events: Events = 1_000_000,
    lot: Lot = 1000,
    made_only: MadeOnly = False,
    chips: Chips = 10_000_000,
    fleets: Fleets = 20,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Measure planning, drawing, simulating, the registry and honest fleets; 1 if anything is not as it must be."""
    measures: dict[str, Callable[[], Iterable[PartRow]]] = {
        "plan": lambda: _plan(chips),
        "draw": lambda: _draw(chips),
        "simulate": _simulate,
        "registry": lambda: _registry(events, lot, made_only=made_only),
        "fleets": lambda: _fleets(fleets, seed),
    }
    return measure_parts("tally bench monitor", measures, part, as_json=as_json)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - busy


def _plan(chips: int) -> list[PartRow]:
    from tallystick.fleet.sampling.planner import PlanQuestion, Stratum
    from tallystick.fleet.sampling.workload import make_plan

    question = PlanQuestion(9.9e24, (Stratum("fleet", chips, 8.64e19),), 0.1, 365.0, 30.0, 0.9)
    wall, busy = _timed(lambda: make_plan(question))
    return [PartRow("plan", f"a plan for {chips:,} chips", wall, "s", 1.0, busy=busy)]


def _draw(chips: int) -> list[PartRow]:
    from tallystick.fleet.sampling.draw import DrawAnnouncement, DrawnStratum, draw_sample

    made = DrawAnnouncement(
        0, bytes(32), 1, 1, bytes(32), "bench", 1, 2, (DrawnStratum("fleet", chips, chips // 100),)
    )
    wall, busy = _timed(lambda: draw_sample(made, bytes(32)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return [
        PartRow("draw", f"a draw from {chips:,} chips", wall, "s", 10.0, busy=busy),
        PartRow("draw", "memory at most, of the whole process", peak / 1e9, "GB", 2.0),
    ]


def _simulate() -> list[PartRow]:
    from tallystick.fleet.sampling.fleet_year import play_years
    from tallystick.fleet.sampling.scenarios import all_scenarios
    from tallystick.fleet.sampling.simulate import play_all

    year = _timed(lambda: play_years(100_000, 1, seed=0))
    plays = _timed(lambda: play_all(all_scenarios(), trials=4000, seed=0))
    return [
        PartRow("simulate", "a year of 100,000 chips", year[0], "s", 60.0, busy=year[1]),
        PartRow(
            "simulate",
            f"{len(all_scenarios())} scenarios, 4,000 plays each",
            plays[0],
            "s",
            60.0,
            busy=plays[1],
        ),
    ]


def _registry(events: int, lot: int, *, made_only: bool) -> list[PartRow]:
    from tallystick.fleet.registry.facts import REGISTRY
    from tallystick.fleet.registry.industry import START, Industry, chip_name
    from tallystick.fleet.registry.ledger import RegistryLedger
    from tallystick.fleet.registry.state_index import chip_key

    chips = events if made_only else events // 4
    industry = Industry()
    entries = [*industry.beginning(), *industry.lives(chips, lot, made_only=made_only)]
    some = [chip_name(at * 7919 % chips) for at in range(200)]
    with tempfile.TemporaryDirectory(prefix="tallystick-registry-") as place:
        with RegistryLedger(Path(place) / "registry") as ledger:
            taken = _timed(lambda: ledger.append(entries, industry.keys[REGISTRY], now=START + len(entries)))
        with RegistryLedger(Path(place) / "registry") as ledger:
            first = _timed(lambda: ledger.find_chip(some[0]))
            looked = _timed(lambda: [ledger.find_chip(name) for name in some])
            proved = _timed(lambda: [ledger.prove_key(chip_key(name)) for name in some])
            more = industry.event("fab", {"maker": "fab", "model": "gx1", "chips": [chip_name(chips)]}, "fab")
            added = _timed(lambda: ledger.append([more], industry.keys[REGISTRY], now=START + len(entries)))
            again = _timed(ledger.rebuild)
    what = f"{chips:,} chips, {len(entries):,} deeds, signatures and rules checked"
    most = max(60.0, len(entries) / LEAST_DEEDS)
    return [
        PartRow("registry", what, taken[0], "s", most, busy=taken[1]),
        PartRow("registry", "deeds taken up in a second", len(entries) / taken[0], "/s"),
        PartRow("registry", "index made again from the log", again[0], "s", most, busy=again[1]),
        PartRow("registry", "first look-up after opening", 1e3 * first[0], "ms", 10.0),
        PartRow("registry", "a look-up", 1e3 * looked[0] / len(some), "ms", 10.0),
        PartRow("registry", "a proof", 1e3 * proved[0] / len(some), "ms", 10.0),
        PartRow("registry", "one more deed and head", 1e3 * added[0], "ms", 1000.0),
    ]


def _fleets(fleets: int, seed: int) -> Iterable[PartRow]:
    from tallystick_bench.fleets import fleet_rows

    return fleet_rows(fleets, seed)
