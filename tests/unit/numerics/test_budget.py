"""The budget of moves against the exact tails of a Poisson variable."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import Nondeterminism
from tallystick.numerics.budget import SLACK, STEP_TAIL, TAIL, most_moves, most_square
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.policy import entry_budget, move_budget
from tallystick.numerics.reference import T_FIXED
from tallystick.numerics.rounded_sites import entry_room, is_dense
from tallystick.numerics.rounding import round_recorded

MEANS = st.floats(-12.0, 5.0).map(lambda exponent: 10.0**exponent)


def tail(least: int, mean: float) -> float:
    """Return the probability that a Poisson variable is ``least``, which is above its mean, or more."""
    terms = [math.exp(least * math.log(mean) - mean - math.lgamma(least + 1))]
    while terms[-1] > 1e-20 * terms[0]:
        terms.append(terms[-1] * mean / (least + len(terms)))
    return math.fsum(terms)


def test_the_tails_are_those_of_a_poisson_variable() -> None:
    assert tail(1, 0.25) == pytest.approx(-math.expm1(-0.25), rel=1e-13)
    assert tail(3, 2.0) == pytest.approx(1.0 - 5.0 * math.exp(-2.0), rel=1e-13)


@given(MEANS)
def test_more_than_the_budget_is_rare_and_the_budget_itself_is_none_too_rare(mean: float) -> None:
    """Chernoff's bound is at most sqrt(2 pi k) exp(1 / 12k) times the probability of the very number k (Stirling)."""
    budget = most_moves(mean, 1.0)
    assert tail(budget + 1, mean) <= TAIL
    if budget:
        loss = math.sqrt(2.0 * math.pi * budget) * math.exp(1.0 / (12.0 * budget))
        assert tail(budget, mean) * loss * (1.0 + 1e-6) > TAIL


@pytest.mark.parametrize(
    ("mean", "budget"), [(1e-3, 2), (1.0, 12), (8.0, 32), (100.0, 170), (4e6, 4_012_882)]
)
def test_budgets_by_hand(mean: float, budget: int) -> None:
    """The largest k with k - m - k log(k / m) above log(1e-9), found by counting up."""
    assert most_moves(mean, 1.0) == budget


