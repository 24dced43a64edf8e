"""Random operators of a step: the same numbers whatever torch's generators hold, and no trace left in them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.random import seed as seed_of_its_own
from torch.utils.checkpoint import checkpoint

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.numerics.random import bernoulli, normal, permutation, randint, stream_key
from tallystick.numerics.random import words as philox_words

X = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4, training=True),
    "Dropout in place": lambda x: nn.Dropout(0.4, inplace=True)(x * 1.0),
    "dropout2d": lambda x: F.dropout2d(x.reshape(2, 2, 3, 2), 0.4, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.reshape(1, 2, 4, 3),) * 3, dropout_p=0.4),
    "rand": lambda x: x * torch.rand(4, 6, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(4, 6, dtype=x.dtype),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 9, (4, 6)),
    "randint from": lambda x: x * torch.randint(3, 9, (4, 6), dtype=torch.int32),
    "randint_like": lambda x: x * torch.randint_like(x, 9),
    "randperm": lambda x: x[:, torch.randperm(6)],
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of tensors": lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x.detach())),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(-2.0, 3.0),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1.0, 2.0),
    "random_": lambda x: x * torch.empty(4, 6, dtype=torch.int64).random_(0, 100),
    "new tensors": lambda x: x * x.new_empty(4, 6).uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_do_not_depend_on_the_callers_generators_and_leave_them_alone(name: str, branches: Any) -> None:
    x = X.to(getattr(torch, branches.policy.compute))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
        found.append(branches.record(DRAWS[name], x))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tobytes() == before[2]
    assert torch.equal(found[0].output, found[1].output)
    assert torch.equal(found[0].gradient, found[1].gradient)
    # The control: torch's own operators follow the seed.
    torch.manual_seed(1)
    plain = DRAWS[name](x)
    torch.manual_seed(2)
    assert not torch.equal(plain, DRAWS[name](x))


def test_draws_are_those_of_the_portable_streams(branches: Any) -> None:
    """Call n of a micro-batch has the stream of call n; every element its own word."""
    dtype = getattr(torch, branches.policy.compute)
    drawn: list[Tensor] = []

    def inside(x: Tensor) -> Tensor:
        drawn.append(torch.rand(5, dtype=dtype))
        drawn.append(torch.randn(5, dtype=dtype))
        drawn.append(torch.randint(2, 8, (5,)))
        drawn.append(torch.randperm(5))
        drawn.append(torch.empty(5, dtype=dtype).bernoulli_(0.3))
        return x * 1.0

    branches.record(inside, X.to(dtype))
    keys = [stream_key(7, "operator", 0, 0, 0, call) for call in range(5)]
    top24 = (philox_words(keys[0], 0, 5) >> 8).astype(np.float64) * 2.0**-24
    assert drawn[0].double().tolist() == top24.tolist()
    assert drawn[1].tolist() == torch.from_numpy(normal(keys[1], 0, 5)).to(dtype).tolist()
    assert drawn[2].tolist() == randint(keys[2], 0, 5, 2, 8).tolist()
    assert drawn[3].tolist() == permutation(keys[3], 5).tolist()
    assert drawn[4].tolist() == bernoulli(keys[4], 0, 5, 0.3).tolist()


def seed_by_torch() -> int:
    return torch.seed()


def seed_by_generator() -> int:
    return torch.default_generator.seed()


def seed_by_device() -> int:
    return torch.cuda.default_generators[0].seed()


@pytest.mark.parametrize("new_seed", [seed_by_torch, seed_of_its_own, seed_by_generator, seed_by_device])
def test_a_new_seed_is_drawn_from_the_next_calls_stream(
    new_seed: Callable[[], int], branches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As reversible layers take one, to draw alike when they are computed again: of the system's entropy it was another one."""
    own = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (own,))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", own.manual_seed)
    dtype, seen = getattr(torch, branches.policy.compute), list[Any]()

    def inside(x: Tensor) -> Tensor:
        torch.rand(2, dtype=dtype)
        seed = new_seed()
        torch.manual_seed(seed)
        first, state = torch.rand(5, dtype=dtype), torch.get_rng_state()
        second = torch.rand(5, dtype=dtype)
        torch.set_rng_state(state)
        seen.extend((seed, first, second, torch.rand(5, dtype=dtype)))
        return x * 1.0

    before = torch.default_generator, torch.cuda.default_generators, torch.get_rng_state()
    branches.record(inside, X.to(dtype))
    seed, first, second, again = seen
    assert seed == int(randint(stream_key(7, "operator", 0, 0, 0, 1), 0, 1, 0, 1 << 53)[0])
    for call, drawn in ((seed, first), (seed + 1, second), (seed + 1, again)):
        words = philox_words(stream_key(7, "operator", 0, 0, 0, call), 0, 5)
        assert drawn.double().tolist() == ((words >> 8).astype(np.float64) * 2.0**-24).tolist()
    assert (torch.default_generator, torch.cuda.default_generators) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert len({new_seed(), new_seed()}) == 2  # the control: outside it is the system's


