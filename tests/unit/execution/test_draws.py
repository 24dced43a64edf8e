"""Random operators in build and batch: fixed bits, torch's own integers, generators of their own, and what stays torch's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tallystick.execution import draws
from tallystick.execution.draws import drawing_portably, portable_draws
from tallystick.execution.job import Job, JobSource
from tallystick.execution.step import batch_digest
from tallystick.numerics.kernels import random_words
from tallystick.numerics.random import COEFFICIENTS, inverse_normal, stream_key


def drawn(make: Callable[[], Tensor], seed: int = 3, use: str = "batch", step: int = 5) -> Tensor:
    with portable_draws(seed, use, step):
        return make()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]


DRAWS: dict[str, Callable[[Any], Tensor]] = {
    "randn": lambda g: torch.randn(5, 7, generator=g),
    "randn float64": lambda g: torch.randn(33, generator=g, dtype=torch.float64),
    "rand": lambda g: torch.rand(40, generator=g),
    "uniform_": lambda g: torch.empty(40).uniform_(-0.3, 0.1, generator=g),
    "normal_": lambda g: torch.empty(40).normal_(1.0, 3.0, generator=g),
    "normal of tensors": lambda g: torch.normal(torch.arange(20.0), torch.full((20,), 0.5), generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((200,), 0.3), generator=g),
    "exponential_": lambda g: torch.empty(40).exponential_(2.0, generator=g),
    "geometric_": lambda g: torch.empty(40).geometric_(0.2, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.arange(1.0, 21.0), 9, generator=g),
    "multinomial, replaced": lambda g: torch.multinomial(torch.ones(3, 5), 9, replacement=True, generator=g),
    "trunc_normal_": lambda g: nn.init.trunc_normal_(torch.empty(50), std=0.02, generator=g),
    "randint": lambda g: torch.randint(0, 1000, (50,), generator=g),
    "randperm": lambda g: torch.randperm(50, generator=g),
}
EXPECTED: dict[str, Any] = {
    "randn": ("5b6dce364c067073", "79afbaa8f9d503dd"),
    "randn float64": ("fb62e4af1cb495a5", "e5bff834de92f01a"),
    "rand": ("b48b41d097d499cb", "de6db40f309185d6"),
    "uniform_": ("9c375dff1b3c11e9", "0770ba76394e3a7a"),
    "normal_": ("20909059673ddfc8", "2a058947c63ca56c"),
    "normal of tensors": ("f391cb22016f20f3", "4cb5fc0961d81016"),
    "bernoulli": ("0841a927bc2cc69f", "48ee4295fbf51664"),
    "exponential_": ("7db2a406c6a97d1e", "6bb3826d6eae4f07"),
    "geometric_": ("4b0f150af7d9e4cc", "b0d65578f575b645"),
    "multinomial": ("f28e0b6e7dd47f5f", "2157f4e17ac2247d"),
    "multinomial, replaced": ("83c9d010ddf8757a", "d0bc9608e255a701"),
    "trunc_normal_": ("92a1ef2d47b365ac", "d6b878063dbba957"),
    "randint": ("45d3001cb50c9cfe", "4e7d88d0d285c3a3"),
    "randperm": ("90bfb548ab5a48cb", "493d4f960bd2ec1a"),
    "a job's weights": "9d988094fcd7c37e",
    "a job's batch": "ec4731ea30361133209b3316aec5418ec9c6893faa881f3f19a2f3f13b0b009c",
}


@pytest.mark.parametrize("name", DRAWS)
def test_bits_are_fixed_whatever_the_processor(name: str) -> None:
    assert bits(drawn(lambda: DRAWS[name](None))) == EXPECTED[name][0]
    assert bits(drawn(lambda: DRAWS[name](seeded(11)))) == EXPECTED[name][1]


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_ones_own_repeats_restarts_and_differs_by_seed(name: str) -> None:
    make, g = DRAWS[name], seeded(11)
    first, second = drawn(lambda: make(g)), drawn(lambda: make(g))
    assert not torch.equal(first, second)
    g.manual_seed(11)
    assert torch.equal(drawn(lambda: make(g), seed=8, step=2), first)  # of its seed alone
    assert not torch.equal(drawn(lambda: make(seeded(12))), first)
    state = g.get_state()
    again = drawn(lambda: make(g))
    assert torch.equal(again, second)
    g.set_state(state)
    assert torch.equal(drawn(lambda: make(g)), second)


def test_without_a_seed_seed_use_and_step_say_what_is_drawn() -> None:
    places = [(3, "batch", 5), (4, "batch", 5), (3, "build", 5), (3, "batch", 6)]
    found = [bits(drawn(lambda: torch.randn(8), *place)) for place in places]
    assert len(set(found)) == 4
    low, high = stream_key(3, "batch", 5, 0, 0, 0)
    with portable_draws(3, "batch", 5):
        assert torch.initial_seed() == high << 32 | low


def test_a_seed_set_in_the_middle_restarts() -> None:
    def twice() -> Tensor:
        torch.default_generator.manual_seed(7)
        one = torch.randn(6)
        torch.default_generator.manual_seed(7)
        return torch.stack([one, torch.randn(6)])

    found = drawn(twice)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], drawn(lambda: torch.randn(6, generator=seeded(7))))


def test_the_callers_generator_is_put_back() -> None:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        wanted = torch.rand(3)
        torch.default_generator.manual_seed(1)
        drawn(lambda: torch.randn(9))
        assert torch.equal(torch.rand(3), wanted)


def test_integers_and_uniform_numbers_are_torchs_own() -> None:
    """The words are those of MT19937, which numpy has as well; so jobs with uniform initialisers keep their weights."""
    mt: Any = np.random.MT19937()
    mt._legacy_seeding(11)
    words = mt.random_raw(40)
    expected = (words & 0xFFFFFF).astype(np.float64) * 2.0**-24
    got = drawn(lambda: torch.rand(40, generator=seeded(11)))
    assert np.array_equal(got.numpy(), expected.astype(np.float32))
    assert torch.equal(got, torch.rand(40, generator=seeded(11)))
    for make in (lambda: torch.randint(0, 77, (9,)), lambda: torch.randperm(9)):
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(11)
            plain = make()

            def again(make: Callable[[], Tensor] = make) -> Tensor:
                torch.default_generator.manual_seed(11)
                return make()

            assert torch.equal(drawn(again), plain)


def test_normal_numbers_follow_the_specification() -> None:
    mt: Any = np.random.MT19937()
    mt._legacy_seeding(11)
    words: Any = mt.random_raw(2 * 30).reshape(30, 2)[:, 1]  # the second word of a pair is the lower half
    expected = inverse_normal((words.astype(np.float64) + 0.5) * 2.0**-32)
    got = drawn(lambda: torch.randn(30, generator=seeded(11), dtype=torch.float64))
    assert np.array_equal(got.numpy(), expected)
    assert np.array_equal(
        drawn(lambda: torch.randn(30, generator=seeded(11))).numpy(), expected.astype(np.float32)
    )


def test_the_compiled_normal_numbers_are_the_references_bits() -> None:
    ends = np.arange(3000)
    middle = np.arange(0, 1 << 32, 65_521)
    words = np.concatenate([ends, (1 << 32) - 1 - ends, middle]).astype(np.int64)
    out = np.empty(words.size)
    random_words.normal(words, COEFFICIENTS, out)
    assert np.array_equal(
        out.view(np.int64), inverse_normal((words.astype(np.float64) + 0.5) * 2.0**-32).view(np.int64)
    )


def test_what_is_drawn_does_not_depend_on_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(lambda: torch.randn(100))
    monkeypatch.setattr(draws, "AT_A_TIME", 7)
    assert torch.equal(drawn(lambda: torch.randn(100)), whole)


def test_distributions() -> None:
    """Of 40,000 fixed numbers each; the bounds are six times the deviation of the mean."""
    n = 40_000
    normal = drawn(lambda: torch.empty(n, dtype=torch.float64).normal_(2.0, 3.0))
    assert abs(float(normal.mean()) - 2.0) < 6 * 3.0 / math.sqrt(n)
    assert abs(float(normal.std()) - 3.0) < 0.08
    kept = drawn(lambda: torch.empty(n).bernoulli_(0.3))
    assert abs(float(kept.mean()) - 0.3) < 6 * 0.46 / math.sqrt(n)
    waits = drawn(lambda: torch.empty(n).exponential_(2.0))
    assert abs(float(waits.mean()) - 0.5) < 6 * 0.5 / math.sqrt(n)
    trials = drawn(lambda: torch.empty(n).geometric_(0.2))
    assert float(trials.min()) == 1.0
    assert abs(float(trials.mean()) - 5.0) < 6 * 4.5 / math.sqrt(n)
    weights = torch.tensor([1.0, 0.0, 3.0])
    picks = drawn(lambda: torch.multinomial(weights, n, replacement=True))
    assert torch.equal(torch.bincount(picks, minlength=3) > 0, weights > 0)
    assert abs(float((picks == 2).float().mean()) - 0.75) < 6 * 0.44 / math.sqrt(n)
    assert sorted(drawn(lambda: torch.multinomial(weights, 2)).tolist()) == [0, 2]
    assert drawn(lambda: torch.multinomial(weights, 3)).tolist()[2] == 1
    cut = drawn(lambda: nn.init.trunc_normal_(torch.empty(n), std=0.02, a=-0.03, b=0.03))
    assert float(cut.abs().max()) <= 0.03
    dropped = drawn(lambda: nn.functional.dropout(torch.ones(n), 0.25))
    assert set(dropped.unique().tolist()) == {0.0, float(np.float32(1 / 0.75))}


def test_refusals_are_torchs_own() -> None:
    with pytest.raises(RuntimeError):
        drawn(lambda: torch.multinomial(torch.tensor([1.0, -1.0]), 1))
    with pytest.raises(RuntimeError):
        drawn(lambda: torch.multinomial(torch.ones(3), 4))


def test_meta_tensors_narrow_ones_and_strides_are_drawn() -> None:
    assert drawn(lambda: torch.randn(3, device="meta")).is_meta
    narrow = drawn(lambda: torch.empty(50, dtype=torch.bfloat16).normal_())
    assert torch.equal(narrow, drawn(lambda: torch.empty(50).normal_()).bfloat16())
    turned = drawn(lambda: torch.empty(4, 5).t().normal_())
    assert torch.equal(turned, drawn(lambda: torch.empty(5, 4).normal_()))
    like = drawn(lambda: torch.randn_like(torch.empty(4, 5), dtype=torch.float64))
    assert like.dtype == torch.float64


JOB = """
import torch
from tallystick.execution.job import Job


