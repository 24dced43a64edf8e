"""Noise measured by repeating a step under last-bit noise: what it finds, refuses, and leaves as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import Nondeterminism, ProtocolViolation
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.job import Job
from tallystick.execution.noise import bands as bands_module
from tallystick.execution.noise import calibration as calibrate_module
from tallystick.execution.noise import deviations
from tallystick.execution.noise.bands import choose_grids, grid_for, zero_grid
from tallystick.execution.noise.calibration import calibrate, repetitions_at
from tallystick.execution.noise.deviations import Deviations
from tallystick.execution.noise.measured import LEAST_TENSOR, Calibration, SiteNoise, exponent_above
from tallystick.execution.noise.safety import safety_for
from tallystick.execution.rounding.grids import NOISE_BAND, is_noise_only, scale_exponents, site_grid
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import backward_of, run_step
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import POLICIES

BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])


def bytes_of(session: Any) -> dict[str, bytes]:
    return {entry.name: bytes(entry.data) for entry in state_entries(session)}


@BOTH
@pytest.mark.parametrize("model", ["convolutions", "transformer", "sparse", "frozen", "reassigned"])
def test_calibration_leaves_the_session_as_it_was(model: str, policy: str, zoo: Any, open_job: Any) -> None:
    job = zoo.build({"model": model, "clip": "0.1", "accumulation": "2"})
    session = open_job(job, POLICIES[policy], jitter=4)
    mine = session.arithmetic.jitter
    torch.manual_seed(5)
    before, generator = bytes_of(session), torch.get_rng_state()
    found = calibrate(session, backward_of(session, job))
    assert bytes_of(session) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert session.arithmetic.jitter is mine
    assert session.step == 0
    with pytest.raises(ProtocolViolation, match="no step is open"):
        _ = session.open_step
    assert all(p.grad is None for p in job.model.parameters())
    again = calibrate(session, backward_of(session, job))
    assert again.table == found.table, "the same step gives the same grids"


def test_clipping_adds_no_noise_of_its_own_to_large_gradients(open_job: Any) -> None:
    """A kernel that adds squares one by one is off by 1e-5 of the norm of two million numbers, and moves all gradients alike."""
    generator = torch.Generator().manual_seed(7)
    wanted = torch.randn(1 << 21, generator=generator) * torch.rand(1 << 21, generator=generator) ** 3
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1 << 21))
    job = Job(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch=lambda step: torch.zeros(1), steps=2,
        loss=lambda module, batch: (module.weight * wanted.to(module.weight.dtype)).sum() + batch.sum(), clip_norm=0.5,
    )  # fmt: skip
    session = open_job(job, POLICIES["fp32"])
    seen = calibrate(session, backward_of(session, job)).noise[(Kind.GRADIENT, 0)]
    assert seen.relative < 1e-6


@BOTH
def test_a_failed_calibration_leaves_the_session_usable(policy: str, zoo: Any, open_job: Any) -> None:
    job = zoo.build({"model": "convolutions"})
    session = open_job(job, POLICIES[policy])
    before = bytes_of(session)
    loss = job.loss
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        value = loss(model, batch)
        return value.mode().values if len(calls) == 2 else value

    job.loss = failing
    with pytest.raises(Nondeterminism, match="mode"):
        calibrate(session, backward_of(session, job))
    job.loss = loss
    after = bytes_of(session)
    assert after == before, [name for name in before if after[name] != before[name]]
    calibrate(session, backward_of(session, job))


@BOTH
def test_bands_stand_over_the_measured_noise_by_the_policys_safety(
    policy: str, zoo: Any, open_job: Any
) -> None:
    job = zoo.build({"model": "transformer"})
    rules = POLICIES[policy]
    session = open_job(job, rules)
    found = calibrate(session, backward_of(session, job))
    normal = 0
    for place, noise in found.noise.items():
        grid = found.table.sites.get(place)
        if grid is None or is_noise_only(grid) or place[0] not in (Kind.GRADIENT, Kind.DECISION):
            continue
        normal += 1
        lowest = (rules.gradient_band if place[0] == Kind.GRADIENT else rules.decision_band)[0]
        assert grid.band == max(lowest, exponent_above(noise.relative) + rules.safety)
        assert noise.relative < 2.0**grid.band
    assert normal > 8
    assert exponent_above(0.0) == -1000
    assert [exponent_above(v) for v in (0.25, 0.26, 1.0, 3.0)] == [-2, -1, 0, 2]


@BOTH
def test_noise_only_gradients_are_found_and_signals_are_not(policy: str, zoo: Any, open_job: Any) -> None:
    class Keys(nn.Module):
        """Softmax over keys does not feel a bias that all keys share."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(3, 8) for _ in range(3))
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = x.reshape(-1, 4, 3)
            weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), dim=-1)
            return self.head((weights @ self.value(x)).mean(dim=1))

    job = zoo.build({})
    job.model = Keys()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    session = open_job(job, POLICIES[policy])
    table = calibrate(session, backward_of(session, job)).table
    noise = {
        session.parameters[ordinal][0]
        for (kind, ordinal), grid in table.sites.items()
        if kind == Kind.GRADIENT and is_noise_only(grid)
    }
    assert noise == {"key.bias"}


