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
from tallystick.execution.dispatch.capture import Capture, SpelledOut
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.noise.bands import choose_rows, grid_for
from tallystick.execution.noise.freedom import Freedom
from tallystick.execution.noise.gradients import FLIP
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.probes import ProbingContext
from tallystick.execution.noise.safety import decision_band, safety_of
from tallystick.execution.noise.weighing import Weight
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.breaches import find_policy_breaches
from tallystick.execution.rounding.context import RecordingContext, outgrown_from, reaches
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import (
    NOISE_BAND,
    bits_for,
    floor_exponent,
    has_dips,
    is_noise_only,
    lowest_scale,
    reach_of,
    residue_bits_of,
    row_scales_of,
    settled_scales,
    site_grid,
    whole_scale,
    with_residue_bits,
)
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Frame,
    Kind,
    Residues,
    SiteAddress,
    SparseEntries,
    decode_frame,
    decode_residues,
    encode,
    encode_residues,
)
from tallystick.numerics.policy import (
    BF16,
    FP32,
    FP64,
    LEAF,
    is_calibration_step,
    move_budget,
    policy_of,
)

GRADIENT = (int(Kind.GRADIENT), 0)
AT = SiteAddress(0, 0, Kind.GRADIENT, 0)
N = 4096
BITS = residue_bits_of(BF16, Kind.GRADIENT, -9)
QUANTUM = 2.0 ** (1 + BF16.gradient_floor)  # of `table_of`


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
    assert sum(context.freedom.moved for context in done.contexts) > 0, "the log was needed"


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
    from tallystick.commit.state import summarise
    from tallystick.execution.session.session import Session
    from tallystick.execution.snapshot import state_entries
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
        context = session.recording_context(session.table)
        run_step(session, job, context)
        context.finish()
        session.settle(context)
    return summarise(state_entries(session)).root().hex()


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
    kept = {name: t.dtype for name, t in run.session.state if not name.endswith("/step")}
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
    with session.stepping(ProbingContext()), session.open_step.micro_batch(0):
        session.open_step.backward(Watching.apply(session.model(torch.ones(2, 12))).sum())
    assert inside == [True, False]


def test_a_cast_below_bfloat16_is_still_refused() -> None:
    def narrowed(dtype: torch.dtype, policy: Any) -> Tensor:
        stream = RandomStream(7)
        state = torch.get_rng_state()
        stream.start(0, 0, 0)
        try:
            with Capture(
                ProbingContext(), stream, compute=getattr(torch, policy.compute), findings=OperatorFindings()
            ):
                return torch.linspace(0.1, 1.0, 8).to(dtype)
        finally:
            torch.set_rng_state(state)

    assert narrowed(torch.bfloat16, BF16).dtype is torch.bfloat16
    with pytest.raises(Nondeterminism, match=r"cast from torch\.float32 to torch\.float8_e4m3fn"):
        narrowed(torch.float8_e4m3fn, BF16)
    with pytest.raises(Nondeterminism, match=r"cast from torch\.float32 to torch\.bfloat16"):
        narrowed(torch.bfloat16, FP32)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_of_a_convolution_is_added_to_its_rounded_sums_on_every_device(bias: bool) -> None:
    """A control: one rounding of both together, as a processor's fused kernel has it, gives other numbers."""
    generator = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(size, generator=generator) for size in ((2, 3, 9, 9), (5, 3, 3, 3), (5,)))
    operators: list[str] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    capture = Capture(ProbingContext(), RandomStream(7), compute=torch.bfloat16, findings=OperatorFindings())
    with Watching(), capture:
        found = nn.functional.conv2d(x.bfloat16(), w.bfloat16(), b.bfloat16() if bias else None)
    sums = nn.functional.conv2d(x.bfloat16().double(), w.bfloat16().double())
    shift = b.bfloat16().view(5, 1, 1).double() * bias
    assert ("aten::add" in operators) is bias
    assert torch.equal(found, (sums.bfloat16() + shift.bfloat16()))
    assert torch.equal(found, (sums + shift).bfloat16()) is not bias


