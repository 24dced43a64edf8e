"""Everything that a recording would refuse, all at once, of copies."""

from __future__ import annotations

import copy
from typing import Any

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
    named = ("ReduceLROnPlateau", "rrelu_with_noise", "cummax", "embedding_renorm_")
    assert len(found) == len(named)
    for text, name in zip(found, named, strict=True):
        assert name in text
        assert "; take" in text or "; instead: " in text
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
