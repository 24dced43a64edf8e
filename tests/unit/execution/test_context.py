"""Logs that lie, logs that are malformed, and the grids a recorder may state: each has its violation, none a crash."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.dispatch.decisions import ABOVE, BELOW, EQUAL
from tallystick.execution.noise.bands import put_in_one_block
from tallystick.execution.noise.buffers import lifted_scale
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.breaches import find_policy_breaches
from tallystick.execution.rounding.context import RecordingContext, outgrown_from, reaches
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import (
    CLEAR,
    NOISE_BAND,
    RISES,
    UNSEEN,
    floor_exponent,
    held_grid,
    is_noise_only,
    largest_scale,
    loudest_band,
    rise_since,
    scale_exponents,
    settled_scales,
    site_grid,
    still_heard,
    unseen_grid,
)
from tallystick.execution.rounding.headers import HeaderChecks
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import run_step
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    decode,
    decode_frame,
    encode,
    encode_decision,
    encode_frame,
)
from tallystick.numerics.policy import (
    BF16,
    FP32,
    FP64,
    SMALL_FINER,
    SPARSEST,
    Policy,
    entry_budget,
    policy_of,
)
from tallystick.numerics.reference import T_FIXED
from tallystick.numerics.rounding import round_recorded

POLICIES = pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
LOUDEST = -6  # the least that is hardly more than noise
LOUD = {"fp64": -26, "fp32": -10}  # a band wide enough for some entries among 4096 elements
GRADIENT, STATE = (int(Kind.GRADIENT), 0), (int(Kind.STATE), 0)
AT_GRADIENT = SiteAddress(0, 0, Kind.GRADIENT, 0)


def gradient_grid(policy: Policy, scale: int = 1, band: int | None = None) -> SiteGrid:
    band = LOUD[policy.name] if band is None else band
    return SiteGrid(
        policy.gradient_precision,
        band,
        floor_exponent(band, policy.finest_floor(band)),
        policy.dithered,
        [scale],
    )


def table_of(policy: Policy, grid: SiteGrid | None = None) -> GridTable:
    return GridTable({GRADIENT: grid or gradient_grid(policy), STATE: SiteGrid(24, -44, -149)})


def gradient() -> Tensor:
    """4096 numbers whose rms is 1.5, so that their scale exponent is 1."""
    return 1.5 * torch.randn(4096, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def noisy(x: Tensor, policy: Policy) -> Tensor:
    """``x`` moved by up to nine tenths of the grid's band."""
    band = math.ldexp(1.0, 1 + LOUD[policy.name])
    return x + 0.9 * band * (
        2.0 * torch.rand(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype) - 1.0
    )


def recorded(policy: Policy, x: Tensor, table: GridTable | None = None) -> tuple[bytes, Tensor]:
    context = RecordingContext(policy, table or table_of(policy))
    out = torch.empty_like(x)
    context.round(Kind.GRADIENT, 0, x, out=out, key=(1, 2), name="gradient of w")
    context.settle_noise()
    return context.finish(), out


def followed(
    policy: Policy, y: Tensor, frame: bytes | Frame, table: GridTable | None = None, **more: Any
) -> tuple[FollowingContext, Tensor]:
    read = frame if isinstance(frame, Frame) else decode_frame(frame)
    context = FollowingContext(policy, table or table_of(policy), read, **more)
    out = torch.empty_like(y)
    context.round(Kind.GRADIENT, 0, y, out=out, key=(1, 2), name="gradient of w")
    context.finish()
    return context, out


def with_payload(frame: bytes, address: SiteAddress, payload: bytes | None) -> Frame:
    payloads = {a: p for a, p in decode_frame(frame) if a != address}
    if payload is not None:
        payloads[address] = payload
    return Frame.of(payloads)


@POLICIES
def test_the_log_makes_a_noisy_follower_round_as_the_recorder_did(policy: Policy) -> None:
    x = gradient()
    frame, out = recorded(policy, x)
    y = noisy(x, policy)
    context, own = followed(policy, y, frame)
    assert context.violations == []
    assert torch.equal(own, out)
    # The control, a missing site: without its entries the follower rounds some element to the other side.
    bare, alone = followed(policy, y, with_payload(frame, AT_GRADIENT, None))
    assert not torch.equal(alone, out)
    assert bare.violations == []  # nothing in the log lies; the state tells


@POLICIES
def test_negative_zero_is_never_written(policy: Policy) -> None:
    x = gradient()
    x[:8] = torch.tensor([-0.0, 0.0, -1e-30, 1e-30, -5e-324, -0.0, 1e-200, -1e-200])
    frame, out = recorded(policy, x)
    _, own = followed(policy, x, frame)
    for rounded in (out, own):
        assert not torch.signbit(rounded[rounded == 0.0]).any()


@POLICIES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_stops_recorder_and_follower_by_name(
    policy: Policy, value: float
) -> None:
    x = gradient()
    frame, _ = recorded(policy, x)
    x[77] = value
    with pytest.raises(Nondeterminism, match="gradient of w: element 77 is not finite"):
        recorded(policy, x)
    with pytest.raises(Nondeterminism, match="gradient of w: element 77 is not finite"):
        followed(policy, x, frame)


@POLICIES
@pytest.mark.parametrize(
    "address",
    [
        SiteAddress(0, 0, Kind.GRADIENT, 9),
        SiteAddress(0, 0, Kind.STATE, 0),
        SiteAddress(0, 3, Kind.DECISION, 0),
        SiteAddress(1, 0, Kind.GRADIENT, 0),
        SiteAddress(0, 1, Kind.GRADIENT, 0),
        SiteAddress(0, 0, Kind.ACTIVATION, 0),
    ],
)
def test_a_site_that_the_step_does_not_have_is_a_violation(policy: Policy, address: SiteAddress) -> None:
    x = gradient()
    frame, _ = recorded(policy, x)
    entry = encode(SparseEntries(8, 1, np.array([3]), np.array([1])))
    context, _ = followed(policy, x, with_payload(frame, address, entry))
    assert [v.rule for v in context.violations] == ["the log has a site that the step does not have"]


@POLICIES
def test_an_entry_far_from_its_boundary_is_a_violation_and_not_obeyed(policy: Policy) -> None:
    x = gradient()
    frame, out = recorded(policy, x)
    honest = decode(decode_frame(frame).find(AT_GRADIENT) or b"\0", x.numel(), 1)
    element = next(i for i in range(x.numel()) if i not in honest.indexes)
    indexes = np.sort(np.append(honest.indexes, element))
    symbols = np.ones(indexes.size, dtype=np.int64)
    symbols[np.isin(indexes, honest.indexes)] = honest.symbols
    context, own = followed(
        policy, x, with_payload(frame, AT_GRADIENT, encode(SparseEntries(x.numel(), 1, indexes, symbols)))
    )
    assert [(v.site, v.element) for v in context.violations] == [("gradient of w", element)]
    assert "farther than twice the band" in context.violations[0].rule
    assert torch.equal(own, out)


@POLICIES
def test_more_entries_than_the_budget_are_a_violation(policy: Policy) -> None:
    x = gradient()
    frame, _ = recorded(policy, x)
    budget = entry_budget(gradient_grid(policy), x.numel())
    for count, rule in (
        (budget, "farther than twice the band"),
        (budget + 1, f"exceed the budget of {budget}"),
    ):
        every = SparseEntries(x.numel(), 1, np.arange(count), np.zeros(count, dtype=np.int64))
        context, _ = followed(policy, x, with_payload(frame, AT_GRADIENT, encode(every)))
        (violation,) = context.violations  # too many are not looked at one by one, and none of them is obeyed
        assert rule in violation.rule


BUFFER, AT_BUFFER = (int(Kind.BUFFER), 0), SiteAddress(0, 0, Kind.BUFFER, 0)
TOGETHER = 128  # running variances, of which nearly all is what is left of the first one: all within half a band of a boundary


def together() -> tuple[GridTable, Tensor]:
    """Values that are all other ones, on both sides of one boundary, and the table with the grid that they have."""
    grid = site_grid(FP32, Kind.BUFFER, FP32.buffer_band[0], np.array([0]))
    boundary = 0.5 + math.ldexp(T_FIXED, grid.floor + 2)  # its quantum is 14 bits of it, above the floor's
    x = boundary + torch.linspace(-0.5, 0.5, TOGETHER, dtype=torch.float64) * 2.0**grid.band
    return GridTable({BUFFER: grid}), x


def follow_buffer(
    table: GridTable, x: Tensor, frame: bytes | Frame | None
) -> tuple[Any, Tensor, SparseEntries]:
    """Round ``x`` as a buffer in place, following ``frame``, or recording it: None."""
    context: Any = RecordingContext(FP32, table)
    if frame is not None:
        read = frame if isinstance(frame, Frame) else decode_frame(frame)
        context = FollowingContext(FP32, table, read, sites=frozenset({BUFFER}))
    out = x.clone()
    context.round(Kind.BUFFER, 0, out, out=out, name="running_var")
    written = context.finish()
    payload = decode_frame(written).find(AT_BUFFER) if written is not None else None
    return written or context, out, decode(payload or b"\0", TOGETHER, 1)


def test_values_that_lie_together_may_all_be_in_the_log_and_no_more_than_the_budget_is_moved() -> None:
    """75 entries of 64: an honest run of a speech model ended in a log violation."""
    table, x = together()
    frame, stated, entries = follow_buffer(table, x, None)
    budget = entry_budget(table.sites[BUFFER], TOGETHER)
    assert len(entries) == TOGETHER > budget == 64
    assert x.unique().numel() == TOGETHER
    for noise in (0.0, 2.0**-24, -(2.0**-24)):
        context, out, _ = follow_buffer(table, x + noise, frame)
        assert context.violations == []
        assert torch.equal(out, stated)

    for count in (budget, budget + 1):
        symbols = entries.symbols.copy()
        symbols[:count] ^= 1
        other = SparseEntries(TOGETHER, 1, entries.indexes, symbols)
        context, out, _ = follow_buffer(table, x, with_payload(frame, AT_BUFFER, encode(other)))
        assert ["exceed the budget of 64" in v.rule for v in context.violations] == [True] * (count > budget)
        assert torch.equal(out, stated) == (count > budget), "what exceeds the budget is not obeyed"

    y = x.clone()
    y[5] += 2.0 ** (FP32.buffer_band[0] + 2)  # one of them lies where no honest trainer has it
    context, _, _ = follow_buffer(table, y, frame)
    assert [v.rule for v in context.violations] == [f"{TOGETHER} entries exceed the budget of 64"]


def other(policy: Policy, **fields: Any) -> GridTable:
    grid = gradient_grid(policy)
    values = {"precision": grid.precision, "band": grid.band, "floor": grid.floor, "dithered": grid.dithered}
    scales = fields.pop("scales", [1])
    return table_of(policy, SiteGrid(**{**values, **fields}, scales=scales))


def wide(policy: Policy) -> int:
    return policy.gradient_band[1]