def build(settings):
    model = torch.nn.Linear(6, 3)
    torch.nn.init.normal_(model.weight)

    def batch(step):
        x = torch.randn(8, 6) + torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        return torch.nn.functional.dropout(x, 0.5), torch.randint(0, 3, (8,))

    loss = lambda net, both: torch.nn.functional.cross_entropy(net(both[0]), both[1])
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss, steps=4)
"""


def weights(job: Job) -> Tensor:
    return next(job.model.parameters()).detach()


def test_a_jobs_weights_and_batches_follow_from_the_seed(tmp_path: Path) -> None:
    source = JobSource(str(tmp_path / "drawing.py"), JOB.encode())
    one, same, other = source.build({}, 1), source.build({}, 1), source.build({}, 2)
    assert torch.equal(weights(one), weights(same))
    assert not torch.equal(weights(one), weights(other))
    assert bits(weights(one)) == EXPECTED["a job's weights"]
    assert batch_digest(one.batch(2)) == batch_digest(same.batch(2)) == EXPECTED["a job's batch"]
    assert batch_digest(one.batch(3)) != batch_digest(one.batch(2)) != batch_digest(other.batch(2))


def test_batches_are_drawn_under_the_step_they_are_asked_for() -> None:
    batch = drawing_portably(lambda step: torch.randn(4), 9)
    assert torch.equal(batch(1), drawn(lambda: torch.randn(4), 9, "batch", 1))