def test_attention_with_dropout_is_spelled_out_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels draw inside. On a processor none does, so which ones torch may take is asked here."""
    allowed: list[bool] = []
    real = nn.functional.scaled_dot_product_attention

    class Asking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is real:
                allowed.append(torch.backends.cuda.flash_sdp_enabled())
                allowed.append(torch.backends.cuda.mem_efficient_sdp_enabled())
            return func(*args, **(kwargs or {}))

    q = torch.ones(1, 1, 4, 8)
    with Asking(), SpelledOut():
        for arguments in ({}, {"dropout_p": 0.0}, {"dropout_p": 0.5}):
            real(q, q, q, **arguments)
        real(q, q, q, None, 0.5)
    assert allowed == [True] * 4 + [False] * 4
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_inside_torchs_own_module_is_spelled_out_too(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused on a CUDA device before: no mode sees the attention that another overridable function calls."""
    allowed: list[bool] = []
    real = nn.functional.scaled_dot_product_attention

    def asked(*args: Any, **kwargs: Any) -> Any:
        allowed.append(torch.backends.cuda.mem_efficient_sdp_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", asked)
    x, module = torch.ones(2, 4, 8), nn.MultiheadAttention(8, 2, dropout, batch_first=True)
    with SpelledOut():
        module(x, x, x, need_weights=False)
    assert allowed == [dropout == 0.0]


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_are_made_of_steps_on_devices(layer: Any) -> None:
    """Refused on a CUDA device before, with the reason that cuDNN's kernel draws, which it does not without dropout."""
    enabled: list[bool] = []

    class Asking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.gru, torch.lstm, torch.rnn_tanh):
                enabled.append(torch.backends.cudnn.enabled)
            return func(*args, **(kwargs or {}))

    x, module = torch.ones(3, 2, 4), layer(4, 5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with Asking(), SpelledOut():
        module(x)
        module(packed)
    assert enabled == [False, False]
    assert torch.backends.cudnn.enabled


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


@pytest.mark.parametrize("band", [-9, -5, -2, 0, 1])
def test_a_gradient_is_coded_by_as_many_bits_as_its_noise_needs(band: int) -> None:
    """Its quantum is the policy's; with three bits a follower may be 3.5 quanta away, and each bit doubles that."""
    grid = site_grid(BF16, Kind.GRADIENT, band, np.array([0]))
    assert (grid.floor, grid.band, grid.residue_bits) == (-3, -2, max(3, band + 5))
    assert (2.0 ** (grid.residue_bits - 1) - 0.5) * 2.0**grid.floor >= 0.75 * 2.0**band
    assert find_policy_breaches(BF16, GridTable({GRADIENT: grid})) == []
    more = replace(grid, residue_bits=8)
    assert find_policy_breaches(BF16, GridTable({GRADIENT: more})) == []
    for other in (
        SiteGrid(0, -9, -3, True, [0]),
        SiteGrid(0, -4, -3, True, [0], residue_bits=1),
    ):
        (breach,) = find_policy_breaches(BF16, GridTable({GRADIENT: other}))
        assert (
            breach.rule == f"residues of {other.residue_bits} bits, the policy has 3 for band 2**{other.band}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_follow_the_largest_element_over_its_scale(dtype: torch.dtype) -> None:
    """A result that falls otherwise moves an element in proportion to its size: they reach a sixteenth of the largest."""
    grid = site_grid(BF16, Kind.GRADIENT, -9, np.array([0, 4]))
    for largest, bits in (
        (0.0, 3),
        (1.0, 3),
        (8.0, 3),
        (8.01, 4),
        (16.0, 4),
        (100.0, 7),
        (128.01, 8),
        (1e6, 8),
        (math.inf, 3),
    ):
        x = torch.zeros(2, 300, dtype=dtype)
        x[1, 7], x[0, 3] = -16.0 * largest, 1.0
        found = with_residue_bits(grid, x, 2)
        assert found.residue_bits == bits
        reach = (2.0 ** (bits - 1) - 0.5) * 0.25
        assert bits == 8 or math.isinf(largest) or reach >= largest / 16 - 0.25
        assert with_residue_bits(found, x, 5).residue_bits == max(5, bits)


def test_no_other_policy_has_residues_and_none_of_their_grids_changed() -> None:
    for policy in (FP32, FP64, LEAF):
        for kind in Kind:
            assert not any(residue_bits_of(policy, kind, band) for band in range(-60, 0))
        assert {"residue_bits", "row_scales", "decision_safety", "dithered_buffers"}.isdisjoint(
            policy.parameters()
        )
    assert floor_exponent(-16, -5) == -5
    assert (BF16.parameters()["residue_bits"], BF16.parameters()["loss_band_max"]) == (2, -2)
    stated = {**BF16.parameters(), "optimizer_arithmetic": "general"}
    assert policy_of("bf16", stated) == replace(BF16, optimizer_arithmetic="general")
    with pytest.raises(InvalidInput, match="policy bf16: residue_bits is None in the specification"):
        policy_of("bf16", {k: v for k, v in stated.items() if k != "residue_bits"})


NOISE_GRID = site_grid(BF16, Kind.GRADIENT, NOISE_BAND, np.array([-20]))


def test_a_noise_only_gradient_is_never_coded_by_residues() -> None:
    grid = site_grid(BF16, Kind.GRADIENT, NOISE_BAND, np.array([-20]))
    assert (grid.residue_bits, grid.dithered, is_noise_only(grid)) == (0, False, True)
    assert find_policy_breaches(BF16, GridTable({GRADIENT: grid})) == []


@pytest.mark.parametrize("elements", [24, 255])
def test_a_small_gradient_has_a_finer_quantum_where_it_is_quiet_and_all_bits_where_it_is_not(
    elements: int,
) -> None:
    """A bias before a batch norm: its next deviation may be twenty times those seen, and 24 numbers cost nothing."""
    for relative, silent in (
        (0.0, False),
        (2.0**-8, False),
        (0.1, False),
        (0.5, False),
        (2.0, False),
        (2.1, True),
    ):
        measured = SiteNoise(relative, np.array([3]), 1.0, 8.0 * relative, elements)
        grid = grid_for(BF16, Kind.GRADIENT, measured)
        assert grid is not None and is_noise_only(grid) == silent
        floor, bits = (-5, 6) if relative <= 2.0**-8 else (-3, 8)
        assert silent or (grid.floor, grid.residue_bits, grid.band) == (floor, bits, -2)
        assert find_policy_breaches(BF16, GridTable({GRADIENT: grid})) == []
    large = grid_for(BF16, Kind.GRADIENT, SiteNoise(0.01, np.array([3]), 1.0, 0.08, 256))
    assert large is not None and (large.floor, large.residue_bits) == (-3, 3)
    coarsest = SiteGrid(0, -2, -6, True, [3], residue_bits=7)
    (breach,) = find_policy_breaches(BF16, GridTable({GRADIENT: coarsest}))
    assert breach.rule == "floor 2**-6, the policy has 2**-3 for band 2**-2"


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


def test_noise_larger_than_the_gradient_is_reached_by_bits_and_not_by_wider_scales() -> None:
    """What one measurement hears as loud as that, another may not: a wider scale would be the trainer's word."""
    rms = np.full(64, 3.0)
    for noise, bits in ((1.9, 6), (5.9, 7), (8.0, 7), (8.1, None)):
        measured = SiteNoise(0.0, row_scales_of(rms, False), 3.0, noise, 64 * 16, rms, np.full(64, noise))
        choose_rows(BF16, measured, None)
        assert measured.scales.tolist() == [2] * 64
        grid = grid_for(BF16, Kind.GRADIENT, measured)
        assert grid is not None and (None if is_noise_only(grid) else grid.residue_bits) == bits


def test_scales_fall_to_an_octave_above_their_values_in_the_step_that_was_calibrated() -> None:
    """Those calibrated stay, but where they belong to other values: a loop of one's own may clip what it measured."""
    close, far = (GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -2, np.full(64, s))}) for s in (3, 9))
    for base, table, expected in (
        (GridTable(), close, 3),
        (close, close, 2),
        (GridTable(), far, 8),
        (far, far, 8),
    ):
        context = RecordingContext(BF16, table, base=base)
        x = torch.full((64, 16), 3.0)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        context.finish()
        assert context.table.sites[GRADIENT].scales.tolist() == [expected] * 64


