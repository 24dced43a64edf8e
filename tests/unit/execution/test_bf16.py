"""Policy bf16: autocast around float32 parameters, coarse dithered grids, and gradients logged by parity."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.calibrate import SiteNoise, choose_rows, decision_band, grid_for, safety_of
from tallystick.execution.capture import Capture, Findings
from tallystick.execution.follow_tape import FollowTape, find_policy_breaches
from tallystick.execution.freedom import FLIP
from tallystick.execution.grids import (
    NOISE_BAND,
    floor_exponent,
    has_dips,
    is_noise_only,
    is_parity_coded,
    lowest_scale,
    row_scales_of,
    settled_scales,
    site_grid,
    whole_scale,
)
from tallystick.execution.jitter import Jitter
from tallystick.execution.probe_tapes import ProbeTape
from tallystick.execution.randomness import RandomStream
from tallystick.execution.tape import RecordTape
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Frame,
    Kind,
    Parities,
    SiteAddress,
    SparseEntries,
    decode_frame,
    decode_parities,
    encode,
    encode_parities,
)
from tallystick.numerics.policy import (
    BF16,
    FP32,
    FP64,
    LEAF,
    SPARSEST,
    is_calibration_step,
    move_budget,
    policy_of,
)

GRADIENT = (int(Kind.GRADIENT), 0)
AT = SiteAddress(0, 0, Kind.GRADIENT, 0)
N = 4096


# ---------------------------------------------------------------------------------------------- whole runs

RUNS: dict[str, dict[str, str]] = {
    "plain, adamw": {"model": "plain", "optimizer": "adamw"},
    "batch norm, max-pool, relu": {"model": "convolutions", "optimizer": "momentum"},
    "attention, two micro-batches, clipped": {"model": "transformer", "accumulation": "2", "clip": "0.5"},
    "recurrent": {"model": "recurrent"},
    "a sparse embedding": {"model": "sparse"},
    "an averaged copy": {"average": "yes", "scheduler": "cosine"},
    "checkpointed": {"model": "checkpointed"},
    "gradients that begin late": {"model": "late", "optimizer": "sgd"},
}


def _has_bfloat16_lstm() -> bool:
    """Whether plain torch can: without instructions for bfloat16 oneDNN has no such LSTM."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.zeros(2, 1, 4))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_followed_to_the_same_roots_under_noise(
    name: str, zoo: Any, record_run: Any, follow_run: Any
) -> None:
    if name == "recurrent" and not _has_bfloat16_lstm():
        pytest.skip("torch's own LSTM does not compute in bfloat16 on this processor")
    make = lambda: zoo.build(RUNS[name])  # noqa: E731
    run = record_run(make, "bf16", 11)
    done = follow_run(make, "bf16", run)
    assert [v for step in done.violations for v in step] == []
    assert done.roots == run.roots
    assert [o.loss for o in done.outcomes] == [o.loss for o in run.outcomes]
    assert sum(tape.freedom.moved for tape in done.tapes) > 0, "the log was needed"


def test_the_same_noise_without_the_log_ends_elsewhere(zoo: Any, record_run: Any, follow_run: Any) -> None:
    """The control: gradients rounded on the same grids, the stated parities left out."""
    make = lambda: zoo.build(RUNS["plain, adamw"])  # noqa: E731
    run = record_run(make, "bf16", 3)
    alone = [_own_roundings(make, run, jitter) for jitter in (None, 5)]
    assert alone[0] == run.roots[-1]
    assert alone[1] != run.roots[-1]
    assert follow_run(make, "bf16", run).roots == run.roots


def _own_roundings(make: Any, run: Any, jitter: int | None) -> str:
    """The root after recording again, with this machine's own log, under noise or without."""
    from tallystick.execution.session import Session
    from tallystick.execution.snapshot import state_summary
    from tallystick.execution.step import run_step

    job = make()
    session = Session(
        job.model, job.optimizer, policy=BF16, seed=3, scheduler=job.scheduler,
        jitter=None if jitter is None else Jitter(jitter),
        follows_up=job.after_step is not None,
    )  # fmt: skip
    session.prepare()
    session.table = run.initial
    for _ in run.frames:
        tape = session.record_tape(session.table)
        run_step(session, job, tape)
        tape.finish()
        session.settle(tape)
    return state_summary(session).root().hex()