@pytest.mark.parametrize("largest", [0.0, 7e-18, 2.0**-22, 2.0**-21])
def test_a_zero_whose_reference_is_a_last_bit_of_float64_is_as_noisy_as_the_step(
    largest: float, zoo: Any, open_job: Any
) -> None:
    """Its floor was 2**-54, and an honest trainer was called a liar where a float32 machine left 2**-27."""
    session = open_job(zoo.build({}), POLICIES["fp32"])
    loud = SiteNoise(2.0**-21, np.zeros(1, dtype=np.int64), 1.0, 2.0**-21, 4096)
    zero = SiteNoise(math.inf, np.zeros(1, dtype=np.int64), 0.0, largest, 1)
    seen: Any = SimpleNamespace(noise={(Kind.GRADIENT, 0): loud, (Kind.GRADIENT, 1): zero}, first=[])
    found = choose_grids(session, seen, {}).table.sites[(Kind.GRADIENT, 1)]
    assert is_noise_only(found)
    assert int(found.scales.min()) + found.band == -21 + POLICIES["fp32"].safety


@pytest.mark.parametrize(("elements", "more", "kept"), [(7, 0, True), (8, 0, False), (7, 1, False)])
@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16"])
def test_of_very_few_elements_one_quiet_repetition_makes_no_signal(
    policy: str, elements: int, more: int, kept: bool, zoo: Any, open_job: Any
) -> None:
    """A bias that cancels moved by its own last bit alone: recorded as a signal, no other machine could follow it.

    One that is larger than noise was, though below its floor, was too small beside its noise, and is not now.
    """
    rules = POLICIES[policy]
    session = open_job(zoo.build({}), rules)
    silent = site_grid(rules, Kind.GRADIENT, NOISE_BAND, np.array([-16]))  # below 2**-17
    session.table = GridTable({(Kind.GRADIENT, 0): silent})
    rms = -17 - rules.safety + 1 + more
    size = math.ldexp(1.0, rms)
    noise = SiteNoise(2.0**-50, np.array([rms]), size, size * 2.0**-50, elements)
    seen: Any = SimpleNamespace(noise={(Kind.GRADIENT, 0): noise}, first=[])
    found = choose_grids(session, seen, {}).table.sites[(Kind.GRADIENT, 0)]
    assert (found == silent) == (kept and policy != "bf16")


def with_function(zoo: Any, function: Any, smooth: tuple[str, ...] = ()) -> Job:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function(self.first(x)))

    job = zoo.build({"batch": "32"})
    with torch.random.fork_rng():
        torch.manual_seed(2)
        job.model = Inside()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    job.smooth = smooth
    return job


@BOTH
def test_a_jump_declared_smooth_is_found_too_noisy(policy: str, zoo: Any, open_job: Any) -> None:
    """A lattice finer than the noise turns last-bit noise into jumps; calling it smooth does not hide that."""
    fine = 1e-17 if policy == "fp64" else 1e-8

    def rough(x: Tensor) -> Tensor:
        return x + 1e3 * torch.copysign(torch.ones_like(x), torch.sin(x / fine))

    job = with_function(zoo, rough, ("aten::copysign",))
    rough_session = open_job(job, POLICIES[policy])
    with pytest.raises(
        Nondeterminism, match=r"its noise is 2\*\*-?\d+ of its scale, policy fp\d\d allows 2\*\*-\d+"
    ):
        calibrate(rough_session, backward_of(rough_session, job))
    smooth = with_function(zoo, lambda x: x + 1e-3 * torch.fmod(x, 100.0), ("aten::fmod",))
    session = open_job(smooth, POLICIES[policy])
    calibrate(session, backward_of(session, smooth))