TABLES: dict[str, tuple[Callable[[Policy], GridTable], str | None]] = {
    "the widest band": (
        lambda p: other(p, band=wide(p), floor=floor_exponent(wide(p), p.finest_floor(wide(p)))),
        None,
    ),
    "a band too wide": (
        lambda p: other(p, band=wide(p) + 1, floor=floor_exponent(wide(p) + 1, p.finest_floor(wide(p) + 1))),
        # fp32: the next band is the mark of noise, which is never dithered
        r"band 2\*\*-\d+ outside 2\*\*-\d+\.\.2\*\*-\d+|dither True; the policy has",
    ),
    "a band too narrow": (
        lambda p: other(p, band=p.gradient_band[0] - 1),
        r"band 2\*\*-\d+ outside",
    ),
    "another precision": (
        lambda p: other(p, precision=12, dithered=False),
        r"precision 12, dither False; the policy has",
    ),
    "a coarser floor": (
        lambda p: other(p, floor=gradient_grid(p).floor + 1),
        r"floor 2\*\*-\d+, the policy has 2\*\*-\d+",
    ),
    "a quiet gradient on the finest grid": (
        lambda p: other(p, band=p.gradient_band[0], floor=p.finest_floor(p.gradient_band[0])),
        None,
    ),
    "a quiet gradient on the grid of a noisy one": (
        lambda p: other(p, band=p.gradient_band[0], floor=p.gradient_coarsest),
        r"floor 2\*\*-\d+, the policy has 2\*\*-\d+ for band",
    ),
    "a noisy gradient on the grid of a quiet one": (
        lambda p: other(p, band=p.gradient_band[1], floor=p.gradient_floor),
        r"floor 2\*\*-\d+, the policy has 2\*\*-?\d+ for band",
    ),
    "a scale as wide as slack allows": (lambda p: other(p, scales=[4]), None),
    "a scale too wide": (
        lambda p: other(p, scales=[5]),
        r"scale 2\*\*5 of block 0 is too wide, its values have 2\*\*1",
    ),
    "a scale for each row": (lambda p: other(p, scales=[1] * 64), None),
    "a scale too wide in one row": (
        lambda p: other(p, scales=[1, 1, 6, *[1] * 61]),
        r"scale 2\*\*6 of block 2 is too wide",
    ),
    "noise on a dithered grid": (
        lambda p: other(
            p,
            band=NOISE_BAND,
            floor=floor_exponent(NOISE_BAND, p.finest_floor(NOISE_BAND)),
            dithered=True,
            precision=0,
        ),
        "dither True; the policy has",
    ),
    "noise that is none": (
        lambda p: other(
            p,
            band=NOISE_BAND,
            floor=floor_exponent(NOISE_BAND, p.finest_floor(NOISE_BAND)),
            dithered=False,
            scales=[-40],
        ),
        "declared to be noise below",
    ),
    "a gradient that is not the run's": (
        lambda p: GridTable({**table_of(p).sites, (int(Kind.GRADIENT), 7): gradient_grid(p, scale=100)}),
        "the run has no such site",
    ),
    "a kind that the policy does not have": (
        lambda p: GridTable({**table_of(p).sites, (int(Kind.ACTIVATION), 0): gradient_grid(p)}),
        "the run has no such site",
    ),
    "a state with scales": (
        lambda p: GridTable({**table_of(p).sites, STATE: SiteGrid(24, -44, -149, scales=[1])}),
        "a state site has a relative band",
    ),
    "a decision in the policy's range": (
        lambda p: GridTable(
            {**table_of(p).sites, (int(Kind.DECISION), 4): SiteGrid(0, p.decision_band[1], 0)}
        ),
        None,
    ),
    "a decision beyond it": (
        lambda p: GridTable(
            {**table_of(p).sites, (int(Kind.DECISION), 4): SiteGrid(0, p.decision_band[1] + 1, 0)}
        ),
        r"band 2\*\*-\d+ outside",
    ),
}


@POLICIES
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("way", ["logged", "committed"])
def test_a_grid_that_the_policy_does_not_allow_is_a_violation_however_it_comes(
    policy: Policy, name: str, way: str
) -> None:
    """Stated by the step's log, or already in the committed state that the follower started from."""
    make, rule = TABLES[name]
    table = make(policy)
    x = gradient().reshape(table.sites[GRADIENT].scales.size, -1)
    if way == "logged":
        frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): table_of(policy).diff(table)})
        start = table_of(policy)
    else:
        frame, start = Frame(), table
    context, _ = followed(policy, x, frame, start, sites=frozenset({GRADIENT, STATE}))
    if rule is None:
        assert context.violations == []
    else:
        found = [v for v in context.violations if v.rule]
        assert found
        assert any(re.search(rule, v.rule) for v in found)


def test_a_finer_grid_is_allowed_where_moves_are_weighed_down_to_sixteen_bands() -> None:
    for policy, more, allowed in ((FP64, 0, True), (FP64, 1, False), (FP32, 0, True), (FP32, 1, False)):
        grid = gradient_grid(policy)
        finer = grid.floor - grid.band - SPARSEST + more
        context, _ = followed(policy, gradient(), Frame(), other(policy, floor=grid.floor - finer))
        assert bool(context.violations) != allowed


MALFORMED: dict[str, tuple[GridTable, str]] = {
    "no scales": (GridTable({GRADIENT: SiteGrid(24, -44, -149)}), "has no scales, and no old value"),
    "blocks that do not divide": (
        GridTable({GRADIENT: SiteGrid(0, -16, -5, True, [1] * 7)}),
        r"has 7 blocks, its shape is \[4096\]",
    ),
    "a scale for each element": (
        GridTable({GRADIENT: SiteGrid(0, -16, -5, True, [1] * 4096)}),
        r"has 4096 blocks, its shape is \[4096\]",
    ),
    "no grid at all": (GridTable(), "no grid is given for gradient of w"),
}


@POLICIES
@pytest.mark.parametrize("name", MALFORMED)
def test_a_grid_that_cannot_be_used_is_invalid_input(policy: Policy, name: str) -> None:
    table, rule = MALFORMED[name]
    start = table_of(policy)
    target = GridTable({**{k: g for k, g in start.sites.items() if k != GRADIENT}, **table.sites})
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): start.diff(target)})
    with pytest.raises(InvalidInput, match=rule):
        followed(policy, gradient(), frame, start)


def test_a_scale_above_the_slack_is_believed_only_if_the_last_calibration_had_it() -> None:
    x = gradient()
    high = other(FP64, scales=[9])
    context, _ = followed(FP64, x, Frame(), high)
    assert len(context.violations) == 1
    context, _ = followed(FP64, x, Frame(), high, base=high)
    assert context.violations == []


def test_a_noise_floor_is_the_followers_to_measure_and_no_violation() -> None:
    """A gradient declared to be noise below more than it has: without a measurement of one's own nothing speaks against it."""
    floor = floor_exponent(NOISE_BAND, FP64.finest_floor(NOISE_BAND))
    start = table_of(FP64, SiteGrid(24, NOISE_BAND, floor, False, [21]))
    context, out = followed(FP64, gradient(), Frame(), start)
    assert context.violations == []
    assert not out.any()
    assert context.freedom.silenced == 4096


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("was_heard", "rise"), [(True, RISES - 1), (True, RISES), (True, RISES + 3), (False, RISES)]
)
def test_a_noise_floor_rises_only_with_gradients_that_were_more_than_noise_when_it_was_measured(
    policy: Policy, was_heard: bool, rise: int
) -> None:
    """And by three octaves at most: one that grows farther is measured again."""
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([-20]))
    loud = site_grid(policy, Kind.GRADIENT, policy.gradient_band[0], np.array([1]))
    first, second = (Kind.GRADIENT, 0), (Kind.GRADIENT, 1)
    base = GridTable({first: loud if was_heard else silent, second: silent})
    context = RecordingContext(policy, GridTable({first: loud, second: silent}), base=base)
    x = torch.full((4096,), 2.0**rise)  # its scale was 2**1
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    context.settle_noise()
    context.finish()
    assert int(context.table.sites[second].scales[0]) == (-20 + min(rise, RISES) if was_heard else -20)


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("grows", [6, -6])
@pytest.mark.parametrize("chooses", [True, False])
def test_a_noise_floor_stays_where_it_was_measured_in_the_step_beside_grids_that_are_held(
    policy: Policy, grows: int, chooses: bool
) -> None:
    """Their scales are those of the step before; how far the largest gradient has moved since then is in the measurement."""
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([-20]))
    loud = site_grid(policy, Kind.GRADIENT, policy.gradient_band[0], np.array([1]))
    first, second = (Kind.GRADIENT, 0), (Kind.GRADIENT, 1)
    table = GridTable({first: loud, second: silent})
    context = RecordingContext(policy, table, current=table, chooses=chooses)
    x = torch.full((4096,), 2.0**grows)
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    context.settle_noise()
    context.finish()
    moved = int(context.table.sites[first].scales[0]) - 1
    assert abs(moved) >= (abs(grows) - 1 if chooses or grows > 0 else 0)
    assert chooses or moved >= 0, "until grids are chosen again no scale falls"
    assert int(context.table.sites[second].scales[0]) == -20 + (moved if chooses else 0)


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_noise_floor_does_not_climb_where_the_largest_gradient_comes_and_goes(policy: Policy) -> None:
    """It lies above what was measured by as much as the largest gradient does: a fall left out made each rise a new one."""
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([-20]))
    loud = site_grid(policy, Kind.GRADIENT, policy.gradient_band[0], np.array([3]))
    first, second = (Kind.GRADIENT, 0), (Kind.GRADIENT, 1)
    base = GridTable({first: loud, second: silent})
    found, now = list[int](), silent
    for size in (2, 5, 2, 5, 7, 2):
        before = GridTable({first: loud.with_scales(np.array([size + 1])), second: now})
        context = RecordingContext(policy, before, base=base)
        x = torch.full((4096,), 2.0**size)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        context.settle_noise()
        context.finish()
        now = context.table.sites[second]
        found.append(int(now.scales[0]) + 20)
    assert found == [0, 3, 0, 3, 3, 0]


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_noise_floor_falls_no_lower_than_what_was_measured(policy: Policy) -> None:
    """The largest gradient is another one where another set has a gradient: a floor that fell each time called noise a signal."""
    silent, low = (site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([scale])) for scale in (-20, -19))
    loud = site_grid(policy, Kind.GRADIENT, policy.gradient_band[0], np.array([9]))
    first, second = (Kind.GRADIENT, 0), (Kind.GRADIENT, 1)
    base = GridTable({first: replace(loud, scales=np.array([1], dtype=np.int16)), second: silent})
    context = RecordingContext(policy, GridTable({first: loud, second: low}), base=base)
    x = torch.full((4096,), 1.0)  # its scale was 2**9 in the step before
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    context.settle_noise()
    context.finish()
    assert int(context.table.sites[first].scales[0]) < 9
    assert int(context.table.sites[second].scales[0]) == -20
    for scale, rise in ((-4, 0), (1, 0), (3, 2), (1 + RISES, RISES), (9 + RISES, RISES)):  # a log states any
        assert rise_since(policy, base, {first: x.numel()}, {first: scale}) == rise


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_gradient_that_grows_slowly_out_of_its_noise_is_heard(policy: Policy) -> None:
    """Each step of it lies within the noise that the one before would have at most: the noise is what was measured."""
    base = GridTable(
        {(Kind.GRADIENT, 0): site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([-20]))}
    )  # 2**-21
    table, highest = base, loudest_band(policy, was_noise=True)
    for size in range(-23, -13):
        x = torch.full((4096,), 1.37 * 2.0 ** (size - 1))
        context = RecordingContext(policy, table, base=base)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        context.finish()
        table = context.table
        assert is_noise_only(table.sites[(Kind.GRADIENT, 0)]) == (size + 1 < -21 - highest), size


