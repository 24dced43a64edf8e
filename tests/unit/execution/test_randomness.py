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
from tallystick.numerics.random import (
    bernoulli,
    normal,
    permutation,
    portable_log,
    randint,
    stream_key,
    uniform01,
)
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
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: x * torch.empty_like(x).geometric_(0.01),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
    "multinomial": lambda x: x[:, torch.multinomial(torch.arange(6.0), 4)],
    "multinomial, replaced": lambda x: x[
        torch.arange(4).repeat_interleave(9),
        torch.multinomial(x.detach().abs(), 9, replacement=True).reshape(-1),
    ],
    "normal": lambda x: x * torch.normal(0.5, 2.0, (4, 6), dtype=x.dtype),
    "normal of a mean": lambda x: x * torch.normal(x.detach(), 2.0),
    "normal of a deviation": lambda x: x * torch.normal(0.5, x.detach().abs()),
    "normal of both": lambda x: x * torch.normal(x.detach(), x.detach()[0].abs()),
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
        drawn.append(torch.empty(5, dtype=dtype).exponential_(2.0))
        drawn.append(torch.empty(5, dtype=torch.int64).geometric_(0.3))
        return x * 1.0

    branches.record(inside, X.to(dtype))
    keys = [stream_key(7, "operator", 0, 0, 0, call) for call in range(7)]
    top24 = (philox_words(keys[0], 0, 5) >> 8).astype(np.float64) * 2.0**-24
    assert drawn[0].double().tolist() == top24.tolist()
    assert drawn[1].tolist() == torch.from_numpy(normal(keys[1], 0, 5)).to(dtype).tolist()
    assert drawn[2].tolist() == randint(keys[2], 0, 5, 2, 8).tolist()
    assert drawn[3].tolist() == permutation(keys[3], 5).tolist()
    assert drawn[4].tolist() == bernoulli(keys[4], 0, 5, 0.3).tolist()
    logs = [portable_log(uniform01(key, 0, 5)) for key in keys[5:]]
    assert drawn[5].tolist() == torch.from_numpy(-logs[0] / 2.0).to(dtype).tolist()
    scale = portable_log(np.asarray([0.7]))
    assert drawn[6].tolist() == np.maximum(np.ceil(logs[1] / scale), 1.0).astype(np.int64).tolist()


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


def waits_of(shape: tuple[int, ...]) -> Tensor:
    """The waiting times that the first call of a micro-batch draws."""
    draws, state = RandomStream(7), torch.get_rng_state()
    draws.start(0, 0, 0)
    found = draws.waits("a test", None, shape, torch.device("cpu"))
    torch.set_rng_state(state)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["without replacement", "with"])
def test_which_of_two_categories_comes_first_is_a_decision(again: bool, branches: Any) -> None:
    """Two whose waiting times over their weights are alike, up to last bits."""
    dtype = getattr(torch, branches.policy.compute)
    waits = waits_of((2, 8) if again else (8,))[-1 if again else slice(None)]
    weights = (0.01 * waits).to(dtype)  # all times are 100
    weights[3] *= 2.0
    weights[5] *= 2.0
    away = 1e-13 if dtype == torch.float64 else 4e-7
    first, second = weights.clone(), weights.clone()
    first[3] *= 1.0 + away
    second[3] *= 1.0 - away
    if dtype == torch.float32:  # the order is not chance's: float32 weights have rounding errors of their own
        times = [(waits / w.double())[[3, 5]] for w in (first, second)]
        assert times[0][0] < times[0][1] and times[1][0] > times[1][1]

    def chosen(x: Tensor) -> Tensor:
        index = torch.multinomial(x.detach(), 2, replacement=again)
        return x * 3.0 + 1000.0 * index[-1 if again else 0]

    trainer = branches.record(chosen, first)
    assert len(trainer.frame) == 1
    follower = branches.follow(chosen, second, trainer.frame)
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, atol=1e-5, rtol=0.0)
    alone = branches.record(chosen, second)
    assert abs(float(alone.output[0] - trainer.output[0])) > 999.0
    second[3] *= 0.9
    assert branches.follow(chosen, second, trainer.frame).violations


def test_categories_come_as_often_as_they_weigh(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=dtype)
    seen: list[Tensor] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(torch.multinomial(x.detach(), 40_000, replacement=True))
        seen.append(torch.multinomial(x.detach().expand(20_000, 4), 2))
        return x * 1.0

    branches.record(inside, weights)
    often = torch.bincount(seen[0], minlength=4) / 40_000
    torch.testing.assert_close(often, torch.tensor([0.0, 0.125, 0.25, 0.625]), atol=0.01, rtol=0.0)
    pairs = torch.bincount(seen[1] @ torch.tensor([4, 1]), minlength=16).reshape(4, 4) / 20_000
    second = {(1, 2): 1 / 8 * 2 / 7, (1, 3): 1 / 8 * 5 / 7, (2, 1): 2 / 8 / 6, (2, 3): 2 / 8 * 5 / 6,
              (3, 1): 5 / 8 / 3, (3, 2): 5 / 8 * 2 / 3}  # fmt: skip
    for pair, chance in second.items():
        assert abs(float(pairs[pair]) - chance) < 0.02, pair
    seen.clear()
    branches.record(lambda x: (x * 1.0, seen.append(torch.multinomial(x.detach(), 4)))[0], weights)
    assert seen[0][3] == 0, "what weighs nothing comes last"
    for bad, count in ((-weights, 2), (weights * 0.0, 2), (weights / 0.0, 2), (weights, 5)):
        with pytest.raises(
            RuntimeError, match=r"probability tensor|invalid multinomial|cannot sample n_sample"
        ):
            branches.record(lambda x, n=count: x * torch.multinomial(x.detach(), n), bad)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "poisson": (
        lambda x: x * torch.poisson(x.detach().abs()),
        r"operator aten\.poisson\S*: draws random numbers",
    ),
    "rrelu": (
        lambda x: F.rrelu(x, training=True),
        r"operator aten\.rrelu_with_noise\S*: draws random numbers",
    ),
    "cauchy": (
        lambda x: x * torch.empty_like(x).cauchy_(),
        r"operator aten\.cauchy_\S*: draws random numbers .* instead: its quantile function of rand",
    ),
    "many draws by weight": (
        lambda x: x.sum() * torch.multinomial(x.detach().abs(), 1 << 23, replacement=True),
        r"8388608 draws with replacement, each among 6 categories, take 201326592 random numbers, 16777216 at most",
    ),
    "a generator of its own, drawn by weight": (
        lambda x: x[0][torch.multinomial(x.detach()[0].abs(), 2, generator=torch.Generator())],
        r"operator aten\.multinomial\S*: uses a generator of its own",
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