@BOTH
def test_whole_numbers_that_noise_may_turn_are_refused(policy: str, zoo: Any, open_job: Any) -> None:
    """What moves by a part of the distance between two whole numbers is near one here and near the next elsewhere."""
    size = 1e15 if policy == "fp64" else 1e7

    def rounded(factor: float) -> Any:
        return lambda x: x + torch.floor(factor * x.detach()) / factor

    coarse = with_function(zoo, rounded(size))
    session = open_job(coarse, POLICIES[policy])
    with pytest.raises(
        Nondeterminism, match="a quarter of the distance between its switching points at most"
    ):
        calibrate(session, backward_of(session, coarse))
    fine = with_function(zoo, rounded(1e3))
    session = open_job(fine, POLICIES[policy])
    calibrate(session, backward_of(session, fine))


@BOTH
def test_gradients_that_are_nothing_but_noise_stop_no_run_and_move_nothing(
    policy: str, zoo: Any, open_job: Any
) -> None:
    job = with_function(zoo, torch.tanh)
    job.loss = lambda model, batch: nn.functional.cross_entropy(
        model(batch[0]), torch.softmax(model(batch[0]).detach(), dim=1)
    )
    session = open_job(job, POLICIES[policy])
    session.table = calibrate(session, backward_of(session, job)).table
    before = [p.detach().clone() for _, p in session.parameters]
    context = session.recording_context(session.table)
    run_step(session, job, context)
    assert any(
        is_noise_only(grid) for (kind, _), grid in session.table.sites.items() if kind == Kind.GRADIENT
    )
    assert all(torch.equal(p, was) for (_, p), was in zip(session.parameters, before, strict=True))


@BOTH
def test_a_gradient_that_is_not_finite_is_refused_by_name(policy: str, zoo: Any, open_job: Any) -> None:
    job = with_function(zoo, lambda x: (x * 0.0).sqrt())
    session = open_job(job, POLICIES[policy])
    with pytest.raises(Nondeterminism, match=r"gradient of first\.\w+ is not finite at step 0"):
        calibrate(session, backward_of(session, job))


@BOTH
def test_a_zero_that_noise_makes_nonzero_is_noise_only(policy: str, zoo: Any, open_job: Any) -> None:
    """A gradient may cancel to exact zeros here and to last bits elsewhere."""
    job = with_function(zoo, torch.tanh)
    job.loss = lambda model, batch: (
        nn.functional.l1_loss(model(batch[0]), model(batch[0]).detach().flip(0))
        + model.first.weight.square().sum()
    )
    session = open_job(job, POLICIES[policy])
    table = calibrate(session, backward_of(session, job)).table
    names = [name for name, _ in session.parameters]
    grid = table.sites[(Kind.GRADIENT, names.index("last.bias"))]
    assert is_noise_only(grid)
    assert grid.band == NOISE_BAND
    assert not grid.dithered


@BOTH
def test_gradients_that_are_exactly_zero_are_noise_only_until_their_first_size(
    policy: str, zoo: Any, open_job: Any
) -> None:
    job = zoo.build({"model": "late"})
    session = open_job(job, POLICIES[policy])
    table = calibrate(session, backward_of(session, job)).table
    names = [name for name, _ in session.parameters]
    for name in ("first.weight", "second.bias"):
        assert is_noise_only(table.sites[(Kind.GRADIENT, names.index(name))])
    assert table.sites[(Kind.GRADIENT, names.index("head.bias"))].scales[0] > -20


@BOTH
def test_rows_of_very_different_size_have_their_own_scales(policy: str, zoo: Any, open_job: Any) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(128, 12), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x[:, 0].abs() * 0).to(torch.int64)
            tokens = tokens + torch.arange(x.shape[0]) % 7
            return self.head(self.table(tokens) * 3.0 + x)

    job = zoo.build({})
    job.model = Words()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    session = open_job(job, POLICIES[policy])
    grid = calibrate(session, backward_of(session, job)).table.sites[(Kind.GRADIENT, 0)]
    assert grid.scales.size == 128
    assert int(grid.scales.max()) - int(grid.scales.min()) == 16