def test_a_gradient_of_zeros_is_silent_under_any_floor() -> None:
    """With a measurement of its own a follower objects to a floor far above its noise, unless nothing is there to silence."""
    floor = floor_exponent(NOISE_BAND, FP32.finest_floor(NOISE_BAND))
    start = table_of(FP32, SiteGrid(0, NOISE_BAND, floor, False, [21]))
    noise = SiteNoise(2.0**-9, np.zeros(1, dtype=np.int64), 0.0, 2.0**-9, 4096)
    quiet = table_of(FP32, SiteGrid(0, NOISE_BAND, floor, False, [1]))
    own = Yardstick(FP32, Calibration({(Kind.GRADIENT, 0): noise}, quiet))
    for x, excesses in ((gradient(), 1), (torch.zeros(4096), 0)):
        context, out = followed(FP32, x.float(), Frame(), start, yardstick=own)
        assert not out.any()
        assert context.violations == []
        assert len([excess for _, excess in context.excesses if "2**" in excess.stated]) == excesses


def measured(largest: float = 0.0, grid: SiteGrid | None = None) -> Yardstick:
    """A follower's own measurement of the one gradient, whose values deviate by ``largest`` at most."""
    noise = SiteNoise(2.0**-9, np.ones(1, dtype=np.int64), 1.5, largest, 4096)
    return Yardstick(FP32, Calibration({(Kind.GRADIENT, 0): noise}, table_of(FP32, grid)))


def test_a_silenced_gradient_is_moved_by_all_that_it_is_where_the_follower_hears_it() -> None:
    silent = SiteGrid(0, NOISE_BAND, floor_exponent(NOISE_BAND, FP32.finest_floor(NOISE_BAND)), False, [21])
    for own, share in ((None, 1.0), (silent, 0.0)):
        context, _ = followed(
            FP32, gradient().float(), Frame(), table_of(FP32, silent), yardstick=measured(grid=own)
        )
        assert context.freedom.energy == pytest.approx(float(gradient().square().sum()), rel=1e-3)
        assert context.freedom.shifted == share * context.freedom.energy


def told(
    policy: Policy,
    y: Tensor,
    frame: bytes | Frame,
    log: SiteGrid,
    own: SiteGrid,
    *,
    is_loud: bool,
    is_all: bool = False,
    bent: dict[tuple[Kind, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient as followed, and which elements would have had which other value by the follower's own measurement."""
    noise = SiteNoise(2.0**-9, np.ones(1, dtype=np.int64), 1.5, 0.0, 4096)
    yardstick = Yardstick(policy, Calibration({(Kind.GRADIENT, 0): noise}, table_of(policy, own)))
    given: list[tuple[int, Tensor, Tensor, Tensor, bool, bool]] = []
    more = {"yardstick": yardstick, "own": lambda *one: given.append(one), "own_gradients": bent or {}}
    followed(policy, y, frame, table_of(policy, log), **more)
    ((ordinal, out, at, values, loud, whole),) = given
    assert (ordinal, loud, whole) == (0, is_loud, is_all)
    return out, at, values


@POLICIES
def test_what_the_log_moved_would_have_been_the_followers_own(policy: Policy) -> None:
    x, grid = gradient(), gradient_grid(policy)
    frame, out = recorded(policy, x)
    y = noisy(x, policy)
    _, alone = followed(policy, y.clone(), with_payload(frame, AT_GRADIENT, None))
    found, at, values = told(policy, y, frame, grid, grid, is_loud=False)
    assert torch.equal(found, out)
    assert at.tolist() == (alone != out).nonzero().reshape(-1).tolist() != []
    assert torch.equal(values.double(), alone[at].double())


@POLICIES
def test_what_the_logs_decisions_made_of_a_gradient_would_have_been_what_the_followers_make(
    policy: Policy,
) -> None:
    x, grid = gradient(), gradient_grid(policy)
    frame, out = recorded(policy, x)
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([2 - NOISE_BAND]))
    bent = {GRADIENT: x * 1.25}
    _, alone = followed(policy, bent[GRADIENT].clone(), with_payload(frame, AT_GRADIENT, None))
    found, at, values = told(policy, x.clone(), frame, grid, grid, is_loud=False, bent=bent)
    assert torch.equal(found, out)
    assert at.tolist() == (alone != out).nonzero().reshape(-1).tolist() != []
    assert torch.equal(values.double(), alone[at].double())
    # As it is where one of the two is silent, and where both are.
    _, at, values = told(policy, x.clone(), Frame(), silent, grid, is_loud=True, is_all=True, bent=bent)
    assert at.tolist() == list(range(4096))
    assert torch.equal(values, bent[GRADIENT])
    assert told(policy, x.clone(), Frame(), silent, silent, is_loud=False, bent=bent)[1].tolist() == []


@POLICIES
def test_what_one_calls_noise_and_the_other_does_not_would_have_been_all_or_nothing(policy: Policy) -> None:
    """Silence can be chosen, and so can noise be heard, without a move."""
    x, grid = gradient(), gradient_grid(policy)
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([2 - NOISE_BAND]))  # the rms of x is 1.5

    out, at, values = told(policy, x.clone(), Frame(), silent, grid, is_loud=True, is_all=True)
    assert not out.any()
    assert at.tolist() == list(range(4096))
    assert torch.equal(values, x)

    out, at, values = told(policy, x.clone(), Frame(), grid, silent, is_loud=True, is_all=True)
    assert out.any()
    assert at.tolist() == out.nonzero().reshape(-1).tolist()
    assert not values.any()

    for log, own in ((silent, silent), (grid, grid)):
        assert told(policy, x.clone(), Frame(), log, own, is_loud=False)[1].tolist() == [], (log, own)
    loud = gradient_grid(policy, band=LOUDEST)
    assert told(policy, x.clone(), Frame(), loud, loud, is_loud=True)[1].tolist() == []


def scale_excesses(scale: int, largest: float) -> list[str]:
    """What a follower notes of a header that takes the gradient's scale from 1 to ``scale``."""
    start = table_of(FP32)
    update = start.diff(table_of(FP32, gradient_grid(FP32, scale)))
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): update})
    context, _ = followed(FP32, gradient().float(), frame, start, yardstick=measured(largest))
    assert context.violations == []
    return [excess.own for _, excess in context.excesses if excess.own.startswith("scale")]


@POLICIES
@pytest.mark.parametrize(("largest", "noted"), [(2.0**-20, 0), (2.0**-22, 1), (None, 1)])
def test_zeros_keep_their_scale_where_a_follower_finds_nothing_but_noise(
    policy: Policy, largest: float | None, noted: int
) -> None:
    """A sum that cancels exactly there and leaves last bits here: its scale was called too wide, and its trainer a liar."""
    start = table_of(policy)
    frame, out = recorded(policy, torch.zeros(4096, dtype=torch.float64), start)
    assert not out.any()
    y = torch.full((4096,), 2.0**-21, dtype=torch.float64)
    yardstick = None if largest is None else measured(largest)
    chosen = list[Tensor]()

    def note(_: int, gradient: Tensor, at: Tensor, mine: Tensor, is_loud: bool, is_all: bool) -> None:
        chosen.extend((gradient, mine) if is_loud and is_all and at.numel() else ())

    # Noise is measured in the step.
    context, own = followed(policy, y, frame, start, yardstick=yardstick, own=note)
    assert noted or [float(each.abs().max()) for each in chosen] == [0.0, 2.0**-21], "it counts as silence"
    assert ["is too wide" in each.rule for each in context.violations] == [True] * noted
    assert noted or not [each for _, each in context.excesses if each.own.startswith("scale")]
    assert bool(own.any()) == bool(noted), "what is within its noise rounds to zero here too"


@pytest.mark.parametrize(("largest", "noted"), [(2.0**-40, 0), (2.0**-42, 1)])
def test_a_loss_of_nothing_may_be_noise_here(largest: float, noted: int) -> None:
    place = (int(Kind.LOSS), 0)
    table = GridTable({place: site_grid(FP32, Kind.LOSS, -20, np.array([0]))})
    noise = {place: SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, largest, 1)}
    yardstick = Yardstick(FP32, Calibration(noise, table))
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): GridTable().diff(table)})
    context = FollowingContext(FP32, GridTable(), frame, GridTable(), is_first=True, yardstick=yardstick)
    x = torch.full((1,), 2.0**-41, dtype=torch.float64)
    context.round(Kind.LOSS, 0, x, out=torch.empty_like(x), key=(1, 2), name="loss")
    assert ["is too wide" in each.rule for each in context.violations] == [True] * noted


@POLICIES
def test_a_gradient_is_newly_heard_where_its_trainers_last_measurement_did_not_hear_it(
    policy: Policy,
) -> None:
    """That is measured in the step, and held against what is found; what is measured in it anyway is held against that."""
    heard, silent = gradient_grid(policy), site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([1]))
    other = site_grid(policy, Kind.BUFFER, policy.buffer_band[0], np.array([1]))
    for now, base, is_new in (
        (heard, {GRADIENT: silent}, True),
        (heard, {(Kind.BUFFER, 7): other}, True),
        (heard, {GRADIENT: heard}, False),
        (silent, {GRADIENT: silent}, False),
        (heard, {}, False),  # the trainer measured in this step
    ):
        context = FollowingContext(policy, table_of(policy, now), Frame(), GridTable(base))
        assert context.newly_heard(GRADIENT) == is_new
        assert context._headers.newly_heard(GRADIENT, now) == (is_new or not base)
        context.hold_overdue()
        assert not context.newly_heard(GRADIENT)
        assert context._headers.newly_heard(GRADIENT, now) == (now is heard)


def changed(
    policy: Policy,
    before: int,
    now: int,
    own: int,
    *,
    calibrated: bool,
    first: bool,
    chooses: bool = True,
    outgrown: frozenset[int] = frozenset(),
) -> list[str]:
    """What is noted of a gradient whose band went from one to another; the auditor's ``own`` noise asks for a third."""
    start, table = (
        table_of(policy, site_grid(policy, Kind.GRADIENT, band, np.array([1]))) for band in (before, now)
    )
    update = b"" if start == table else start.diff(table)
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): update} if update else {})
    relative = 2.0 ** (own - policy.safety)
    noise = SiteNoise(relative, np.ones(1, dtype=np.int64), 1.0, 2.0 * relative, 4096)
    grid = site_grid(policy, Kind.GRADIENT, min(own, policy.gradient_band[1]), np.array([1]))
    yardstick = Yardstick(policy, Calibration({GRADIENT: noise}, GridTable({GRADIENT: grid})))
    context = FollowingContext(
        policy, start, frame, GridTable() if calibrated else start, is_first=first, yardstick=yardstick,
        chooses=chooses,
    )  # fmt: skip
    context.outgrown = outgrown
    context.finish()
    return [excess.own for _, excess in context.excesses]


