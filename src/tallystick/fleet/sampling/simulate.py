"""How often a run is really found: chips, snapshots, draws and evaders, played many times; against the planner's claim.

Rules and what each evader does: spec/simulation.md. Nothing here uses a formula of the planner: snapshots come at
exponential times, every draw takes chips one by one without replacement, and a run is found when a drawn chip's
log gives it away. Random numbers are Philox streams of the seed, so a result can be had again anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.coverage import (
    binomial_interval,
    deficit_p_value,
    largest_deficit,
    poisson_table,
)
from tallystick.fleet.sampling.planner import PlanQuestion
from tallystick.numerics.random import portable_log, stream_key, uniform01

CONFIDENCE = 0.99  # of all statements of one report together, shared out equally (Bonferroni)
MOST_TRIALS = 10**6
EQUAL, AT_LEAST, LIMIT = "equals", "at least", "limit"

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Use:
    """``chips`` chips of one stratum in use by the evader from day ``start`` to day ``end``; None: chips outside the list."""

    stratum: int | None
    chips: int
    start: float
    end: float


@dataclass(frozen=True)
class Evasion:
    """What the evader does beside training: all of it without effect by default.

    ``suppressed`` is the share of snapshots that never reach a log. ``losses`` chips with a snapshot are reported lost
    just before the next draw, the earliest ones, and others take over. ``spoofed`` is the probability that a
    false transcript explains whatever is found.
    """

    suppressed: float = 0.0
    losses: int = 0
    spoofed: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One fleet, plan and evader, and what the planner says about them.

    ``samples[r][j]`` chips of monitored stratum j are reached in round r, at the end of day (r + 1) T_m. ``kind``
    says what ``claim`` is: the exact detection, a lower bound, or the exact detection of a plan that falls short of
    what was wanted (a limit that the threat model states). ``false_alarm`` is that of the coverage test of one
    log, None where it is not made.
    """

    name: str
    words: str
    question: PlanQuestion
    uses: tuple[Use, ...]
    samples: tuple[tuple[int, ...], ...]
    claim: float
    kind: str
    evasion: Evasion = Evasion()
    false_alarm: float | None = None

    def __post_init__(self) -> None:
        strata = self.question.monitored
        if self.kind not in (EQUAL, AT_LEAST, LIMIT):
            raise InvalidInput(f"scenario {self.name}: kind {self.kind} is unknown")
        for row in self.samples:
            if len(row) != len(strata) or any(
                not 0 <= s <= t.chips for s, t in zip(row, strata, strict=True)
            ):
                raise InvalidInput(f"scenario {self.name}: samples {row} do not fit its strata")
        for at, stratum in enumerate(strata):
            used = sum(use.chips for use in self.uses if use.stratum == at) + self.evasion.losses
            if used > stratum.chips:
                raise InvalidInput(
                    f"scenario {self.name}: {used} chips of {stratum.name} in use, it has {stratum.chips}"
                )

    @property
    def flop(self) -> float:
        """What the evader's chips in the list do at the stated rates."""
        strata = self.question.monitored
        return math.fsum(
            use.chips * (use.end - use.start) * strata[use.stratum].flop_per_chip_day
            for use in self.uses
            if use.stratum is not None
        )


@dataclass(frozen=True)
class ScenarioOutcome:
    """How often the run of one scenario was found, with the Clopper-Pearson interval of ``confidence``."""

    scenario: Scenario
    trials: int
    found: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Found out of all trials."""
        return self.found / self.trials

    @property
    def agrees(self) -> bool:
        """Whether the planner's claim is compatible with what was counted."""
        claim = self.scenario.claim
        return self.high >= claim if self.scenario.kind == AT_LEAST else self.low <= claim <= self.high


def play(
    scenario: Scenario, *, trials: int, seed: int, confidence: float = CONFIDENCE, drawn: float = 1.0
) -> ScenarioOutcome:
    """Return how often the run is found in ``trials`` independent plays.

    ``drawn`` scales every sample, rounded down: below 1 it plays a planner that asks for too little, and the
    outcome must then disagree with the claim.
    """
    if not 0 < trials <= MOST_TRIALS:
        raise InvalidInput(f"trials {trials}: must lie in [1, {MOST_TRIALS}]")
    if not 0.0 < drawn <= 1.0:
        raise InvalidInput(f"share of the samples {drawn}: must lie above 0 and be at most 1")
    found = np.zeros(trials, dtype=np.bool_)
    for stratum in range(len(scenario.question.monitored)):
        samples = [math.floor(row[stratum] * drawn) for row in scenario.samples]
        found |= _stratum_finds(scenario, stratum, samples, trials, seed)
    if scenario.evasion.spoofed > 0.0:
        found &= _uniform(scenario, seed, "spoof", 0, 0, trials) >= scenario.evasion.spoofed
    hits = int(found.sum())
    return ScenarioOutcome(scenario, trials, hits, *binomial_interval(hits, trials, confidence))


