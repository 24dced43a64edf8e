"""Other formulas for samples of a fleet, against which tests hold the planner's."""

from __future__ import annotations

import math

import numpy as np

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.planner import PlanQuestion, exposures


def independent_detection(question: PlanQuestion, samples: float) -> float:
    """Detection of a run of the question's days by ``samples`` per period, drawn with replacement; logs persist.

    Eq. 1 without its bound p_w >= 1 - e**(-f T_m). Not a guarantee: see exact_miss.
    """
    share = question.visible_flop / (question.run_days * question.flop_per_day)
    if not 0.0 < share <= 1.0:
        raise InvalidInput(f"run of {question.visible_flop:.4g} FLOP: does not fit the chips and the days")
    days = np.array(exposures(question.run_days, question.period_days))
    with np.errstate(divide="ignore"):
        logs = np.log1p(share * np.expm1(-question.snapshots_per_day * days))
    return -math.expm1(samples * float(logs.sum()))


def attribute_samples(chips: int, informative: float, probability: float) -> int:
    """C (1 - (1 - p)**(1/K')), rounded up: the closed form for one draw without replacement, K' informative chips.

    An approximation; known from material accounting as attribute sampling.
    """
    return math.ceil(chips * -math.expm1(math.log1p(-probability) / informative))


def one_draw_samples(chips: int, informative: int, probability: float) -> int:
    """The fewest samples that hit one of ``informative`` whole chips in one draw without replacement, exactly."""
    if not 0 < informative <= chips:
        raise InvalidInput(f"{informative} informative chips of {chips}: must lie within the fleet")
    allowed, miss, samples = math.log1p(-probability), 0.0, 0
    while miss > allowed:
        left = chips - informative - samples
        miss = miss + math.log(left / (chips - samples)) if left > 0 else -math.inf
        samples += 1
    return samples


def segments_to_check(forged_share: float, probability: float) -> int:
    """How many random segments of a transcript find one of a ``forged_share`` of them, with replacement."""
    return math.ceil(math.log1p(-probability) / math.log1p(-forged_share))
