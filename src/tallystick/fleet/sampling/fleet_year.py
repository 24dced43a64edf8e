"""Whole years of a fleet of honest and evading owners: every chip's log, every draw by the product's own rule, every finding.

Where `simulate` follows one evader's chips through many plays, this follows all chips of all owners: honest
ones train declared runs, so that false alarms can be counted too. Rules: spec/simulation.md section 4.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tallystick.commit.encoding import digest
from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.coverage import binomial_interval, largest_deficit
from tallystick.fleet.sampling.draw import DrawAnnouncement, DrawnStratum, draw_sample
from tallystick.fleet.sampling.exact import exact_miss
from tallystick.fleet.sampling.planner import (
    PlanQuestion,
    Stratum,
    draw_size,
    guaranteed_detection,
    guaranteed_shares,
)
from tallystick.fleet.sampling.simulate import poisson_numbers
from tallystick.numerics.random import stream_key, uniform01

H100 = 1e15 * 86400.0  # FLOP a day
HONEST_OWNERS = 20
RUN_SHARE = 0.002  # of what the fleet can do in the run's days: so large a run must be found
RATE, YEAR, PERIOD, WANTED = 0.1, 360.0, 30.0, 0.9
ROUNDS = 12
FALSE_ALARMS_A_YEAR = 0.01
UNEXPLAINED, REFUSED, TOO_EMPTY = "unexplained snapshot", "chip not shown", "log too empty"
LEAST_CHIPS, MOST_CHIPS, MOST_YEARS = 2_000, 10**7, 10_000

Counts = npt.NDArray[np.int64]
Owners = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Evader:
    """One hidden run: the owners that share it, on which chips of the list, and what is done about their logs."""

    name: str
    words: str
    owners: tuple[str, ...]
    chips: Counts
    suppresses: bool = False
    refuses: bool = False


@dataclass(frozen=True)
class CountedRate:
    """A rate that was counted, its Clopper-Pearson interval, and what was claimed for it.

    ``kind`` is ``equals``, ``at least`` or ``at most``.
    """

    name: str
    words: str
    hits: int
    trials: int
    low: float
    high: float
    claim: float
    kind: str

    @property
    def agrees(self) -> bool:
        """Whether the claim is compatible with what was counted."""
        above, below = self.low <= self.claim, self.claim <= self.high
        return {"at least": below, "at most": above, "equals": above and below}[self.kind]


@dataclass(frozen=True)
class FleetYears:
    """What became of a fleet in some years: detections of each evader, false alarms on everybody else."""

    chips: int
    owners: int
    years: int
    inspected: int
    samples: tuple[int, ...]
    snapshots: int
    statements: tuple[CountedRate, ...]
    findings: tuple[tuple[str, int], ...]
    days_to_find: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True)
class _Year:
    """``when`` is the round (from 1, or 0 for never) in which each evader was found first."""

    when: dict[str, int]
    false_alarms: int
    honest_logs: int
    snapshots: int
    findings: Counter[str]


@dataclass(frozen=True)
class _Fleet:
    question: PlanQuestion
    owner_of: Owners
    in_use: npt.NDArray[np.float64]  # share of each owner's days
    evaders: tuple[Evader, ...]


def play_years(
    chips: int,
    years: int,
    *,
    seed: int,
    confidence: float = 0.99,
    drawn: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> FleetYears:
    """Return what inspections of the guaranteed plan find in ``years`` independent years of a fleet of ``chips``.

    ``drawn`` scales the plan's samples, as in simulate.play.
    """
    must_be_playable(chips, years)
    fleet = _fleet(chips)
    shares = guaranteed_shares(fleet.question)
    assert shares is not None  # RUN_SHARE is chosen so
    strata = fleet.question.monitored
    planned = [draw_size(share, s.chips) for share, s in zip(shares, strata, strict=True)]
    samples = [math.floor(count * drawn) for count in planned]
    alarm = FALSE_ALARMS_A_YEAR / (ROUNDS * sum(planned))
    found: dict[str, list[int]] = {evader.name: [] for evader in fleet.evaders}
    false_alarms = honest_logs = snapshots = 0
    findings = Counter[str]()
    for year in range(years):
        if progress is not None:
            progress(year, years, f"year {year + 1} of {chips:,} chips")
        played = _one_year(fleet, samples, alarm, seed, year)
        for name, at in played.when.items():
            found[name].append(at)
        false_alarms += played.false_alarms
        honest_logs += played.honest_logs
        snapshots += played.snapshots
        findings += played.findings
    each = 1.0 - (1.0 - confidence) / (len(fleet.evaders) + 1)
    statements = [
        _statement(evader, found[evader.name], fleet, planned, alarm, each) for evader in fleet.evaders
    ]
    statements.append(_false_alarm_statement(false_alarms, honest_logs, alarm, each))
    return FleetYears(
        chips,
        fleet.in_use.size,
        years,
        years * ROUNDS * sum(samples),
        tuple(samples),
        snapshots,
        tuple(statements),
        tuple(sorted(findings.items())),
        tuple((name, _mean([at * PERIOD for at in rounds if at])) for name, rounds in found.items()),
    )


def _false_alarm_statement(
    false_alarms: int, honest_logs: int, alarm: float, confidence: float
) -> CountedRate:
    low, high = binomial_interval(false_alarms, max(1, honest_logs), confidence)
    words = "honest logs held for too empty"
    return CountedRate("false-alarms", words, false_alarms, honest_logs, low, high, alarm, "at most")


def must_be_playable(chips: int, years: int) -> None:
    """Return if a fleet of so many chips can be played for so many years.

    Raises:
        InvalidInput: too few or too many of either.
    """
    if not LEAST_CHIPS <= chips <= MOST_CHIPS:
        raise InvalidInput(f"chips {chips}: must lie in [{LEAST_CHIPS}, {MOST_CHIPS}]")
    if not 0 < years <= MOST_YEARS:
        raise InvalidInput(f"years {years}: must lie in [1, {MOST_YEARS}]")


def _one_year(fleet: _Fleet, samples: Sequence[int], alarm: float, seed: int, year: int) -> _Year:
    """Return one year: its snapshots, its twelve draws and what they find."""
    question = fleet.question
    hidden = np.zeros(fleet.owner_of.size, dtype=np.int16)
    for number, evader in enumerate(fleet.evaders, start=1):
        hidden[evader.chips] = number
    counts = np.zeros(fleet.owner_of.size, dtype=np.int64)
    when, kinds = {evader.name: 0 for evader in fleet.evaders}, Counter[str]()
    false_alarms = honest = 0
    busy = np.where(hidden > 0, 1.0, fleet.in_use[fleet.owner_of])
    for at in range(ROUNDS):
        chance = uniform01(stream_key(seed, "fleet-year/snapshots", year, at, 0, 0), 0, counts.size)
        for level in np.unique(busy):
            here = busy == level
            counts[here] += poisson_numbers(RATE * PERIOD * float(level), chance[here])
        worst = {
            float(level): largest_deficit(RATE * PERIOD * (at + 1) * float(level), alarm)
            for level in np.unique(busy)
        }
        for position in _inspected(question, samples, seed, year, at):
            number = int(hidden[position])
            if number == 0:
                honest += 1
                false_alarms += int(counts[position]) <= worst[float(busy[position])]
                continue
            evader = fleet.evaders[number - 1]
            logged = 0 if evader.suppresses else int(counts[position])
            if logged > 0:
                kinds[REFUSED if evader.refuses else UNEXPLAINED] += 1
            elif logged <= worst[1.0]:
                kinds[TOO_EMPTY] += 1
            else:
                continue
            when[evader.name] = when[evader.name] or at + 1
    return _Year(when, false_alarms, honest, int(counts.sum()), kinds)


def _inspected(question: PlanQuestion, samples: Sequence[int], seed: int, year: int, at: int) -> list[int]:
    """Positions in the whole list of the chips that the product's own draw takes."""
    frames = tuple(
        DrawnStratum(stratum.name, stratum.chips, count)
        for stratum, count in zip(question.monitored, samples, strict=True)
    )
    closed = int((year * YEAR + (at + 1) * PERIOD) * 86400)
    announcement = DrawAnnouncement(
        at, digest("fleet-year/reports", bytes([at])), len(samples), closed,
        digest("fleet-year/list", question.chips.to_bytes(8, "little")),
        "simulated", year * ROUNDS + at, closed + 3600, frames,
    )  # fmt: skip
    beacon = digest("fleet-year/beacon", seed.to_bytes(8, "little"), f"{year}/{at}".encode("ascii"))
    drawn = draw_sample(announcement, beacon).samples
    positions: list[int] = []
    first = 0
    for stratum in question.monitored:
        positions += [first + int(position) for position in drawn[stratum.name]]
        first += stratum.chips
    return positions