def test_scales_follow_the_rows_without_slack_but_not_into_a_dip() -> None:
    large, small = torch.full((64, 16), 3.0), torch.full((64, 16), 0.01)
    grid = site_grid(BF16, Kind.GRADIENT, -3, np.full(64, 2))
    table = GridTable({GRADIENT: grid})
    lowest: list[int] = []
    for x in (large, small, small, small, large):
        context = RecordingContext(BF16, table, base=table)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        context.finish()
        table = context.table
        assert len(set(table.sites[GRADIENT].scales.tolist())) == 1
        lowest.append(int(table.sites[GRADIENT].scales[0]))
    assert lowest == [2, 1, 0, -1, 2]


@pytest.mark.parametrize(("above", "noted"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_a_scale_more_than_an_octave_too_wide_is_a_violation_more_than_three_at_a_calibration(
    above: int, noted: int
) -> None:
    x = gradient()
    before, wide = table_of(scale=0), table_of(scale=1 + above)
    none = Residues.of([0] * N, BITS)
    payloads = {AT: encode_residues(none), SiteAddress(0, 0, Kind.GRID, 0): before.diff(wide)}
    rules: list[str] = []
    for base in (before, GridTable()):
        context = FollowingContext(BF16, before, Frame.of(payloads), base)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        rules += [v.rule for v in context.violations if "is too wide" in v.rule]
    assert len(rules) == noted


def test_a_scale_that_the_step_before_had_may_be_kept_less_an_octave() -> None:
    x = gradient()
    for scale, noted in ((4, 0), (5, 1)):  # the values have 1
        before = table_of(scale=5)
        update = before.diff(table_of(scale=scale))
        payloads = {AT: b"\0" * (BITS * N // 8)} | (
            {SiteAddress(0, 0, Kind.GRID, 0): update} if scale != 5 else {}
        )
        context = FollowingContext(BF16, before, Frame.of(payloads), before)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        assert sum("is too wide" in v.rule for v in context.violations) == noted


def test_in_the_first_step_no_scale_is_kept() -> None:
    """Grids of a first state are the trainer's word: kept, they would let it round a run's first steps to nothing."""
    x = gradient()
    before = table_of(scale=20)
    payloads = {AT: b"\0" * (BITS * N // 8), SiteAddress(0, 0, Kind.GRID, 0): before.diff(table_of(scale=19))}
    for is_first in (False, True):
        context = FollowingContext(BF16, before, Frame.of(payloads), GridTable(), is_first=is_first)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        assert any("is too wide" in v.rule for v in context.violations) == is_first


def silent_in(floor: int) -> GridTable:
    """A gradient declared to be nothing but noise below ``2**floor``."""
    return GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, NOISE_BAND, np.array([floor - NOISE_BAND]))})


def heard(largest: float, elements: int, table: GridTable) -> Yardstick:
    """A follower's own measurement: values near 2**0 that deviate by ``largest`` at most."""
    noise = SiteNoise(largest, np.zeros(1, dtype=np.int64), 1.0, largest, elements)
    return Yardstick(BF16, Calibration({GRADIENT: noise}, table))


def violated(x: Tensor, before: GridTable, table: GridTable, base: GridTable, own: Yardstick) -> list[str]:
    """What of a header that goes from ``before`` to ``table`` is a violation to a follower with its ``own`` measurement."""
    return [v.rule for v in found_in(x, before, table, base, own).violations]


def found_in(
    x: Tensor, before: GridTable, table: GridTable, base: GridTable, own: Yardstick
) -> FollowingContext:
    """What such a follower finds."""
    payloads: dict[SiteAddress, bytes] = {}
    if not is_noise_only(table.sites[GRADIENT]):
        payloads[AT] = encode_residues(Residues.of([0] * x.numel(), BITS))
    if table != before:
        payloads[SiteAddress(0, 0, Kind.GRID, 0)] = before.diff(table)
    context = FollowingContext(BF16, before, Frame.of(payloads), base, yardstick=own)
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    return context


def test_what_is_noise_on_both_sides_may_be_five_octaves_larger_here_and_what_is_heard_here_may_not() -> None:
    """Its values have 2**0 (rms 1): declared floors down to 2**-5 accuse nobody."""
    x = torch.ones(N)
    for floor, larger, accused in ((0, 0, 0), (-1, 1, 0), (-5, 1, 0), (-6, 0, 1)):
        silent = silent_in(floor)
        assert len(violated(x, silent, silent, silent, heard(2.0, N, silent))) == accused
        loud = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, np.array([0]))})
        found = found_in(x, silent, silent, silent, heard(2.0**-9, N, loud))
        assert len(found.violations) == accused
        assert [e.stated for _, e in found.excesses if e.own == "values of 2**0"] == [
            f"noise below 2**{floor}"
        ] * larger


