"""What a log may move, by the follower's own measurement: limits just kept and just broken; noise against float64."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.execution.noise.bands import finer_grids, grid_for
from tallystick.execution.noise.buffers import BufferStep
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.freedom import (
    Freedom,
    SiteMoves,
    StepFreedom,
    quantum_square,
)
from tallystick.execution.noise.gradients import (
    A_STEP,
    AT_ONCE,
    FLIP,
    OWN_FLIPS,
    RUN_SLACK,
    WEIGHED_AT_ONCE,
    WEIGHED_FADE,
    GradientAccount,
    GradientMoves,
    Walk,
    WeighedMoves,
)
from tallystick.execution.noise.held import as_held
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.reference import in_float64
from tallystick.execution.noise.yardstick import Yardstick, octaves_allowed
from tallystick.execution.rounding.breaches import find_other_floors
from tallystick.execution.rounding.grids import (
    NOISE_BAND,
    OUTGROWN,
    RISES,
    UNSEEN,
    activation_grid,
    activation_rule,
    is_noise_only,
    site_grid,
)
from tallystick.execution.step import backward_of
from tallystick.numerics.budget import TAIL, chosen_floor, coarsest_quantum, most_moves
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Frame, Kind, SiteAddress, decode_frame, encode_frame
from tallystick.numerics.policy import BF16, FP32, FP64, LEAF, POLICIES, Policy, find_policy
from tallystick.numerics.rounded_sites import NO_KEY
from tallystick.numerics.rounding import round_recorded
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

WEIGHT = (Kind.GRADIENT, 0)


def noise_of(relative: float, elements: int = 4096, rms: float = 1.0) -> SiteNoise:
    """A gradient of one block with scale 2**0."""
    return SiteNoise(
        relative, np.zeros(1, dtype=np.int64), rms, relative, elements, block_mean=np.full(1, relative / 8)
    )


def yardstick(noise: SiteNoise, grid: SiteGrid) -> Yardstick:
    return Yardstick(FP32, Calibration({WEIGHT: noise}, GridTable({WEIGHT: grid})))


def gradient_grid(band: int) -> SiteGrid:
    return site_grid(FP32, Kind.GRADIENT, band, np.zeros(1, dtype=np.int64))


# -- bands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [4096, 256, 64, 10, 1])
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("is_trainers", [True, False])
@pytest.mark.parametrize("policy", [FP32, FP64], ids=["fp32", "fp64"])
def test_a_band_two_octaves_wider_is_accepted_and_one_more_is_not(
    policy: Policy, elements: int, dims: int, *, is_trainers: bool
) -> None:
    """Two more of a convolution's weight under fp32, whose kernels differ; of few elements more where only one measured."""
    few = octaves_allowed(elements)
    assert few == {4096: 2, 256: 2, 64: 3, 10: 5, 1: 6}[elements]
    octaves = 2 if is_trainers else few
    if policy is FP32 and (dims > 2 or not is_trainers):
        octaves += 2

    def grid(band: int) -> SiteGrid:
        return site_grid(policy, Kind.GRADIENT, band, np.zeros(1, dtype=np.int64))

    noise = replace(noise_of(2.0**-17, elements), dims=dims)
    own = Yardstick(
        policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: grid(-14)})), is_trainers=is_trainers
    )
    assert own.compare_band(WEIGHT, grid(-14 + octaves))[:2] == (2.0**octaves, None)
    assert own.compare_band(WEIGHT, grid(-14 + octaves + 1))[1] is not None
    assert own.compare_band(WEIGHT, grid(-18))[:2] == (2.0**-4, None)  # narrow bands move nothing


@pytest.mark.parametrize(
    ("policy", "band", "floor", "is_accepted"),
    [
        (FP64, -28, -16, True),
        (FP64, -27, -16, False),  # one element in 2^10 could be chosen from
        (FP64, -28, -15, False),  # on a coarser quantum than the auditor's own
        (FP64, -33, -21, True),
        (FP64, -32, -21, False),
        (FP32, -28, -16, False),
    ],
)
def test_under_fp64_a_band_may_be_any_that_leaves_one_element_in_2048_to_choose_from(
    policy: Policy, band: int, floor: int, *, is_accepted: bool
) -> None:
    """48 scales of a batch norm had sixteen times the noise on one of two machines."""
    own = SiteGrid(24, -40, -16, False, [0])
    noise = noise_of(2.0**-46, 4096)
    loose = Yardstick(policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: replace(own, floor=-12)})))
    for wide, is_rare in (
        (-28, policy is FP64),
        (-27, False),
    ):  # whoever has coarse quanta has no wider bands
        assert (loose.compare_band(WEIGHT, replace(own, band=wide, floor=-12))[1] is None) == is_rare
    yardstick = Yardstick(policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: own})), is_trainers=True)
    found = yardstick.compare_band(WEIGHT, replace(own, band=band, floor=floor))
    assert (found[1] is None) == is_accepted
    assert found[0] == 2.0 ** (band + 40)


@pytest.mark.parametrize("noise", [2.0**-5, 1.0])
def test_a_row_may_be_an_octave_wider_than_the_whole_whatever_its_noise(noise: float) -> None:
    """Without dips, whatever the auditor's own rows do: the whole matrix's scale is 2**0, and an octave is to spare."""
    rms = np.array([2.0, 0.125, 0.125, 0.125, 0.0, 0.0, 0.0, 0.0])
    measured = SiteNoise(noise, np.zeros(8), 1.0, noise, 512, block_rms=rms, block_largest=np.full(8, noise))
    own = SiteGrid(0, -4, -2, True, [1, -3, -3, -3, -3, -3, -3, -3])
    widest = Yardstick(BF16, Calibration({WEIGHT: measured}, GridTable({WEIGHT: own}))).widest_rows(WEIGHT)
    assert widest is not None
    assert widest.tolist() == [2, *[1] * 7]


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("elements", [1, 4096])
@pytest.mark.parametrize("was_noise", [False, True])
@pytest.mark.parametrize("is_trainers", [True, False])
def test_a_gradient_that_is_more_than_noise_may_not_be_silenced_and_one_near_the_limit_may(
    policy: Policy, elements: int, *, was_noise: bool, is_trainers: bool
) -> None:
    """An octave of what an honest trainer hears: wider, it silenced a scalar's last 29 of 529 steps, a backdoor of 98 %."""
    silent, heard = (site_grid(policy, Kind.GRADIENT, band, np.array([1])) for band in (NOISE_BAND, -8))
    limit = -6 if was_noise else policy.gradient_band[1]
    allowed = 1 if is_trainers else 2
    for band, accepted in ((limit - allowed - 1, False), (limit - allowed, True)):
        noise = noise_of(2.0 ** (band - policy.safety), elements)
        own = Yardstick(
            policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: heard})), is_trainers=is_trainers
        )
        assert (own.compare_band(WEIGHT, silent, was_noise=was_noise)[1] is None) == accepted
    none = Yardstick(policy, Calibration({WEIGHT: noise_of(1.0)}, GridTable({WEIGHT: silent})))
    assert none.compare_band(WEIGHT, silent, was_noise=was_noise)[1] is None


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_what_was_noise_is_heard_again_where_it_is_clearly_more_for_both(policy: Policy) -> None:
    """By the log's own words, and, some octaves aside, by the auditor's noise: a log that chose silence has no other limit."""
    for stated, noise, elements, accepted in (
        (-6, -4, 4096, True), (-6, -3, 4096, False), (-5, -9, 4096, False), (-40, -4, 4096, True),
        (-6, -2, 32, True), (-6, -1, 32, False), (-5, -9, 32, False),
    ):  # fmt: skip
        own = Yardstick(policy, Calibration({WEIGHT: noise_of(2.0 ** (noise - policy.safety), elements)}))
        grid = site_grid(policy, Kind.GRADIENT, stated, np.array([1]))
        assert (own.excess_return(WEIGHT, grid)[0] is None) == accepted, (stated, noise)
        assert (Yardstick(policy, Calibration()).excess_return(WEIGHT, grid)[0] is None) == (stated <= -6)


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_gradient_that_was_noise_is_heard_where_it_is_clearly_more_and_one_that_was_heard_up_to_the_widest_band(
    policy: Policy,
) -> None:
    """Between the two it stays what it was: what is near either limit is not heard in one step and silent in the next."""
    silent, heard = (
        site_grid(policy, Kind.GRADIENT, band, np.zeros(1, dtype=np.int64)) for band in (NOISE_BAND, -9)
    )
    widest = policy.gradient_band[1]
    for previous, highest in ((None, widest), (heard, widest), (silent, -6)):
        for band in range(-9, 2):
            found = grid_for(policy, Kind.GRADIENT, noise_of(2.0 ** (band - policy.safety)), previous)
            assert found is not None
            assert is_noise_only(found) == (band > highest), (previous, band)