def test_parameters_stay_float32_and_contractions_are_bfloat16(zoo: Any, record_run: Any) -> None:
    job = zoo.build({"model": "plain"})
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    first = job.model[0]

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.add((inputs[0].dtype, output.dtype))

    first.register_forward_hook(watch)
    run = record_run(lambda: job, "bf16", 2)
    assert seen == {(torch.float32, torch.bfloat16)}
    assert {p.dtype for p in job.model.parameters()} == {torch.float32}
    kept = {name: t.dtype for name, t in run.session.floating_state() if not name.endswith("/step")}
    assert set(kept.values()) == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_backward_runs_outside_autocast(zoo: Any, open_job: Any) -> None:
    """Torch asks for that; a matrix product of float32 gradients must not be narrowed on the way."""
    inside: list[bool] = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            inside.append(torch.is_autocast_enabled("cpu"))
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            inside.append(torch.is_autocast_enabled("cpu"))
            return grads[0]

    session = open_job(zoo.build({"model": "plain"}), BF16)
    with session.stepping(ProbeTape()), session.micro_batch(0):
        session.backward(Watching.apply(session.model(torch.ones(2, 12))).sum())
    assert inside == [True, False]


def test_a_cast_below_bfloat16_is_still_refused() -> None:
    def narrowed(dtype: torch.dtype, policy: Any) -> Tensor:
        stream = RandomStream(7)
        state = torch.get_rng_state()
        stream.start(0, 0, 0)
        try:
            with Capture(ProbeTape(), stream, compute=getattr(torch, policy.compute), findings=Findings()):
                return torch.linspace(0.1, 1.0, 8).to(dtype)
        finally:
            torch.set_rng_state(state)

    assert narrowed(torch.bfloat16, BF16).dtype is torch.bfloat16
    with pytest.raises(Nondeterminism, match=r"cast from torch\.float32 to torch\.float8_e4m3fn"):
        narrowed(torch.float8_e4m3fn, BF16)
    with pytest.raises(Nondeterminism, match=r"cast from torch\.float32 to torch\.bfloat16"):
        narrowed(torch.bfloat16, FP32)


def test_a_recorded_run_trains_like_a_plain_one(zoo: Any, record_run: Any) -> None:
    settings = {"model": "plain", "optimizer": "sgd", "batch": "64"}
    plain = zoo.build(settings)
    losses: list[float] = []
    for step in range(60):
        loss = plain.loss(plain.model, plain.batch(step % 4))
        plain.optimizer.zero_grad()
        loss.backward()
        plain.optimizer.step()
        losses.append(float(loss.detach()))
    job = zoo.build(settings)
    own = job.batch
    job.batch = lambda step: own(step % 4)
    record_run(lambda: job, "bf16", 60)
    with torch.no_grad():
        recorded = float(job.loss(job.model, plain.batch(3)))
        wanted = float(plain.loss(plain.model, plain.batch(3)))
    assert losses[-1] < losses[0] - 0.02
    assert recorded == pytest.approx(wanted, abs=6e-3)


# ------------------------------------------------------------------------------------- grids and their code


@pytest.mark.parametrize("band", range(BF16.gradient_band[0], BF16.gradient_band[1] + 1))
def test_a_gradient_is_coded_by_whichever_code_is_smaller(band: int) -> None:
    grid = site_grid(BF16, Kind.GRADIENT, band, np.array([0]))
    assert grid.parity == (band + SPARSEST > BF16.gradient_floor)
    assert grid.floor == (max(BF16.gradient_floor, band + 1) if grid.parity else BF16.gradient_floor)
    assert grid.band == (grid.floor - 1 if grid.parity else band)
    assert find_policy_breaches(BF16, GridTable({GRADIENT: grid})) == []
    other = SiteGrid(
        0, grid.band, grid.floor, True, [0], parity=not grid.parity
    )  # the neighbour: the other code on the same grid
    (breach,) = find_policy_breaches(BF16, GridTable({GRADIENT: other}))
    assert f"parity code {not grid.parity}, the policy has {grid.parity}" in breach.rule