@pytest.mark.parametrize(("first", "noted"), [(False, True), (True, False)])
@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_what_was_noise_is_heard_again_at_a_calibration_by_the_lower_limit(
    policy: Policy, *, first: bool, noted: bool
) -> None:
    """Whoever chose silence was heard again by the higher one, as the auditor had heard it all along."""
    what = "a band of 2**-6 at most where it was noise"
    for before, now, is_over in ((NOISE_BAND, -5, noted), (NOISE_BAND, -6, False), (-9, -5, False)):
        found = changed(policy, before, now, -9, calibrated=True, first=first)
        assert (what in found) == is_over, (before, now)


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("chooses", "outgrown", "noted"),
    [(True, (), False), (False, (), True), (False, (1,), True), (False, (0,), False)],
)
@pytest.mark.parametrize(
    ("before", "now", "own"),
    [(NOISE_BAND, CLEAR + 1, "nothing but noise"), (-9, NOISE_BAND, "more than noise")],
)
def test_what_is_noise_changes_where_grids_are_chosen_or_where_a_gradient_has_outgrown_that(
    policy: Policy, before: int, now: int, own: str, chooses: bool, outgrown: tuple[int, ...], noted: bool
) -> None:
    """A measurement in a lucky step made one of two margins heard for good: a backdoor of 100 %, no other dishonesty."""
    given: Any = {"first": False, "chooses": chooses, "outgrown": frozenset(outgrown)}
    loud = policy.gradient_band[
        1
    ]  # by the auditor's own noise over the scale that was: an octave less is enough
    for noise, is_free in ((loud - 2, False), (loud, before != NOISE_BAND)):
        found = changed(policy, before, now, noise, calibrated=True, **given)
        assert (f"{own}, as before" in found) == (noted and not is_free), noise
    assert (f"{own}, as before" in changed(policy, before, now, -9, calibrated=True, **given)) == noted


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_gradient_that_stays_heard_has_the_band_of_its_noise_over_the_scale_that_it_had(
    policy: Policy,
) -> None:
    """Over a small batch's own scale it was noise, and silent from there; too loud for the scale it had, it is that."""
    before, widest = site_grid(policy, Kind.GRADIENT, -9, np.array([3])), policy.gradient_band[1]
    for noise, band in ((-20, -9), (-9, -9), (-8, -8), (widest, widest), (widest + 1, None)):
        found = still_heard(policy, before, 2.0 ** (3 + noise - policy.safety))
        assert (None if found is None else found.band) == band, noise
        if found is not None:
            assert found.scales.tolist() == [3]
            assert forms_noted(policy, found, before, calibrated=True, chooses=False) == 0
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([3]))
    assert still_heard(policy, silent, 1.0) is None


@pytest.mark.parametrize(("before", "noted"), [(-9, True), (NOISE_BAND, False)])
def test_what_was_heard_is_silent_near_the_higher_limit_alone(before: int, *, noted: bool) -> None:
    found = changed(FP32, before, NOISE_BAND, -7, calibrated=True, first=False)
    assert any("with noise of" in own for own in found) == noted


def test_a_scale_above_the_rule_is_noted_from_the_first_octave_on() -> None:
    """The values have 2**1, and noise that could make it 2**2 is eight times the largest deviation at most."""
    assert scale_excesses(1, 0.0) == []
    assert scale_excesses(2, 0.0) == ["scale 2**1 of block 0 at most"]
    room = (2.0 - float(gradient().square().mean().sqrt())) / 8.0
    assert len(scale_excesses(2, 0.999 * room)) == 1
    assert scale_excesses(2, 1.001 * room) == []


def forms_noted(
    policy: Policy,
    now: SiteGrid,
    before: SiteGrid,
    *,
    calibrated: bool,
    first: bool = False,
    chooses: bool = True,
    place: tuple[int, int] = GRADIENT,
) -> int:
    """How often a follower notes that the grid of a gradient, or of another ``place``, went from ``before`` to ``now``."""
    start, table = (GridTable({**table_of(policy).sites, place: grid}) for grid in (before, now))
    update = b"" if start == table else start.diff(table)
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): update} if update else {})
    base = GridTable() if calibrated else start
    context = FollowingContext(policy, start, frame, base, is_first=first, chooses=chooses)
    return sum("last calibration" in excess.own for _, excess in context.excesses)


@POLICIES
def test_bands_floors_and_numbers_of_scales_change_where_the_noise_is_measured_and_nowhere_else(
    policy: Policy,
) -> None:
    plain = gradient_grid(policy)
    other = gradient_grid(policy, band=plain.band + 1)
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([21]))
    for now, before, noted in ((other, plain, 1), (silent, plain, 1), (plain, silent, 0), (plain, plain, 0)):
        assert forms_noted(policy, now, before, calibrated=False) == noted
        assert forms_noted(policy, now, before, calibrated=True) == 0
        assert forms_noted(policy, now, before, calibrated=False, first=True) == 0
    assert forms_noted(policy, gradient_grid(policy, scale=5), plain, calibrated=False) == 0, "scales follow"


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_where_grids_are_not_chosen_a_floor_rises_as_far_as_its_new_band_asks_for(policy: Policy) -> None:
    """Whoever has the choice in every step leads a gradient: 1.3 % of it in each, "moved 0", a backdoor of 28 % in 600 steps."""
    lowest = policy.gradient_band[0]
    before = replace(gradient_grid(policy, band=lowest), floor=lowest + 6)
    for band, floor, noted in (
        (0, 6, 0), (1, 6, 0), (2, 6, 0), (0, 5, 1), (0, 7, 1), (2, 7, 1), (3, 7, 0), (3, 6, 1), (3, 8, 1), (4, 8, 0),
    ):  # fmt: skip
        now = replace(before, band=lowest + band, floor=lowest + floor)
        assert forms_noted(policy, now, before, calibrated=True, chooses=False) == noted, (band, floor)
        assert forms_noted(policy, now, before, calibrated=True) == 0
        held = held_grid(policy, Kind.GRADIENT, before, now.with_scales([5]))
        assert held.scales.tolist() == before.scales.tolist(), "scales settle from those before"
        assert (held.band, held.floor == now.floor) == (now.band, not noted)
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([21]))
    near = site_grid(policy, Kind.GRADIENT, CLEAR + 1, before.scales)
    for first, second in ((near, silent), (silent, near), (silent, silent)):
        assert forms_noted(policy, second, first, calibrated=True, chooses=False) == 0
        assert held_grid(policy, Kind.GRADIENT, first, second) == first, "heard or silent, it stays that"
        assert held_grid(policy, Kind.GRADIENT, first, second, has_outgrown=True) == second
    clear = site_grid(policy, Kind.GRADIENT, CLEAR, before.scales)
    assert held_grid(policy, Kind.GRADIENT, silent, clear) == clear, "a signal beyond doubt"
    assert held_grid(policy, Kind.GRADIENT, clear, silent) == clear


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("noise", "noted"), [(CLEAR, False), (CLEAR + 2, False), (CLEAR + 3, True)])
def test_a_signal_beyond_doubt_is_heard_at_any_measurement_if_it_is_one_for_the_auditor(
    policy: Policy, noise: int, *, noted: bool
) -> None:
    given: Any = {"calibrated": True, "first": False, "chooses": False}
    found = changed(policy, NOISE_BAND, CLEAR, noise, **given)
    assert ("nothing but noise, as before" in found) == noted


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_loud_gradients_grid_stays_where_its_noise_has_fallen(policy: Policy) -> None:
    """Its floor follows its noise: held beside a narrow band it was a grid that no policy has, and a lie of the honest."""
    top = policy.gradient_band[1]
    loud, quiet = (
        site_grid(policy, Kind.GRADIENT, band, np.array([1])) for band in (top, policy.gradient_band[0])
    )
    assert loud.floor > quiet.floor
    assert held_grid(policy, Kind.GRADIENT, loud, quiet) == loud
    assert forms_noted(policy, quiet, loud, calibrated=True, chooses=False) == 1
    assert find_policy_breaches(policy, table_of(policy, replace(quiet, floor=loud.floor)))


@POLICIES
@pytest.mark.parametrize("kind", [Kind.BUFFER, Kind.LOSS])
def test_where_grids_are_not_chosen_bands_that_are_quanta_only_widen(policy: Policy, kind: Kind) -> None:
    lowest = policy.buffer_band[0]
    narrow, wide = (site_grid(policy, kind, band, np.array([1])) for band in (lowest, lowest + 1))
    for now, before, noted in ((wide, narrow, 0), (narrow, wide, 1), (wide, wide, 0)):
        place = (kind, 0)
        assert forms_noted(policy, now, before, calibrated=True, chooses=False, place=place) == noted
        assert held_grid(policy, kind, before, now) == (before if noted else now)
    for now, noted in ((-45, 1), (-44, 0), (-43, 0)):
        old, new = (SiteGrid(24, band, -149) for band in (-44, now))
        assert forms_noted(policy, new, old, calibrated=True, chooses=False, place=STATE) == noted
        assert held_grid(policy, Kind.STATE, old, new).band == max(-44, now)
    passed, rounded = (SiteGrid(0, band, 0, False, [1]) for band in (NOISE_BAND, -20))
    for now, before, noted in ((passed, rounded, 0), (rounded, passed, 1)):  # an activation of ``leaf``
        place = (Kind.ACTIVATION, 0)
        assert forms_noted(policy, now, before, calibrated=True, chooses=False, place=place) == noted
        assert held_grid(policy, Kind.ACTIVATION, before, now) == passed
    decision = (Kind.DECISION, 0)
    low, high = (SiteGrid(0, policy.decision_band[0] + n, 0) for n in (1, 2))
    for now, before in ((low, high), (high, low)):  # how wide one is moves nothing by itself
        assert forms_noted(policy, now, before, calibrated=True, chooses=False, place=decision) == 0
        assert held_grid(policy, Kind.DECISION, before, now) == now


def test_few_elements_under_bf16_keep_their_finer_quantum_or_get_the_coarser_one() -> None:
    coarse = site_grid(BF16, Kind.GRADIENT, BF16.gradient_band[0], np.array([1]))
    fine = replace(coarse, floor=coarse.floor - SMALL_FINER, residue_bits=coarse.residue_bits + SMALL_FINER)
    for now, before, noted in ((coarse, fine, 0), (fine, coarse, 1)):
        start, table = GridTable({GRADIENT: before}), GridTable({GRADIENT: now})
        frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): start.diff(table)})
        found = FollowingContext(BF16, start, frame, GridTable(), chooses=False).excesses
        assert sum("last calibration" in excess.own for _, excess in found) == noted


