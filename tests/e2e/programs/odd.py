"""Training scripts that do what people do; which one, the argument says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import tallystick

STEPS, BATCH = 12, 8
torch.manual_seed(0)
inputs = (
    torch.randint(0, 100, (STEPS * BATCH, 10), generator=torch.Generator().manual_seed(1)).float() / 50 - 1
)
labels = (inputs.sum(1) > 0).long()
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def train(model: nn.Module, optimizer: Any, loss: Loss, *, every: int = 1, **more: Any) -> None:
    tallystick.attach(model, optimizer, **more)
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        loss(model, inputs[part], labels[part]).backward()
        if step % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def layers(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), *(more or (nn.ReLU(),)), nn.Linear(16, 2))


def recurrent() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer, self.out = (
                nn.Embedding(100, 8),
                nn.LSTM(8, 12, batch_first=True),
                nn.Linear(12, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(self.words(((x + 1) * 49).long()))[0][:, -1])

    model = Words()
    train(model, torch.optim.AdamW(model.parameters(), 1e-2), plain)


def recomputed() -> None:
    """Dropout that is drawn again in the backward pass."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (
                nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.ReLU()),
                nn.Linear(16, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    model = Twice()
    train(model, torch.optim.Adam(model.parameters(), 1e-2), plain)


def penalty() -> None:
    """A gradient in the loss, and two backward passes."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        out.square().mean().backward(retain_graph=True)
        return F.cross_entropy(out, y) + slope.norm(dim=1).sub(1.0).square().mean()

    model = layers(nn.Softplus())
    train(model, torch.optim.RMSprop(model.parameters(), 1e-3), loss)


def skips() -> None:
    """Batches that the optimizer does not take, the last among them."""
    model = layers(nn.BatchNorm1d(16), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tallystick.attach(model, optimizer)
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        plain(model, inputs[part], labels[part]).backward()
        if step % 4 != 3:
            optimizer.step()
        optimizer.zero_grad()


def closure() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tallystick.attach(model, optimizer)
    for step in range(STEPS):

        def again(part: slice = slice(step * BATCH, (step + 1) * BATCH)) -> Tensor:
            optimizer.zero_grad()
            loss = plain(model, inputs[part], labels[part])
            loss.backward()
            return loss

        optimizer.step(again)


def prefetches() -> None:
    """The next batch is made while a step is open, from a generator of the loader's own."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tallystick.attach(model, optimizer)
    data = TensorDataset(inputs, labels)
    for _ in range(2):
        loader = iter(DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)))
        batch = next(loader, None)
        while batch is not None:
            loss = plain(model, *batch)
            batch = next(loader, None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def averages() -> None:
    model = layers()
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    run = tallystick.attach(model, optimizer, extra={"average": average}, follows_up=True)
    total = 0.0
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        loss = plain(model, inputs[part], labels[part])
        total += loss.item()
        loss.backward()
        optimizer.step()
        with run.follow_up():
            average.update_parameters(model)
        optimizer.zero_grad()
        model.state_dict()
    print(total)


def sparse() -> None:
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True), nn.Flatten(), nn.Linear(40, 2))
    train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda m, x, y: plain(m, ((x + 1) * 49).long(), y),
        every=2,
    )


def experts() -> None:
    """Tokens gathered by expert: shapes follow from decisions."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.each = nn.Linear(10, 4), nn.ModuleList(nn.Linear(10, 2) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros(len(x), 2)
            for number, expert in enumerate(self.each):
                rows, places = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
            return out

    model = Experts()
    train(model, torch.optim.AdamW(model.parameters(), 1e-2), plain)


def warms_up() -> None:
    """The rate is set between the backward pass and the optimizer's step, from the first step on."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tallystick.attach(model, optimizer)
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        plain(model, inputs[part], labels[part]).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