def silenced(x: Tensor, own: Yardstick) -> FollowingContext:
    """What a follower finds of a gradient declared to be noise only, as large as it is."""
    silent = silent_in(1)
    context = FollowingContext(BF16, silent, Frame.of({}), silent, yardstick=own)
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    return context


def test_what_is_silenced_and_heard_here_counts_in_a_steps_size() -> None:
    x = torch.ones(N)
    loud = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, np.array([0]))})
    for own, moved in ((heard(2.0, N, silent_in(0)), 0.0), (heard(2.0**-9, N, loud), float(N))):
        freedom = silenced(x, own).freedom
        assert (freedom.squared, freedom.shifted, freedom.energy) == (moved, moved, N)
    found = [excess.site for _, excess in Freedom().add(freedom)]
    assert "move of this step's gradient" in found


def test_a_gradient_that_was_noise_only_is_heard_as_soon_as_it_is_as_large_as_its_floor() -> None:
    """Residues have the bits for noise as large as the gradient; who may stay silent longer freezes what it likes."""
    for size, is_silent in ((0.24, True), (0.51, False), (3.0, False)):
        before = silent_in(-1)
        context = RecordingContext(BF16, before, base=before)
        x = torch.full((N,), size)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        context.finish()
        grid = context.table.sites[GRADIENT]
        assert is_noise_only(grid) == is_silent, size
        if not is_silent:
            assert find_policy_breaches(BF16, context.table, None) == []


def noted_at_calibration(
    x: Tensor, before: GridTable, blocks: int, own_blocks: int, *, is_first: bool
) -> list[str]:
    """What a follower says of a gradient that gets so many scales where the noise is measured."""
    scales = np.full(blocks, 1)
    table = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, scales)})
    payloads = {AT: encode_residues(Residues.of([0] * x.numel(), BITS))}
    if table != before:
        payloads[SiteAddress(0, 0, Kind.GRID, 0)] = before.diff(table)
    measured = np.ones(own_blocks, dtype=np.int64), 1.0, 2.0**-9, x.numel()
    noise = SiteNoise(2.0**-9, *measured, block_mean=np.zeros(own_blocks))
    own = Yardstick(BF16, Calibration({GRADIENT: noise}, table))
    context = FollowingContext(BF16, before, Frame.of(payloads), yardstick=own, is_first=is_first)
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    return [excess.own for _, excess in context.excesses]