def test_no_other_policy_has_parities_and_none_of_their_grids_changed() -> None:
    for policy in (FP32, FP64, LEAF):
        for kind in Kind:
            assert not any(is_parity_coded(policy, kind, band) for band in range(-60, 0))
        assert {"parity", "row_scales", "decision_safety", "dithered_buffers"}.isdisjoint(policy.parameters())
    assert floor_exponent(-16, -5) == -5
    assert (BF16.parameters()["parity"], BF16.parameters()["loss_band_max"]) == (1, -2)
    stated = {**BF16.parameters(), "optimizer_arithmetic": "general"}
    assert policy_of("bf16", stated) == replace(BF16, optimizer_arithmetic="general")
    with pytest.raises(InvalidInput, match="policy bf16: parity is None in the specification"):
        policy_of("bf16", {k: v for k, v in stated.items() if k != "parity"})


NOISE_GRID = site_grid(BF16, Kind.GRADIENT, NOISE_BAND, np.array([-20]))


def test_a_noise_only_gradient_is_never_coded_by_parity() -> None:
    grid = site_grid(BF16, Kind.GRADIENT, NOISE_BAND, np.array([-20]))
    assert (grid.parity, grid.dithered, is_noise_only(grid)) == (False, False, True)
    assert find_policy_breaches(BF16, GridTable({GRADIENT: grid})) == []


@pytest.mark.parametrize(
    ("elements", "signal", "silent"), [(24, 4.0, True), (24, 8.0, False), (4096, 4.0, False)]
)
def test_a_small_gradient_as_large_as_its_noise_is_noise_only(
    elements: int, signal: float, silent: bool
) -> None:
    """``signal`` is its rms over its largest deviation; scales are lifted two octaves, so the band would have room."""
    measured = SiteNoise(0.25 / signal, np.array([3]), 1.0, 1.0 / signal, elements)
    grid = grid_for(BF16, Kind.GRADIENT, measured)
    assert grid is not None and is_noise_only(grid) == silent
    if elements < 256:  # what was noise once is noise until it is eight times as large
        assert is_noise_only(grid_for(BF16, Kind.GRADIENT, replace(measured, largest=1.0 / 32.0), NOISE_GRID))
        assert not is_noise_only(
            grid_for(BF16, Kind.GRADIENT, replace(measured, largest=1.0 / 64.0), NOISE_GRID)
        )


def test_every_row_has_a_scale_of_at_least_the_whole() -> None:
    rms = np.array([8.0, 0.5, 1.5, 1.0])
    whole = math.ceil(math.log2(math.sqrt((64 + 0.25 + 2.25 + 1) / 4)))
    assert whole_scale(rms) == whole == 3
    assert settled_scales(None, rms, True).tolist() == [3, 3, 3, 3]
    assert settled_scales(None, np.array([7.9] + [1.0] * 99), True).tolist() == [3, *[1] * 99]
    assert lowest_scale(rms) == 3 - 16


def test_rows_keep_their_dips_while_they_have_them_and_only_then() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        rms = np.exp2(rng.uniform(-9.0, 9.0) + rng.normal(0.0, rng.uniform(0.0, 4.0), 64))
        assert not has_dips(row_scales_of(rms, False))
        dipped = row_scales_of(rms, True)
        if whole_scale(rms) - dipped.min() == 4:
            assert has_dips(dipped)
            assert settled_scales(dipped, rms, True).tolist() == dipped.tolist()
    assert not has_dips(np.array([-900]))
    assert has_dips(np.array([-900, -910]))