@pytest.mark.parametrize(("policy", "safety"), [("fp32", 8), ("fp64", 10)])
def test_whether_a_gradient_is_heard_does_not_hang_on_the_safety_that_the_trainer_chose(
    policy: str, safety: int
) -> None:
    """Of six values one made a margin silent: a backdoor of 90 % beside 0 %."""
    usual, chosen = POLICIES[policy], find_policy(policy, chosen={"safety": safety})
    widest = usual.gradient_band[1]
    for band in range(-9, 2):
        noise = noise_of(2.0 ** (band - usual.safety))
        own, other = (grid_for(each, Kind.GRADIENT, noise) for each in (usual, chosen))
        assert own is not None
        assert other is not None
        assert is_noise_only(own) == is_noise_only(other) == (band > widest)
        if band <= widest:
            assert other.band == min(band + safety - usual.safety, widest)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("scale", [UNSEEN, 3])
def test_what_the_auditor_hears_stays_that_where_grids_are_not_chosen(scale: int, *, changes: bool) -> None:
    """But of what no step had before, and of what the log changes; the noise is that of this step."""
    silent, heard = (gradient_grid(band).with_scales([scale]) for band in (NOISE_BAND, -9))
    for old, new in ((silent, heard), (heard, silent), (heard, heard)):
        one, two = (
            Calibration({WEIGHT: noise_of(size)}, GridTable({WEIGHT: grid}))
            for size, grid in ((0.25, old), (0.5, new.with_scales([scale + 5])))
        )
        found = as_held(FP32, two, one, lambda place, changes=changes: changes)
        kept = scale > UNSEEN and is_noise_only(old) != is_noise_only(new) and not changes
        assert found.table.sites[WEIGHT] == (old if kept else two.table.sites[WEIGHT])
        assert found.noise == two.noise


def test_silence_is_all_of_a_gradient_only_where_everybody_hears_it() -> None:
    for band, clear in ((-9, True), (-8, True), (-7, False), (-2, False)):
        own = yardstick(noise_of(2.0 ** (band - 3)), gradient_grid(band))
        assert (own.hears(WEIGHT), own.hears_clearly(WEIGHT)) == (True, clear)
    assert not yardstick(noise_of(1.0), gradient_grid(NOISE_BAND)).hears_clearly(WEIGHT)
    assert not Yardstick(FP32, Calibration()).hears_clearly(WEIGHT)


def bf16_yardstick(noise: SiteNoise, grid: SiteGrid, *, is_trainers: bool = True) -> Yardstick:
    return Yardstick(BF16, Calibration({WEIGHT: noise}, GridTable({WEIGHT: grid})), is_trainers=is_trainers)


def test_under_bf16_only_what_an_honest_trainer_may_find_too_loud_for_residues_may_be_silenced() -> None:
    """A trainer silences noise above 2**1 of the scale; the auditor's own may be 2**2 less, an octave aside.

    Where it measured in another step, the gradient may have grown up to the floor since, a safety factor above the noise.
    """
    silent, loud = SiteGrid(0, NOISE_BAND, 4, False, [1]), site_grid(BF16, Kind.GRADIENT, -4, np.array([0]))
    for exponent, in_the_same_step, in_another in ((-1, True, True), (-2, False, True), (-3, False, False)):
        for is_trainers, accepted in ((True, in_the_same_step), (False, in_another)):
            own = bf16_yardstick(noise_of(2.0**exponent), loud, is_trainers=is_trainers)
            assert (own.compare_band(WEIGHT, silent)[1] is None) == accepted, (exponent, is_trainers)


def silent_below(floor: int) -> SiteGrid:
    return SiteGrid(0, NOISE_BAND, 4, False, [floor - NOISE_BAND])


def test_under_bf16_neither_floor_nor_values_of_a_silenced_gradient_lie_three_octaves_above_its_own_noise() -> (
    None
):
    own = bf16_yardstick(noise_of(2.0**-6), silent_below(-4))
    highest = -6 + 2 + 2 + 1
    for floor, size, accepted in (
        (highest, highest, True), (highest + 1, -20, False), (-20, highest + 1, False), (-20, highest, True),
    ):  # fmt: skip
        assert (own.excess_floor(WEIGHT, silent_below(floor), size, None)[0] is None) == accepted, (
            floor,
            size,
        )


def test_a_gradient_of_zeros_is_silent_up_to_the_loudest_noise_of_the_step_however_few_elements_it_has() -> (
    None
):
    own = bf16_yardstick(noise_of(0.0, elements=8, rms=0.0), silent_below(-4))
    highest = -4 + 2 + 1
    for floor, accepted in ((highest, True), (highest + 1, False)):
        assert (own.excess_floor(WEIGHT, silent_below(floor), floor, None)[0] is None) == accepted


def test_the_floor_of_noise_may_not_be_higher_than_measured_noise_makes_it() -> None:
    measured = SiteGrid(0, NOISE_BAND, 4, False, [1])
    own = Yardstick(FP32, Calibration({WEIGHT: noise_of(2.0**-6)}, GridTable({WEIGHT: measured})))
    # noise 2**-6, safety 2**3, two octaves and the seven from the band up from which on it would be heard
    highest = max(-6 + 3 + 2 + 6, 1 + NOISE_BAND + 2) + 1
    zero = Yardstick(
        FP32, Calibration({WEIGHT: replace(noise_of(2.0**-6), rms=0.0)}, GridTable({WEIGHT: measured}))
    )
    for yardstick, allowed in (
        (own, highest),
        (zero, 1 + NOISE_BAND + 2 + 1),
    ):  # of zeros there is no size that noise hides
        for floor, accepted in ((allowed, True), (allowed + 1, False)):
            declared = SiteGrid(0, NOISE_BAND, 4, False, [floor - NOISE_BAND])
            assert (yardstick.excess_floor(WEIGHT, declared, -1000, None)[0] is None) == accepted


def test_floors_rise_with_the_largest_gradient_also_where_none_was_more_than_noise() -> None:
    """Whoever hears some where all are noise here has them no smaller than here, and their floors rise with those."""
    quiet = silent_below(-10)
    for rms, noise, before in ((2.0**-12, 2.0**-14, -12), (2.0**-20, 2.0**-10, -12), (0.0, 0.0, None)):
        own = bf16_yardstick(noise_of(noise, elements=4096, rms=rms), quiet)
        lowest = own.highest_floor(WEIGHT, None)
        assert lowest is not None
        for largest in (-30, -12, -11, 5):
            risen = 0 if before is None else min(max(0, largest - before), RISES + 1)
            assert own.highest_floor(WEIGHT, largest) == lowest + risen
    heard = bf16_yardstick(noise_of(2.0**-14, rms=2.0**-12), gradient_grid(-10))
    lowest = heard.highest_floor(WEIGHT, None)
    assert lowest is not None
    for grown in (3, RISES + 1, RISES + 2, 40):
        largest = int(gradient_grid(-10).scales.max()) + grown
        assert heard.highest_floor(WEIGHT, largest) == lowest + min(grown, RISES + 1)


def test_floors_rise_as_far_as_the_trainers_own_do() -> None:
    own = bf16_yardstick(noise_of(2.0**-6), silent_below(-4))
    lowest = own.highest_floor(WEIGHT, None)
    assert lowest is not None
    assert own.highest_floor(WEIGHT, None, 2) == lowest + 2
    assert own.excess_floor(WEIGHT, silent_below(lowest + 2), -1000, None, 2)[0] is None
    assert own.excess_floor(WEIGHT, silent_below(lowest + 3), -1000, None, 2)[0] is not None


