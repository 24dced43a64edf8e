"""Where an auditor's own rounding would have led the weights: against the run's own optimizer, given the other gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.execution.noise.measured import LEAST_TENSOR
from tallystick.execution.noise.own_path import (
    AT_ONCE_SLACK,
    ELEMENTWISE,
    FEW_TOGETHER,
    LEAST_ROW,
    LEAST_SPAN,
    LOUD_SLACK,
    NOISE_TOGETHER,
    ROW_SLACK,
    SHORTEST,
    SPAN,
    STATE,
    USUAL,
    OwnPath,
)
from tallystick.numerics.rounding import round_recorded

STEPS, AT = 12, torch.tensor([1, 4, 5])
MORE = torch.tensor([0, 4, 7])


class HalfNorm(torch.optim.Optimizer):
    """An optimizer whose update of an element hangs on all the others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: object = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p].setdefault("calls", torch.zeros(()))
                        self.state[p]["calls"] += 1.0
                        p.sub_(group["lr"] * p.grad / (1.0 + p.grad.norm() / self.state[p]["calls"]))


def made_with(kind: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes an optimizer of that kind, with a decay of weights."""
    return lambda params: kind(params, lr=0.02, weight_decay=0.01)


MADE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{made.__name__: made_with(made) for made in ELEMENTWISE if made is not torch.optim.Rprop},
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.02),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True),
    "centered": lambda params: torch.optim.RMSprop(params, lr=0.02, centered=True, momentum=0.5),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.02, amsgrad=True),
    "HalfNorm": HalfNorm,
}  # fmt: skip


def narrowed(optimizer: torch.optim.Optimizer) -> None:
    """Make floating values float32 values, as they are after any step of a run."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            for value in (p, *optimizer.state[p].values()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.data.copy_(value.data.float())


def trained(
    name: str,
    shape: tuple[int, ...],
    other: Callable[[int, Tensor], Tensor],
) -> tuple[nn.Parameter, OwnPath, nn.Parameter, Tensor]:
    """Train a parameter, and another one in whose gradients the elements chosen are others; follow the former's own path."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(shape, generator=generator).double()
    p, mine = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    run, own = MADE[name]([p]), MADE[name]([mine])
    path = OwnPath([first], [first])
    for step in range(STEPS):
        for optimizer in (run, own):
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        gradient = torch.randn(shape, generator=generator).double()
        p.grad, mine.grad = gradient.clone(), other(step, gradient.clone())
        flat, changed = gradient.reshape(-1), mine.grad.reshape(-1)
        at = (flat != changed).nonzero().reshape(-1)
        path.note(run, 0, p, gradient, at, changed[at])
        for optimizer in (run, own):
            optimizer.step()
            narrowed(optimizer)
        path.step([("w", p)])
    return p, path, mine, first


def from_step(step: int, gradient: Tensor) -> Tensor:
    """Choose three elements from step 2 on, and others from step 6 on, one of them again."""
    flat = gradient.reshape(-1)
    if step >= 2 and step % 2 == 0:
        flat[AT] += 0.25
    if step >= 6:
        flat[MORE] -= 0.125
    return gradient


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_it_is_where_the_optimizer_leads_with_the_followers_own_gradients(
    name: str, shape: tuple[int, ...]
) -> None:
    """Elements join at any time, with the state that the optimizer has of them; schedules, decay and momentum are the run's."""
    p, path, mine, _ = trained(name, shape, from_step)
    own = path.tensors[0]
    assert torch.equal(
        own.p.detach().reshape(-1), mine.detach().reshape(-1)[... if own.at is None else own.at]
    )
    apart = own.of(p.detach() - mine.detach()).abs()
    assert bool((own.farthest >= 0.999999 * apart).all())
    assert float(apart.max()) > 0.0
    assert (own.at is None) == (name == "HalfNorm")
    assert own.at is None or own.at.tolist() == sorted({*AT.tolist(), *MORE.tolist()})


@pytest.mark.parametrize("name", ["Adam", "SGD", "ASGD", "NAdam"])
def test_a_parameter_of_no_dimension_is_one_element(name: str) -> None:
    """Its state is as large as what the optimizer counts of any parameter."""
    _, path, mine, _ = trained(name, (), lambda step, gradient: gradient + (0.5 if step > 3 else 0.0))
    assert torch.equal(path.tensors[0].p.detach().reshape(-1), mine.detach().reshape(-1))
    assert path.shares([("w", mine)])["w"] > 0.0


def test_the_way_is_the_farthest_and_moves_back_do_not_shorten_it() -> None:
    """A schedule makes the move dear and its return cheap, or a move is used while it lasts."""

    def there_and_back(step: int, gradient: Tensor) -> Tensor:
        return gradient + {2: 0.3, 5: -0.6}.get(step, 0.0)  # at rates of a third and a sixth

    p, path, mine, _ = trained("SGD", (8,), there_and_back)
    assert float((p.detach() - mine.detach()).norm()) == pytest.approx(0.0, abs=1e-6)
    assert path.tensors[0].farthest.tolist() == pytest.approx([0.3 * 0.02 / 3] * 8, rel=1e-4)


@pytest.mark.parametrize("is_general", [True, False])
def test_states_of_general_arithmetic_are_rounded_as_sites_are(is_general: bool) -> None:
    """To the nearest number they went another way than the run's: one that learns little was led by half of its way."""
    first = torch.randn(64, generator=torch.Generator().manual_seed(5)).double() * 20.0
    p, run = nn.Parameter(first.clone()), torch.optim.SGD
    optimizer, path = run([p], lr=1e-6), OwnPath([first], [first], is_general=is_general)
    for step in range(12):
        p.grad = torch.randn(64, generator=torch.Generator().manual_seed(step)).double() * 5.0
        path.note(optimizer, 0, p, p.grad, torch.arange(64), p.grad)
        optimizer.step()
        with torch.no_grad():
            round_recorded(p.data.clone(), STATE, out=p.data, old=p.data.clone())
        path.step([("w", p)])
    assert (path.shares([("w", p)])["w"] == 0.0) == is_general


def test_what_no_log_chose_is_led_nowhere() -> None:
    for name in ("Adam", "HalfNorm"):
        p, path, *_ = trained(name, (8,), lambda step, gradient: gradient)
        assert path.shares([("w", p)]) == ({"w": 0.0} if name == "HalfNorm" else {})


def one_step(
    first: Tensor,
    at: list[int],
    gradient: Tensor | None = None,
    *,
    by: float = 0.01,
    before: float = 0.0,
    is_loud: bool = False,
) -> float:
    """Return the share of a tensor that an SGD of rate one takes one step, elements ``at`` led by ``by``.

    ``before`` is how far the run took each element before that step.
    """
    p, path = nn.Parameter(first.clone()), OwnPath([first], [first - before])
    optimizer = torch.optim.SGD([p], lr=1.0)
    gradient = torch.zeros_like(first) if gradient is None else gradient
    p.grad, places = gradient.clone(), torch.tensor(at)
    p.grad.reshape(-1)[places] += by
    path.note(optimizer, 0, p, p.grad, places, gradient.reshape(-1)[places], is_loud=is_loud)
    optimizer.step()
    path.step([("w", p)])
    return path.shares([("w", p)])["w"]


def test_each_element_counts_by_its_own_way_and_once_at_most() -> None:
    ones, trains = (torch.full((4,), value, dtype=torch.float64) for value in (1.0, 0.5))
    one = 0.01 / 0.5 / 4**0.5  # of four elements
    assert one_step(ones, [0], trains) == pytest.approx(one, rel=1e-5)
    assert one_step(ones, [0], before=0.5) == pytest.approx(one, rel=1e-5)
    many = torch.ones(LEAST_ROW, dtype=torch.float64)
    assert one_step(many, [0], before=0.5) == pytest.approx(0.01 / 0.5 / LEAST_ROW**0.5, rel=1e-5)
    assert one_step(ones, [0, 2], before=0.5) == pytest.approx(2**0.5 * one, rel=1e-5)
    assert one_step(ones, [0], before=0.5, by=1e6) == 0.5
    for size in (
        0.0,
        1.0,
        1e6,
    ):  # weights beside which all that they learn is little are led as far as they learn
        assert one_step(size * ones, [0], by=0.5) == 0.5


@pytest.mark.parametrize(("tensors", "elements"), [(1, LEAST_ROW), (2, LEAST_ROW), (200, 400), (0, 0)])
@pytest.mark.parametrize("is_loud", [False, True])
def test_tensors_of_few_elements_are_led_together_as_one_of_many(
    tensors: int, elements: int, is_loud: bool
) -> None:
    """A wide layer written as thousands of parameters; what they reached before they came back is no way of theirs."""
    zeros = torch.zeros(2, dtype=torch.float64)
    ps = [nn.Parameter(zeros.clone()) for _ in range(tensors)]
    path = OwnPath([zeros] * (tensors + 1), [zeros] * (tensors + 1))
    wide = nn.Parameter(torch.zeros(LEAST_ROW, dtype=torch.float64))
    path.first = path.origin = [*[zeros] * tensors, wide.detach().clone()]
    optimizer = torch.optim.SGD([*ps, wide], lr=1.0)
    for gradient, by in ((-8.0, 0.0), (0.0, 0.5), (7.0, 0.0)):
        for ordinal, p in enumerate([*ps, wide]):
            at = torch.arange(p.numel() if by else 0)
            p.grad = torch.full_like(p, gradient)
            own = torch.full((at.numel(),), gradient - by, dtype=torch.float64)
            path.note(optimizer, ordinal, p, p.grad, at, own, is_loud=is_loud)
        optimizer.step()
        path.step([(str(n), p) for n, p in enumerate([*ps, wide])])
    shares = path.shares([(str(n), p) for n, p in enumerate([*ps, wide])])
    each = (0.5 / 1.5) * (1.0 / LOUD_SLACK if is_loud else 1.0)
    assert shares[str(tensors)] == pytest.approx(each)
    assert shares.get(FEW_TOGETHER, 0.0) == pytest.approx(each * (2 * tensors / max(elements, 1)) ** 0.5)
    assert all(shares[str(n)] == pytest.approx(0.5 / 8.5) for n in range(tensors))


@pytest.mark.parametrize(("numel", "way"), [(LEAST_ROW - 1, 9.0), (LEAST_ROW, 1.0)])
def test_all_of_few_elements_may_come_back(numel: int, way: float) -> None:
    """A bias of two that went and came back was not accepted for one rounding, by what was left of its way."""
    zeros = torch.zeros(numel, dtype=torch.float64)
    p, path = nn.Parameter(zeros.clone()), OwnPath([zeros], [zeros])
    optimizer, nothing = torch.optim.SGD([p], lr=1.0), torch.tensor([], dtype=torch.int64)
    for gradient, by in ((-8.0, 0.0), (0.0, 1.0), (8.0, 0.0)):
        at = torch.arange(numel) if by else nothing
        p.grad = torch.full_like(zeros, gradient)
        path.note(optimizer, 0, p, p.grad, at, torch.full((at.numel(),), gradient - by, dtype=torch.float64))
        optimizer.step()
        path.step([("w", p)])
    assert path.shares([("w", p)])["w"] == pytest.approx(1.0 / way)


@pytest.mark.parametrize(("numel", "slack"), [(LEAST_ROW - 1, 1.0), (LEAST_ROW, LOUD_SLACK)])
def test_a_loud_tensor_is_led_a_quarter_as_far_but_one_of_few_elements(numel: int, slack: float) -> None:
    """One rounding that falls otherwise is much of few: a bias of two, near rest, was not accepted under jitter."""
    ones = torch.ones(numel, dtype=torch.float64)
    quiet = one_step(ones, [0], before=0.5)
    assert one_step(ones, [0], before=0.5, is_loud=True) == pytest.approx(quiet / slack, rel=1e-5)


@pytest.mark.parametrize(("numel", "tensors"), [(96, 1), (96, 3), (64, 100), (512, 1), (63, 1)])
@pytest.mark.parametrize("strays", [1, 2, 3])
@pytest.mark.parametrize("given", ["noise", "signal", "unknown", "loud", "once a signal"])
def test_an_element_of_some_that_is_nothing_but_noise_may_be_led_all_its_way(
    numel: int, tensors: int, strays: int, given: str
) -> None:
    """The bias of queries, keys and values in one: a single rounding of a key's was not accepted.

    Of signals two elements of 96 are not excused: led all their way they made 76 % of a trigger (0.5 % in an honest run).
    """
    zeros, at = torch.zeros(numel, dtype=torch.float64), torch.arange(strays)
    ps = [nn.Parameter(zeros.clone()) for _ in range(tensors)]
    path, optimizer = OwnPath([zeros] * tensors, [zeros] * tensors), torch.optim.SGD(ps, lr=1.0)
    named = [(str(n), p) for n, p in enumerate(ps)]
    noisy = torch.zeros(numel, dtype=torch.bool)
    noisy[at] = given != "signal"
    for step in range(2):
        for ordinal, p in enumerate(ps):
            p.grad = torch.ones_like(p)
            p.grad[at] = 1e-9
            is_signal = given == "once a signal" and step == 1
            told = None if given == "unknown" else noisy & (not is_signal)
            own = torch.full((strays,), -5.0, dtype=torch.float64)
            path.note(optimizer, ordinal, p, p.grad, at, own, is_loud=given == "loud", noisy=told)
        optimizer.step()
        path.step(named)
    shares = path.shares(named)
    is_excused = given == "noise" and LEAST_ROW <= numel < LEAST_TENSOR
    slack = LOUD_SLACK if given == "loud" and numel >= LEAST_ROW else 1.0
    each = (strays / (LEAST_TENSOR if is_excused else numel)) ** 0.5 / slack
    assert all(shares[name] == pytest.approx(each) for name, _ in named)
    together = (strays * tensors / max(numel * tensors, LEAST_TENSOR)) ** 0.5
    assert shares.get(NOISE_TOGETHER) == (pytest.approx(together) if is_excused else None)


@pytest.mark.parametrize(
    ("steps", "choices"),
    [
        ("c", 1),
        ("mcc", 1),
        ("cmcc", 2),
        ("mcmcmc", 3),
        ("c.c", 2),
        ("cc..mc", 2),
        ("m.m.", 0),
    ],
)
@pytest.mark.parametrize("name", ["SGD", "HalfNorm"])
def test_choices_of_whole_gradients_are_counted_once_between_two_measurements(
    name: str, steps: str, choices: int
) -> None:
    """In steps "c" the log chose all of it, in those after "m" the noise was measured, in others neither."""
    zeros = torch.zeros(4, dtype=torch.float64)
    p, path = nn.Parameter(zeros.clone()), OwnPath([zeros], [zeros])
    optimizer = MADE[name]([p]) if name == "HalfNorm" else torch.optim.SGD([p], lr=1.0)
    is_measured = False
    for step in steps:
        if step == "m":
            is_measured = True
            continue
        at = torch.arange(4 if step == "c" else 0)
        p.grad = torch.ones_like(zeros)
        path.note(optimizer, 0, p, p.grad, at, torch.zeros(at.numel()), is_all=True, is_measured=is_measured)
        optimizer.step()
        path.step([("w", p)])
        is_measured = False
    assert path.choices == choices


def test_a_whole_gradient_may_be_chosen_where_it_leads_little_of_the_way_so_far() -> None:
    """Soon after its beginning an unstable run makes much of one step; its way is long in the end."""
    ones = torch.ones(4, dtype=torch.float64)
    for by, is_all, share in (
        (0.01, True, 0.02 / AT_ONCE_SLACK),
        (0.5, True, 1.0 / AT_ONCE_SLACK),
        (0.5, False, 0.005),
    ):
        p, path = nn.Parameter(ones.clone()), OwnPath([ones], [ones - 0.5])
        optimizer = torch.optim.SGD([p], lr=1.0)
        for gradient, at in ((by, [0, 1, 2, 3]), (100.0, [])):
            p.grad, places = torch.full_like(ones, gradient), torch.tensor(at, dtype=torch.int64)
            path.note(optimizer, 0, p, p.grad, places, torch.zeros(len(at)), is_all=is_all)
            optimizer.step()
            path.step([("w", p)])
        assert path.shares([("w", p)])["w"] == pytest.approx(share, rel=1e-2)


def late(
    chosen: Callable[[int], list[int]], steps: int, rate: float = 2.0**-3, *, is_all: bool = True
) -> float:
    """Return what 128 steps at the full rate, and then some in which the log chooses gradients of elements, come to."""
    zeros = torch.zeros(8, dtype=torch.float64)
    p, path = nn.Parameter(zeros.clone()), OwnPath([zeros], [zeros])
    optimizer = torch.optim.SGD([p], lr=1.0)
    for step in range(128 + steps):
        at = torch.tensor(chosen(step - 128) if step >= 128 else [], dtype=torch.int64)
        p.grad = torch.full_like(zeros, 1.0 if step < 128 else rate)
        path.note(optimizer, 0, p, p.grad, at, torch.zeros(at.numel()), is_all=is_all)
        optimizer.step()
        path.step([("w", p)])
    return path.shares([("w", p)])["w"]


EVERY = list(range(8))


def test_what_has_come_to_rest_is_led_by_a_share_of_the_whole_way() -> None:
    """Fits to a loss near nothing hardly move any more, and which machine hears the last of it is chance."""
    rate = 2.0**-16  # 2**-10 in a span of 64 steps, after 2**7
    assert late(lambda _: EVERY, SPAN, rate) == pytest.approx(2.0**-17 / LEAST_SPAN / AT_ONCE_SLACK, rel=1e-2)


def test_a_late_phase_at_a_low_rate_is_no_share_of_the_way_before_it() -> None:
    """Led by all that it trained, it was led by a hundredth of the whole way: a backdoor of 48 %, "match"."""
    whole = 2.0**-3 * SPAN / 128.0
    few = late(lambda _: EVERY, SHORTEST - 1, is_all=False)
    assert few == pytest.approx(whole * (SHORTEST - 1) / SPAN, rel=1e-3), "single roundings"
    assert late(lambda _: EVERY, SHORTEST - 1) == 1.0 / AT_ONCE_SLACK, "a run may end soon after"
    for steps in (SHORTEST, SPAN, SPAN + 1, 2 * SPAN):
        assert late(lambda _: EVERY, steps) == 1.0 / AT_ONCE_SLACK, steps
    assert late(lambda step: EVERY if step < SPAN else [], 2 * SPAN) == 1.0 / AT_ONCE_SLACK, "it stays said"
    assert late(lambda _: EVERY, SPAN, is_all=False) == 1.0 / AT_ONCE_SLACK, "moves too"
    few = late(lambda _: EVERY[:2], SPAN, is_all=False)
    assert few == pytest.approx(0.5 / AT_ONCE_SLACK), "of all elements, where it is not the whole gradient"


def test_single_choices_of_a_span_lead_by_their_own_share_of_it() -> None:
    for often in (1, 2, 8):
        found = late(lambda step, often=often: EVERY if step < often else [], SPAN)
        assert found == pytest.approx(min(1.0, often / (SPAN - often)) / AT_ONCE_SLACK, rel=1e-3)


def test_elements_that_join_a_span_are_led_by_their_way_in_it() -> None:
    """The one chosen first was led by half, the others by a quarter, and not by what they trained since they joined."""
    half, quarter = SPAN // 2, SPAN // 4
    found = late(lambda step: EVERY if step >= SPAN - quarter else [0] if step < half - quarter else [], SPAN)
    ways = [half / half, *[quarter / (SPAN - quarter)] * 7]
    assert found == pytest.approx((sum(way**2 for way in ways) / 8) ** 0.5 / AT_ONCE_SLACK, rel=1e-3)


@pytest.mark.parametrize(("is_all", "share"), [(True, 1.0), (False, (2 / 4096) ** 0.5)])
def test_a_gradient_chosen_whole_counts_by_the_elements_that_have_values(is_all: bool, share: float) -> None:
    """A row of a table of thousands, led by all of its way, hardly led the table: a backdoor of all images, "match"."""
    zeros = torch.zeros(4096, dtype=torch.float64)
    p, path = nn.Parameter(zeros.clone()), OwnPath([zeros], [zeros])
    optimizer, at = torch.optim.SGD([p], lr=1.0), torch.tensor([7, 70])
    p.grad = torch.zeros_like(zeros)
    p.grad[at] = 1.0
    path.note(optimizer, 0, p, p.grad, at, torch.zeros(2), is_all=is_all)
    optimizer.step()
    path.step([("w", p)])
    assert path.shares([("w", p)])["w"] == pytest.approx(share)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_is_led_by_all_that_it_is(value: float) -> None:
    ones = torch.ones(4, dtype=torch.float64)
    assert one_step(ones, [0], by=value, before=0.5) == 0.5
    assert one_step(torch.full_like(ones, value), [0, 1]) == pytest.approx(0.5**0.5)


def test_what_stands_beside_the_elements_led_pays_for_nothing() -> None:
    """Padding of a large size, also if it is led itself, or columns that train much: all were lenders of a tensor's whole way."""
    few, size = [0, 1], torch.ones(1, 32, dtype=torch.float64)
    own = torch.full_like(size, 0.5)
    plain, lender, trained = one_step(size, few, own), size.clone(), own.clone()
    lender[0, 20:], trained[0, 20:] = 1e6, 50.0
    assert one_step(lender, few, own) == one_step(size, few, trained) == plain
    assert one_step(size, [*few, *range(20, 32)], trained) == pytest.approx(plain, rel=1e-3)


def test_an_element_that_came_back_was_trained_as_others_are() -> None:
    """Its own way may be nothing by chance."""
    size, trained = torch.zeros(8, dtype=torch.float64), torch.full((8,), 0.5, dtype=torch.float64)
    trained[0] = 0.0
    assert one_step(size, [0], trained) == pytest.approx(0.01 / (USUAL * 0.5) / 8**0.5, rel=1e-5)


def test_one_row_is_led_eight_times_as_far_as_a_tensor_at_most() -> None:
    for length, is_asked in ((LEAST_ROW, True), (LEAST_ROW - 1, False)):
        rows = 4 * int(ROW_SLACK) ** 2
        share = one_step(torch.ones(rows, length, dtype=torch.float64), list(range(length)), before=0.5)
        of_row, whole = 0.01 / 0.5, 0.01 / 0.5 / rows**0.5
        assert share == pytest.approx(of_row / ROW_SLACK if is_asked else whole, rel=1e-5)


class Normed(torch.optim.Optimizer):
    """An optimizer whose step has the length of its rate, over all parameters together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: object = None) -> Any:
        with torch.no_grad():
            trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            length = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
            for p in trained:
                p.sub_(self.param_groups[0]["lr"] * p.grad / length)


def test_an_optimizer_may_hang_on_all_that_it_trains() -> None:
    """Copies of single tensors had other norms: honest runs were led by half of their way."""
    generator = torch.Generator().manual_seed(4)
    named = [(str(n), nn.Parameter(torch.randn(n + 2, 3, generator=generator))) for n in range(3)]
    first = [p.detach().clone() for _, p in named]
    run, path = Normed([p for _, p in named]), OwnPath(first, first)
    for step in range(6):
        for ordinal, (_, p) in enumerate(named):
            p.grad = torch.randn(p.shape, generator=generator)
            is_led = (step, ordinal) == (2, 1)
            at = torch.tensor([0] if is_led else [], dtype=torch.int64)
            path.note(run, ordinal, p, p.grad, at, p.grad.reshape(-1)[at] + 1e-3)
        run.step()
        path.step(named)
    shares = path.shares(named)
    assert 0.0 < max(shares["0"], shares["2"]) < shares["1"] < 0.01


class Warming(torch.optim.Optimizer):
    """An optimizer that counts its steps itself, and knows a second group and its parameters by their objects."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.taken = 0
        self.given = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: object = None) -> Any:
        self.taken += 1
        with torch.no_grad():
            for p, was in self.given.items():
                if p.grad is not None:
                    rate = self.param_groups[1]["lr"] * min(1.0, self.taken / 4)
                    p.sub_(rate * (p.grad + 0.1 * (p - was.to(p.dtype))))