@pytest.mark.parametrize(("follows", "lowest"), [(True, 0), (False, 4)])
def test_small_rows_have_small_scales_where_their_noise_is_small(follows: bool, lowest: int) -> None:
    rms = np.array([64.0, *[1.0] * 40, *[0.01] * 10])
    noise = 0.02 * (np.maximum(rms, 1.0) if follows else np.full(51, 10.0))
    measured = SiteNoise(0.0, row_scales_of(rms, False), 9.0, float(noise.max()), 51 * 64, rms, noise)
    choose_rows(BF16, measured, None)
    assert measured.scales.tolist() == [6, *[lowest] * 50]
    assert measured.relative == pytest.approx(float((noise / np.exp2(measured.scales)).max()))


def test_scales_that_noise_leaves_no_room_are_lifted_for_the_step_that_was_calibrated() -> None:
    rms, noise = np.full(64, 3.0), np.full(64, 1.3)
    measured = SiteNoise(0.0, row_scales_of(rms, False), 3.0, 1.3, 64 * 16, rms, noise)
    choose_rows(BF16, measured, None)
    assert measured.scales.tolist() == [4] * 64  # 2 without; 1.3 is 2**-3 of 2**4 at most
    table = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -2, measured.scales)})
    for base, expected in ((GridTable(), 4), (table, 3)):
        tape = RecordTape(BF16, table, base=base)
        x = torch.full((64, 16), 3.0)
        tape.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        tape.finish()
        assert tape.table.sites[GRADIENT].scales.tolist() == [expected] * 64


def test_scales_follow_the_rows_without_slack_but_not_into_a_dip() -> None:
    large, small = torch.full((64, 16), 3.0), torch.full((64, 16), 0.01)
    grid = site_grid(BF16, Kind.GRADIENT, -3, np.full(64, 2))
    table = GridTable({GRADIENT: grid})
    lowest: list[int] = []
    for x in (large, small, small, small, large):
        tape = RecordTape(BF16, table, base=table)
        tape.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        tape.finish()
        table = tape.table
        assert len(set(table.sites[GRADIENT].scales.tolist())) == 1
        lowest.append(int(table.sites[GRADIENT].scales[0]))
    assert lowest == [2, 1, 0, -1, 2]