@pytest.mark.parametrize("policy", [FP32, FP64], ids=["fp32", "fp64"])
def test_a_gradient_that_is_noise_here_is_heard_where_its_size_without_noise_and_its_band_say_so(
    policy: Policy,
) -> None:
    """Three octaves from scale to size, as far as an honest scale lies; two from what the band is for to the noise."""
    silent = SiteGrid(0, NOISE_BAND, 4, False, [1])
    loudest = -6 - policy.safety + 2
    for scale, exact, exponent, accepted in (
        (0, 2.0**-3, loudest, True),
        (0, 2.0**-3, loudest + 1, False),
        (0, 2.0**-3.01, loudest, True),
        (0, 2.0**-4, loudest, False),
        (5, 2.0**2, loudest + 5, True),
        (5, 2.0**1, loudest + 5, False),
        (0, None, loudest, True),
        (0, None, loudest + 1, False),
    ):
        noise = noise_of(2.0**exponent)
        noise.exact = exact
        own = Yardstick(policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: silent})))
        declared = site_grid(policy, Kind.GRADIENT, -6, np.array([scale]))
        assert (own.excess_signal(WEIGHT, declared)[0] is None) == accepted, (scale, exact, exponent)
    hears = Yardstick(policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: declared})))
    assert hears.excess_signal(WEIGHT, declared)[0] is None
    assert Yardstick(policy, Calibration()).excess_signal(WEIGHT, declared)[0] is None


def test_rows_are_heard_by_the_scale_of_all_together() -> None:
    silent = SiteGrid(0, NOISE_BAND, 4, False, [1])
    rows = site_grid(FP32, Kind.GRADIENT, -6, np.array([0] + 15 * [-8]))  # together an octave below the first
    for exact, accepted in ((2.0**-4, True), (2.0**-5, False)):
        noise = noise_of(2.0**-12)
        noise.exact = exact
        own = Yardstick(FP32, Calibration({WEIGHT: noise}, GridTable({WEIGHT: silent})))
        assert (own.excess_signal(WEIGHT, rows)[0] is None) == accepted


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_expected_moves_are_the_mean_deviation_over_the_quantum() -> None:
    grid = gradient_grid(-10)
    assert grid.floor == -4
    assert yardstick(noise_of(2.0**-13), grid).expected(WEIGHT, grid, 4096) == pytest.approx(
        4096 * 2.0**-16 * 2.0**4
    )
    own = yardstick(noise_of(2.0**-13), grid)
    assert own.expected(WEIGHT, SiteGrid(0, NOISE_BAND, 4, False, [1]), 4096) == 0.0


def test_a_gradient_that_was_zero_when_noise_was_measured_is_expected_to_move_as_the_others_do() -> None:
    grid, place = gradient_grid(-10), (Kind.GRADIENT, 1)
    zeros = SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, 0.0, 4096)
    table = GridTable({WEIGHT: grid, place: grid})
    own = Yardstick(FP32, Calibration({WEIGHT: noise_of(2.0**-13), place: zeros}, table))
    pooled = noise_of(2.0**-13).block_mean.item()
    assert own.expected(place, grid, 4096) == pytest.approx(4096 * pooled * 2.0**4)


@pytest.mark.parametrize("cluster", [1, 64])
def test_a_budget_may_be_used_up_and_not_exceeded(cluster: int) -> None:
    def added(moved: int, expected: float) -> list[str]:
        step = StepFreedom(cluster=cluster, energy=1.0)
        step.sites[WEIGHT] = SiteMoves(expected, moved, near=1000, square=1e-9, cluster=cluster)
        return [excess.site for _, excess in Freedom().add(step)]

    of_step = StepFreedom(cluster=cluster).budget(2.0)
    assert added(of_step, 2.0) == []
    if cluster == 1:  # where moves come in clusters a single step is held by its size
        assert added(of_step + 1, 2.0) == [
            "roundings moved in this step",
            "roundings moved here in this step",
        ]
    of_run = most_moves(2.0, cluster=cluster)
    # One step is all so far: a run's budget is the rarer surprise, but where moves come in clusters.
    assert of_run > of_step if cluster == 1 else of_run == of_step
    assert "roundings moved here so far" not in added(of_run, 2.0)
    assert "roundings moved here so far" in added(of_run + 1, 2.0)


@pytest.mark.parametrize("carried", [0.0, 12.0])
def test_the_size_of_a_steps_move_has_a_budget(carried: float) -> None:
    step = StepFreedom(energy=1.0, quanta=0.25, carried=carried)
    step.sites[WEIGHT] = SiteMoves(100.0, 0, near=10**6, square=2.0**-20, by_square={-20: 1.0})
    alone = step.square_budget - carried * FLIP * 0.5 - (carried * FLIP) ** 2
    assert 4.0 * 2.0**-20 < alone < 32.0 * 2.0**-20
    assert step.largest_steer <= math.sqrt(step.square_budget) * (1.0 + 1e-12)
    for factor, found in ((0.999, []), (1.001, ["move of this step's gradient"])):
        step.squared, freedom = factor * step.square_budget, Freedom()
        assert [excess.site for _, excess in freedom.add(step)] == found
        assert freedom.fullest_step == pytest.approx(factor)


def test_a_move_of_a_gradient_that_is_zero_exceeds_its_budget_and_ends_nothing() -> None:
    step = StepFreedom(squared=1.0)
    assert [(excess.site, excess.stated) for _, excess in Freedom().add(step)] == [
        ("move of this step's gradient", "inf")
    ]


def test_one_sixteen_bit_result_that_falls_otherwise_moves_no_more_than_its_bound() -> None:
    """The whole gradient carried by 2**-8 of its size: boundaries lie between with probability ``d / q``."""
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=10**5)
    quantum = 0.25
    offsets = rng.random(gradient.size)
    moved = np.floor(gradient * (1.0 + FLIP) / quantum + offsets) != np.floor(gradient / quantum + offsets)
    energy, quanta = float(gradient @ gradient), quantum**2 * gradient.size
    step = StepFreedom(energy=energy, quanta=quanta, carried=1.0)
    assert 0.5 < moved.sum() * quantum**2 / step.square_budget < 1.0


def test_a_run_may_not_use_up_every_steps_budget() -> None:
    """What a single step may move by chance, every step may not."""
    freedom, found = Freedom(), list[str]()
    for _ in range(50):
        step = StepFreedom(energy=1.0)
        step.sites[WEIGHT] = SiteMoves(0.1, step.budget(0.1), near=1000, square=1e-9)
        found += [excess.site for _, excess in freedom.add(step)]
    assert set(found) == {"roundings moved here so far", "roundings moved so far"}


def test_the_largest_steer_buys_the_largest_quanta_first() -> None:
    step = StepFreedom(energy=4.0)
    step.sites[WEIGHT] = SiteMoves(1.0, near=3, square=2.0**-6, by_square={-6: 1.0})
    step.sites[(Kind.GRADIENT, 1)] = SiteMoves(1.0, near=1000, square=2.0**-14, by_square={-14: 1.0})
    left = min(step.budget(2.0) - 3, step.budget(1.0))
    assert step.largest_steer == pytest.approx(math.sqrt((3 * 2.0**-6 + left * 2.0**-14) / 4.0))
    step.bent = 0.5
    assert step.largest_steer > step.largest_move == 0.5


def test_a_site_that_never_differed_is_pooled_if_it_is_small_and_its_silent_rows_are() -> None:
    still = replace(noise_of(2.0**-6), block_mean=np.zeros(1))
    table = GridTable({WEIGHT: gradient_grid(-4), (Kind.GRADIENT, 1): gradient_grid(-4)})
    found = Calibration({WEIGHT: still, (Kind.GRADIENT, 1): noise_of(2.0**-6)}, table)
    yardstick = Yardstick(FP32, found)
    assert yardstick.expected(WEIGHT, gradient_grid(-4), 4096) == 0.0
    assert yardstick.expected(WEIGHT, gradient_grid(-4), 255) > 0.0
    assert yardstick.by_square(WEIGHT, gradient_grid(-4), 4096)[0] > 0.0, (
        "a token may occur in the next batch"
    )


def test_where_single_results_may_be_most_of_the_noise_more_is_allowed() -> None:
    found = Calibration({WEIGHT: noise_of(2.0**-6)}, GridTable({WEIGHT: gradient_grid(-4)}))
    steady, unsteady = Yardstick(BF16, found), Yardstick(BF16, replace(found, steady=False))
    assert (steady.flips_allowed, unsteady.flips_allowed, Yardstick(FP32, found).flips_allowed) == (
        2.0,
        12.0,
        0.0,
    )
    assert [y.cluster(4096) for y in (steady, unsteady, Yardstick(FP32, found))] == [64, 256, 1]
    assert unsteady.cluster(100) == 64
    assert (unsteady.cluster(10), steady.cluster(1)) == (10, 1), "no more than there are"
    after = Yardstick(BF16, found, Yardstick(BF16, found, unsteady))
    assert not after.steady, "what single results carried once they may carry again"
    assert Yardstick(BF16, found, steady).steady