def test_how_many_scales_a_gradient_has_follows_from_its_first_values() -> None:
    """Rows of nine elements have one each only where they are uneven: eight times the median row, a factor of 2 aside."""
    even, uneven, doubtful = torch.ones(64, 9), torch.ones(64, 9), torch.ones(64, 9)
    uneven[3], doubtful[3] = 17.0, 9.0
    for x, blocks, own_blocks, noted in (
        (even, 1, 1, []), (even, 64, 1, ["1 scales"]), (uneven, 64, 64, []), (uneven, 1, 64, ["64 scales"]),
        (doubtful, 1, 64, []), (doubtful, 64, 1, []), (torch.ones(64, 16), 1, 64, ["64 scales"]),
    ):  # fmt: skip
        found = noted_at_calibration(x, GridTable({}), blocks, own_blocks, is_first=True)
        assert [each for each in found if "scales" in each] == noted, (blocks, own_blocks)


def test_how_many_scales_a_gradient_has_is_never_changed() -> None:
    x = torch.ones(64, 16)
    for blocks, noted in ((64, 0), (1, 1)):
        before = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, np.full(64, 1))})
        found = noted_at_calibration(x, before, blocks, 64, is_first=False)
        assert sum("the grid of the last calibration" in each for each in found) == noted, blocks


def test_a_row_may_lie_an_octave_below_its_size_or_as_far_as_noise_reaches_and_no_farther() -> None:
    """One row of 2**3 among rows of 2**0, which all are at least the whole's 2**1 or an octave less."""
    x = torch.ones(64, 16)
    x[9] = 8.0

    def noted(scale: int, largest: float, of: int = 9) -> list[str]:
        scales = np.where(np.arange(64) == 9, 3, 1)
        before = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, scales)})
        scales[of] = scale
        table = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, scales)})
        payloads = {AT: encode_residues(Residues.of([0] * x.numel(), BITS))}
        if table != before:
            payloads[SiteAddress(0, 0, Kind.GRID, 0)] = before.diff(table)
        own = heard(largest, x.numel(), before)
        context = FollowingContext(BF16, before, Frame.of(payloads), before, yardstick=own)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        assert context.violations == []
        return [excess.own for _, excess in context.excesses if "block" in excess.own]

    assert noted(3, 0.0) == noted(2, 0.0) == []
    assert noted(1, 0.0) == noted(1, 5.9) == ["scale 2**2 of block 9 at least"]
    assert noted(1, 6.1) == []
    assert noted(0, 0.0, of=5) == []
    assert noted(-1, 6.1, of=5) == ["scale 2**0 of block 5 at least"]


def test_where_grids_are_chosen_rows_may_be_as_large_as_a_loop_made_them() -> None:
    """It may add up parts of what was measured as a whole: measured rows had 2**0, these have 2**3."""
    x = 8.0 * torch.ones(64, 16)
    noise = SiteNoise(
        2.0**-9, np.zeros(64, dtype=np.int64), 1.0, 2.0**-9, x.numel(), np.ones(64), np.full(64, 2.0**-9)
    )
    for scale, noted in ((3, []), (4, []), (5, ["scale 2**4 of block 0 at most"])):
        table = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, np.full(64, scale))})
        measured = GridTable({GRADIENT: table.sites[GRADIENT].with_scales(np.zeros(64, dtype=np.int64))})
        own = Yardstick(BF16, Calibration({GRADIENT: noise}, measured))
        frame = Frame.of({AT: encode_residues(Residues.of([0] * x.numel(), BITS))})
        context = FollowingContext(BF16, table, frame, yardstick=own, is_first=True)
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        assert [excess.own for _, excess in context.excesses if excess.own.startswith("scale ")] == noted


def scales_noted(
    kind: Kind, value: float, scale: int, noise: float, *, calibrated: bool = False
) -> list[str]:
    """What a follower that measured so much noise notes of a buffer or loss of this value with this scale."""
    place = (kind, 0)
    before, table = (
        GridTable({place: site_grid(BF16, kind, -9, np.array([each]))}) for each in (scale, scale)
    )
    own = SiteNoise(noise, np.array([1 if calibrated else 0]), value, noise, 1)
    yardstick = Yardstick(BF16, Calibration({place: own}, before))
    payloads = {SiteAddress(0, 0, kind, 0): encode_residues(Residues.of([0], 1))}
    base = GridTable() if calibrated else before
    context = FollowingContext(BF16, table, Frame.of(payloads), base, yardstick=yardstick)
    x = torch.tensor([value], dtype=torch.float64 if kind == Kind.LOSS else torch.float32)
    context.round(kind, 0, x, out=torch.empty_like(x), key=(1, 2), name="mean")
    return [excess.own for _, excess in context.excesses if "block" in excess.own]