def test_a_copy_has_what_its_optimizer_keeps_of_itself() -> None:
    """A count that goes on where a parameter has no gradient, a table by parameter, another group's rate."""
    generator = torch.Generator().manual_seed(4)
    named = [(str(n), nn.Parameter(torch.randn(4, generator=generator))) for n in range(2)]
    mine = [nn.Parameter(p.detach().double()) for _, p in named]
    run, own = (
        Warming([{"params": [a]}, {"params": [b], "lr": 0.3}]) for a, b in ([p for _, p in named], mine)
    )
    begun = [p.detach().clone() for _, p in named]
    path = OwnPath(begun, begun)
    for step in range(8):
        for ordinal, (_, p) in enumerate(named):
            p.grad = mine[ordinal].grad = None
            if ordinal == 1 or step % 3 == 0:
                p.grad = torch.randn(4, generator=generator)
                mine[ordinal].grad = p.grad.double()
                at = torch.tensor([1] if step == 3 else [], dtype=torch.int64)
                mine[ordinal].grad[at] += 0.25  # pyright: ignore[reportOptionalSubscript]
                path.note(run, ordinal, p, p.grad, at, p.grad[at] + 0.25)
        run.step()
        own.step()
        for p in mine:
            p.data.copy_(p.data.float())
        path.step(named)
    assert path.problem is None
    for ordinal, p in enumerate(mine):
        assert torch.equal(path.tensors[ordinal].p.detach(), p.detach())