def test_the_bits_of_a_bf16_gradient_are_no_ground() -> None:
    """One repetition sees a result fall otherwise and the next does not: bits say little, and the moves are counted."""
    quiet = replace(noise_of(2.0**-9), relative=2.0**-9)
    own = grid_for(BF16, Kind.GRADIENT, quiet)
    wide = site_grid(BF16, Kind.GRADIENT, 1, np.zeros(1, dtype=np.int64))
    assert own is not None and (own.residue_bits, wide.residue_bits) == (3, 6)
    yardstick = Yardstick(BF16, Calibration({WEIGHT: quiet}, GridTable({WEIGHT: own})))
    assert yardstick.compare_band(WEIGHT, wide) == (1.0, None, "")


@pytest.mark.parametrize(
    ("policy", "kind", "own", "widest"),
    [(BF16, Kind.BUFFER, -14, -11), (FP32, Kind.BUFFER, -18, -15), (BF16, Kind.LOSS, -9, -3)],
)
def test_a_buffer_of_one_element_has_a_band_three_octaves_wider_at_most(
    policy: Policy, kind: Kind, own: int, widest: int
) -> None:
    """Six octaves held a running mean still; by a loss nothing is led."""
    place, quiet = (kind, 0), noise_of(2.0**-22, elements=1)
    mine, accepted, refused = (
        site_grid(policy, kind, band, np.zeros(1, dtype=np.int64)) for band in (own, widest, widest + 1)
    )
    yardstick = Yardstick(policy, Calibration({place: quiet}, GridTable({place: mine})))
    assert yardstick.compare_band(place, accepted)[1] is None
    assert yardstick.compare_band(place, refused)[1] is not None


def test_a_buffer_is_followed_on_the_auditors_own_grid_where_its_band_is_wider_by_two_octaves() -> None:
    place, mine = (Kind.BUFFER, 0), site_grid(FP32, Kind.BUFFER, -18, np.zeros(1, dtype=np.int64))
    own = Yardstick(FP32, Calibration({place: noise_of(2.0**-22)}, GridTable({place: mine})))
    for band, elements, is_followed in ((-17, 2, False), (-16, 2, True), (-16, 255, True), (-16, 256, False)):
        stated = site_grid(FP32, Kind.BUFFER, band, np.array([3]))
        found = own.own_buffer_grid(place, stated, torch.full((elements,), 5.0))
        assert (found is not None) == is_followed
        if found is not None:
            assert (found.band, list(found.scales)) == (-18, [3])
    elsewhere = site_grid(FP32, Kind.BUFFER, -14, np.zeros(1, dtype=np.int64))
    assert own.own_buffer_grid(WEIGHT, elsewhere, torch.ones(2)) is None


@pytest.mark.parametrize(
    ("own_band", "own_scale", "stated_scale", "value", "followed"),
    [
        (-9, 3, 4, 1.0, None),
        (-9, 3, 5, 1.0, 3),
        (-10, 3, 4, 1.0, 3),
        (-9, 3, 5, 15.0, None),
        (-11, 0, 0, 0.5, 0),
    ],
)
def test_a_buffer_of_the_scale_of_its_noise_is_followed_on_that_of_the_auditors(
    own_band: int, own_scale: int, stated_scale: int, value: float, followed: int | None
) -> None:
    """With the widest band the scale may be the noise's, so it is the width of the band itself that is two octaves wider."""
    place, mine = (Kind.BUFFER, 0), site_grid(FP32, Kind.BUFFER, own_band, np.array([own_scale]))
    own = Yardstick(FP32, Calibration({place: noise_of(2.0**-22)}, GridTable({place: mine})))
    stated = site_grid(FP32, Kind.BUFFER, -9, np.array([stated_scale]))
    found = own.own_buffer_grid(place, stated, torch.full((2,), value))
    assert (None if found is None else (found.band, int(found.scales[0]))) == (
        None if followed is None else (own_band, followed)
    )


@pytest.mark.parametrize("elements", [64, 4096])
def test_what_a_mean_of_noise_moves_is_expected_on_the_grid_that_is_declared(elements: int) -> None:
    """The auditor's own measurement may have given it the scale of its noise, and the trainer's that of its values."""
    place, quiet = (Kind.BUFFER, 0), np.full(1, -20, dtype=np.int64)
    noise = SiteNoise(2.0**-14, quiet, 2.0**-20, 2.0**-34, elements, block_mean=np.full(1, 2.0**-34))
    lifted = replace(noise, scales=quiet + 6, relative=2.0**-20)
    grid = site_grid(FP32, Kind.BUFFER, FP32.buffer_band[1], quiet)
    own = {noise.relative: replace(grid, band=-10), lifted.relative: grid}
    found = [
        Yardstick(FP32, Calibration({place: each}, GridTable({place: own[each.relative]}))).expected(
            place, grid, elements
        )
        for each in (noise, lifted)
    ]
    assert found[0] == found[1] > 0.0


@pytest.mark.parametrize("scale", [0, -1000])
def test_a_declared_scale_makes_no_more_moves_of_a_buffer_of_zeros_plausible_than_its_band(
    scale: int,
) -> None:
    """Ten steps of a buffer of zeros with the scale 1 made 2,562 moves plausible, and with one of 2**-1000 none at all."""
    place = (Kind.BUFFER, 0)
    lifted = SiteNoise(
        2.0**-12, np.full(1, -10, dtype=np.int64), 0.0, 2.0**-22, 4096, block_mean=np.full(1, 2.0**-24)
    )
    own = site_grid(FP32, Kind.BUFFER, FP32.buffer_band[1], lifted.scales)
    yardstick = Yardstick(FP32, Calibration({place: lifted}, GridTable({place: own})))
    stated = site_grid(FP32, Kind.BUFFER, FP32.buffer_band[0], np.full(1, scale))
    expected = 4096 * (2.0**-24 if scale == 0 else 2.0**stated.band) / 2.0**stated.floor
    assert yardstick.expected(place, stated, 4096) == pytest.approx(expected)
    assert yardstick.expected(place, own, 4096) == pytest.approx(4096 * 2.0**-14 / 2.0**own.floor)


def held_still(update: float, steps: int, jitter: float = 0.0, left_out: int = 0) -> Freedom:
    """A buffer beside a large one, on a grid of quantum 2**-3, that stays where it is while it should go by ``update``.

    After every ``left_out`` steps some are left out in which it goes far, or its band is not wide.
    """
    freedom, excesses = Freedom(), list[str]()
    stated, own = (site_grid(FP32, Kind.BUFFER, band, np.array([9])) for band in (-16, -19))
    assert 2.0 ** (9 + stated.floor) == 2.0**-3
    rng = np.random.default_rng(1)
    far = 0.0
    for number in range(steps):
        if left_out and number % left_out == left_out - 1:
            far += 8.0
            if far % 16.0:
                freedom.leave_out_steps()
            else:
                freedom.add(StepFreedom())
        found = torch.tensor([500.0, far + 0.75 - update + jitter * float(rng.uniform(-1.0, 1.0))])
        rounded = torch.empty_like(found)
        round_recorded(found, stated, out=rounded, name="stats")
        step = StepFreedom(
            buffers={(Kind.BUFFER, 0): BufferStep.of(found, rounded, stated, own, NO_KEY, "stats")}
        )
        excesses += [excess.site for _, excess in freedom.add(step)]
    freedom.silenced_parameters = sum("led this buffer" in each for each in excesses)
    return freedom


def test_a_buffer_that_a_wide_band_holds_still_is_led_and_one_whose_errors_go_either_way_is_not() -> None:
    assert held_still(0.05, 400).silenced_parameters > 0
    assert held_still(0.05, 40).silenced_parameters == 0, "a few errors the same way are chance"
    assert held_still(0.0, 400, jitter=0.3).silenced_parameters == 0
    assert held_still(0.0, 400).silenced_parameters == 0
    assert held_still(0.05, 400, left_out=8).silenced_parameters > 0, "a way that nobody saw is none"


