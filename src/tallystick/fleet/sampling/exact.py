"""Exact probabilities of a fleet's sampling, by sums over every way the draws can fall (spec/plan.md)."""

from __future__ import annotations

import math

import numpy as np

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.coverage import Floats
from tallystick.fleet.sampling.planner import (
    EXACT_WORK,
    MOST_EXACT_ROUNDS,
    MOST_FACTORS,
    MOST_LONG_SUMS,
    PlanQuestion,
    draw_size,
    exposures,
    guaranteed_shares,
    hit_probability,
)


def exact_miss(
    chips: int, used: float, samples: int, run_days: float, period_days: float, snapshots_per_day: float
) -> float | None:
    """The probability that a run on ``used`` chips is missed by ``samples`` of ``chips`` drawn in every period.

    Draws are without replacement within a period and independent between periods; a chip keeps its log. Of a
    number that is not whole, the last chip is used for that fraction of the run, at its end. None where the
    sum would take too long; the guarantee holds there as everywhere.

    A chip contributes e**(-f d), d its days of use when it was drawn last, so the sum runs over how many used
    chips were drawn for the first time, from the last period back to the first.
    """
    if not 0.0 < used <= chips or not 0 <= samples <= chips:
        raise InvalidInput(f"run on {used} of {chips} chips, {samples} drawn: must lie within the fleet")
    if samples == 0:
        return 1.0
    full, days = math.floor(used), exposures(run_days, period_days)
    if len(days) > MOST_EXACT_ROUNDS or min(full, samples) > MOST_FACTORS:
        return None
    part = (used - full) * run_days
    mean = full * -math.expm1(len(days) * math.log1p(-samples / chips)) if samples < chips else float(full)
    states = min(
        full, math.ceil(mean + 12.0 * math.sqrt(mean) + 40.0)
    )  # beyond twelve deviations: kept as missed
    near_complete = chips - full < samples
    if len(days) * (states + 1) ** 2 > EXACT_WORK or (near_complete and states > MOST_LONG_SUMS):
        return None
    if part > 0.0:
        beside = _transitions(chips - 1, full, samples - 1, states)
        rest = _transitions(chips - 1, full, min(samples, chips - 1), states)  # of no weight if all are drawn
    else:
        beside = rest = np.zeros((states + 1, states + 2))
    alone = _transitions(chips, full, samples, states)
    drawn = samples / chips
    # Row vectors over the number of used chips drawn so far, the last entry for more than `states`.
    pending, settled = np.zeros(states + 2), np.zeros(states + 2)
    (pending if part > 0.0 else settled)[0] = 1.0
    step = np.maximum(np.arange(states + 2)[None, :] - np.arange(states + 1)[:, None], 0)
    for back, exposure in enumerate(days):
        weights = np.exp(-snapshots_per_day * exposure * np.arange(states + 2))[step]
        weights[:, -1] = 1.0
        partial = math.exp(-snapshots_per_day * max(0.0, part - back * period_days))
        settled = _step(settled, alone * weights) + drawn * partial * _step(
            pending, beside * weights, over=False
        )
        if part > 0.0:
            settled[-1] += drawn * pending[-1]
            pending = (1.0 - drawn) * _step(pending, rest * weights)
    return min(1.0, math.fsum(pending) + math.fsum(settled))


def exact_samples(question: PlanQuestion) -> tuple[int, float] | None:
    """The fewest samples per period that detect a run of the question's days, exactly, and the detection they give.

    For fleets of one monitored stratum. None for a mixed fleet, if no such run fits, if inspecting every chip
    does not suffice, or where the sum would take too long.
    """
    if len(question.monitored) != 1 or hit_probability(question) is None:
        return None
    stratum = question.monitored[0]
    used = min(question.visible_flop / (stratum.flop_per_chip_day * question.run_days), float(stratum.chips))
    allowed = 1.0 - question.sampling_probability

    def miss(samples: int) -> float | None:
        return exact_miss(
            stratum.chips, used, samples, question.run_days, question.period_days, question.snapshots_per_day
        )

    shares = guaranteed_shares(question, losses=0)
    if shares is None:
        return None
    low, high = 0, draw_size(shares[0], stratum.chips)
    reached = miss(high)
    if reached is None or reached > allowed:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = miss(middle)
        if found is None:
            return None
        low, high, reached = (low, middle, found) if found <= allowed else (middle, high, reached)
    return high, 1.0 - reached


def _transitions(chips: int, used: int, samples: int, states: int) -> Floats:
    """P(a draw takes h fresh used chips) at [j, j + h], where j of ``used`` were drawn before; rest in the last column."""
    already = np.arange(states + 1)
    fresh = (used - already)[:, None].astype(np.float64)
    hits = np.arange(states + 1)[None, :].astype(np.float64)
    if chips - used >= samples:  # a draw may miss all of them, however few are fresh
        few, many = min(used, samples), max(used, samples)
        none = float(np.log1p(-many / (chips - np.arange(few, dtype=np.float64))).sum())
        room = chips - used + 1.0 + already[:-1]
        start = none + np.concatenate([[0.0], np.cumsum(-np.log1p(-samples / room))])
        with np.errstate(divide="ignore"):
            ratios = np.maximum(fresh - hits, 0.0) * np.maximum(samples - hits, 0.0)
            ratios = np.log(ratios / ((hits + 1.0) * (chips - fresh - samples + hits + 1.0)))
        logs = start[:, None] + np.concatenate(
            [np.zeros((states + 1, 1)), np.cumsum(ratios, axis=1)[:, :-1]], axis=1
        )
        chances = np.exp(logs)
    else:
        chances = np.array([_chances(chips, used - j, samples, states) for j in range(states + 1)])
    table = np.zeros((states + 1, states + 2))
    for j in range(states + 1):
        table[j, j : states + 1] = chances[j, : states + 1 - j]
    table[:, -1] = np.maximum(0.0, 1.0 - table.sum(axis=1))
    if states == used:  # nothing lies beyond: what is left is rounding
        table[:, -1] = 0.0
    return table


def _step(vector: Floats, matrix: Floats, *, over: bool = True) -> Floats:
    """The next row vector; what lies beyond the last state stays there."""
    following = vector[:-1] @ matrix
    if over:
        following[-1] += vector[-1]
    return following


def _chances(chips: int, used: int, samples: int, most: int) -> list[float]:
    """P(h of ``used`` among ``samples`` of ``chips``) for h = 0 .. most, from exact integers; for near-complete draws."""
    whole = math.comb(chips, samples)
    return [
        math.comb(used, h) * math.comb(chips - used, samples - h) / whole if h <= samples else 0.0
        for h in range(most + 1)
    ]
