"""Noise measured by repeating a step under last-bit noise: what it finds, refuses, and leaves as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import Nondeterminism
from tallystick.execution.calibrate import calibrate, exponent_above
from tallystick.execution.grids import NOISE_BAND, is_noise_only
from tallystick.execution.jitter import Jitter
from tallystick.execution.job import Job
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import backward_of, run_step
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
    mine = session.jitter
    torch.manual_seed(5)
    before, generator = bytes_of(session), torch.get_rng_state()
    found = calibrate(session, backward_of(session, job))
    assert bytes_of(session) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert session.jitter is mine
    assert session.step == 0
    assert not session.probing
    assert all(p.grad is None for p in job.model.parameters())
    again = calibrate(session, backward_of(session, job))
    assert again.table == found.table, "the same step gives the same grids"


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
        return value.kthvalue(1).values if len(calls) == 2 else value

    job.loss = failing
    with pytest.raises(Nondeterminism, match="kthvalue"):
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
    fine = 1e-13 if policy == "fp64" else 1e-5

    def rough(x: Tensor) -> Tensor:
        return x + 1e3 * torch.fmod(x, fine) / fine

    job = with_function(zoo, rough, ("aten::fmod",))
    rough_session = open_job(job, POLICIES[policy])
    with pytest.raises(
        Nondeterminism, match=r"its noise is 2\*\*-?\d+ of its scale, policy fp\d\d allows 2\*\*-\d+"
    ):
        calibrate(rough_session, backward_of(rough_session, job))
    smooth = with_function(zoo, lambda x: x + 1e-3 * torch.fmod(x, 100.0), ("aten::fmod",))
    session = open_job(smooth, POLICIES[policy])
    calibrate(session, backward_of(session, smooth))


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
    tape = session.record_tape(session.table)
    run_step(session, job, tape)
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