def test_moves_of_an_activation_that_was_never_measured_are_as_few_as_its_band_makes_them() -> None:
    rule = activation_rule(LEAF)
    for band, share in ((-40, 2.0**-8), (-34, 2.0**-8)):
        grid = activation_grid(rule, band, np.zeros(1, dtype=np.int64))
        own = Yardstick(LEAF, Calibration({}, GridTable()))
        assert own.expected((Kind.ACTIVATION, 3), grid, 4096) == 4096 * share


@pytest.mark.parametrize("kind", [Kind.BUFFER, Kind.LOSS])
def test_a_parity_band_of_what_no_size_is_counted_of_is_held_against_the_auditors_own(kind: Kind) -> None:
    """Buffers and losses have no part in a step's size: a running statistic was moved by a quarter of itself at a time."""
    place, quiet = (kind, 0), noise_of(2.0**-14)
    own, widest, wider, finest = (
        site_grid(BF16, kind, band, np.zeros(1, dtype=np.int64)) for band in (-9, -7, -6, -4)
    )
    yardstick = Yardstick(BF16, Calibration({place: quiet}, GridTable({place: own})))
    assert finest.residue_bits == 1 and finest.floor == BF16.gradient_floor
    assert yardstick.compare_band(place, widest) == (4.0, None, "")
    for grid in (wider, finest):
        assert yardstick.compare_band(place, grid)[1] is not None


def test_what_a_calibration_does_not_see_the_one_before_still_says() -> None:
    """A layer that its step leaves out: the follower's table then has the trainer's grid, which says nothing."""
    seen, wide = gradient_grid(-14), gradient_grid(-2)
    first = yardstick(noise_of(2.0**-17), seen)
    left_out = Calibration({}, GridTable({WEIGHT: wide}))
    alone, later = Yardstick(FP32, left_out), Yardstick(FP32, left_out, first)
    assert (alone.lacks(WEIGHT), later.lacks(WEIGHT), later.lacks((Kind.GRADIENT, 1))) == (
        True,
        False,
        True,
    )
    assert alone.compare_band(WEIGHT, wide)[1] is None
    assert later.compare_band(WEIGHT, wide) == first.compare_band(WEIGHT, wide)
    assert later.compare_band(WEIGHT, wide)[1] is not None
    assert later.expected(WEIGHT, seen, 4096) == first.expected(WEIGHT, seen, 4096) > 0.0


def measured_sites(*sites: tuple[int, list[int]]) -> Calibration:
    """Gradients of so many elements, with the scales of their blocks; bands of 2**-14."""
    noise = {
        (Kind.GRADIENT, n): SiteNoise(2.0**-18, np.array(scales), 1.0, 2.0**-18, elements)
        for n, (elements, scales) in enumerate(sites)
    }
    grids = {
        at: site_grid(FP32, Kind.GRADIENT, -14, each.scales.astype(np.int64)) for at, each in noise.items()
    }
    return Calibration(noise, GridTable(grids))


def finer_floors(measured: Calibration, policy: Policy = FP32) -> dict[int, int]:
    return {
        n: grid.floor for (_, n), grid in finer_grids(policy, measured.noise, measured.table.sites).items()
    }


def test_no_quantum_is_coarser_than_a_share_of_the_whole_gradient() -> None:
    """A loud tensor beside a large quiet one: all the steer is the loud one's, and the whole is as large as both together."""
    measured = measured_sites((512, [0]), (1 << 20, [-10]))
    # 512 + 1 squares of 2**0: 2**9, of which a move may be 2**-29 at most, so its quantum 2**-10
    assert coarsest_quantum(FP32, [(512, np.array([0])), (1 << 20, np.array([-10]))]) == -10
    assert finer_floors(measured) == {0: -10, 1: -4}
    assert finer_floors(measured, replace(FP32, gradient_steer=-24)) == {0: -10, 1: -4}, (
        "sixteen bands at least"
    )
    assert coarsest_quantum(replace(FP32, gradient_steer=-24), [(512, np.array([0]))]) == -12
    # rows count each by its own scale, and the largest has the coarsest quantum
    rows = measured_sites((512, [0, -20]), (1 << 20, [-10]))
    assert coarsest_quantum(FP32, [(512, np.array([0, -20])), (1 << 20, np.array([-10]))]) == -11
    assert finer_floors(rows)[0] == -10
    # units make no difference: all that counts is how large each is beside the others
    for shift in (-300, 7, 300):
        scaled = [(512, np.array([shift])), (1 << 20, np.array([shift - 10]))]
        assert coarsest_quantum(FP32, scaled) == shift - 10


@pytest.mark.parametrize(("elements", "finer"), [(256, 0), (255, 2), (1, 2)])
def test_few_elements_have_a_finer_quantum(elements: int, finer: int) -> None:
    assert chosen_floor(FP32, gradient_grid(-18), -9, elements) == -9 - finer
    assert chosen_floor(FP32, gradient_grid(-18), 9, elements) == -4 - finer
    assert chosen_floor(FP32, gradient_grid(-13), -9, elements) == -9, "sixteen bands at least"
    assert (
        chosen_floor(FP64, site_grid(FP64, Kind.GRADIENT, -40, np.zeros(1, dtype=np.int64)), None, elements)
        == -21
    )


def test_floors_follow_from_sizes_and_bands_and_from_no_noise() -> None:
    """Whoever chooses quanta chooses the rate of what is smaller: noise, which machines differ in, has no say but by the band."""
    quiet, loud = measured_sites((512, [0]), (1 << 20, [-10])), measured_sites((512, [0]), (1 << 20, [-10]))
    for noise in loud.noise.values():
        noise.block_mean, noise.largest, noise.relative = np.full(1, 2.0**-12), 2.0**-9, 2.0**-9
    assert finer_floors(quiet) == finer_floors(loud)
    wide = {at: replace(grid, band=-9) for at, grid in quiet.table.sites.items()}
    assert finer_grids(FP32, quiet.noise, wide)[WEIGHT].floor == -5, "sixteen bands above the noise"
    widest = {at: replace(grid, band=-8) for at, grid in quiet.table.sites.items()}
    assert finer_grids(FP32, quiet.noise, widest)[WEIGHT].floor == -4
    assert finer_floors(quiet, replace(FP32, gradient_steer=None)) == {}
    silent = {
        **quiet.table.sites,
        WEIGHT: site_grid(FP32, Kind.GRADIENT, NOISE_BAND, np.zeros(1, dtype=np.int64)),
    }
    assert set(finer_grids(FP32, quiet.noise, silent)) == {(Kind.GRADIENT, 1)}, (
        "what is only noise has no part in it"
    )


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("elements", [4096, 16])
def test_a_floor_is_the_one_that_follows_where_grids_are_chosen(policy: Policy, elements: int) -> None:
    """An octave finer, a small element of an adaptive optimizer's gradient goes half as fast again: a backdoor of 100 %."""
    zeros = np.zeros(1, dtype=np.int64)
    noise = SiteNoise(2.0**-40, zeros, 0.7, 2.0**-40, elements)
    band = policy.gradient_band[0] + 2
    grid = site_grid(policy, Kind.GRADIENT, band, zeros)
    grid = replace(grid, residue_bits=8) if policy is BF16 else grid
    own = finer_grids(policy, {WEIGHT: noise}, {WEIGHT: grid}).get(WEIGHT, grid)
    yardstick = Yardstick(policy, Calibration({WEIGHT: noise}, GridTable({WEIGHT: own})))

    def others(changed: SiteGrid) -> list[Any]:
        return find_other_floors(policy, GridTable({WEIGHT: changed}), yardstick, str)

    assert others(own) == []
    for octaves in (-3, -2, -1, 1):
        is_few = policy is BF16 and elements < 256 and octaves == -2
        assert bool(others(replace(own, floor=own.floor + octaves))) != is_few
    left_out = Yardstick(policy, Calibration({}, GridTable()), yardstick)
    finer = GridTable({WEIGHT: replace(own, floor=own.floor - 1)})
    assert find_other_floors(policy, finer, left_out, str) == [], "a layer left out keeps its grid"