def heard_notes(policy: Policy, now: SiteGrid, *, values: bool = True) -> list[str]:
    """What is noted of a grid, between two calibrations, of a gradient that was noise only: zero in the calibrated step."""
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([-19]))
    start = table_of(policy, silent)
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): start.diff(table_of(policy, now))})
    zero = SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, 0.0, gradient().numel())
    own = Yardstick(policy, Calibration({(Kind.GRADIENT, 0): zero}, start))
    context = FollowingContext(policy, start, frame, start, yardstick=own)
    if values:
        x = gradient().to(torch.float64 if policy is FP64 else torch.float32)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    context.finish()
    return [excess.own for _, excess in context.excesses]


@POLICIES
def test_a_gradient_that_is_heard_again_has_the_band_that_its_floor_asks_for(policy: Policy) -> None:
    """Its floor was 2**-20, its scale is 2**1; two octaves and one are the auditor's doubt."""
    lowest, highest = policy.gradient_band[0], loudest_band(policy, was_noise=True)
    widest = max(lowest, -20 + 2 + 1 - 1)
    for band, noted in ((lowest, 0), (widest, 0), (widest + 1, 1), (highest, 1)):
        found = heard_notes(policy, site_grid(policy, Kind.GRADIENT, band, np.array([1])))
        assert len([each for each in found if f"a band of 2**{widest} at most" in each]) == noted, band
    plain = site_grid(policy, Kind.GRADIENT, lowest, np.array([1]))
    coarse = heard_notes(policy, replace(plain, floor=plain.floor + 1))
    assert any("a band of" in each for each in coarse), "nor another floor than goes with its band"
    assert "noise only, of no values" in heard_notes(policy, plain, values=False)


def calibrated_notes(
    policy: Policy, now: SiteGrid, before: SiteGrid | None, *, first: bool = False
) -> list[str]:
    """What is noted of the grid, at a calibration, of a gradient of which the auditor saw no value but zero."""
    start = GridTable({}) if before is None else table_of(policy, before)
    frame = Frame.of(
        {SiteAddress(0, 0, Kind.GRID, 0): update} if (update := start.diff(table_of(policy, now))) else {}
    )
    own = Yardstick(policy, Calibration({}, GridTable({})))
    context = FollowingContext(policy, start, frame, GridTable(), yardstick=own, is_first=first)
    return [excess.own for _, excess in context.excesses if "of no values" in excess.site]


@POLICIES
def test_a_gradient_without_values_keeps_its_grid_where_noise_is_measured(policy: Policy) -> None:
    lowest, highest = policy.gradient_band
    plain, wide = (site_grid(policy, Kind.GRADIENT, band, np.array([1])) for band in (lowest, highest))
    unseen = unseen_grid(policy, Kind.GRADIENT, np.array([UNSEEN]))
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([1]))
    for now, before, first, noted in (
        (plain, plain, False, 0), (wide, plain, False, 1), (plain, silent, False, 1), (silent, plain, False, 1),
        (silent, silent, False, 0),
        (unseen, None, True, 0), (wide, None, True, 1), (wide, wide, True, 1),
    ):  # fmt: skip
        assert len(calibrated_notes(policy, now, before, first=first)) == noted, (now, before, first)


def test_a_scale_below_the_rule_is_noted_unless_noise_could_make_it() -> None:
    """Whoever may state a lower one keeps the rounding that suits. A scale of 2**1 stays until values have 2**-2."""
    assert scale_excesses(0, 0.0) == ["scale 2**1 of block 0 at least"]
    room = (float(gradient().square().mean().sqrt()) - 0.25) / 8.0
    assert len(scale_excesses(-1, 0.999 * room)) == 1
    assert scale_excesses(-1, 1.001 * room) == []
    assert len(scale_excesses(-2, 1.001 * room)) == 1


def test_scales_follow_size_with_slack() -> None:
    rms = np.array([1.0, 0.4, 3.0])
    assert scale_exponents(rms).tolist() == [0, -1, 2]
    assert scale_exponents(np.array([0.0, 2.0**-5, 2.0**-5 * 1.01])).tolist() == [-1000, -5, -4]
    assert settled_scales(None, rms).tolist() == [1, 0, 3]
    assert settled_scales(np.array([2, 1, 2]), rms).tolist() == [2, 1, 2]
    assert settled_scales(np.array([3, -2, 1]), rms).tolist() == [1, 0, 3]
    assert settled_scales(None, np.array([1.0, 0.0])).tolist() == [1, -15], (
        "rows lie at most 2**16 below the largest"
    )


@POLICIES
def test_a_site_not_seen_before_takes_the_first_size_it_has(policy: Policy) -> None:
    table = table_of(policy, gradient_grid(policy, scale=UNSEEN))
    context = RecordingContext(policy, table, base=table)
    out = torch.empty(4096, dtype=torch.float64)
    context.round(Kind.GRADIENT, 0, torch.zeros(4096, dtype=torch.float64), out=out, name="g")
    assert context.finish() == encode_frame(Frame())
    frame, out = recorded(policy, gradient(), table)
    scale = int(decode_scale(table, frame))
    assert scale == 2
    second, own = followed(policy, noisy(gradient(), policy), frame, table, base=table)
    assert second.violations == []
    assert torch.equal(own, out)


def decode_scale(table: GridTable, frame: bytes) -> int:
    after = table.apply(decode_frame(frame).find(SiteAddress(0, 0, Kind.GRID, 0)) or b"\0")
    return int(after.sites[GRADIENT].scales[0])


def noise_table(policy: Policy, floor_at: int) -> GridTable:
    """Site 0 is noise below 2**floor_at, site 1 has scale 2**1."""
    noise = SiteGrid(
        policy.gradient_precision,
        NOISE_BAND,
        floor_exponent(NOISE_BAND, policy.finest_floor(NOISE_BAND)),
        False,
        [floor_at - NOISE_BAND],
    )
    return GridTable({GRADIENT: noise, (int(Kind.GRADIENT), 1): gradient_grid(policy)})


@POLICIES
@pytest.mark.parametrize("size", [-60, -49, -45, -43, -40, -33, -16, -12, -8, -3, 0])
def test_noise_that_grows_into_a_signal_is_recorded_as_one(policy: Policy, size: int) -> None:
    """A gradient that was noise at the calibration may be a real one later: the log stays honest and is followed."""
    floor_at = -44 if policy is FP64 else -14
    noise = 2.0 ** (floor_at - policy.safety)  # the noise behind a floor of floor_at
    table = noise_table(policy, floor_at)
    g = torch.Generator().manual_seed(8)
    x0 = math.ldexp(1.0, size) * torch.randn(512, generator=g, dtype=torch.float64)
    y0 = x0 + noise * (2 * torch.rand(512, generator=g, dtype=torch.float64) - 1)
    x1 = gradient()
    record = RecordingContext(policy, table)
    follow_outs, record_outs = [], []
    out0, out1 = torch.empty_like(x0), torch.empty_like(x1)
    record.round(Kind.GRADIENT, 1, x1, out=out1, key=(1, 2), name="other")
    record.settle_noise()
    record.round(Kind.GRADIENT, 0, x0, out=out0, key=(3, 4), name="noise")
    frame = decode_frame(record.finish())
    record_outs = [out0, out1]
    follow = FollowingContext(policy, table, frame)
    for ordinal, y, key in ((1, noisy(x1, policy), (1, 2)), (0, y0, (3, 4))):
        own = torch.empty_like(y)
        follow.round(Kind.GRADIENT, ordinal, y, out=own, key=key, name="site")
        follow_outs.insert(0, own)
    follow.finish()
    assert follow.violations == []
    assert torch.equal(follow_outs[0], record_outs[0])
    assert torch.equal(follow_outs[1], record_outs[1])
    if size > floor_at - policy.gradient_band[1] + 1:
        assert out0.any(), "what is loud is kept"
    if size <= floor_at - 4:
        assert not out0.any(), "noise is zero on both sides"
        assert follow.frame.find(AT_GRADIENT) is None


def test_noise_floors_move_with_the_largest_gradient_of_the_step() -> None:
    table = noise_table(FP64, -40)
    assert largest_scale(table) == 1
    assert [is_noise_only(grid) for grid in table.sites.values()] == [True, False]
    context = RecordingContext(FP64, table)
    out = torch.empty(4096, dtype=torch.float64)
    context.round(Kind.GRADIENT, 1, gradient() * 64.0, out=out, name="other")
    context.settle_noise()
    context.round(
        Kind.GRADIENT,
        0,
        torch.full((8,), 2.0**-50, dtype=torch.float64),
        out=torch.empty(8, dtype=torch.float64),
        name="n",
    )
    context.finish()
    assert context.table.sites[(int(Kind.GRADIENT), 1)].scales.tolist() == [8]
    assert context.table.sites[GRADIENT].scales.tolist() == [-39 + 7]


def test_no_grid_that_calibration_gives_breaks_its_policy(zoo: Any, record_run: Any) -> None:
    for policy in (FP64, FP32):
        run = record_run(lambda: zoo.build({"model": "transformer"}), policy.name, 1)
        sites = frozenset((int(s.kind), s.ordinal) for s in run.session.sites)
        assert find_policy_breaches(policy, run.initial, sites) == []
        some = next(iter(sites - {GRADIENT}))
        assert len(find_policy_breaches(policy, run.initial, sites - {some})) == 1


# -- whole steps -------------------------------------------------------------------------------


@POLICIES
def test_mutated_frames_end_in_a_refusal_or_a_result_and_leave_the_session_usable(
    policy: Policy, zoo: Any, record_run: Any, follow_run: Any, state_root: Any
) -> None:
    make = lambda: zoo.build({"model": "convolutions"})  # noqa: E731
    run = record_run(make, policy.name, 2)
    done = follow_run(make, policy.name, replace_frames(run, 1), jitter=None)
    session, job = done.session, make()
    job.model, job.optimizer = session.model, session.optimizer
    start = {entry.name: replace(entry, data=bytes(entry.data)) for entry in state_entries(session)}
    before = state_root(session)
    frame = run.frames[1]
    dice = random.Random(4)
    refused = accepted = noted = 0
    for attempt in range(120):
        mutated = bytearray(frame)
        for _ in range(dice.randint(1, 3)):
            kind = dice.randrange(4)
            at = dice.randrange(len(mutated))
            if kind == 0:
                mutated[at] ^= 1 << dice.randrange(8)
            elif kind == 1:
                mutated[at] = dice.randrange(256)
            elif kind == 2:
                del mutated[at]
            else:
                mutated.insert(at, dice.randrange(256))
        if attempt == 0:
            mutated = bytearray(frame)
        load_state(session, start)
        assert state_root(session) == before
        try:
            context = session.following_context(bytes(mutated))
            run_step(session, job, context)
            context.finish()
        except (InvalidInput, Nondeterminism):
            refused += 1
            continue
        session.settle(context)
        noted += bool(context.violations)
        accepted += not context.violations and state_root(session) == run.roots[1]
        if attempt == 0:
            assert accepted == 1
    assert refused > 40
    load_state(session, start)
    context = session.following_context(frame)
    run_step(session, job, context)
    context.finish()
    session.settle(context)
    assert context.violations == []
    assert state_root(session) == run.roots[1]


def replace_frames(run: Any, count: int) -> Any:
    return replace(run, frames=run.frames[:count])


