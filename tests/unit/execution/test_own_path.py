"""Where an auditor's own rounding would have led the weights: against the run's own optimizer, given the other gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.execution.noise.own_path import ELEMENTWISE, FIRST_UPDATES, SETTLED, Led, OwnPath

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
    lasting: Callable[[Tensor], object] = lambda p: None,
) -> tuple[nn.Parameter, OwnPath, nn.Parameter, Tensor]:
    """Train a parameter, and another one in whose gradients the elements chosen are others; follow the former's own path."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(shape, generator=generator).double()
    p, mine = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    run, own = MADE[name]([p]), MADE[name]([mine])
    path = OwnPath(heard={0})
    for step in range(STEPS):
        for optimizer in (run, own):
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        gradient = torch.randn(shape, generator=generator).double()
        p.grad, mine.grad = gradient.clone(), other(step, gradient.clone())
        flat, changed = gradient.reshape(-1), mine.grad.reshape(-1)
        at = (flat != changed).nonzero().reshape(-1)
        path.note(run, 0, p, gradient, at, changed[at])
        before = p.detach().clone()
        for optimizer in (run, own):
            optimizer.step()
            narrowed(optimizer)
        path.step([("w", p)], [before])
        for tensor in (p, mine):
            lasting(tensor.data)
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
    p, path, mine, first = trained(name, shape, from_step)
    led = path.led([("w", p)], [first])["w"]
    assert torch.equal(path.tensors[0].without_choices(p).reshape(shape), mine.detach())
    assert led.distance == pytest.approx(float((mine.detach() - first).norm()))
    assert led.size == pytest.approx(float(first.norm()))
    apart = float((p.detach() - mine.detach()).norm())
    assert led.way >= apart > 0.0
    assert (path.tensors[0].at is None) == (name == "HalfNorm")
    assert path.tensors[0].at is None or path.tensors[0].at.tolist() == sorted({*AT.tolist(), *MORE.tolist()})


@pytest.mark.parametrize("name", ["Adam", "SGD", "ASGD", "NAdam"])
def test_a_parameter_of_no_dimension_is_one_element(name: str) -> None:
    """Its state is as large as what the optimizer counts of any parameter."""
    p, path, mine, first = trained(name, (), lambda step, gradient: gradient + (0.5 if step > 3 else 0.0))
    assert torch.equal(path.tensors[0].without_choices(p).reshape(()), mine.detach())
    assert path.led([("w", p)], [first])["w"].way > 0.0


def test_what_is_done_to_the_weights_between_steps_leads_nobody() -> None:
    """Weights that are clipped after each step stay within; a path of its own would leave."""
    p, path, _, first = trained(
        "SGD", (8,), lambda step, gradient: gradient + (0.25 if step == 2 else 0.0), lambda p: p.mul_(0.5)
    )
    assert path.led([("w", p)], [first])["w"].way == pytest.approx(0.25 * 0.02 / 3 * 8**0.5)
    assert float(path.tensors[0].apart.norm()) == pytest.approx(0.25 * 0.02 / 3 * 8**0.5, rel=1e-3)


def test_the_way_is_the_farthest_and_moves_back_do_not_shorten_it() -> None:
    """A schedule makes the move dear and its return cheap, or a move is used while it lasts."""

    def there_and_back(step: int, gradient: Tensor) -> Tensor:
        return gradient + {2: 0.3, 5: -0.6}.get(step, 0.0)  # at rates of a third and a sixth

    p, path, mine, first = trained("SGD", (8,), there_and_back)
    assert float((p.detach() - mine.detach()).norm()) == pytest.approx(0.0, abs=1e-6)
    led = path.led([("w", p)], [first])["w"]
    assert led.way == pytest.approx(0.3 * 0.02 / 3 * 8**0.5, rel=1e-5)


def test_what_no_log_chose_or_heard_is_led_nowhere() -> None:
    p, path, _, first = trained("Adam", (8,), lambda step, gradient: gradient)
    assert path.led([("w", p)], [first]) == {}
    p, path, _, first = trained("Adam", (8,), from_step)
    path.heard.clear()
    assert path.led([("w", p)], [first]) == {}


def test_a_copy_is_another_path() -> None:
    """What steps that differ led is taken back."""
    _, path, _, _ = trained("AdamW", (8,), from_step)
    kept = copy.deepcopy(path)
    run = path.tensors[0].optimizer
    p = run.param_groups[0]["params"][0]
    path.tensors[0].apart += 1.0
    p.data += 1.0
    other = kept.tensors[0]
    assert not torch.equal(other.apart, path.tensors[0].apart)
    assert other.optimizer.param_groups[0]["params"] == [other.p]
    assert list(other.optimizer.state) == [other.p]


@pytest.mark.parametrize(
    ("led", "share"),
    [
        (Led(0.0, 0.0, 0.0), 0.0),
        (Led(1.0, 4.0, 4.0), 0.25),
        (Led(1.0, 0.0, 4.0 / SETTLED), 0.25),
        (Led(1.0, 0.0, 0.0), float("inf")),
        (Led(1.0, 2.0, 0.0, update=0.5 / FIRST_UPDATES), 0.25),
        (Led(1.0, 0.0, 0.0, update=1.0 / FIRST_UPDATES), 0.0),
    ],
)
def test_a_share_is_of_the_way_trained_or_of_what_a_settled_tensor_is(led: Led, share: float) -> None:
    assert led.share == share