@pytest.mark.parametrize(("rms", "is_noise"), [(2.0**-20, True), (2.0**-19, False)])
def test_of_a_gradient_that_was_zero_the_loudest_noise_says_what_is_noise(
    rms: float, *, is_noise: bool
) -> None:
    """A bias before a batch norm, in a branch whose loss had no weight when it was measured: an honest run was not accepted."""
    zero = SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, 0.0, 16)
    grid = site_grid(FP32, Kind.GRADIENT, NOISE_BAND, np.array([-19]))
    own = Yardstick(FP32, Calibration({WEIGHT: zero}, GridTable({WEIGHT: grid})))
    for elements in (16, 4096):
        assert own.is_mostly_noise(WEIGHT, rms, elements, is_silent=True) == is_noise
        assert not own.is_mostly_noise(WEIGHT, rms, elements), (
            "the log hears it, and what decisions made of it"
        )
    seen = site_grid(FP32, Kind.GRADIENT, -9, np.array([-19]))
    heard = Yardstick(FP32, Calibration({WEIGHT: zero}, GridTable({WEIGHT: seen})))
    assert not heard.is_mostly_noise(WEIGHT, rms, 16, is_silent=True)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("elements", [4096, 16])
def test_what_is_heard_anew_has_the_floor_of_this_steps_sizes_whatever_its_band(
    elements: int, *, is_held: bool
) -> None:
    """A layer frozen at first, heard on quanta by the band that its trainer states: 100 % for 8 % of an honest run.

    What is held has scales of another step's in the auditor's own measurement, and they say nothing either: of twelve audio
    classifiers, whose first gradient is that of the last layer alone, five were not accepted.
    """
    heard, zeros = (Kind.GRADIENT, 1), np.zeros(1, dtype=np.int64)
    noise = {
        at: SiteNoise(2.0**-40, zeros, 0.7, 2.0**-40, n) for at, n in ((WEIGHT, elements), (heard, 1 << 20))
    }
    grids = {at: site_grid(FP32, Kind.GRADIENT, FP32.gradient_band[0], zeros) for at in noise}
    usual = GridTable({**finer_grids(FP32, noise, grids)})
    kept = noise | {heard: replace(noise[heard], scales=zeros - is_held * 12)}
    yardstick = Yardstick(FP32, Calibration(kept, usual, usual=usual))
    silent = site_grid(FP32, Kind.GRADIENT, NOISE_BAND, zeros)
    before = GridTable({WEIGHT: silent, heard: grids[heard]})
    for band, floor in ((0, 0), (2, 0), (0, 1), (0, -1), (4, 2)):
        own = usual.sites[WEIGHT]
        changed = replace(own, band=own.band + band, floor=own.floor + floor)
        held = replace(usual.sites[heard], floor=usual.sites[heard].floor + floor).with_scales([3])
        found = find_other_floors(FP32, GridTable({WEIGHT: changed, heard: held}), yardstick, str, before)
        assert [site for site, _ in found] == ([WEIGHT] if floor else [])
    silenced = GridTable(dict.fromkeys(noise, silent))
    assert find_other_floors(FP32, silenced, yardstick, str, before) == []


@pytest.mark.parametrize(
    ("octaves", "dims", "accepted"),
    [(0, 2, True), (-1, 2, True), (1, 2, True), (-2, 2, True), (2, 2, True), (-3, 2, False), (-3, 4, True)],
)
def test_a_quantum_that_its_band_sets_lies_no_more_than_two_octaves_below_the_auditors_own(
    octaves: int, dims: int, *, accepted: bool
) -> None:
    """Narrower bands moved nothing, and their quanta trained what was small twice as fast: 42 % for 8 % of an honest run."""
    zeros = np.zeros(1, dtype=np.int64)
    noise = SiteNoise(2.0**-13, zeros, 0.7, 2.0**-13, 512, dims=dims)
    usual = GridTable({WEIGHT: site_grid(FP32, Kind.GRADIENT, -9, zeros)})
    yardstick = Yardstick(FP32, Calibration({WEIGHT: noise}, usual, usual=usual))
    grid = site_grid(FP32, Kind.GRADIENT, -9 + octaves, zeros)
    grid = replace(grid, floor=chosen_floor(FP32, grid, coarsest_quantum(FP32, [(512, zeros)]), 512))
    assert grid.floor == max(-10, -5 + octaves), "its band sets it"
    found = find_other_floors(FP32, GridTable({WEIGHT: grid}), yardstick, str)
    assert (found == []) == accepted


# -- the reference ----------------------------------------------------------------------------------------------------


def test_a_pass_in_float64_leaves_tensors_policy_and_findings_as_they_were(zoo: Any, open_job: Any) -> None:
    job = zoo.build({"model": "convolutions"})
    session = open_job(job, POLICIES["fp32"])
    tensors = {
        name: (id(t), t.data_ptr(), t.clone()) for name, t in job.model.state_dict(keep_vars=True).items()
    }
    before = (
        session.policy,
        session.arithmetic.compute,
        session.arithmetic.precision,
        session.arithmetic.findings,
    )
    with in_float64(session):
        assert {p.dtype for p in job.model.parameters()} == {torch.float64}
        assert session.policy.storage == "float64"
    after = job.model.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr()) for name, t in after.items()} == {
        name: (number, pointer) for name, (number, pointer, _) in tensors.items()
    }
    assert all(torch.equal(after[name], values) for name, (_, _, values) in tensors.items())
    assert (
        session.policy,
        session.arithmetic.compute,
        session.arithmetic.precision,
        session.arithmetic.findings,
    ) == before


def test_without_jitter_noise_is_the_deviation_from_float64_and_under_fp64_there_is_none(
    zoo: Any, open_job: Any
) -> None:
    for policy in ("fp32", "fp64"):
        job = zoo.build({"model": "plain"})
        session = open_job(job, POLICIES[policy])
        noise = calibrate(session, backward_of(session, job), repeats=1, units=0.0).noise[WEIGHT].largest
        gradients: list[Tensor] = []
        for dtype in (torch.float32, torch.float64):
            model = copy.deepcopy(job.model).to(dtype)
            job.loss(
                model, tuple(t.to(dtype) if t.is_floating_point() else t for t in job.batch(0))
            ).backward()
            gradients.append(next(model.parameters()).grad.double())  # pyright: ignore[reportOptionalMemberAccess]
        deviation = float((gradients[0] - gradients[1]).abs().max())
        assert deviation > 0.0
        # Row operators are in double here and in plain torch are not: within a factor, not to the bit.
        assert (deviation / 8 < noise < 8 * deviation) if policy == "fp32" else noise == 0.0


# -- events -----------------------------------------------------------------------------------------------------------

LOUD_BATCH = """
import torch
from tallystick.execution.job import Job

def build(settings):
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-32, 32, p.shape, generator=generator) / 64)

    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randint(-16, 16, (16, 8), generator=drawn) / 16
        return x, torch.full((1,), 1000.0 if step == 6 else 1.0)

    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4), batch=batch,
               loss=lambda model, b: (model(b[0]) * b[1]).square().mean(), steps=9)
"""


def test_a_batch_unlike_the_last_has_its_step_measured_anew_and_is_followed(tmp_path: Path) -> None:
    from tallystick.execution.job import find_source
    from tallystick.roles.auditor import audit

    job = tmp_path / "loud.py"
    job.write_text(LOUD_BATCH)
    run, source = RunDirectory(tmp_path / "run"), find_source(str(job))
    record(Order(source, {}, POLICIES["fp32"], checkpoint_every=3), run)
    frames = run.load_frames(run.load_transcript(), 0, 9)
    place = SiteAddress(0, 0, Kind.CALIBRATION, 0)
    assert [step for step, frame in frames.items() if decode_frame(frame).find(place) is not None] == [6]
    assert audit(run, source, jitter=True).verdict == "match"
    # The step is what it would be without: only how it is logged differs.
    again = RunDirectory(tmp_path / "again")
    record(Order(source, {}, POLICIES["fp32"], checkpoint_every=3), again)
    assert again.load_transcript().root() == run.load_transcript().root()


def test_a_note_of_a_calibration_that_was_due_is_malformed(zoo: Any, open_job: Any) -> None:
    session = open_job(zoo.build({}), POLICIES["fp32"])
    place = SiteAddress(0, 0, Kind.CALIBRATION, 0)
    for step, note, refused in ((0, b"\x01", True), (5, b"\x01", False), (5, b"\x02", True)):
        session.step = step
        frame = encode_frame(Frame.of({place: note}))
        if refused:
            with pytest.raises(InvalidInput, match="the log's note of a calibration"):
                session.following_context(frame)
        else:
            assert session.following_context(frame).is_calibrated


# -- what was decided, to the number ----------------------------------------------------------------------------------