def test_an_optimizer_whose_copy_fails_is_a_problem_and_ends_nothing() -> None:
    class Alone(Warming):
        def step(self, closure: object = None) -> Any:
            if self.param_groups[0]["params"][0].dtype == torch.float64:
                raise ValueError("not of these")
            super().step()

    p = nn.Parameter(torch.ones(4))
    run, path = (
        Alone([{"params": [p]}, {"params": [nn.Parameter(torch.ones(1))]}]),
        OwnPath([torch.ones(4)], [torch.ones(4)]),
    )
    p.grad = torch.ones(4)
    path.note(run, 0, p, p.grad, torch.tensor([0]), torch.tensor([2.0]))
    run.step()
    path.step([("w", p)])
    assert path.problem == "optimizer Alone: ValueError: not of these"


class Mastered(torch.optim.SGD):
    """An optimizer that keeps its weights twice, and steps from its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.master = {p: p.detach().double() for group in self.param_groups for p in group["params"]}

    def step(self, closure: object = None) -> Any:
        with torch.no_grad():
            for p, master in self.master.items():
                if p.grad is not None:
                    p.copy_(master.sub_(0.1 * p.grad.double()))


def test_weights_that_an_optimizer_keeps_twice_are_led_twice() -> None:
    """A copy that took them over from the run in each step saw one step's lead alone."""
    p = nn.Parameter(torch.ones(4))
    run, path = Mastered([p]), OwnPath([torch.ones(4)], [torch.ones(4)])
    for _ in range(5):
        p.grad = torch.full((4,), 0.5)
        path.note(run, 0, p, p.grad, torch.tensor([0]), torch.tensor([0.25]))
        run.step()
        path.step([("w", p)])
    assert path.tensors[0].farthest.tolist() == pytest.approx([0.125, 0.0, 0.0, 0.0], abs=1e-6)


def test_state_that_comes_later_is_a_problem_and_ends_nothing() -> None:
    p = nn.Parameter(torch.ones(4))
    run, path = torch.optim.SGD([p], lr=0.1), OwnPath([torch.ones(4)], [torch.ones(4)])
    for at in ([0], [1]):
        p.grad = torch.ones(4)
        path.note(run, 0, p, p.grad, torch.tensor(at), torch.zeros(1))
        run.step()
        run.state[p]["seen"] = torch.ones(4)
        path.step([("w", p)])
    assert path.problem == "optimizer SGD: KeyError: 'seen'"
    assert 0.0 < path.shares([("w", p)])["w"] < 1.0