@pytest.mark.parametrize("kind", [Kind.BUFFER, Kind.LOSS])
def test_the_scale_of_a_buffer_or_a_loss_is_the_one_that_its_value_has(kind: Kind) -> None:
    """Whoever may take of three scales the one that rounds it upwards leads it anywhere."""
    assert scales_noted(kind, 0.75, 0, 2.0**-20) == []
    assert scales_noted(kind, 0.75, 1, 2.0**-20) == ["scale 2**0 of block 0 at most"]
    # One that may have been as large in the step before is kept, an octave lower in each.
    assert scales_noted(kind, 1.5, 0, 2.0**-20) == ["scale 2**1 of block 0 at least"]
    # By less than 2**-7 of itself, or eight times its noise, it may be that of the next octave too.
    for value, noise, noted in ((1.005, 0.0, 0), (1.01, 0.0, 1), (1.01, 0.0014, 0), (1.01, 0.0012, 1)):
        assert len(scales_noted(kind, value, 0, noise)) == noted, (value, noise)
    for value, noise, noted in ((0.995, 0.0, 0), (0.99, 0.0, 1), (0.99, 0.0014, 0), (0.99, 0.0012, 1)):
        assert len(scales_noted(kind, value, 1, noise)) == noted, (value, noise)
    # Where it was measured the measurement's scale is one more ground.
    assert scales_noted(kind, 0.75, 1, 2.0**-20, calibrated=True) == []
    assert scales_noted(kind, 0.75, 2, 2.0**-20, calibrated=True) == ["scale 2**1 of block 0 at most"]


@pytest.mark.parametrize(
    ("elements", "noise", "most"), [(64, 0.125, 8), (64, 0.124, 3), (255, 0.125, 8), (256, 0.125, 3)]
)
def test_the_scale_of_a_small_gradient_no_more_than_eight_times_its_noise_may_be_five_octaves_wider(
    elements: int, noise: float, most: int
) -> None:
    """Three are given to all at a calibration."""
    x = torch.ones(elements)
    for scale, found in ((most, 0), (most + 1, 1)):
        base = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, np.array([0]))})
        table = GridTable({GRADIENT: site_grid(BF16, Kind.GRADIENT, -4, np.array([scale]))})
        rules = violated(x, base, table, GridTable(), heard(noise, elements, base))
        assert len([rule for rule in rules if "too wide" in rule]) == found, (scale, rules)


@pytest.mark.parametrize(("bits", "reach"), [(1, 2.0**-4), (2, 1.5 / 16), (3, 3.5 / 16), (7, 63.5 / 16)])
def test_noise_excuses_up_to_a_quarter_of_what_residues_reach(bits: int, reach: float) -> None:
    """Reach is 2**(n - 1) - 1/2 quanta, of 2**-2 here; one bit has the band."""
    assert reach_of(SiteGrid(0, -4, -2, True, [0], residue_bits=bits)) == reach


def test_the_bits_that_a_step_needs_are_those_of_its_largest_element() -> None:
    grid = SiteGrid(0, -4, -2, True, [0], residue_bits=2)
    assert [bits_for(grid, largest, 2) for largest in (-2, 2, 3, 4, 5, 6, 7, 50)] == [2, 2, 2, 3, 4, 5, 6, 8]
    assert bits_for(grid, 0, 5) == 5


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
    context = RecordingContext(BF16, table or table_of())
    out = torch.empty_like(x, dtype=torch.float64)
    context.round(Kind.GRADIENT, 0, x, out=out, key=(1, 2), name="gradient of w")
    context.settle_noise()
    return context.finish(), out


def followed(y: Tensor, frame: Frame, table: GridTable | None = None) -> tuple[FollowingContext, Tensor]:
    context = FollowingContext(BF16, table or table_of(), frame)
    out = torch.empty_like(y, dtype=torch.float64)
    context.round(Kind.GRADIENT, 0, y, out=out, key=(1, 2), name="gradient of w")
    context.finish()
    return context, out


def flipped(frame: Frame, at: Any) -> Frame:
    payload = frame.find(AT)
    assert payload is not None
    values = decode_residues(payload, N, BITS).values
    values[at] = (values[at] + 1) % (1 << BITS)
    return Frame.of({AT: encode_residues(Residues.of(values, BITS))})


def test_residues_make_a_noisy_follower_round_as_the_recorder_did() -> None:
    x = gradient()
    frame, out = recorded(x)
    assert len(frame) <= BITS * N // 8 + 8
    context, own = followed(noisy(x), decode_frame(frame))
    assert context.violations == []
    assert torch.equal(own, out)
    _, alone = recorded(noisy(x))
    different = int((alone != out).sum())
    assert context.freedom.moved == different > 10, "the control: as many differ without the log"
    assert context.freedom.largest_move == pytest.approx(
        math.sqrt(different) * QUANTUM / float(noisy(x).double().norm()), rel=1e-9
    )