def test_limits_are_those_of_the_decision() -> None:
    """docs/adr/0026: by how much bands may be wider, noise larger, and one sixteen-bit result heavier."""
    own = yardstick(noise_of(2.0**-17), gradient_grid(-14))
    assert own.reach(WEIGHT) == 4.0 * 2.0**-17
    assert own.reach((Kind.DECISION, 9)) == math.inf, "no decision was measured"
    heard = {(Kind.DECISION, 0): noise_of(2.0**-17), (Kind.DECISION, 1): noise_of(2.0**-15)}
    some = Yardstick(FP32, Calibration(heard, GridTable()))
    assert [some.reach((Kind.DECISION, n)) for n in (0, 1, 9)] == [4.0 * 2.0**-n for n in (17, 15, 15)]
    assert Yardstick(BF16, own.measured).reach(WEIGHT) == 0.0, "all but ties count"
    for octaves, accepted in ((2, True), (3, False)):
        assert (own.compare_band(WEIGHT, gradient_grid(-14 + octaves))[1] is None) == accepted
    step = StepFreedom(energy=4.0, quanta=1.0, carried=2.0)
    assert step.square_budget == 2.0 * 2.0**-8 * 2.0 + (2.0 * 2.0**-8 * 2.0) ** 2
    assert step.budget(2.0) == most_moves(8.0, 1.0, tail=1e-6)
    for measured, share in (
        (0.0, 2.0**-10), (2.0**-13, 2.0**-10), (2.0**-12, 2.0**-9), (2.0**-8, 2.0**-5), (1.0, 2.0**-5)
    ):  # fmt: skip
        assert Yardstick(BF16, replace(own.measured, weighed=measured)).weighable == share, measured
    assert StepFreedom().weighable == 2.0**-10
    weighed = WeighedMoves(allowed=1.0, largest=0.0625)
    assert weighed.budget == 2.0, "docs/adr/0031: a share of what was trained, and 16 steps of it at once"
    for elements, times in ((4096, 1.0), (255, 8.0)):
        for measured, share in ((0.0, 2.0**-8), (2.0**-9, 2.0**-7), (2.0**-4, 2.0**-2), (1.0, 1.0)):
            found = Calibration(
                {WEIGHT: noise_of(2.0**-9, elements)}, GridTable(), weights={WEIGHT: measured}
            )
            assert Yardstick(BF16, found).weighable_at(WEIGHT) == min(times * share, 1.0)


def test_a_gradient_of_few_elements_or_one_that_is_silent_here_may_be_mostly_noise() -> None:
    """Eight times its noise at most; a large one that is heard is what it is."""
    for table, elements, rms, is_noise in (
        (gradient_grid(-10), 255, 1.0, True), (gradient_grid(-10), 255, 1.01, False), (gradient_grid(-10), 256, 0.5, False),
        (silent_below(-4), 256, 1.0, True), (silent_below(-4), 256, 1.01, False),
    ):  # fmt: skip
        own = bf16_yardstick(noise_of(2.0**-3, elements=elements), table)
        assert own.is_mostly_noise(WEIGHT, rms, elements) == is_noise
    assert not own.is_mostly_noise((Kind.GRADIENT, 9), 0.0, 8), "never measured"


def test_decisions_beyond_the_reach_of_noise_have_a_budget_by_step_and_run() -> None:
    def added(steps: int, far: int, flips: float, cluster: int = 1) -> list[str]:
        freedom, found = Freedom(), list[str]()
        for _ in range(steps):
            step = StepFreedom(
                energy=1.0, decisions_moved=far, decisions_far=far, flips=flips, cluster=cluster
            )
            found += [excess.site for _, excess in freedom.add(step)]
        return found

    one = StepFreedom(flips=0.5).decision_budget
    assert added(1, one, 0.5) == []
    assert added(1, one + 1, 0.5) == ["decisions moved in this step"]
    assert added(1, 1, 0.0) == ["decisions moved in this step", "decisions moved so far"]
    whole = [steps for steps in range(1, 20) if "decisions moved so far" in added(steps, one, 0.5)]
    assert whole and whole[0] == next(n for n in range(1, 20) if n * one > most_moves(0.5 * n))
    # However many roundings one result moves, it turns 64 decisions at most.
    assert added(1, 64, 0.0, cluster=4096) == []
    assert "decisions moved in this step" in added(1, 65, 0.0, cluster=4096)


def test_steps_in_which_flips_may_carry_all_share_a_budget_of_size() -> None:
    """Each may be full, not all of them: honest ones use 0.04 on average at most (small resnet50)."""

    def refused(share: float, steps: int, carried: float = 12.0) -> list[int]:
        freedom, at = Freedom(), list[int]()
        for step in range(steps):
            moves = {WEIGHT: SiteMoves(1.0, 1, 1, 1.0, by_square={0: 1.0})}
            one = StepFreedom(energy=1.0, quanta=1.0, carried=carried, sites=moves)
            one.squared = share * one.square_budget
            found = [excess.site for _, excess in freedom.add(one)]
            at += [step] * ("steps' budgets of size used so far" in found)
        return at

    assert refused(1.0, 8) == [4, 5, 6, 7], "four, and an eighth for each step"
    assert refused(1.0 / 8.0, 400) == []
    assert refused(2.0 / 8.0, 400)[0] == 32
    assert refused(1.0, 8, carried=2.0) == [], (
        "where no flip is most of the noise many steps may be nearly full"
    )


def test_moves_over_no_distance_are_an_endless_path_and_relative_grids_have_no_size() -> None:
    assert (Freedom(path=0.0).path_steer, Freedom(path=2.0, distance=8.0).path_steer) == (0.0, 0.25)
    assert Freedom(path=2.0).path_steer == math.inf
    assert Freedom(path=2.0).fields()["path_steer"] is None
    assert (
        quantum_square(SiteGrid(24, -30, -20, False, [0]))
        == quantum_square(SiteGrid(0, -30, -20))
        == math.inf
    )
    assert quantum_square(SiteGrid(0, -10, -4, True, [0, 3])) == 2.0**-2


@pytest.mark.parametrize(("elements", "steps"), [(1000, 4), (100, 9), (1, 290)])
def test_moves_of_a_gradient_that_go_together_farther_than_noise_ever_does_are_not_accepted(
    elements: int, steps: int
) -> None:
    """Every element the same way: in n elements, T times, T n over n + 2 sqrt(2 x n) + 4 x, x = ln 1e9 (docs/adr/0031)."""
    freedom = Freedom()
    place, at, moves = (int(Kind.GRADIENT), 0), torch.arange(elements), torch.full((elements,), 3.0)
    for step in range(steps + 1):
        size = GradientMoves(energy=3.0 * 4.0 ** (step % 3), quanta=4.0 ** (step % 3))
        moved = {place: (elements, at, moves * 2.0 ** (step % 3))}
        found = freedom.add(StepFreedom(carried=1.0, gradients={place: size}, moves=moved))
        together = [excess for where, excess in found if where == place and "together" in excess.site]
        assert len(together) == (step == steps), (step, freedom.drifts[place].share)
    bits = math.log(1e9)
    wanted = elements * (steps + 1) / (elements + 2.0 * math.sqrt(2.0 * bits * elements) + 4.0 * bits)
    assert freedom.drifts[place].share == pytest.approx(wanted, rel=1e-5)


def test_moves_to_and_fro_never_add_up() -> None:
    freedom, place = Freedom(), (int(Kind.GRADIENT), 0)
    rng = np.random.Generator(np.random.PCG64(5))
    for _ in range(300):
        at = torch.from_numpy(np.flatnonzero(rng.random(512) < 0.1))
        moves = torch.from_numpy(rng.choice([-1.0, 1.0], at.numel())).float()
        size = GradientMoves(energy=1.0)
        step = StepFreedom(carried=1.0, gradients={place: size}, moves={place: (512, at, moves)})
        assert freedom.add(step) == []
    assert 0.1 < freedom.drifts[place].share < 0.75


# -- one gradient -----------------------------------------------------------------------------------------------------


def excesses_of(freedom: Freedom, moves: GradientMoves, *, energy: float = 1e12) -> list[str]:
    """What is noted of one gradient in a step whose whole gradient is much larger, and could be moved much farther."""
    step = StepFreedom(
        energy=energy, squared=moves.shifted, quanta=energy, carried=2.0, gradients={WEIGHT: moves}
    )
    return [excess.site for place, excess in freedom.add(step) if place == WEIGHT]