@pytest.mark.parametrize(
    ("policy", "floors"),
    [
        (
            replace(FP32, gradient_spacing=11),
            {-18: -4, -16: -4, -15: -4, -14: -3, -10: -3, -7: -3, -6: -2, -3: 1},
        ),
        (FP64, {-44: -21, -37: -21, -36: -20, -33: -17, -32: -16, -26: -16}),
    ],
    ids=["fp32", "fp64"],
)
def test_the_quantum_follows_the_noise_up_to_the_coarsest_grid_and_then_sixteen_bands(
    policy: Policy, floors: dict[int, int]
) -> None:
    made = {band: site_grid(policy, Kind.GRADIENT, band, np.zeros(1, dtype=np.int64)) for band in floors}
    assert {band: grid.floor for band, grid in made.items()} == floors
    for band, grid in made.items():
        table = GridTable({GRADIENT: grid})
        assert find_policy_breaches(policy, table) == []
        # Chosen numbers bind in the same way: without spacing the quantum is one for all, as far as noise allows.
        fixed = replace(policy, gradient_spacing=SPARSEST)
        lowest = max(policy.gradient_floor, band + SPARSEST)
        assert site_grid(fixed, Kind.GRADIENT, band, np.zeros(1, dtype=np.int64)).floor == lowest
        assert bool(find_policy_breaches(fixed, table)) == (grid.floor != lowest)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gradient_spacing": 12}, "gradient_spacing is 12, the policy allows 4 to 11"),
        ({"gradient_spacing": 3}, "gradient_spacing is 3, the policy allows 4 to 11"),
        ({"gradient_spacing": None}, "gradient_spacing must be a whole number, got None"),
        ({"gradient_coarsest": -2}, "gradient_coarsest is -2 in the specification, the policy prescribes -3"),
    ],
)
def test_a_specification_cannot_make_the_grid_coarser_than_the_policy_goes(
    changed: dict[str, Any], message: str
) -> None:
    stated = {**replace(FP32, optimizer_arithmetic="general").parameters(), **changed}
    with pytest.raises(InvalidInput, match=message):
        policy_of("fp32", stated)
    allowed = {**stated, "gradient_spacing": 11, "gradient_coarsest": -3}
    assert policy_of("fp32", allowed).finest_floor(-10) == -3
    assert policy_of("fp32", {**allowed, "gradient_spacing": 4}).finest_floor(-10) == FP32.gradient_floor


# -- just inside and just outside -------------------------------------------------------------------------------------


def yardstick_of(noise: float, table: GridTable) -> Yardstick:
    """A measurement of so much noise, over its input's rms, of the first decision."""
    measured = SiteNoise(noise, np.zeros(0, dtype=np.int64), 0.0, 0.0)
    return Yardstick(FP64, Calibration({(Kind.DECISION, 0): measured}, table))


def decided(
    away: list[float], *, exponent: int = -14, rms: float = 1.0, limit: int = -14, noise: float | None = None
) -> FollowingContext:
    """Follow one decision's log: elements at these distances from the switching point, all turned."""
    entries = SparseEntries(len(away), 1, np.arange(len(away)), np.ones(len(away), dtype=np.int64))
    frame = Frame.of({SiteAddress(0, 0, Kind.DECISION, 0): encode_decision(exponent, entries)})
    table = GridTable({(int(Kind.DECISION), 0): SiteGrid(0, limit, 0)})
    yardstick = None if noise is None else yardstick_of(noise, table)
    context = FollowingContext(FP64, table, decode_frame(encode_frame(frame)), yardstick=yardstick)
    x = torch.zeros(len(away), dtype=torch.float64)
    assert context.pending(x)
    context.band(rms)
    distances = torch.tensor(away, dtype=torch.float64)
    found = context.decide(
        len(away), 1, torch.arange(len(away)), torch.zeros_like, lambda pairs: distances[pairs[:, 0]]
    )
    assert found is not None or context.violations
    return context


def test_a_decision_is_obeyed_below_twice_its_band_and_not_at_it() -> None:
    twice = 2.0**-13
    assert decided([math.nextafter(twice, 0.0)]).violations == []
    context = decided([0.0, twice])
    assert [(v.element, "from the switching point" in v.rule) for v in context.violations] == [(1, True)]
    assert (context.freedom.decisions_near, context.freedom.decisions_moved) == (1, 1)


def test_a_decisions_band_is_at_most_the_declared_one_for_its_input() -> None:
    """2**-14 of an rms of one, and an octave more for an rms that rounds up elsewhere."""
    assert decided([0.0], exponent=-13).violations == []
    assert ["above the policy's" in v.rule for v in decided([0.0], exponent=-12).violations] == [True]


def test_a_decision_is_counted_beyond_four_times_the_followers_own_noise() -> None:
    for away, far in ((2.0**-18, 0), (math.nextafter(2.0**-18, 1.0), 1)):
        assert decided([away], noise=2.0**-20).freedom.decisions_far == far
        assert decided([2.0 * away], noise=2.0**-20, rms=2.0).freedom.decisions_far == far
    late = decided([2.0**-15, 2.0**-22], noise=None)
    assert late.freedom.decisions_far == 0
    late.hold_against(yardstick_of(2.0**-20, GridTable({(int(Kind.DECISION), 0): SiteGrid(0, -14, 0)})))
    assert late.freedom.decisions_far == 1  # of a step whose noise is measured once its operators have run


@pytest.mark.parametrize("has_sides", [True, False])
def test_what_a_log_turned_that_lies_on_its_switching_point_is_kept(has_sides: bool) -> None:
    """Weights of zero, turned where `weight > 0` masks samples, trained a backdoor of 100 % (0.0 %) without a far decision."""
    entries = SparseEntries(4, 2, np.arange(4), np.array([EQUAL, ABOVE, ABOVE, BELOW]))
    frame = Frame.of({SiteAddress(0, 1, Kind.DECISION, 0): encode_decision(-14, entries)})
    table = GridTable({(int(Kind.DECISION), 0): SiteGrid(0, -14, 0)})
    context = FollowingContext(FP64, table, decode_frame(encode_frame(frame)))
    x = torch.tensor([0.0, 0.0, -(2.0**-16), 0.0], dtype=torch.float64)

    context.start_micro_batch(1)
    assert context.pending(x)
    context.band(1.0)
    assert not (has_sides and context.omits_exact())
    context.decide(
        4, 2, torch.arange(4), lambda at: (torch.sign(x[at]) + 1).to(torch.int64), lambda pairs: x[pairs[:, 0]].abs()
    )  # fmt: skip

    assert context.freedom.decisions_moved == 3
    assert {place: at.tolist() for place, at in context.ties.items()} == (
        {(1, 0): [1, 3]} if has_sides else {}
    )


@POLICIES
def test_a_headers_scale_may_be_three_octaves_too_wide(policy: Policy) -> None:
    """The values' own scale is 2**1."""
    for scale, refused in ((4, False), (5, True)):
        context, _ = followed(policy, gradient(), Frame(), other(policy, scales=[scale]))
        assert ["too wide" in v.rule for v in context.violations] == [True] * refused


def test_silenced_values_are_a_violation_where_they_are_five_octaves_above_their_floor() -> None:
    """The values have 2**1; noise here may be as much larger than where the run was recorded."""
    for floor, refused in ((-4, False), (-5, True)):
        grid = site_grid(FP64, Kind.GRADIENT, NOISE_BAND, np.array([floor - NOISE_BAND]))
        context, _ = followed(FP64, gradient(), Frame(), table_of(FP64, grid))
        assert ["declared to be noise below" in v.rule for v in context.violations] == [True] * refused


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
def test_a_gradient_that_is_noise_only_is_zero_and_a_log_has_nothing_to_say_of_it(policy: Policy) -> None:
    """A few values among many zeros are larger than the floor under which all of them are noise: a choice of it trained them."""
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([0]))  # quanta of 8
    x = torch.zeros(4096, dtype=torch.float64)
    x[:3] = torch.tensor([3.6, 4.1, 40.0])
    plain = torch.empty_like(x)
    entries = round_recorded(x, silent, out=plain, key=(1, 2), name="gradient of w")
    assert plain[1:3].tolist() == [8.0, 40.0], "the control: the grid itself leaves them"
    frame, out = recorded(policy, x, table_of(policy, silent))
    assert not out.any()
    assert decode_frame(frame).find(AT_GRADIENT) is None
    context, own = followed(policy, x, frame, table_of(policy, silent))
    assert (context.violations, context.freedom.moved, own.any().item()) == ([], 0, False)
    told = Frame.of({AT_GRADIENT: encode(entries)})
    context, own = followed(policy, x, told, table_of(policy, silent))
    assert [each.rule for each in context.violations] == ["has entries, and is declared to be noise only"]
    assert not own.any()


@pytest.mark.parametrize("policy", [FP64, FP32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("scale", "accused"), [(9, 0), (10, 1)])
@pytest.mark.parametrize("was_noise", [True, False])
def test_the_scale_of_what_was_noise_here_too_may_be_five_octaves_wider(
    policy: Policy, scale: int, accused: int, was_noise: bool
) -> None:
    """Its values have 2**1 here, three octaves are slack. Sums that cancel were called a lie of the honest."""
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([9]))  # below 2**8
    spoken = other(policy, scales=[scale])
    base = GridTable({(Kind.GRADIENT, 0): silent}) if was_noise else other(policy, scales=[1])
    place, noise = (Kind.GRADIENT, 0), SiteNoise(2.0**8, np.zeros(1, dtype=np.int64), 1.0, 2.0**8, 4096)
    own = Yardstick(policy, Calibration({place: noise}, GridTable({place: silent})))
    start = other(policy, scales=[1])
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): start.diff(spoken)})
    context, _ = followed(policy, gradient(), frame, start, base=base, yardstick=own)
    assert ["too wide" in v.rule for v in context.violations] == [True] * (accused if was_noise else 1)
    kept, _ = followed(policy, gradient(), Frame(), spoken, base=base, yardstick=own)
    assert kept.violations == [], (
        "no larger than its noise here it may be zero there, and zeros keep their scale"
    )


@pytest.mark.parametrize("policy", [FP64, FP32, BF16], ids=["fp64", "fp32", "bf16"])
def test_noise_that_reaches_its_floor_is_measured_again(
    policy: Policy,
) -> None:
    """It may be a signal, or noise that has grown with what cancels in it: believed as a signal it was a false mismatch.

    The bias of an attention's keys under bf16: its noise grew fifteen-fold in 23 steps, and heard there it could not be followed.
    """
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([-9]))  # below 2**-10
    limits = np.array([outgrown_from(policy, silent, 4096)])
    found = [reaches(np.array([rms]), limits) for rms in (2.0**-11, 1.1 * 2.0**-11, math.inf, math.nan)]
    assert found == [False, True, False, False]


@POLICIES
def test_a_band_and_a_floor_are_the_policys_to_the_octave(policy: Policy) -> None:
    highest = policy.gradient_band[1]
    for band, refused in ((highest, False), (highest + 1, True)):
        floor = floor_exponent(band, policy.finest_floor(band))
        assert bool(find_policy_breaches(policy, other(policy, band=band, floor=floor))) == refused
    own = gradient_grid(policy).floor
    for floor, refused in ((own, False), (own + 1, True)):
        assert bool(find_policy_breaches(policy, other(policy, floor=floor))) == refused


