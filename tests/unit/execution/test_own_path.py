"""Where an auditor's own rounding would have led the weights: against the run's own optimizer, given the other gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.execution.noise.own_path import (
    ELEMENTWISE,
    LEAST_ROW,
    ROW_SLACK,
    SETTLED,
    OwnPath,
    shares_of,
)

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
    path = OwnPath()
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
    assert torch.equal(own.own(), mine.detach().reshape(-1)[... if own.at is None else own.at])
    apart = float((p.detach() - mine.detach()).norm())
    assert float(own.ways[-1]) >= 0.999999 * apart > 0.0
    assert own.places.tolist() == sorted({*AT.tolist(), *MORE.tolist()})
    assert (own.at is None) == (name == "HalfNorm")


@pytest.mark.parametrize("name", ["Adam", "SGD", "ASGD", "NAdam"])
def test_a_parameter_of_no_dimension_is_one_element(name: str) -> None:
    """Its state is as large as what the optimizer counts of any parameter."""
    _, path, mine, first = trained(name, (), lambda step, gradient: gradient + (0.5 if step > 3 else 0.0))
    assert torch.equal(path.tensors[0].own(), mine.detach().reshape(-1))
    assert path.shares([("w", mine)], [first])["w"] > 0.0


def test_the_way_is_the_farthest_and_moves_back_do_not_shorten_it() -> None:
    """A schedule makes the move dear and its return cheap, or a move is used while it lasts."""

    def there_and_back(step: int, gradient: Tensor) -> Tensor:
        return gradient + {2: 0.3, 5: -0.6}.get(step, 0.0)  # at rates of a third and a sixth

    p, path, mine, _ = trained("SGD", (8,), there_and_back)
    assert float((p.detach() - mine.detach()).norm()) == pytest.approx(0.0, abs=1e-6)
    assert float(path.tensors[0].ways[-1]) == pytest.approx(0.3 * 0.02 / 3 * 8**0.5, rel=1e-5)


def test_what_no_log_chose_is_led_nowhere() -> None:
    for name in ("Adam", "HalfNorm"):
        p, path, _, first = trained(name, (8,), lambda step, gradient: gradient)
        assert path.shares([("w", p)], [first]) == ({"w": 0.0} if name == "HalfNorm" else {})


@pytest.mark.parametrize(
    ("way", "trained", "share"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 4.0, 0.25),
        (1.0, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, math.inf),
        (0.0, math.nan, math.inf),
    ],
)
def test_a_share_is_of_the_way_trained_and_unknown_is_more_than_any(
    way: float, trained: float, share: float
) -> None:
    assert float(shares_of(torch.tensor([way]), torch.tensor([trained]))) == share


def one_step(first: Tensor, at: list[int], gradient: Tensor | None = None, *, is_loud: bool = True) -> float:
    """Return the share of a tensor that an SGD of rate one takes one step, elements ``at`` led by one."""
    p, path = nn.Parameter(first.clone()), OwnPath()
    optimizer = torch.optim.SGD([p], lr=1.0)
    gradient = torch.zeros_like(first) if gradient is None else gradient
    p.grad, places = gradient.clone(), torch.tensor(at)
    p.grad.reshape(-1)[places] += 1.0
    path.note(optimizer, 0, p, p.grad, places, gradient.reshape(-1)[places], is_loud=is_loud)
    optimizer.step()
    path.step([("w", p)])
    return path.shares([("w", p)], [first])["w"]


def test_what_stands_beside_the_elements_led_pays_for_nothing() -> None:
    """Padding of a large size, or columns that train much: both were lenders of a tensor's whole way."""
    few, size = [0, 1], torch.ones(1, 32, dtype=torch.float64)
    plain = one_step(size, few)
    assert plain == pytest.approx(2**0.5 / (32**0.5 * SETTLED))
    lender, trained = size.clone(), torch.zeros_like(size)
    lender[0, 8:], trained[0, 8:] = 1e6, 50.0
    assert (
        one_step(lender, few) == one_step(lender, few, is_loud=False) == one_step(size, few, trained) == plain
    )
    # Nor does one of them whose size is another.
    lender, many = size.clone(), list(range(7))
    lender[0, 0] = 1e6
    assert one_step(lender, many) == one_step(size, many)
    # A gradient that is more than its noise is led less where it is larger: all of the tensor's way counts.
    assert one_step(size, few, trained, is_loud=False) == pytest.approx(2**0.5 / (24**0.5 * 50.0))


def test_one_row_is_led_eight_times_as_far_as_a_tensor_at_most() -> None:
    for length, is_asked in ((LEAST_ROW, True), (LEAST_ROW - 1, False)):
        rows = 4 * int(ROW_SLACK) ** 2
        size, row = torch.ones(rows, length, dtype=torch.float64), list(range(length))
        of_row, whole = 1.0 / SETTLED, (1.0 / rows) ** 0.5 / SETTLED
        assert one_step(size, row, is_loud=False) == pytest.approx(of_row / ROW_SLACK if is_asked else whole)
        assert one_step(size, row) == pytest.approx(
            of_row if is_asked else whole
        )  # hardly more than noise: as far as a tensor


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
    run, path = Normed([p for _, p in named]), OwnPath()
    first = [p.detach().clone() for _, p in named]
    for step in range(6):
        for ordinal, (_, p) in enumerate(named):
            p.grad = torch.randn(p.shape, generator=generator)
            is_led = (step, ordinal) == (2, 1)
            at = torch.tensor([0] if is_led else [], dtype=torch.int64)
            path.note(run, ordinal, p, p.grad, at, p.grad.reshape(-1)[at] + 1e-3)
        run.step()
        path.step(named)
    shares = path.shares(named, first)
    assert 0.0 < max(shares["0"], shares["2"]) < 0.25 * shares["1"] < 1e-3


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
    path = OwnPath()
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
        assert torch.equal(path.tensors[ordinal].own(), p.detach())


def test_an_optimizer_whose_copy_fails_is_a_problem_and_ends_nothing() -> None:
    class Alone(Warming):
        def step(self, closure: object = None) -> Any:
            if self.param_groups[0]["params"][0].dtype == torch.float64:
                raise ValueError("not of these")
            super().step()

    p = nn.Parameter(torch.ones(4))
    run, path = Alone([{"params": [p]}, {"params": [nn.Parameter(torch.ones(1))]}]), OwnPath()
    p.grad = torch.ones(4)
    path.note(run, 0, p, p.grad, torch.tensor([0]), torch.tensor([2.0]))
    run.step()
    path.step([("w", p)])
    assert path.problem == "optimizer Alone: ValueError: not of these"
