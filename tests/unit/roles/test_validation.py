"""Everything that a recording would refuse, all at once, of copies."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tallystick
from tallystick.errors import InvalidInput


class Odd(nn.Module):
    """Three operators that nobody records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slopes = nn.Linear(8, 8), nn.RReLU()
        self.table = nn.Embedding(10, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.slopes(self.linear(x)).cummax(1).values + self.table(torch.tensor([1]))


def ones(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 8)).square().mean()


def test_all_that_is_refused_is_named_with_what_to_do_and_nothing_is_changed() -> None:
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = tallystick.validate(model, optimizer, scheduler, loss=ones)
    named = (
        "ReduceLROnPlateau", "rrelu_with_noise", "cummax", "embedding_renorm_", "rrelu_with_noise_backward", "table.weight",
    )  # fmt: skip
    assert len(found) == len(named)
    for text, name in zip(found, named, strict=True):
        assert name in text
        assert "; take" in text or "; instead: " in text or "; let the optimizer" in text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert optimizer.state == {}
    assert "ReduceLROnPlateau" in tallystick.validate(model, optimizer, scheduler)[0]
    ones(model).backward()
    optimizer.step()  # no hook of the trial's is left on it


@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16", "leaf"])
def test_of_what_can_be_recorded_nothing_is_named(policy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert tallystick.validate(model, optimizer, scheduler, loss=ones, policy=policy) == []


class Jumping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * torch.heaviside(ctx.saved_tensors[0], torch.zeros(()))


BACKWARDS: dict[str, tuple[Any, str]] = {
    "an operator that is listed": (
        lambda m: torch.cdist(m(torch.ones(2, 8)), torch.zeros(2, 2), p=1.0).sum(),
        "_cdist_backward",
    ),
    "a function of one's own": (lambda m: Jumping.apply(m(torch.ones(2, 8))).sum(), "heaviside"),
    "no gradient at all": (lambda m: m(torch.ones(2, 8)).detach().sum(), "does not require grad"),
    "no number": (lambda m: ones(m) * float("nan"), "not finite"),
}


@pytest.mark.parametrize("what", BACKWARDS)
def test_the_backward_pass_is_looked_at_too(what: str) -> None:
    loss, named = BACKWARDS[what]
    model = nn.Linear(8, 2)
    if what == "no gradient at all":
        with pytest.raises(RuntimeError, match=named):
            tallystick.validate(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    else:
        found = tallystick.validate(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
        assert [named in text for text in found] == [True]
    assert model.weight.grad is None


def test_generators_stay_as_they_are() -> None:
    model = nn.Linear(8, 2)
    held = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()

    def drawn(model: nn.Module) -> Tensor:
        return ones(model) * (1.0 + random.random() + np.random.rand()) + torch.rand(())

    assert tallystick.validate(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=drawn) == []
    assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == held


def test_what_a_copy_leaves_behind_is_looked_at_too() -> None:
    hooked, compiled, waiting = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 2).eval()
    hooked.weight.register_hook(lambda g: torch.heaviside(g, torch.zeros(())))
    compiled.compile(backend="eager")
    for model, named in ((hooked, "heaviside"), (compiled, "compiled"), (waiting, "evaluation mode")):
        found = tallystick.validate(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=ones)
        assert [named in text for text in found] == [True], found


def test_several_things_of_an_optimizer_are_named_with_what_ends_the_trial() -> None:
    model = nn.Linear(8, 2)
    found = tallystick.validate(model, torch.optim.LBFGS(model.parameters()))
    assert len(found) == 2
    assert all("LBFGS" in text for text in found)
    strange = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    assert "no parameters of the model" in tallystick.validate(model, strange)[0]


def test_what_cannot_be_looked_at_is_an_error_and_a_loss_may_raise_what_it_likes() -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="policy"):
        tallystick.validate(model, optimizer, policy="fp8")

    given: Any
    for named, given in {
        "model is to be .* is dict": ({}, optimizer),
        "optimizer is to be .* is generator": (model, model.parameters()),
        "optimizer is to be .* is list": (model, []),
        "loss is to be a function .* is Tensor": (model, optimizer, None, ones(model)),
        "extra is to be modules by name, is list": (model, optimizer, None, None, [model]),
    }.items():
        settings = dict(zip(("loss", "extra"), given[3:], strict=False))
        with pytest.raises(InvalidInput, match=f"validate: {named}"):
            tallystick.validate(*given[:3], **settings)
    shapeless = tallystick.validate(model, optimizer, loss=lambda m: m(torch.ones(2, 8)))
    assert shapeless == ["loss is to return one number as a tensor, returned a tensor of shape (2, 2)"]

    def fails(_: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tallystick.validate(model, optimizer, loss=fails)
    assert tallystick.validate(model, optimizer, loss=ones) == []
    model.kept = model.weight * 2
    with pytest.raises(
        InvalidInput, match="validate: model and optimizer have no copy: Only Tensors created"
    ):
        tallystick.validate(model, optimizer)