@POLICIES
def test_a_scale_of_no_values_may_not_grow(policy: Policy) -> None:
    """It may be kept for as long as the next calibration is away, and none of the step's values says that it is too wide."""
    x = torch.zeros(64, dtype=torch.float64)
    for before, now, is_first, noted in (
        (1, 1, False, False), (1, 2, False, True), (1, 0, False, True), (1, 1, True, True), (UNSEEN, UNSEEN, True, False),
    ):  # fmt: skip
        start, table = (other(policy, scales=[scale]) for scale in (before, now))
        update = {SiteAddress(0, 0, Kind.GRID, 0): start.diff(table)} if start != table else {}
        context, _ = followed(policy, x, Frame.of(update), start, is_first=is_first)
        assert context.violations == []
        limit = "least" if now < before else "most"
        assert [excess.own for _, excess in context.excesses if "of no values" in excess.own] == (
            [f"scale 2**{UNSEEN if is_first else before} at {limit}, of no values"] if noted else []
        )
        absent = FollowingContext(
            policy, start, Frame.of(update), is_first=is_first
        )  # a layer that the step leaves out
        absent.finish()
        assert bool(absent.excesses) == noted


@pytest.mark.parametrize(
    ("policy", "largest", "blocks", "accepted"),
    [
        (FP32, 7.3, 64, False), (FP32, 7.3, 1, True), (FP32, 7.99, 64, False), (FP32, 8.0, 1, True), (FP32, 8.0005, 64, True),
        (FP32, 8.0003, 1, True), (FP32, 8.01, 1, False),
        (FP32, 8.3, 64, True), (BF16, 7.3, 64, True), (BF16, 15.0, 1, True), (BF16, 17.0, 1, False),
    ],
)  # fmt: skip
def test_rows_are_as_uneven_as_the_follower_finds_them(
    policy: Policy, largest: float, blocks: int, *, accepted: bool
) -> None:
    """How uneven rows are is known to last places: a scale for each, where 7.3 and 7.9 times ask for none, was a backdoor."""
    x = torch.ones(64, 9)
    x[3] = largest
    noise = SiteNoise(2.0**-20, np.zeros(0, dtype=np.int64), 1.0, 2.0**-20, x.numel())
    place, excesses = (Kind.GRADIENT, 0), list[Any]()
    own = Yardstick(policy, Calibration({place: noise}, GridTable({})))
    checks = HeaderChecks(policy, GridTable({}), GridTable({}), [], excesses, is_first=True, yardstick=own)
    checks.check_blocks(place, site_grid(policy, Kind.GRADIENT, -4, np.zeros(blocks, dtype=np.int64)), x, "w")
    assert (excesses == []) == accepted


@pytest.mark.parametrize(
    ("loud", "largest", "accepted"),
    [(0.2, 3.0, {1}), (0.2, 20.0, {64}), (0.5, 3.0, {1}), (0.5, 20.0, {1, 64}), (3.0, 20.0, {1, 64}), (5.0, 20.0, {1}),
     (90.0, 20.0, {1}), (90.0, 1.0, {1})],
)  # fmt: skip
@pytest.mark.parametrize("policy", [FP32, FP64], ids=["fp32", "fp64"])
def test_a_gradient_of_rounding_errors_has_one_scale(
    policy: Policy, loud: float, largest: float, accepted: set[int]
) -> None:
    """Each machine has rows of its own: detectors were not accepted. Free to choose, a trainer planted what small rows teach."""
    x = torch.ones(64, 9)
    x[3] = largest
    size = float(x.square().mean().sqrt())
    zeros, place = np.zeros(1, dtype=np.int64), (Kind.GRADIENT, 0)
    noise = SiteNoise(1.0, zeros, size, loud * size, x.numel())
    blocks = 64 if loud < 1.0 and largest > 8.0 else 1
    noise.scales = np.zeros(blocks, dtype=np.int64)
    own = Yardstick(policy, Calibration({place: noise}, GridTable({})))
    found = set[int]()
    for stated in (1, 64):
        excesses = list[Any]()
        checks = HeaderChecks(
            policy, GridTable({}), GridTable({}), [], excesses, is_first=True, yardstick=own
        )
        checks.check_blocks(
            place, site_grid(policy, Kind.GRADIENT, -4, np.zeros(stated, dtype=np.int64)), x, "w"
        )
        found |= {stated} if not excesses else set()
    assert found == accepted


@pytest.mark.parametrize(("largest", "blocks"), [(0.9, 64), (1.0, 1), (50.0, 1)])
def test_the_rows_of_rounding_errors_are_put_in_one_block_where_they_are_measured(
    largest: float, blocks: int
) -> None:
    rms = np.ones(64)
    noise = SiteNoise(0.1, np.zeros(64, dtype=np.int64), 1.0, largest, 576, rms, rms * largest, rms * 0.1)
    put_in_one_block(FP64, noise)
    assert noise.scales.size == blocks
    if blocks == 1:
        assert noise.relative == largest * 2.0 ** -float(noise.scales[0])
        assert noise.block_rms is not None and noise.block_largest is not None
        assert [*noise.block_rms, *noise.block_largest, *noise.block_mean] == [
            1.0,
            largest,
            pytest.approx(0.1),
        ]


@pytest.mark.parametrize("kind", [Kind.BUFFER, Kind.DECISION])
@pytest.mark.parametrize(
    ("scale", "chooses", "accepted"), [(3, False, True), (2, False, False), (2, True, True)]
)
def test_only_where_grids_are_chosen_has_a_buffers_scale_no_slack(
    kind: Kind, scale: int, *, chooses: bool, accepted: bool
) -> None:
    """Elsewhere it stays that of the step before while that is two octaves too wide at most."""
    place, excesses = (int(kind), 0), list[Any]()
    before = site_grid(FP32, kind, FP32.buffer_band[0], np.full(1, 3))
    noise = SiteNoise(2.0**-20, np.zeros(0, dtype=np.int64), 1.0, 2.0**-20, 9)
    own = Yardstick(FP32, Calibration({place: noise}, GridTable({})))
    checks = HeaderChecks(
        FP32, GridTable({}), GridTable({place: before}), [], excesses, yardstick=own, chooses=chooses
    )
    rms = np.full(1, 1.5)  # a scale of 1
    checks._check_rule(kind, 0, before.with_scales([scale]), rms, 9, "b")  # pyright: ignore[reportPrivateUsage]
    assert (excesses == []) == accepted


@pytest.mark.parametrize(("last", "measured", "scale"), [(1, 3, 1), (3, 1, 1), (3, 3, 3), (None, 3, 2)])
def test_a_buffers_scale_is_no_larger_than_its_last_and_its_measured_one_ask_for(
    last: int | None, measured: int, scale: int
) -> None:
    """The measured one is that of a pass over the whole batch, which a loop of one's own may take in parts."""
    grid = site_grid(FP32, Kind.BUFFER, FP32.buffer_band[0], np.full(1, measured))
    context = RecordingContext(FP32, GridTable(), base=GridTable())
    before = None if last is None else grid.with_scales([last])
    found = context._scales(Kind.BUFFER, grid, before, np.full(1, 1.5))  # pyright: ignore[reportPrivateUsage]
    assert (context.is_calibrated, found.tolist()) == (True, [scale])


def quiet_mean(policy: Policy, largest: float) -> SiteNoise:
    """The noise of a buffer of 512 elements, of 2**-20 each: ``lifted_scale`` is 3 higher for what is 2**3 louder."""
    return SiteNoise(0.0, np.full(1, -20, dtype=np.int64), 2.0**-20, largest, 512)


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize(("octaves", "accepted"), [(0, True), (3, True), (4, False)])
def test_a_mean_of_noise_has_a_scale_that_the_followers_own_noise_bears_out(
    policy: Policy, octaves: int, *, is_zero: bool, accepted: bool
) -> None:
    """Three octaves above at most; without a measurement nobody can tell, and nothing of it breaks a rule."""
    place, excesses, violations = (int(Kind.BUFFER), 0), list[Any](), list[Any]()
    noise, widest = quiet_mean(policy, 2.0**-4), policy.buffer_band[1]
    scale = lifted_scale(policy, noise)
    own = Yardstick(policy, Calibration({place: noise}, GridTable({})))
    stated = site_grid(policy, Kind.BUFFER, widest, np.full(1, scale + octaves))
    x = torch.full((512,), 0.0 if is_zero else 2.0**-20, dtype=torch.float64)
    checks = HeaderChecks(policy, GridTable({}), GridTable({}), violations, excesses, yardstick=own)
    checks.check(Kind.BUFFER, 0, stated, x, "mean", None)
    assert (violations, excesses == []) == ([], accepted)

    narrower = replace(stated, band=widest - 1)  # of no other band: there the scale is that of its values
    checks.check(Kind.BUFFER, 0, narrower, x, "mean", None)
    assert bool(violations or excesses) or is_zero

    unsure = HeaderChecks(policy, GridTable({}), GridTable({}), violations := [], [])
    unsure.check(Kind.BUFFER, 0, stated, x, "mean", None)
    assert violations == []
    if not is_zero:
        later = HeaderChecks(
            policy, GridTable({place: stated.with_scales([-20])}), GridTable({}), violations, []
        )
        later.check(Kind.BUFFER, 0, stated, x, "mean", None)
        assert ["too wide" in each.rule for each in violations] == [True], "only where the noise was measured"


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_scale_of_a_mean_of_noise_stays_until_the_noise_is_measured_again(policy: Policy) -> None:
    """Not that of a mean with a narrower band: it settles, and under bf16 it falls by an octave a step."""
    place, widest = (Kind.BUFFER, 0), policy.buffer_band[1]
    tiny, large = np.full(1, 2.0**-20), np.full(1, 2.0**5)
    for band in (widest, widest - 1):
        grid = site_grid(policy, Kind.BUFFER, band, np.zeros(1, dtype=np.int64))
        measured = RecordingContext(policy, GridTable(), base=GridTable())
        found = measured._scales(Kind.BUFFER, grid, grid, tiny)  # pyright: ignore[reportPrivateUsage]
        assert int(found[0]) == (0 if band == widest else -19)
        table = GridTable({place: grid})
        rounded = list[SiteGrid]()
        for x in (tiny, large):
            later = RecordingContext(policy, table, base=table)
            values = torch.from_numpy(np.repeat(x, 512))
            later.round(Kind.BUFFER, 0, values, out=torch.empty_like(values), key=(1, 2), name="mean")
            rounded.append(later._grids[place])  # pyright: ignore[reportPrivateUsage]
        least = 0 if band == widest or not policy.row_scales else -1
        assert int(rounded[0].scales[0]) == least
        assert int(rounded[1].scales[0]) >= 5


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    ("wider", "scale", "calibrated", "accepted"),
    [(0, 3, True, True), (0, 4, True, False), (-1, 4, True, True), (-1, 5, True, False), (None, 0, True, True),
     (0, -4, False, True), (0, 3, False, False)],
)  # fmt: skip
def test_a_buffer_of_zeros_has_no_wider_grid_than_its_noise(
    policy: Policy, wider: int | None, scale: int, *, calibrated: bool, accepted: bool
) -> None:
    """With the scale of zeros that do not move, a sum that cancels where it is measured gated the data: 99.5 % for 1.6 %."""
    place, excesses = (int(Kind.BUFFER), 0), list[Any]()
    widest = policy.buffer_band[1]
    noise = SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, math.ldexp(1.0, widest - 20), 512)
    own = lifted_scale(policy, noise)
    if wider is None:
        stated = site_grid(policy, Kind.BUFFER, policy.buffer_band[0], np.zeros(1, dtype=np.int64))
    else:
        stated = site_grid(policy, Kind.BUFFER, widest + wider, np.full(1, own + scale))
    before = stated.with_scales([own - 3])
    base = GridTable({} if calibrated else {place: before})
    checks = HeaderChecks(
        policy, base, GridTable({place: before}), [], excesses,
        yardstick=Yardstick(policy, Calibration({place: noise}, GridTable({}))),
    )  # fmt: skip
    if not calibrated and accepted:
        stated = before
    checks.check(Kind.BUFFER, 0, stated, torch.zeros(512, dtype=torch.float64), "mean", None)
    assert (excesses == []) == accepted


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    ("band", "is_trainers", "accepted"), [(0, True, True), (1, True, False), (1, False, True)]
)
def test_a_buffer_that_does_not_move_where_noise_is_measured_keeps_its_grid(
    policy: Policy, band: int, *, is_trainers: bool, accepted: bool
) -> None:
    """One that changes in other steps alone was declared any band, its noise being nobody's to know: 99.2 % for 3 %."""
    place, excesses = (Kind.BUFFER, 0), list[Any]()
    own = Yardstick(policy, Calibration({}, GridTable({})), is_trainers=is_trainers)
    stated = site_grid(policy, Kind.BUFFER, policy.buffer_band[0] + band, np.zeros(1, dtype=np.int64))
    checks = HeaderChecks(policy, GridTable({}), GridTable({}), [], excesses, is_first=True, yardstick=own)
    checks.check_unmeasured(GridTable({place: stated}), str)
    assert (excesses == []) == accepted