def test_the_freedom_of_residues_is_what_the_budget_leaves() -> None:
    frame, _ = recorded(gradient())
    context, _ = followed(gradient(), decode_frame(frame))
    grid = table_of().sites[GRADIENT]
    most = move_budget(grid, N)
    assert most == int(N / 4 + 8 * math.sqrt(N / 4)) + 16
    freedom, site = context.freedom, context.freedom.sites[GRADIENT]
    assert (site.near, freedom.elements, freedom.moved) == (most, N, 0)
    length = float(gradient().double().norm())
    assert freedom.largest_steer == 0.0, "nothing was measured that would explain more"
    assert freedom.quanta == N * QUANTUM**2
    assert site.square == (4 * QUANTUM) ** 2, "the longest move is four quanta"
    freedom.cluster = site.cluster = 64
    site.expected, site.by_square = 2.0, {2 * (1 + BF16.gradient_floor): 2.0}
    assert 0 < freedom.budget(2.0) < most
    assert freedom.largest_steer == pytest.approx(math.sqrt(freedom.square_budget) / length)
    alone, freedom.carried = freedom.square_budget, 12.0
    carried = 12.0 * FLIP * length
    assert freedom.square_budget == pytest.approx(alone + carried * math.sqrt(N) * QUANTUM + carried**2)


@pytest.mark.parametrize("steps", [1, 2, 5, 7])
def test_a_steered_element_is_followed_and_shows_in_what_was_moved_and_how_far(steps: int) -> None:
    """What the policy does not prove: within the budget a log may choose. It is bounded, counted and printed."""
    x = gradient()
    frame = decode_frame(recorded(x)[0])
    stated = frame
    for _ in range(steps):
        stated = flipped(stated, 100)
    context, own = followed(x, stated)
    _, out = followed(x, frame)
    far = min(steps, 8 - steps)  # seven quanta up is one down
    assert context.violations == []
    assert (own != out).nonzero().reshape(-1).tolist() == [100]
    assert abs(float(own[100] - out[100])) == far * QUANTUM
    assert (context.freedom.moved, context.freedom.squared) == (1, far**2 * QUANTUM**2)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_audit_keeps_which_elements_a_log_moved_and_where_to(in_place: bool) -> None:
    x = gradient()
    frame = decode_frame(recorded(x)[0])
    _, out = followed(x, frame)
    context = FollowingContext(
        BF16, table_of(), flipped(frame, [7, 100]), yardstick=heard(2.0**-9, N, table_of())
    )
    target = x.clone() if in_place else torch.empty_like(x)
    context.round(Kind.GRADIENT, 0, target if in_place else x, out=target, key=(1, 2), name="gradient of w")
    numel, at, moves = context.freedom.moves[GRADIENT]
    assert (numel, at.tolist()) == (N, [7, 100])
    assert torch.equal(moves.double(), (target.double() - out)[at])
    assert moves.abs().tolist() == [QUANTUM, QUANTUM]


def test_an_audit_weighs_the_moves_of_a_log() -> None:
    x = gradient()
    frame = decode_frame(recorded(x)[0])
    asked: list[tuple[int, list[int]]] = []

    def weigh(ordinal: int, rounded: Tensor, at: Tensor, moves: Tensor) -> Weight:
        asked.append((ordinal, at.tolist()))
        return Weight(float(moves.abs().sum()), float(rounded.numel()))

    for flips in ([], [7, 100]):
        context = FollowingContext(
            BF16, table_of(), flipped(frame, flips), yardstick=heard(2.0**-9, N, table_of()), weigh=weigh
        )
        context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
        assert (context.freedom.weighed, context.freedom.trained) == (len(flips) * QUANTUM, N)
        moves = context.freedom.gradients[GRADIENT]
        assert (moves.weighed, moves.weighable) == (len(flips) * QUANTUM, N * 2.0**-8)
    assert asked == [(0, []), (0, [7, 100])]
    # Of what is noise here, how large it is says nothing of how large it is elsewhere.
    noisy = FollowingContext(
        BF16, table_of(), flipped(frame, [7, 100]), yardstick=heard(1.0, N, silent_in(0)), weigh=weigh
    )
    noisy.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    moves = noisy.freedom.gradients[GRADIENT]
    assert moves.weighed == moves.weighable == 2 * QUANTUM


def test_a_log_that_steers_more_than_the_budget_is_not_accepted_and_nobody_accused() -> None:
    x = gradient()
    frame = decode_frame(recorded(x)[0])
    budget = move_budget(table_of().sites[GRADIENT], N)
    context, _ = followed(x, flipped(frame, slice(0, budget)))
    assert (context.violations, context.excesses) == ([], [])
    for count in (budget + 1, N):
        context, _ = followed(x, flipped(frame, slice(0, count)))
        ((_, excess),) = context.excesses
        assert context.violations == []
        assert (excess.own, excess.stated) == (f"{budget} moved at most", str(count))