def _fleet(chips: int) -> _Fleet:
    """Two kinds of chips, twenty honest owners, and four hidden runs of five other owners, each as large as the threshold."""
    fast = chips // 5
    strata = (Stratum("a-fast", fast, 2.5 * H100), Stratum("b-plain", chips - fast, H100))
    capacity = math.fsum(s.chips * s.flop_per_chip_day for s in strata) * YEAR
    question = PlanQuestion(RUN_SHARE * capacity, strata, RATE, YEAR, PERIOD, WANTED)
    names = ("alone", "left", "right", "silent", "refusing", *(f"honest-{n}" for n in range(HONEST_OWNERS)))
    # Owners hold equal, contiguous parts of each stratum.
    owner_of = np.concatenate([(np.arange(s.chips) * len(names) // s.chips).astype(np.int16) for s in strata])
    in_use = np.array([0.9] * 5 + [0.2 + 0.78 * n / (HONEST_OWNERS - 1) for n in range(HONEST_OWNERS)])
    work = question.threshold_flop / YEAR  # a day

    def owned(name: str, stratum: int, flop: float) -> Counts:
        first = 0 if stratum == 0 else strata[0].chips
        mine = first + np.flatnonzero(owner_of[first : first + strata[stratum].chips] == names.index(name))
        need = math.ceil(flop / strata[stratum].flop_per_chip_day)
        assert need <= mine.size  # RUN_SHARE leaves room in every owner's part
        return mine[:need]

    evaders = (
        Evader("alone", "one owner, its fast chips", ("alone",), owned("alone", 0, work)),
        Evader(
            "colluding", "two owners, half each, on different chips", ("left", "right"),
            np.concatenate([owned("left", 0, work / 2), owned("right", 1, work / 2)]),
        ),
        Evader(
            "silent", "one owner whose logs stay empty", ("silent",), owned("silent", 1, work), suppresses=True
        ),
        Evader(
            "refusing", "one owner that refuses chips with snapshots", ("refusing",),
            owned("refusing", 1, work), refuses=True,
        ),
    )  # fmt: skip
    return _Fleet(question, owner_of, in_use, evaders)


def _statement(
    evader: Evader, rounds: list[int], fleet: _Fleet, planned: Sequence[int], alarm: float, confidence: float
) -> CountedRate:
    hits = sum(at > 0 for at in rounds)
    low, high = binomial_interval(hits, len(rounds), confidence)
    claim, kind = guaranteed_detection(fleet.question, planned), "at least"
    if evader.suppresses:
        # An empty log tells once e**(-f d) <= alarm; from then on every drawn chip of the run does.
        late = sum(math.exp(-RATE * PERIOD * (at + 1)) <= alarm for at in range(ROUNDS))
        plain = fleet.question.monitored[1]
        missed = exact_miss(plain.chips, float(evader.chips.size), planned[1], late * PERIOD, PERIOD, 1e6)
        assert missed is not None
        claim, kind = 1.0 - missed, "equals"
    return CountedRate(evader.name, evader.words, hits, len(rounds), low, high, claim, kind)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