def play_all(
    scenarios: tuple[Scenario, ...],
    *,
    trials: int,
    seed: int,
    drawn: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[ScenarioOutcome, ...]:
    """Return the outcome of each scenario; their intervals hold together with ``CONFIDENCE``."""
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(1, len(scenarios))
    outcomes: list[ScenarioOutcome] = []
    for at, scenario in enumerate(scenarios):
        if progress is not None:
            progress(at, len(scenarios), scenario.name)
        outcomes.append(play(scenario, trials=trials, seed=seed, confidence=confidence, drawn=drawn))
    return tuple(outcomes)


# ------------------------------------------------------------------------------------------------ one stratum


def _stratum_finds(scenario: Scenario, stratum: int, samples: list[int], trials: int, seed: int) -> Flags:
    """Whether the draws from one stratum find the run, for each trial."""
    period, chips = scenario.question.period_days, scenario.question.monitored[stratum].chips
    times: Floats = np.arange(1, len(samples) + 1, dtype=np.float64) * np.float64(period)
    spans = [
        (use.start, use.end) for use in scenario.uses if use.stratum == stratum for _ in range(use.chips)
    ]
    starts: list[Floats | float] = [start for start, _ in spans]
    logs: list[Floats] | None = None
    if scenario.evasion.losses:
        starts, ends, logs = _after_losses(scenario, stratum, spans, times, trials, seed)
    else:
        ends = [end for _, end in spans]
    found = np.zeros(trials, dtype=np.bool_)
    # How many of the chips asked about so far were taken in this round of this trial, and how many were asked about.
    taken, asked = np.zeros((len(samples), trials), dtype=np.int64), np.zeros(len(samples), dtype=np.int64)
    for chip, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first = int(np.searchsorted(times, float(np.min(start)), side="right"))
        if first == len(samples):
            continue
        telling = (
            times[first:, None] >= logs[chip][None, :]
            if logs is not None
            else _telling(scenario, stratum, chip, float(np.min(start)), end, times[first:], trials, seed)
        )
        shape = (len(samples) - first, trials)
        chance = _uniform(scenario, seed, "draw", stratum, chip, shape[0] * shape[1]).reshape(shape)
        wanted = np.array(samples[first:])[:, None] - taken[first:]
        drawn = chance * (chips - asked[first:])[:, None] < wanted
        taken[first:] += drawn
        asked[first:] += 1
        found |= (drawn & telling).any(axis=0)
    return found


def _telling(
    scenario: Scenario,
    stratum: int,
    chip: int,
    start: float,
    end: float,
    times: Floats,
    trials: int,
    seed: int,
) -> Flags:
    """Whether the chip's log gives the run away in each round of ``times``, for each trial."""
    rate = scenario.question.snapshots_per_day * (1.0 - scenario.evasion.suppressed)
    if scenario.false_alarm is None:
        if rate == 0.0:
            return np.zeros((times.size, trials), dtype=np.bool_)
        first = start + _exponential(scenario, seed, "snapshot", stratum, chip, trials) / rate
        return (times[:, None] >= first) & (first < end)
    in_use = np.minimum(times, end) - start
    steps = np.diff(in_use, prepend=0.0)
    chance = _uniform(scenario, seed, "snapshot", stratum, chip, times.size * trials).reshape(
        times.size, trials
    )
    counts = np.cumsum(
        [poisson_numbers(rate * days, u) for days, u in zip(steps, chance, strict=True)], axis=0
    )
    expected = scenario.question.snapshots_per_day * in_use
    worst = np.array([largest_deficit(float(mean), scenario.false_alarm) for mean in expected])
    return (counts > 0) | (counts <= worst[:, None])


def _after_losses(
    scenario: Scenario, stratum: int, spans: list[tuple[float, float]], times: Floats, trials: int, seed: int
) -> tuple[list[Floats | float], list[float], list[Floats]]:
    """Return starts, ends and the days from which each log tells, once the evader lost the earliest telling chips.

    A lost chip never tells. The chip that takes over works from the loss to the end of the run.
    """
    rate, losses = scenario.question.snapshots_per_day, scenario.evasion.losses
    first = np.stack(
        [
            start + _exponential(scenario, seed, "snapshot", stratum, chip, trials) / rate
            for chip, (start, _) in enumerate(spans)
        ]
    )
    ends = np.array([end for _, end in spans])
    first[first >= ends[:, None]] = np.inf
    chosen = np.argsort(first, axis=0, kind="stable")[:losses]
    earliest = np.take_along_axis(first, chosen, axis=0)
    np.put_along_axis(first, chosen, np.inf, axis=0)
    starts: list[Floats | float] = [start for start, _ in spans]
    for extra in range(losses):
        next_round = np.searchsorted(times, earliest[extra], side="left")
        lost = np.where(next_round < times.size, times[np.minimum(next_round, times.size - 1)], np.inf)
        end = ends[chosen[extra]]
        later = lost + _exponential(scenario, seed, "replacement", stratum, extra, trials) / rate
        later[~(later < end)] = np.inf
        first = np.concatenate([first, later[None, :]])
        starts.append(lost)
    return starts, [*ends.tolist(), *[float(ends.max())] * losses], list(first)


def _uniform(scenario: Scenario, seed: int, purpose: str, stratum: int, chip: int, count: int) -> Floats:
    return uniform01(stream_key(seed, f"simulate/{scenario.name}/{purpose}", stratum, chip, 0, 0), 0, count)


def _exponential(scenario: Scenario, seed: int, purpose: str, stratum: int, chip: int, count: int) -> Floats:
    return -portable_log(_uniform(scenario, seed, purpose, stratum, chip, count))


def poisson_numbers(mean: float, uniform: Floats) -> npt.NDArray[np.int64]:
    """Poisson numbers of ``mean``, by inversion of ``uniform``; the same on every machine up to rounding of the table."""
    first, table = poisson_table(mean)
    return first + np.searchsorted(table, uniform, side="left").astype(np.int64)


# ------------------------------------------------------------------------------------------- coverage test


@dataclass(frozen=True)
class RocCurve:
    """The coverage test of ``expected`` snapshots with a share of them suppressed: false alarms against detections.

    ``points`` hold the threshold on the count, the false alarms and detections counted in ``trials`` logs of each
    kind, and both as the Poisson distribution says.
    """

    name: str
    expected: float
    suppressed: float
    trials: int
    points: tuple[tuple[int, float, float, float, float], ...]

    @property
    def area(self) -> float:
        """The area under the counted curve: 1 for a perfect test, 1/2 for none."""
        sides = [(0.0, 0.0), *((alarm, hit) for _, alarm, hit, _, _ in self.points), (1.0, 1.0)]
        return math.fsum((right[0] - left[0]) * (right[1] + left[1]) / 2.0 for left, right in pairwise(sides))

    def agrees(self, confidence: float) -> bool:
        """Whether false alarms and detections at the middle threshold lie within their intervals."""
        _, alarm, hit, honest, cheating = self.points[len(self.points) // 2]
        ranges = [
            binomial_interval(round(rate * self.trials), self.trials, 1.0 - (1.0 - confidence) / 2.0)
            for rate in (alarm, hit)
        ]
        return all(low <= told <= high for (low, high), told in zip(ranges, (honest, cheating), strict=True))


def play_roc(name: str, expected: float, suppressed: float, *, trials: int, seed: int) -> RocCurve:
    """Return the ROC of the coverage test on logs with ``expected`` snapshots, honest and with some suppressed."""
    counts = [
        poisson_numbers(
            mean, uniform01(stream_key(seed, f"simulate/roc/{name}/{kind}", 0, 0, 0, 0), 0, trials)
        )
        for kind, mean in (("honest", expected), ("cheating", expected * (1.0 - suppressed)))
    ]
    last = int(max(count.max() for count in counts))
    points = tuple(
        (
            at,
            float((counts[0] <= at).mean()),
            float((counts[1] <= at).mean()),
            deficit_p_value(at, expected),
            deficit_p_value(at, expected * (1.0 - suppressed)),
        )
        for at in range(last + 1)
    )
    # Thresholds at which nothing happens any more say nothing.
    told = [p for p in points if p[1] < 1.0 and p[2] > 0.0] or [points[0]]
    return RocCurve(name, expected, suppressed, trials, tuple(told))