def test_where_single_results_may_carry_all_of_a_gradient_size_is_held_to_and_not_number() -> None:
    x = gradient()
    frame = flipped(decode_frame(recorded(x)[0]), slice(0, N))
    steady = heard(2.0**-9, N, table_of())
    unsteady = Yardstick(BF16, replace(steady.measured, steady=False))
    assert [len(under(own, x, frame).excesses) for own in (steady, unsteady)] == [1, 0]
    context = under(unsteady, x, frame)
    assert context.freedom.squared == N * QUANTUM**2
    context.freedom.energy = float(x.square().sum())
    assert "move of this step's gradient" in [excess.site for _, excess in Freedom().add(context.freedom)]


def under(own: Yardstick, x: Tensor, frame: Frame) -> FollowingContext:
    """A context that has followed one gradient with the measurement ``own``."""
    context = FollowingContext(BF16, table_of(), frame, yardstick=own)
    context.round(Kind.GRADIENT, 0, x, out=torch.empty_like(x), key=(1, 2), name="gradient of w")
    return context


def test_noise_beyond_three_and_a_half_quanta_is_not_seen_by_the_context() -> None:
    """No violation and another state: the fingerprint and the root tell, not the log."""
    x = gradient()
    frame, out = recorded(x)
    near, far = x.clone(), x.clone()
    near[1] += 3.4 * QUANTUM
    far[1] += 4.6 * QUANTUM
    assert torch.equal(followed(near, decode_frame(frame))[1], out)
    context, own = followed(far, decode_frame(frame))
    assert context.violations == []
    assert (own != out).nonzero().reshape(-1).tolist() == [1]
    assert abs(float(own[1] - out[1])) == 8.0 * QUANTUM


def test_a_burst_takes_more_bits_and_is_followed() -> None:
    """One example makes most of a gradient: its largest element is far from the others, and so is its noise."""
    x = gradient()
    x[5] = 300.0
    x[6:] *= 0.05
    frame, out = recorded(x)
    y = x * (1.0 + 2.0**-6)
    context, own = followed(y, decode_frame(frame))
    assert torch.equal(own, out)
    assert context.table.sites[GRADIENT].residue_bits > BITS
    alone, _ = recorded(y)
    assert not torch.equal(recorded(y)[1], out), "the control"
    assert decode_frame(alone) != decode_frame(frame)


MALFORMED: dict[str, tuple[bytes | None, str]] = {
    "absent": (None, "is to be rounded by residues, and the log has none"),
    "a byte short": (b"\0" * (BITS * N // 8 - 1), f"{N} elements of {BITS} bits need {BITS * N // 8} bytes"),
    "a byte long": (b"\0" * (BITS * N // 8 + 1), f"{N} elements of {BITS} bits need {BITS * N // 8} bytes"),
    "entries": (
        encode(SparseEntries(N, 1, np.array([3]), np.array([1]))),
        f"{N} elements of {BITS} bits need {BITS * N // 8} bytes",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_residues_are_refused_with_the_reason(name: str) -> None:
    payload, reason = MALFORMED[name]
    frame = Frame.of({} if payload is None else {AT: payload})
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        followed(gradient(), frame)


def test_residues_where_the_grid_is_for_entries_are_refused() -> None:
    sparse = GridTable({GRADIENT: SiteGrid(0, -8, -2, True, [1])})
    stated = decode_frame(recorded(gradient())[0])
    with pytest.raises(InvalidInput, match="entries"):
        followed(gradient(), stated, sparse)


def test_a_grid_that_switches_the_code_off_policy_is_a_violation() -> None:
    """A trainer who takes a coarser quantum, for its wider freedom, is noted."""
    coarse = SiteGrid(0, -2, -2, True, [1], residue_bits=3)
    context = FollowingContext(BF16, GridTable({GRADIENT: coarse}), Frame.of({AT: b"\0" * (3 * N // 8)}))
    assert [v.rule for v in context.violations] == ["floor 2**-2, the policy has 2**-3 for band 2**-2"]


def test_a_gradient_without_elements_has_no_residues() -> None:
    frame, _ = recorded(torch.zeros(0), table_of())
    assert decode_frame(frame).find(AT) is None
    followed(torch.zeros(0), decode_frame(frame))
    with pytest.raises(InvalidInput, match="has no elements, and 1 bytes of residues"):
        followed(torch.zeros(0), Frame.of({AT: b"\0"}))


def test_a_small_gradient_that_is_mostly_noise_is_no_ground_to_measure_anew() -> None:
    """Its quantum says so: a quiet one has two octaves finer. It may be several times its scale by chance in any step."""
    quiet = grid_for(BF16, Kind.GRADIENT, SiteNoise(2.0**-9, np.zeros(1, dtype=np.int64), 1.0, 2.0**-9, 16))
    noisy = grid_for(BF16, Kind.GRADIENT, SiteNoise(1.0, np.zeros(1, dtype=np.int64), 1.0, 1.0, 16))
    for grid, numel, outgrown in ((quiet, 16, True), (noisy, 16, False), (noisy, 256, True)):
        assert grid is not None
        limits = np.array([outgrown_from(BF16, grid, numel)])
        assert reaches(np.array([4.1]), limits) == outgrown
        assert not reaches(np.array([3.9]), limits)