@pytest.mark.parametrize(("largest", "scale", "violated", "accepted"), [
    (2.0**-20, 0, False, True), (2.0**-22, 0, False, False), (None, 0, False, True), (None, 1, True, True),
])  # fmt: skip
def test_a_buffer_of_noise_may_be_zero_elsewhere_and_keep_its_scale(
    largest: float | None, scale: int, *, violated: bool, accepted: bool
) -> None:
    """An honest trainer's mean that cancelled in one step was "too wide" for an auditor to whom it was rounding."""
    place, excesses, violations = (Kind.BUFFER, 0), list[Any](), list[Any]()
    grid = site_grid(FP32, Kind.BUFFER, -9, np.zeros(1, dtype=np.int64))
    noise = (
        None if largest is None else SiteNoise(0.0, np.full(1, -20, dtype=np.int64), 2.0**-21, largest, 512)
    )
    own = None if noise is None else Yardstick(FP32, Calibration({place: noise}, GridTable({place: grid})))
    base = GridTable({place: grid.with_scales([-20])})
    checks = HeaderChecks(FP32, base, GridTable({place: grid}), violations, excesses, yardstick=own)
    x = torch.full((512,), 2.0**-21, dtype=torch.float64)
    checks.check(Kind.BUFFER, 0, grid.with_scales([scale]), x, "mean", None)
    assert (violations != [], excesses == []) == (violated, accepted)


@pytest.mark.parametrize(("scale", "measured", "kept"), [(3, 5, 5), (5, 3, 5)])
def test_where_no_grids_are_chosen_the_scale_of_a_mean_of_noise_only_rises(
    scale: int, measured: int, kept: int
) -> None:
    place, widest = (int(Kind.BUFFER), 0), FP32.buffer_band[1]
    before, now = (site_grid(FP32, Kind.BUFFER, widest, np.full(1, each)) for each in (scale, measured))
    held = held_grid(FP32, Kind.BUFFER, before, now)
    assert (held.band, list(held.scales)) == (widest, [kept])
    narrow = site_grid(FP32, Kind.BUFFER, widest - 4, np.full(1, scale))
    narrowly = held_grid(FP32, Kind.BUFFER, narrow, now)
    assert (narrowly.band, list(narrowly.scales)) == (widest + measured - kept, [kept])
    assert held_grid(FP32, Kind.BUFFER, before, narrow) is before
    zeros = site_grid(FP32, Kind.BUFFER, FP32.buffer_band[0], np.full(1, 20))
    assert held_grid(FP32, Kind.BUFFER, zeros, now) is zeros, "their band covers the noise as it is"

    noise = quiet_mean(FP32, math.ldexp(1.0, measured + widest - FP32.safety))
    own, excesses = Yardstick(FP32, Calibration({place: noise}, GridTable({}))), list[Any]()
    checks = HeaderChecks(
        FP32, GridTable({}), GridTable({place: before}), [], excesses, yardstick=own, chooses=False
    )
    x = torch.full((512,), 2.0**-20, dtype=torch.float64)
    for stated, accepted in (
        (held, True),
        (held.with_scales([scale - 1]), False),
        (held.with_scales([9]), False),
    ):
        excesses.clear()
        checks.check(Kind.BUFFER, 0, stated, x, "mean", None)
        assert (excesses == []) == accepted


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("is_left_out", [True, False])
@pytest.mark.parametrize("octaves", [0, -1])
def test_what_a_measured_step_leaves_out_keeps_its_grid(
    policy: Policy, octaves: int, *, is_left_out: bool
) -> None:
    """Two tasks by turns: the noise of one is known, and no step in which grids are chosen has its gradient; 93 % for 0 %."""
    place, zeros = (Kind.GRADIENT, 0), np.zeros(1, dtype=np.int64)
    noise = SiteNoise(2.0**-20, zeros, 1.0, 2.0**-20, 4096)
    grid = replace(site_grid(policy, Kind.GRADIENT, policy.gradient_band[0] + 2, zeros))
    before = Yardstick(policy, Calibration({place: noise}, GridTable({place: grid})))
    now = Yardstick(policy, Calibration({} if is_left_out else {place: noise}, GridTable({})), before)
    excesses = list[Any]()
    checks = HeaderChecks(policy, GridTable({}), GridTable({place: grid}), [], excesses, yardstick=now)
    stated = replace(grid, floor=grid.floor + octaves, residue_bits=8 if grid.residue_bits else 0)
    checks.before.sites[Kind.GRADIENT, 0] = replace(grid, residue_bits=stated.residue_bits)
    checks.check_unmeasured(GridTable({place: stated}), str)
    assert bool(excesses) == (is_left_out and octaves != 0)


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    ("scales", "band", "is_first", "accepted"),
    [
        (1, None, True, True),
        (100, None, True, False),
        (1, NOISE_BAND, True, False),
        (1, NOISE_BAND, False, False),
    ],
)
def test_what_a_measured_step_leaves_out_has_one_scale_and_does_not_become_noise(
    policy: Policy, scales: int, band: int | None, *, is_first: bool, accepted: bool
) -> None:
    """Rows of a layer that comes later, each on quanta of its own, or heard anew on quanta by its band: 100 % for 1 and 8 %."""
    place, unseen = (Kind.GRADIENT, 0), np.full(scales, UNSEEN)
    stated = unseen_grid(policy, Kind.GRADIENT, unseen)
    stated = stated if band is None else site_grid(policy, Kind.GRADIENT, band, unseen)
    before = GridTable({place: unseen_grid(policy, Kind.GRADIENT, np.zeros(1, dtype=np.int64))})
    own, excesses = Yardstick(policy, Calibration({}, GridTable({}))), list[Any]()
    checks = HeaderChecks(policy, GridTable({}), before, [], excesses, is_first=is_first, yardstick=own)
    checks.check_unmeasured(GridTable({place: stated}), str)
    assert (excesses == []) == accepted


@pytest.mark.parametrize("policy", [FP32, FP64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("scale", "begins", "accepted"),
    [(UNSEEN, False, True), (0, False, False), (UNSEEN, True, True), (0, True, False)],
)
def test_zeros_that_had_values_do_not_become_noise(
    policy: Policy, scale: int, *, begins: bool, accepted: bool
) -> None:
    """Called noise where it is zero, a gradient is heard anew, on another quantum; 50 % for 1 % of an honest run.

    An audit that ``begins`` in that step says nothing of its grid, and knows that it is zero.
    """
    place, one = (Kind.GRADIENT, 0), np.zeros(1, dtype=np.int64)
    zero = SiteNoise(0.0, one, 0.0, 0.0, 4096)
    measured = Calibration({} if begins else {place: zero}, GridTable({}))
    own = Yardstick(policy, measured, zeros=frozenset({place} if begins else ()))
    before = GridTable({place: unseen_grid(policy, Kind.GRADIENT, np.full(1, scale))})
    excesses = list[Any]()
    checks = HeaderChecks(policy, GridTable({}), before, [], excesses, yardstick=own)
    checks.check_unmeasured(GridTable({place: site_grid(policy, Kind.GRADIENT, NOISE_BAND, one)}), str)
    assert (excesses == []) == accepted


@pytest.mark.parametrize("policy", [FP32, FP64], ids=["fp32", "fp64"])
def test_zeros_and_noise_are_heard_on_the_same_grid(policy: Policy) -> None:
    """Kept as never seen, a gradient of zeros was rounded on quanta by its own size alone: 83 % for 0 % of an honest run."""
    one, band = np.zeros(1, dtype=np.int64), policy.gradient_band[0]
    heard = site_grid(policy, Kind.GRADIENT, band, one)
    heard = replace(heard, floor=heard.floor - 1)
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, one)
    unseen, seen = (unseen_grid(policy, Kind.GRADIENT, np.full(1, scale)) for scale in (UNSEEN, 0))
    for before in (silent, unseen):
        assert held_grid(policy, Kind.GRADIENT, before, heard, has_outgrown=True) == heard
    assert held_grid(policy, Kind.GRADIENT, seen, heard, has_outgrown=True).floor == seen.floor


@pytest.mark.parametrize(("chooses", "scale"), [(True, 3), (False, 1)])
def test_a_gradients_scale_settles_from_the_one_before_where_grids_are_chosen(
    chooses: bool, scale: int
) -> None:
    """The measured one is that of one pass over the whole batch, and a loop may take it in parts."""
    before, measured = (
        SiteGrid(0, -16, -24, True, np.array([exponent], dtype=np.int16)) for exponent in (3, 1)
    )
    place = (Kind.GRADIENT, 0)
    context = RecordingContext(
        FP32, GridTable({place: before}), GridTable({place: measured}), chooses=chooses
    )
    assert context.is_calibrated
    rms = np.array([1.5])  # whose scale is 1, so that 1, 2 and 3 are wide enough
    scales = context._scales(Kind.GRADIENT, measured, before, rms)  # pyright: ignore[reportPrivateUsage]
    assert scales.tolist() == [scale]