def test_devices_that_are_found_in_a_step_stay_found(branches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (torch.Generator(),)
    monkeypatch.setattr(torch.cuda, "default_generators", ())

    def inside(x: Tensor) -> Tensor:
        torch.cuda.default_generators = found
        return x * 1.0

    branches.record(inside, X.to(getattr(torch, branches.policy.compute)))
    assert torch.cuda.default_generators is found


def test_the_numbers_of_a_step_are_pinned(branches: Any) -> None:
    """A digest of draws that no machine, no torch release and no edit may change."""
    dtype = getattr(torch, branches.policy.compute)

    def inside(x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(999, dtype=dtype), 0.5, training=True) > 0.0
        return (
            torch.cat((torch.rand(999, dtype=dtype), torch.randn(999, dtype=dtype), kept.to(dtype))) * x.sum()
        )

    x = torch.ones(1, dtype=dtype)
    found = hashlib.sha256(branches.record(inside, x).output.float().numpy().tobytes()).hexdigest()
    assert found[:16] == "a51aeb554218f095"


def test_dropout_keeps_the_stated_share_and_scales_it(branches: Any) -> None:
    x = torch.ones(100_000, dtype=getattr(torch, branches.policy.compute))
    found = branches.record(lambda t: F.dropout(t, 0.25, training=True), x)
    kept = found.output > 0.0
    assert 0.745 < kept.double().mean() < 0.755
    torch.testing.assert_close(found.output[kept], torch.full_like(found.output[kept], 1.0 / 0.75))
    weights = torch.linspace(1.0, 2.0, x.numel(), dtype=x.dtype)
    torch.testing.assert_close(found.gradient, weights * found.output)
    assert torch.equal(branches.record(lambda t: F.dropout(t, 0.25, training=False), x).output, x)
    assert not branches.record(lambda t: F.dropout(t, 1.0, training=True), x).output.any()


def test_a_computed_probability_beside_its_random_number_is_a_decision(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    draws = RandomStream(7)
    state = torch.get_rng_state()
    draws.start(0, 0, 0)
    point = draws.thresholds("a test", None, torch.empty(8))
    torch.set_rng_state(state)
    p = torch.full((8,), 0.5, dtype=dtype)
    p[:] = torch.where(point < 0.5, 0.9, 0.1)
    away = 1e-13 if dtype == torch.float64 else 2e-7
    above, below = p.clone(), p.clone()
    above[3], below[3] = point[3] + away, point[3] - away

    def straight_through(x: Tensor) -> Tensor:
        return torch.bernoulli(x.detach()) * 3.0 + x

    trainer = branches.record(straight_through, above)
    assert len(trainer.frame) == 1
    follower = branches.follow(straight_through, below, trainer.frame)
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, atol=1e-6, rtol=0.0)
    alone = branches.record(straight_through, below)
    assert abs(float(alone.output[3] - trainer.output[3])) > 2.9
    assert len(branches.record(straight_through, p).frame) == 0


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "multinomial": (
        lambda x: x[0][torch.multinomial(torch.softmax(x.detach()[0], 0), 2)],
        r"operator aten\.multinomial\S*: draws random numbers that other devices cannot repeat",
    ),
    "exponential": (
        lambda x: x * torch.empty_like(x).exponential_(),
        r"operator aten\.exponential_\S*: draws random numbers",
    ),
    "poisson": (
        lambda x: x * torch.poisson(x.detach().abs()),
        r"operator aten\.poisson\S*: draws random numbers",
    ),
    "rrelu": (
        lambda x: F.rrelu(x, training=True),
        r"operator aten\.rrelu_with_noise\S*: draws random numbers",
    ),
    "normal of tensors": (
        lambda x: x * torch.normal(x.detach(), 1.0),
        r"operator aten\.normal\S*: draws random numbers",
    ),
    "a generator of its own": (
        lambda x: x * torch.rand(4, 6, generator=torch.Generator().manual_seed(1)),
        r"operator aten\.rand\S*: uses a generator of its own",
    ),
    "a generator of its own, computed probabilities": (
        lambda x: x * torch.bernoulli(torch.sigmoid(x.detach()), generator=torch.Generator()),
        r"operator aten\.bernoulli\S*: uses a generator of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_portable_form_is_refused_by_name(name: str, branches: Any) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(Nondeterminism, match=reason):
        branches.record(function, X.to(getattr(torch, branches.policy.compute)))


def test_fused_attention_runs_without_dropout_and_draws_portably_with_it(branches: Any) -> None:
    x = X.to(getattr(torch, branches.policy.compute)).reshape(1, 2, 4, 3)
    plain = branches.record(lambda t: F.scaled_dot_product_attention(t, t, t), x)
    torch.testing.assert_close(plain.output, F.scaled_dot_product_attention(x, x, x))
    dropped = branches.record(lambda t: F.scaled_dot_product_attention(t, t, t, dropout_p=0.5), x)
    assert not torch.allclose(dropped.output, plain.output)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_repeats_its_dropout(reentrant: bool, branches: Any) -> None:
    """Were the mask another one in the recomputation, the gradient would not be the mask's."""
    x = torch.linspace(1.0, 2.0, 64, dtype=getattr(torch, branches.policy.compute))
    masks: list[Tensor] = []

    def block(t: Tensor) -> Tensor:
        dropped = F.dropout(t, 0.5, training=True)
        masks.append((dropped != 0.0).detach())
        return dropped * torch.rand_like(t)

    def inside(t: Tensor) -> Tensor:
        before = torch.rand(3, dtype=t.dtype)
        y = checkpoint(block, t, use_reentrant=reentrant)
        return y * before[0] + F.dropout(t, 0.5, training=True)

    found = branches.record(inside, x)
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    masks.clear()

    def alone(t: Tensor) -> Tensor:
        before = torch.rand(3, dtype=t.dtype)
        return block(t) * before[0] + F.dropout(t, 0.5, training=True)

    plain = branches.record(alone, x)
    assert torch.equal(plain.output, found.output)
    torch.testing.assert_close(plain.gradient, found.gradient)


def test_streams_differ_by_step_micro_batch_rank_and_seed() -> None:
    seen = set()
    for seed, step, rank, micro_batch in (
        (1, 0, 0, 0),
        (2, 0, 0, 0),
        (1, 1, 0, 0),
        (1, 0, 1, 0),
        (1, 0, 0, 1),
    ):
        stream = RandomStream(seed)
        state = torch.get_rng_state()
        stream.start(step, rank, micro_batch)
        first = stream.thresholds("a test", None, torch.empty(4))
        second = stream.thresholds("a test", None, torch.empty(4))
        stream.start(step, rank, micro_batch)
        again = stream.thresholds("a test", None, torch.empty(4))
        torch.set_rng_state(state)
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        seen.add(tuple(first.tolist()))
    assert len(seen) == 5


@pytest.mark.parametrize("policy", ["fp64", "fp32"])
def test_generators_outside_torch_are_refused(policy: str, around: Any, record_run: Any) -> None:
    with pytest.raises(Nondeterminism, match=r"draws from numpy\.random, which no other machine can repeat"):
        record_run(around(lambda: lambda x: x * np.random.rand()), policy, 1)
    with pytest.raises(Nondeterminism, match="draws from Python's random"):
        record_run(around(lambda: lambda x: x * random.random()), policy, 1)


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        *((kind, drawn) for kind in ("MT19937", "PCG64") for drawn in ("permutation", "randint", "bytes")),
        ("MT19937", "seed"),
    ],
)
def test_each_draw_from_numpys_own_generator_is_seen(
    kind: str, drawn: str, around: Any, record_run: Any
) -> None:
    numpy_random: Any = np.random
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(getattr(np.random, kind)(5))
    try:
        with pytest.raises(Nondeterminism, match=r"draws from numpy\.random"):
            record_run(around(lambda: lambda x: (getattr(np.random, drawn)(1 << 7), x)[1]), "fp32", 1)
        record_run(around(lambda: lambda x: x), "fp32", 1)  # the control: nothing is drawn
    finally:
        numpy_random.set_bit_generator(before)


def test_a_step_leaves_the_callers_generator_where_it_was(zoo: Any, record_run: Any) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    run = record_run(lambda: zoo.build({"model": "transformer"}), "fp32", 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(98)
    again = record_run(lambda: zoo.build({"model": "transformer"}), "fp32", 2)
    assert run.roots == again.roots