@BOTH
def test_jitter_moves_last_bits_only_and_leaves_counts(policy: str) -> None:
    dtype = getattr(torch, POLICIES[policy].compute)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[:4] = torch.tensor([3.0, -0.0, math.inf, math.nan])
    moved = Jitter(1).disturbed(x, whole=True)
    assert torch.equal(moved[:3], x[:3])
    assert math.isnan(float(moved[3]))
    assert (moved[4:] != x[4:]).all()
    assert float(Jitter(1).disturbed(x)[0]) != 3.0
    assert ((moved[4:] - x[4:]).abs() <= torch.finfo(dtype).eps * x[4:].abs() * 2.0).all()
    counts = torch.arange(9)
    assert Jitter(1).disturbed(counts) is counts
    assert torch.equal(Jitter(1).disturbed(x, whole=True)[4:], moved[4:])
    assert not torch.equal(Jitter(2).disturbed(x, whole=True)[4:], moved[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jitter_moves_half_down_and_half_up_whatever_the_layout(dtype: torch.dtype) -> None:
    x = torch.linspace(1.001, 1.999, 30_000, dtype=dtype).reshape(300, 100)

    moved = Jitter(3).disturbed(x)

    places = ((moved - x) / torch.finfo(dtype).eps).round()
    assert places.unique().tolist() == [-2.0, -1.0, 1.0, 2.0]  # x * eps is one to two last places
    assert 0.48 < float((places < 0).double().mean()) < 0.52
    assert torch.equal(Jitter(3).disturbed(x.t()).t(), moved)  # the same memory, seen otherwise
    again = x.clone()
    Jitter(3).disturb_(again)
    assert torch.equal(again, moved)
    gaps = x.repeat_interleave(2, dim=1)[:, ::2]  # does not fill its memory: the way of other devices
    assert not torch.equal(Jitter(3).disturbed(gaps), gaps)


def test_jitter_goes_on_with_new_numbers() -> None:
    x = torch.linspace(1.001, 1.999, 30_000)
    jitter = Jitter(3)

    first, second = jitter.disturbed(x), jitter.disturbed(x)

    assert 0.48 < float((first != second).double().mean()) < 0.52


# -- just inside and just outside -------------------------------------------------------------------------------------


def test_an_optimizers_noise_has_a_factor_of_four_and_a_limit(
    zoo: Any, open_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = zoo.build({})
    session = open_job(job, replace(POLICIES["fp32"], optimizer_arithmetic="general"))
    count = len(session.parameters) * (1 + len(session.trained.keys))

    def bands(typical: float, largest: float, **how: Any) -> set[int]:
        monkeypatch.setattr(bands_module, "_state_noise", lambda *given: [(typical, largest, 0.0)] * count)
        table = calibrate(session, backward_of(session, job), **how).table
        return {grid.band for (kind, _), grid in table.sites.items() if kind == Kind.STATE}

    assert bands(2.0**-60, 2.0**-45) == {-43}
    assert bands(2.0**-60, 2.0**-60) == {-47}
    assert bands(2.0**-42, 1.0) == {-40}
    with pytest.raises(
        Nondeterminism, match=r"the optimizer's noise is .* of the value, policy fp32 allows 2\*\*-42"
    ):
        bands(2.0**-42 * 1.001, 1.0)
    assert bands(2.0**-40, 1.0, for_audit=True) == {-40}, "two octaves louder for an auditor"
    with pytest.raises(Nondeterminism, match="the optimizer's noise is"):
        bands(2.0**-40 * 1.001, 1.0, for_audit=True)


def test_a_decision_and_a_buffer_may_be_as_noisy_as_the_policys_widest_band(zoo: Any, open_job: Any) -> None:
    session = open_job(zoo.build({}), POLICIES["fp64"])
    seen = Deviations(session, [])
    found = choose_grids(session, seen, {0: 2.0**-15})  # its factor given up, but for an octave
    assert found.table.sites[(Kind.DECISION, 0)].band == -14
    with pytest.raises(Nondeterminism, match=r"decision 0: its input moves by .* allows 2\*\*-15"):
        choose_grids(session, seen, {0: 2.0**-15 * 1.001})
    # An auditor's may be louder by two octaves: a trainer whose own just fits is honest.
    there = choose_grids(session, seen, {0: 2.0**-13}, for_audit=True)
    assert there.table.sites[(Kind.DECISION, 0)].band == -14
    with pytest.raises(Nondeterminism, match=r"decision 0: its input moves by .* allows 2\*\*-15"):
        choose_grids(session, seen, {0: 2.0**-13 * 1.001}, for_audit=True)
    for policy in (POLICIES["fp32"], POLICIES["fp64"]):
        widest = policy.buffer_band[1] - policy.safety
        for more, fits in ((0, True), (1, False)):
            noise = SiteNoise(2.0 ** (widest + more), np.zeros(1, dtype=np.int64), 1.0, 0.0, 4096)
            assert (grid_for(policy, Kind.BUFFER, noise) is not None) == fits


def test_a_silent_gradients_floor_is_the_steps_loudest_noise_times_the_safety() -> None:
    silent = SiteNoise(0.0, np.zeros(2, dtype=np.int64), 0.0, 0.0, 64)
    for policy in (POLICIES["fp64"], POLICIES["fp32"]):
        grid = zero_grid(policy, silent, None, 2.0**-10)
        assert (grid.scales + grid.band).tolist() == [-10 + policy.safety] * 2


def test_a_deviation_that_is_not_finite_is_no_noise(zoo: Any, open_job: Any) -> None:
    seen = Deviations(open_job(zoo.build({}), POLICIES["fp64"]), [])
    seen.compare_loss(1.0, 2.0)
    with pytest.raises(Nondeterminism, match="is not finite when the step is repeated"):
        seen.compare_loss(1.0, math.inf)


@pytest.mark.parametrize("elements", [8, LEAST_TENSOR - 1, LEAST_TENSOR])
def test_an_element_is_noise_that_differs_by_a_quarter_of_itself_in_some_repetition(
    elements: int, zoo: Any, open_job: Any
) -> None:
    """Exact zeros are none, nor what is tiny and the same: a column that training hardly has is what a trigger is made of."""
    session = open_job(zoo.build({}), POLICIES["fp64"])
    first = torch.full((elements,), 2.0**-30, dtype=torch.float64)
    first[:3] = torch.tensor([1.0, 0.0, 1.0])
    seen = Deviations(session, [first, *[None] * (len(session.parameters) - 1)])
    for part, by in ((0, 0.25), (2, 0.2499), (3, -(2.0**-31)), (0, 0.0)):
        again = first.clone()
        again[part] += by
        seen.compare([again, *[None] * (len(session.parameters) - 1)])
    noisy = seen.noise[Kind.GRADIENT, 0].noisy
    assert noisy.nonzero()[0].tolist() == ([0, 3] if elements < LEAST_TENSOR else [])
    assert noisy.size == (elements if elements < LEAST_TENSOR else 0)


@pytest.mark.parametrize(
    ("sizes", "steady"),
    [((1.0, 1.125, 1.25), True), ((1.0, 1.125, 1.26), False), ((0.0, 0.0, 0.0), False)],
)
def test_repetitions_are_steady_that_move_the_gradient_alike(
    sizes: tuple[float, ...], steady: bool, zoo: Any, open_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured(Deviations):
        def compare(self, again: list[Tensor | None]) -> None:
            super().compare(again)
            at = len(self.sizes) - (self.expected - len(sizes)) - 1
            self.sizes[-1] = sizes[at] if at >= 0 else 1e9

        expected = 1 + len(sizes)

    monkeypatch.setattr(calibrate_module, "Deviations", Measured)
    job = zoo.build({})
    session = open_job(job, POLICIES["bf16"])
    assert calibrate(session, backward_of(session, job), for_audit=True).steady == steady
    assert calibrate(session, backward_of(session, job)).steady, "a trainer's own does not ask"


class Counting(nn.Module):
    """Scales its output by how often it was called, which no state holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.model(x) * (1.0 + 0.01 * self.calls)


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16", "leaf"])
def test_a_program_that_keeps_count_beside_its_tensors_is_refused(
    policy: str, zoo: Any, open_job: Any
) -> None:
    plain = zoo.build({"model": "convolutions"})
    session = open_job(plain, POLICIES[policy])
    calibrate(session, backward_of(session, plain))
    session.close()

    job = zoo.build({"model": "convolutions"})
    job.model = Counting(job.model)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    counted = open_job(job, POLICIES[policy])
    with pytest.raises(Nondeterminism, match="keeps count beside the model's tensors"):
        calibrate(counted, backward_of(counted, job))


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_loss_that_is_only_noise_is_no_reason_for_an_auditor_not_to_accept(
    policy: str, zoo: Any, open_job: Any
) -> None:
    session = open_job(zoo.build({"model": "convolutions"}), POLICIES[policy])
    seen = deviations.Deviations(session, [None] * len(session.parameters))
    seen.noise[(Kind.LOSS, 0)] = SiteNoise(0.5, np.zeros(1, dtype=np.int64), 1.0, 0.5, 1)
    with pytest.raises(Nondeterminism, match=r"^loss: its noise is 2\*\*-1 of its scale"):
        bands_module.choose_grids(session, seen, {})
    widest = bands_module.choose_grids(session, seen, {}, for_audit=True).table.sites[(Kind.LOSS, 0)]
    assert widest.band == -2


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_running_mean_of_nothing_but_rounding_has_the_scale_of_its_noise(
    bias: float, policy: str, zoo: Any, open_job: Any
) -> None:
    """A mean of what a linear layer makes of numbers of mean zero is nothing else; that of others is as any."""
    job = with_function(zoo, nn.Identity())
    with torch.random.fork_rng():
        torch.manual_seed(2)
        linear = nn.Linear(16, 16, bias=False)
    first, second = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    with torch.no_grad():
        first.bias.copy_(torch.linspace(-1.0, 2.0, 16) * bias)
    job.model.first = nn.Sequential(nn.Linear(12, 16), first, linear, second)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    session = open_job(job, POLICIES[policy])

    found = calibrate(session, backward_of(session, job))

    [place] = [
        (site.kind, site.ordinal) for site in session.sites if site.name.endswith("first.3.running_mean")
    ]
    noise, grid = found.noise[place], found.table.sites[place]
    widest = session.policy.buffer_band[1]
    if bias:
        assert grid.band < widest
        assert list(grid.scales) == list(scale_exponents(np.array([noise.rms])))
        return
    assert grid.band == widest
    safety = safety_for(session.policy, noise)
    assert list(grid.scales) == [exponent_above(noise.largest) + safety - widest]
    assert noise.relative == math.ldexp(noise.largest, -int(grid.scales[0]))


LOUD = r"its noise is 2\*\*{} of its scale, .*; a batch of more samples"


@pytest.mark.parametrize(
    ("relative", "cancels", "was_lifted", "scale"),
    [(2.0**-11, False, False, None), (2.0**-3, False, False, None), (2.0**-2, False, False, 10),
     (2.0**-11, True, False, 1), (2.0**-11, False, True, 1), (2.0**-12, True, True, 0), (0.5, None, False, 11)],
)  # fmt: skip
def test_a_buffer_that_is_only_loud_is_refused_but_where_its_values_cancel_and_by_no_auditor(
    relative: float, cancels: bool | None, was_lifted: bool, scale: int | None, zoo: Any, open_job: Any
) -> None:
    """A variance that is loud would be kept to half of itself; a mean that is may be so because it is small beside its terms."""
    policy, place = POLICIES["fp32"], (Kind.BUFFER, 0)
    session = open_job(zoo.build({"model": "convolutions"}), policy)
    zeros = np.zeros(1, dtype=np.int64)
    known = GridTable({place: site_grid(policy, Kind.BUFFER, -9 if was_lifted else -10, zeros)})

    def chosen(**how: Any) -> SiteGrid:
        seen = deviations.Deviations(session, [None] * len(session.parameters))
        rms = 0.0 if cancels is None else 1.0  # a sum that is zero here leaves its last bits elsewhere
        seen.noise[place] = SiteNoise(relative, zeros, rms, relative, 64, cancels=bool(cancels))
        return bands_module.choose_grids(session, seen, {}, earlier=known, **how).table.sites[place]

    if scale is None:
        with pytest.raises(Nondeterminism, match=LOUD.format(int(math.log2(relative)))):
            chosen()
        assert chosen(for_audit=True).band == -9
    else:
        assert (chosen().band, list(chosen().scales)) == (-9, [scale])


@pytest.mark.parametrize(
    ("values", "cancels"), [([1.0, -1e-9], True), ([1.0, 0.0], False), ([-1.0, -2.0], False)]
)
def test_a_buffer_cancels_where_it_has_values_of_either_sign(
    values: list[float], cancels: bool, zoo: Any, open_job: Any
) -> None:
    session = open_job(zoo.build({"model": "convolutions"}), POLICIES["fp32"])
    seen = deviations.Deviations(session, [None] * len(session.parameters))
    [first, *_] = [site for site in session.sites if site.kind == Kind.BUFFER]
    seen.compare_buffers({first.name: torch.tensor(values)}, {first.name: torch.tensor(values)})
    assert seen.noise[Kind.BUFFER, first.ordinal].cancels == cancels


def test_an_auditors_small_sites_keep_its_own_bands_and_not_the_trainers(zoo: Any, open_job: Any) -> None:
    policy, place = POLICIES["bf16"], (Kind.LOSS, 0)
    session = open_job(zoo.build({"model": "convolutions"}), policy)
    session.table = GridTable({place: site_grid(policy, Kind.LOSS, -2, np.zeros(1, dtype=np.int64))})
    seen = Deviations(session, [None] * len(session.parameters))
    seen.noise[place] = SiteNoise(2.0**-12, np.zeros(1, dtype=np.int64), 1.0, 2.0**-12, 1)
    for earlier, band in ((None, -2), (session.table, -2), (GridTable(), -6)):
        assert choose_grids(session, seen, {}, earlier=earlier).table.sites[place].band == band


def test_an_auditor_asks_first_as_a_trainer_does_which_gradients_are_noise(
    monkeypatch: pytest.MonkeyPatch, zoo: Any, open_job: Any
) -> None:
    """In how many repetitions, and under which jitter, decides near the limit; what else is repeated is for all the rest."""
    job = zoo.build({"model": "convolutions"})
    session = open_job(job, POLICIES["fp32"])
    asked: list[tuple[int, ...]] = []
    jitters: list[int] = []
    monkeypatch.setattr(
        calibrate_module,
        "Jitter",
        lambda seed, units, **more: (jitters.append(seed), Jitter(seed, units, **more))[1],
    )
    plain = choose_grids
    first, last = (Kind.GRADIENT, 0), (Kind.GRADIENT, len(session.parameters) - 1)

    def choose(*given: Any, **more: Any) -> Calibration:
        """The first gradient is noise by the first repetitions alone, the second by all together."""
        asked.append(tuple(jitters))
        chosen = plain(*given, **more)
        silent = first if len(asked) == 1 else last
        grid = site_grid(POLICIES["fp32"], Kind.GRADIENT, NOISE_BAND, np.array([-7 * len(asked)]))
        return replace(chosen, table=GridTable({**chosen.table.sites, silent: grid}))

    monkeypatch.setattr(calibrate_module, "choose_grids", choose)
    for step, theirs in ((0, 2), (5, 1)):
        session.step = step
        asked.clear(), jitters.clear()
        found = calibrate(session, backward_of(session, job), repeats=4, seed=11, for_audit=True)
        own = [session.seed * 1000003 + step * 101 + each for each in range(theirs)]
        more = [11 * 1000003 + step * 101 + each for each in range(4 - theirs)]
        assert asked == [tuple(own + more)[:theirs], tuple(own + more)]
        assert repetitions_at(step) == theirs
        assert found.table.sites[first].scales.tolist() == [-7], "a trainer would have called it noise"
        assert not is_noise_only(found.table.sites[last]), "a trainer would have heard it"


@pytest.mark.parametrize(
    ("doubt", "size", "outgrown"), [(0, 4.01, True), (0, 3.99, False), (1, 2.01, True), (1, 1.99, False)]
)
def test_a_gradient_has_outgrown_its_scale_by_two_octaves_or_a_doubt_less(
    doubt: int, size: float, outgrown: bool, zoo: Any, open_job: Any
) -> None:
    session = open_job(zoo.build({"model": "convolutions"}), POLICIES["fp32"])
    grid = site_grid(POLICIES["fp32"], Kind.GRADIENT, -20, np.array([0]))
    session.base = GridTable({(Kind.GRADIENT, 0): grid})
    p = session.parameters[0][1]
    p.grad = torch.full_like(p, size)  # what has a scale of 2**0 is below one
    assert session.has_outgrown(doubt) == outgrown
