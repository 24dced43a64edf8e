"""What a calibrator proposes, from surveys made by hand: the rule of the safety, and its limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tallystick.errors import Nondeterminism
from tallystick.execution.noise.measured import SiteNoise
from tallystick.execution.noise.survey import JITTER, Measured, Survey
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.noise import relative_exponents
from tallystick.numerics.policy import CHOICES, FP32, SPARSEST
from tallystick.roles.calibrator import CalibrationLimits, expect, needed_safety, propose

N = 1 << 16


FIXED = replace(FP32, gradient_spacing=SPARSEST)  # one grid, however much of it is ambiguous
WIDER = replace(FIXED, safety=FP32.safety + 1)  # FP32 has the least safety that it allows


def survey(jitter: float, other: float | None) -> Survey:
    place = (Kind.GRADIENT, 0)
    noise = SiteNoise(jitter, np.zeros(1, dtype=np.int64), 0.7, jitter)
    relative = {JITTER: jitter} | ({} if other is None else {"sse4": other})
    x = np.random.default_rng(0).normal(size=(1, N)) * 0.7
    measured = Measured(place, "weight", N, noise, relative)
    measured.exponents = relative_exponents(x, noise.scales)
    return Survey(4, {place: measured}, GridTable())


@pytest.mark.parametrize(("ratio", "needed"), [(0.25, 0), (0.9, 2), (1.9, 3), (3.9, 4), (15.0, 6)])
def test_the_safety_needed_keeps_two_octaves_over_the_profiles(ratio: float, needed: int) -> None:
    surveys = [survey(2.0**-15, ratio * 2.0**-15)]
    assert needed_safety(FP32, surveys) == (needed, "gradient weight at step 4")
    made = propose(FP32, surveys, CalibrationLimits())
    assert made.policy.safety == max(FP32.safety, needed)
    assert made.policy.gradient_floor == FP32.gradient_floor


def test_deviations_below_the_smallest_band_ask_for_nothing() -> None:
    found = needed_safety(FP32, [survey(2.0**-40, 2.0**-25)])
    assert found is not None
    assert found[0] < 0


def test_more_than_the_policy_allows_is_refused_with_the_site_and_both_values() -> None:
    with pytest.raises(
        Nondeterminism,
        match=r"gradient weight at step 4: .* 2\*\*7 times .* a safety of 2\*\*9, it allows 2\*\*8",
    ):
        propose(FP32, [survey(2.0**-20, 2.0**-13)], CalibrationLimits())


def test_the_grid_gives_way_before_the_safety_and_the_safety_only_where_profiles_were_compared() -> None:
    quiet = [survey(2.0**-18, 2.0**-20)]
    own = expect(WIDER, quiet)
    assert own is not None
    coarsest = CHOICES["fp32"]["gradient_floor"][1]
    near = propose(WIDER, quiet, CalibrationLimits(freedom=own.freedom / 4))
    assert (near.policy.gradient_floor, near.policy.safety, near.warnings) == (
        FP32.gradient_floor + 2,
        WIDER.safety,
        [],
    )
    far = propose(WIDER, quiet, CalibrationLimits(freedom=own.freedom / 16))
    assert (far.policy.gradient_floor, far.policy.safety) == (coarsest, WIDER.safety - 1)
    assert "safety 2**3 instead of the policy's 2**4" in far.warnings[0]
    alone = propose(WIDER, [survey(2.0**-18, None)], CalibrationLimits(freedom=own.freedom / 16))
    assert alone.policy.safety == WIDER.safety
    assert alone.problems
    assert alone.needed is None


def test_a_finer_grid_is_taken_where_the_log_may_be_larger() -> None:
    made = propose(FP32, [survey(2.0**-18, 2.0**-20)], CalibrationLimits(log_bits=0.3))
    assert made.policy.gradient_floor < FP32.gradient_floor
    assert made.expected.log_bits <= 0.3
    assert made.chosen() == {
        "gradient_floor": made.policy.gradient_floor,
        "gradient_spacing": SPARSEST,
        "safety": FP32.safety,
        "gradient_steer": FP32.gradient_steer,
        "recalibrate_every": FP32.recalibrate_every,
    }


def test_a_grid_that_was_chosen_does_not_follow_the_noise() -> None:
    """With a spacing the policy makes the quantum coarser for a noisy gradient; a grid that meets what is wanted stays."""
    loud = [survey(2.0**-16, 2.0**-18)]
    own, fixed = expect(replace(FP32, gradient_spacing=11), loud), expect(FIXED, loud)
    assert own is not None and fixed is not None
    assert own.log_bits < 0.6 * fixed.log_bits
    made = propose(FP32, loud, CalibrationLimits(log_bits=1.1 * fixed.log_bits))
    assert (made.policy.gradient_floor, made.policy.gradient_spacing) == (FP32.gradient_floor, SPARSEST)
    assert made.expected == fixed