def test_a_gradient_is_moved_as_far_as_flips_carry_it_whatever_the_others_are() -> None:
    """Four flips of 2**-8 carry an energy of 256 by 2**-4, squared, and its quanta by the root of 2**-4 times them."""
    assert OWN_FLIPS == 2.0
    flips, noise = 2.0**-4, 3.0 * 2.0**-4
    for unsure, allowed in (
        (0.0, flips + 2.0 * math.sqrt(flips)),
        (noise, 2.0**-2 + 2.0 * math.sqrt(2.0**-2)),
    ):
        for shifted, noted in ((allowed, False), (allowed * (1.0 + 1e-9), True)):
            found = excesses_of(Freedom(), GradientMoves(256.0, shifted, 4.0, unsure))
            assert ("move of this gradient" in found) == noted


def test_moves_that_are_expected_come_on_top_of_what_flips_carry() -> None:
    bare, expected = GradientMoves(256.0, 0.0, 4.0), GradientMoves(256.0, 0.0, 4.0, by_square={-4: 8.0})
    assert expected.rare(2.0) == bare.rare(2.0) == bare.budget(2.0)
    assert expected.budget(2.0) > bare.budget(2.0) + 4.0 * 8.0 * 2.0**-4


def test_without_flips_a_gradient_is_held_to_the_number_of_its_moves_alone() -> None:
    step = StepFreedom(energy=1.0, gradients={WEIGHT: GradientMoves(1.0, 9.0, 0.1)})
    assert [excess for place, excess in Freedom().add(step) if place == WEIGHT] == []


def test_a_gradients_moves_of_all_steps_are_what_is_expected_and_few_flips() -> None:
    """Each step's over its own size: one whose gradient is a thousand times as large counts no more, nor lends."""
    account, expected = GradientAccount(), 0.0
    for step in range(50):
        unit = 4.0 ** (step % 5)
        size, rare = 260.0, GradientMoves(256.0, 0.0, 4.0).rare(2.0) / 260.0
        exponent = -4 + 2 * (step % 5)
        account.add(GradientMoves(256.0 * unit, 0.5 * unit, 4.0 * unit, by_square={exponent: 2.0}), 2.0)
        expected += RUN_SLACK * 2.0 * 2.0**-4 / size + A_STEP * rare
        assert account.shifted == pytest.approx((step + 1) * 0.5 / size)
        assert account.budget == pytest.approx(expected + AT_ONCE * rare)


def test_a_gradient_that_is_moved_in_every_step_is_noted_and_one_moved_now_and_then_is_not() -> None:
    allowed = GradientMoves(256.0, 0.0, 4.0).budget(2.0)
    for every, noted in ((1, True), (int(1.0 / A_STEP), False)):
        freedom, found = Freedom(), list[str]()
        for step in range(300):
            shifted = allowed if step % every == 0 else 0.0
            found += excesses_of(freedom, GradientMoves(256.0, shifted, 4.0))
        assert bool(found) == noted
        assert set(found) <= {"squared moves of this gradient so far, over its squares"}


def test_a_gradient_of_zeros_that_is_moved_is_noted() -> None:
    found = excesses_of(Freedom(), GradientMoves(0.0, 1.0, 4.0))
    assert "move of this gradient" in found


def test_of_few_elements_eight_times_the_largest_deviation_is_doubtful_and_of_many_the_largest() -> None:
    grid = gradient_grid(-10)
    for elements, times in ((255, 8.0), (256, 1.0)):
        own = bf16_yardstick(noise_of(2.0**-6, elements=elements, rms=2.0), grid)
        assert own.unsure(WEIGHT, 16.0) == 16.0 * (times * 2.0**-7) ** 2
    own = bf16_yardstick(noise_of(2.0**-6, elements=256, rms=2.0), grid)
    most = (
        256 * 4.0 * 4.0 ** (OUTGROWN + 1)
    )  # an honest trainer has measured again before its squares add up to more
    for energy in (most, 2.0 * most, 1e9 * most):
        assert own.unsure(WEIGHT, energy) == most * 2.0**-14
    assert bf16_yardstick(noise_of(2.0**-6, rms=0.0), grid).unsure(WEIGHT, 16.0) == 0.0
    assert bf16_yardstick(noise_of(2.0**-6), grid).unsure((Kind.GRADIENT, 9), 16.0) == 0.0


def test_what_a_gradients_moves_come_to_in_the_optimizer_is_held_to_what_that_gradient_does() -> None:
    """A whole hundred times as large lends nothing: 16 steps at once, and one more in each."""
    for steps, over, noted in ((1, 0.99999, 0), (1, 1.00001, 1), (40, 0.99999, 0)):
        freedom, found = Freedom(), list[str]()
        for step in range(steps):
            last = WEIGHED_AT_ONCE + sum((1.0 - WEIGHED_FADE) ** k for k in range(steps))
            weighed = over * last if step == steps - 1 else 0.0
            moves = GradientMoves(256.0, 0.0, 4.0, weighed=weighed, weighable=1.0)
            more = StepFreedom(
                trained=1e9, weighed=weighed, carried=2.0, energy=1e9, gradients={WEIGHT: moves}
            )
            found += [excess.site for place, excess in freedom.add(more) if place == WEIGHT]
        assert found == ["squared moves of late, as the optimizer weighs them"] * noted
        assert freedom.fullest_gradient == pytest.approx(over)


def moved_by(moves: float, expected: float, elements: int = 4) -> StepFreedom:
    """A step whose gradient has squares of 1, of which the log moves every element by ``moves``."""
    step = StepFreedom(energy=1.0)
    step.gradients[WEIGHT] = GradientMoves(energy=1.0, by_square={0: expected})
    if moves:
        step.moves[WEIGHT] = elements, torch.arange(elements), torch.full((elements,), moves)
    return step


def test_moves_go_together_no_farther_than_a_quarter_of_what_noise_reaches() -> None:
    """The sum of sixteen squared walks; a single move counts by itself."""
    tail = -math.log(TAIL)
    walk = Walk()
    walk.add(torch.arange(16), torch.full((16,), 3.0))
    assert (walk.share, walk.largest) == (0.0, 9.0)  # each element once: it went nowhere together
    walk.add(torch.arange(16), torch.full((16,), 3.0))
    for expected in (0.0, 2.0):
        walk.expected = expected
        most = 2 * expected * (math.sqrt(tail / 16) + tail / 16) + 2 * tail * 9.0
        assert walk.share == pytest.approx(16 * (36.0 - 18.0) / most)
    assert Walk().share == 0.0


def test_a_walk_is_how_far_squared_sums_exceed_the_sum_of_squares() -> None:
    """Of any elements in any steps, by the definition; only those that moved are kept."""
    rng = np.random.Generator(np.random.PCG64(7))
    walk, sums, squares = Walk(), np.zeros(1000), 0.0
    for _ in range(60):
        at = np.flatnonzero(rng.random(1000) < 0.002)
        moves = rng.choice([-1.5, 0.5, 2.0], at.size)
        walk.add(torch.from_numpy(at), torch.from_numpy(moves))
        sums[at] += moves
        squares += float(np.square(moves).sum())
    assert walk.beyond == pytest.approx(float(np.square(sums).sum()) - squares)
    assert walk.at.size < 200
    assert np.array_equal(walk.together, sums[walk.at])


@pytest.mark.parametrize(("sign", "exceeds"), [(1.0, True), (-1.0, False)])
def test_moves_that_go_one_way_are_not_accepted_and_as_many_that_do_not_are(
    sign: float, exceeds: bool
) -> None:
    """An optimizer that makes full steps of the smallest gradient went where a log led it, a few moves at a time."""
    freedom, steps = Freedom(), list[int]()
    for step in range(12):
        found = freedom.add(moved_by(sign**step * 2.0**-8, 2.0**-17))
        steps += [step for _, excess in found if "went together" in excess.site]
        if step < 3:  # four elements once: nothing of what noise reaches; twice 0.17, three times 0.48
            assert freedom.walks[WEIGHT].share < 1.0
    assert steps == (list(range(2, 12)) if exceeds else [])
    assert (freedom.fullest_gradient > 1.0) == exceeds


def test_what_is_expected_counts_in_steps_that_move_nothing() -> None:
    freedom = Freedom()
    for _ in range(8):
        freedom.add(moved_by(0.0, 0.5))
    assert freedom.walks[WEIGHT].expected == pytest.approx(4.0)
    assert freedom.fullest_gradient == 0.0