@given(MEANS, MEANS)
def test_a_budget_grows_with_the_mean(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert most_moves(low) <= most_moves(high)


@given(MEANS, st.integers(1, 64))
def test_moves_that_come_in_clusters_have_a_budget_of_whole_clusters(mean: float, cluster: int) -> None:
    events = most_moves(SLACK * mean / cluster, 1.0)
    assert most_moves(mean, cluster=cluster) == cluster * (events if cluster == 1 else max(1, events))
    assert most_moves(mean, cluster=cluster) >= SLACK * mean - cluster


@given(st.integers(0, 2**32), MEANS)
def test_the_squares_of_chance_moves_stay_below_their_bound(seed: int, mean: float) -> None:
    """Three kinds of quanta; a chance of 1e-9 does not happen in a thousand draws."""
    rng = np.random.default_rng(seed)
    exponents = rng.choice(np.arange(-24, 8), 3, replace=False)
    squares, means = np.exp2(exponents.astype(float)), mean * rng.random(3)
    bound = most_square(dict(zip(exponents.tolist(), means.tolist(), strict=True)), 1e-9)
    drawn = rng.poisson(means, (1000, 3)) @ squares
    assert drawn.max() <= bound
    bernstein = (
        means @ squares
        + math.sqrt(2.0 * math.log(1e9) * (means @ squares**2))
        + math.log(1e9) / 3.0 * squares.max()
    )
    assert bound <= bernstein * (1.0 + 1e-6), "no looser than the bound that knows the variance alone"


@given(MEANS, st.integers(-60, 60))
def test_the_squares_of_one_quantum_have_the_budget_of_its_moves(mean: float, exponent: int) -> None:
    """Between the largest number that is no surprise and one more."""
    events = most_square({exponent: mean}, TAIL) / 2.0**exponent
    assert most_moves(mean, 1.0) - 1e-6 * events <= events <= most_moves(mean, 1.0) + 1.0 + 1e-6 * events


def test_a_slack_is_that_many_times_the_mean() -> None:
    assert most_square({0: 3.0, -4: 50.0}, 1e-6, slack=4.0) == pytest.approx(
        most_square({0: 12.0, -4: 200.0}, 1e-6)
    )
    assert most_square({}, 1e-6) == most_square({3: 0.0}, 1e-6) == 0.0


def test_nothing_expected_leaves_no_move_and_no_bound_leaves_all() -> None:
    assert [most_moves(mean) for mean in (0.0, -1.0, math.nan, 1e-12)] == [0, 0, 0, 0]
    assert most_moves(math.inf) == 1 << 62


def test_the_probabilities_and_slacks_are_those_that_were_decided() -> None:
    """docs/adr/0026: four times the mean, one in 1e9 for a run's budget, one in 1e6 for a step's."""
    assert [most_moves(2.0), most_moves(2.0, 1.0), most_moves(8.0, 1.0)] == [32, 16, 32]
    assert most_moves(100.0, 1.0, tail=STEP_TAIL) == 156
    assert most_moves(1e-12, cluster=64) == 64, "one result may always fall otherwise"


def test_budgets_of_entries_and_parities_by_hand() -> None:
    """Mean, eight standard deviations and 16: 10**6 elements, of which 1 in 64 is ambiguous, 1 in 1024 moves."""
    grid = SiteGrid(0, -12, -5, True, [0])
    assert entry_budget(grid, 10**6) == 15_625 + 8 * 125 + 16
    assert move_budget(grid, 10**6) == math.floor(976.5625 + 8 * 31.25) + 16
    assert entry_budget(SiteGrid(24, -36, -149), 1 << 20) == 2048 + math.floor(8 * 2**5.5) + 16
    assert entry_budget(grid, 10) == move_budget(grid, 10) == 10


@pytest.mark.parametrize(("octaves", "near"), [(1, 2048), (4, 512)])  # one point of two, or two of sixteen
@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_step_leaves_as_it_is_may_all_lie_near_boundaries(
    octaves: int, near: int, *, in_place: bool
) -> None:
    """Half of a queue, where its grid became an octave coarser: an honest log had more entries than noise explains."""
    n, grid = 4096, SiteGrid(0, -4, 0, False, [0])  # quanta of one
    x = torch.arange(n, dtype=torch.float64) / 2.0**octaves
    x[0] = T_FIXED + 2.0**-20  # a value that has just been computed
    entries = round_recorded(x, grid, out=x if in_place else torch.empty_like(x))
    own = torch.arange(n, dtype=torch.float64) / 2.0**octaves
    own[0] = T_FIXED
    assert len(entries) == near + 1
    for most, dense in ((0, True), (1, False), (n, False)):
        assert is_dense(own, grid, entries.indexes, most) == dense
    own += T_FIXED - 0.5  # the same, of values that have been computed
    assert is_dense(own, grid, entries.indexes, near)


def test_as_many_that_have_been_computed_are_refused_and_so_are_those_of_a_dithered_grid() -> None:
    n = 4096
    x, y = (
        T_FIXED + torch.arange(n, dtype=torch.float64) * 2.0**-44,
        torch.full((n,), 0.5, dtype=torch.float64),
    )
    for values, dithered in ((x, False), (y, True)):
        with pytest.raises(Nondeterminism, match="of 4096 elements are ambiguous, more than one in 8"):
            round_recorded(values, SiteGrid(0, -2, 0, dithered, [0]), out=values)
    assert entry_room(n) < n // 2


def test_equal_values_are_near_a_boundary_together_and_count_once() -> None:
    """The running variances of a batch norm whose inputs hardly vary, and of its dead channels."""
    grid, x = SiteGrid(0, -4, 0, False, [0]), torch.full((4096,), T_FIXED, dtype=torch.float64)
    entries = round_recorded(x, grid, out=torch.empty_like(x))
    assert len(entries) == 4096
    for most, dense in ((0, True), (1, False)):
        assert is_dense(x, grid, entries.indexes, most) == dense


@pytest.mark.parametrize("scales", [[0], [0, 3]])
@pytest.mark.parametrize("precision", [0, 14])
def test_a_value_lies_on_a_finer_grid_by_its_own_quantum(scales: list[int], precision: int) -> None:
    """Of its block, and with a precision of its own size."""
    grid = SiteGrid(precision, -20, -14, False, scales)
    size = 1024.0 if precision else 1.0
    x = torch.tensor([size * (1.0 + 2.0**-17), 1.0 + 2.0**-15, size * (1.0 + 2.0**-19), 1.0 + 2.0**-15])
    for at, dense in ((0, False), (1, False), (2, True), (3, False)):
        assert is_dense(x, grid, np.array([at]), 0) == dense, at