@pytest.mark.parametrize(("above", "noted"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_a_scale_more_than_an_octave_too_wide_is_a_violation_more_than_three_at_a_calibration(
    above: int, noted: int
) -> None:
    x = gradient()
    before, wide = table_of(scale=0), table_of(scale=1 + above)
    bits = torch.zeros(N, dtype=torch.uint8).numpy()
    payloads = {AT: encode_parities(Parities.of(bits)), SiteAddress(0, 0, Kind.GRID, 0): before.diff(wide)}
    rules: list[str] = []
    for base in (before, GridTable()):
        tape = FollowTape(BF16, before, Frame.of(payloads), base)
        tape.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        rules += [v.rule for v in tape.violations if "is too wide" in v.rule]
    assert len(rules) == noted


def test_a_scale_that_the_step_before_had_may_be_kept_less_an_octave() -> None:
    x = gradient()
    for scale, noted in ((4, 0), (5, 1)):  # the values have 1
        before = table_of(scale=5)
        update = before.diff(table_of(scale=scale))
        payloads = {AT: b"\0" * (N // 8)} | ({SiteAddress(0, 0, Kind.GRID, 0): update} if scale != 5 else {})
        tape = FollowTape(BF16, before, Frame.of(payloads), before)
        tape.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        assert sum("is too wide" in v.rule for v in tape.violations) == noted


def test_few_elements_get_more_safety_and_other_policies_are_left_alone() -> None:
    assert [safety_of(3, n) for n in (1, 4, 16, 64, 255, 256, 1 << 20)] == [6, 6, 5, 4, 4, 3, 3]
    steps = [step for step in range(260) if is_calibration_step(step, 100, True)]
    assert steps == [0, 4, 8, 16, 32, 64, 100, 200]
    assert [step for step in range(260) if is_calibration_step(step, 100)] == [0, 4, 32, 100, 200]


def test_a_decision_gives_up_its_safety_before_it_is_refused() -> None:
    assert [decision_band(BF16, noise) for noise in (0.0, 0.05, 0.125, 0.15, 0.25, 0.26)] == [
        -8,
        -3,
        -2,
        -2,
        -2,
        -1,
    ]
    assert BF16.decision_band[1] == -2
    assert decision_band(FP32, 2.0**-10) == -10 + FP32.safety
    assert decision_band(FP64, 2.0**-20) == -20 + FP64.safety
    assert decision_band(FP64, 2.0**-17) == FP64.decision_band[1] == -14
    assert decision_band(FP64, 2.0**-10) == -9, "an octave of safety, and that is refused"


# ------------------------------------------------------------------------------------------ logs that lie


def table_of(band: int = -4, scale: int = 1) -> GridTable:
    return GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, band, np.array([scale]))})


def gradient() -> Tensor:
    """4096 numbers whose rms is 1.5, so that their scale exponent is 1."""
    return 1.5 * torch.randn(N, generator=torch.Generator().manual_seed(5))


def noisy(x: Tensor, share: float = 1.0 / 16.0) -> Tensor:
    """``x`` moved by up to a share of the band, 2**-3."""
    unit = 2.0 * torch.rand(x.shape, generator=torch.Generator().manual_seed(6)) - 1.0
    return x + share * 2.0**-3 * unit


def recorded(x: Tensor, table: GridTable | None = None) -> tuple[bytes, Tensor]:
    tape = RecordTape(BF16, table or table_of())
    out = torch.empty_like(x, dtype=torch.float64)
    tape.round(Kind.GRADIENT, 0, x, out=out, key=(1, 2), name="gradient of w")
    tape.settle_noise()
    return tape.finish(), out


def followed(y: Tensor, frame: Frame, table: GridTable | None = None) -> tuple[FollowTape, Tensor]:
    tape = FollowTape(BF16, table or table_of(), frame)
    out = torch.empty_like(y, dtype=torch.float64)
    tape.round(Kind.GRADIENT, 0, y, out=out, key=(1, 2), name="gradient of w")
    tape.finish()
    return tape, out


def flipped(frame: Frame, at: Any) -> Frame:
    payload = frame.find(AT)
    assert payload is not None
    bits = decode_parities(payload, N).bits
    bits[at] ^= 1
    return Frame.of({AT: encode_parities(Parities.of(bits))})


def test_parities_make_a_noisy_follower_round_as_the_recorder_did() -> None:
    x = gradient()
    frame, out = recorded(x)
    assert len(frame) <= N // 8 + 8
    tape, own = followed(noisy(x), decode_frame(frame))
    assert tape.violations == []
    assert torch.equal(own, out)
    _, alone = recorded(noisy(x))
    different = int((alone != out).sum())
    assert tape.freedom.moved == different > 10, "the control: as many differ without the log"
    assert tape.freedom.largest_move == pytest.approx(
        math.sqrt(different) * 2.0**-1 / float(noisy(x).double().norm()), rel=1e-9
    )


def test_the_freedom_of_parities_is_what_the_budget_leaves() -> None:
    frame, _ = recorded(gradient())
    tape, _ = followed(gradient(), decode_frame(frame))
    grid = table_of().sites[GRADIENT]
    most = move_budget(grid, N)
    assert most == int(N / 16 + 8 * math.sqrt(N / 16)) + 16
    freedom, site = tape.freedom, tape.freedom.sites[GRADIENT]
    assert (site.near, freedom.elements, freedom.moved) == (most, N, 0)
    length = float(gradient().double().norm())
    assert freedom.largest_steer == 0.0, "nothing was measured that would explain more"
    assert freedom.quanta == N * 2.0**-2
    freedom.cluster = site.cluster = 64
    site.expected, site.by_square = 2.0, {-2: 2.0}
    assert 0 < freedom.budget(2.0) < most
    assert freedom.largest_steer == pytest.approx(math.sqrt(freedom.square_budget) / length)
    alone, freedom.carried = freedom.square_budget, 12.0
    assert freedom.square_budget == pytest.approx(alone + 12.0 * FLIP * length * math.sqrt(N) / 2)
    assert freedom.largest_steer <= math.sqrt(freedom.budget(2.0)) * 2.0**-1 / length


def test_a_steered_element_is_followed_and_shows_in_what_was_moved() -> None:
    """What the policy does not prove: within the budget a log may choose. It is bounded, counted and printed."""
    x = gradient()
    frame = decode_frame(recorded(x)[0])
    tape, own = followed(x, flipped(frame, 100))
    _, out = followed(x, frame)
    assert tape.violations == []
    assert (own != out).nonzero().reshape(-1).tolist() == [100]
    assert abs(float(own[100] - out[100])) == 2.0**-1
    assert tape.freedom.moved == 1


def test_a_log_that_steers_more_than_the_budget_is_not_accepted_and_nobody_accused() -> None:
    x = gradient()
    frame = decode_frame(recorded(x)[0])
    budget = move_budget(table_of().sites[GRADIENT], N)
    tape, _ = followed(x, flipped(frame, slice(0, budget)))
    assert (tape.violations, tape.excesses) == ([], [])
    for count in (budget + 1, N):
        tape, _ = followed(x, flipped(frame, slice(0, count)))
        ((_, excess),) = tape.excesses
        assert tape.violations == []
        assert (excess.own, excess.stated) == (f"{budget} moved at most", str(count))


def test_noise_beyond_half_a_quantum_is_not_seen_by_the_tape() -> None:
    """No violation and another state: the fingerprint and the root tell, not the log."""
    x = gradient()
    frame, out = recorded(x)
    y = x.clone()
    y[1] += 0.9 * 2.0**-1
    tape, own = followed(y, decode_frame(frame))
    assert tape.violations == []
    assert (own != out).nonzero().reshape(-1).tolist() == [1]
    assert abs(float(own[1] - out[1])) == 2.0 * 2.0**-1


MALFORMED: dict[str, tuple[bytes | None, str]] = {
    "absent": (None, "is to be rounded by parities, and the log has none"),
    "a byte short": (b"\0" * (N // 8 - 1), f"{N} elements need {N // 8} bytes"),
    "a byte long": (b"\0" * (N // 8 + 1), f"{N} elements need {N // 8} bytes"),
    "entries": (
        encode(SparseEntries(N, 1, np.array([3]), np.array([1]))),
        f"{N} elements need {N // 8} bytes",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parities_are_refused_with_the_reason(name: str) -> None:
    payload, reason = MALFORMED[name]
    frame = Frame.of({} if payload is None else {AT: payload})
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        followed(gradient(), frame)


def test_parities_where_the_grid_is_for_entries_are_refused() -> None:
    sparse = table_of(band=-8)
    frame, out = recorded(gradient(), sparse)
    assert not sparse.sites[GRADIENT].parity
    assert torch.equal(followed(gradient(), decode_frame(frame), sparse)[1], out)
    parities = decode_frame(recorded(gradient())[0])
    with pytest.raises(InvalidInput, match="entries"):
        followed(gradient(), parities, sparse)


def test_a_grid_that_switches_the_code_off_policy_is_a_violation() -> None:
    """A trainer who takes parities for a quiet gradient, for their wider freedom, is noted."""
    quiet = SiteGrid(0, -8, -3, True, [1], parity=True)
    tape = FollowTape(BF16, GridTable({GRADIENT: quiet}), Frame.of({AT: b"\0" * (N // 8)}))
    assert [v.rule for v in tape.violations] == ["parity code True, the policy has False for band 2**-8"]


def test_a_gradient_without_elements_has_no_parities() -> None:
    frame, _ = recorded(torch.zeros(0), table_of())
    assert decode_frame(frame).find(AT) is None
    followed(torch.zeros(0), decode_frame(frame))
    with pytest.raises(InvalidInput, match="has no elements, and 1 bytes of parities"):
        followed(torch.zeros(0), Frame.of({AT: b"\0"}))
