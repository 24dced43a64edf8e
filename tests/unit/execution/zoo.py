"""A job file with many small models, optimizers and schedules; the tests order from it by name.

Settings: model, optimizer, scheduler, steps, accumulation, clip; every choice is a key of a table below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tallystick.execution.job import Batch, Job
from tallystick.jobs.digits import initial_weights
from tallystick.numerics.random import normal, randint, stream_key

WIDTH = 12
CLASSES = 5


class Classifier(nn.Module):
    """ReLU, layer norm, dropout and a linear head over 12 numbers."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.first(x)))
        return self.head(torch.tanh(self.second(self.norm(x))))


class Convolutions(nn.Module):
    """A residual block with batch norm, a max-pool, and average pooling; the convolution's bias is pure noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 1, 3, 4).repeat(1, 1, 2, 2)
        x = F.max_pool2d(self.norm1(self.stem(x)), 2)
        x = F.relu(x + self.norm2(self.conv(x)))
        return self.head(x.mean(dim=(2, 3)))


class Transformer(nn.Module):
    """An encoder layer over 4 tokens of 3 numbers; the attention's key bias is pure noise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.embed(x.reshape(-1, 4, 3)))
        return self.head(x.mean(dim=1))


class Recurrent(nn.Module):
    """An LSTM and a GRU over 4 tokens of 3 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x.reshape(-1, 4, 3))
        x, _ = self.gru(x)
        return self.head(x[:, -1])


class Embedded(nn.Module):
    """A sparse embedding, tied to nothing, and an embedding tied to the output layer; an unused layer besides."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=sparse)
        self.tied = nn.Linear(WIDTH, 10, bias=False)
        if not sparse:
            self.tied.weight = self.table.weight
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :4].abs() * 0).to(torch.int64) + torch.arange(4)
        return self.head(self.tied(x + self.table(tokens).mean(dim=1)))


class Frozen(nn.Module):
    """A frozen first layer, an integer counter and a floating buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.first.requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x))
        if self.training:
            self.seen += 1
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
        return self.head(x - self.average)


class Reassigned(nn.Module):
    """Buffers that are assigned anew in every forward pass, one of them transposed."""

    average: Tensor
    outer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("outer", torch.zeros(WIDTH, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(dim=0)
        self.outer = 0.9 * self.outer + (0.1 * (h.detach().t() @ x / x.shape[0])).t()
        self.outer = self.outer.t().contiguous().t()
        return self.head(h - self.average + x @ self.outer)


class Late(nn.Module):
    """A zero head: the gradients of the other layers are exactly zero at step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.second = nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(F.gelu(self.first(x)))))


class Branches(nn.Module):
    """Every kind of decision in one forward pass: pools, top-k, sort, argmax, comparisons, lattices, clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 16)
        self.slope = nn.PReLU()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.first(x))
        gate = torch.sigmoid(self.second(x))
        kept = torch.topk(gate, 4, dim=1)
        mask = torch.zeros_like(gate).scatter(1, kept.indices, 1.0)
        x = x * gate * mask + F.elu(x).sort(dim=1).values + F.softshrink(x) + F.hardswish(x)
        x = (
            torch.where(x > 0.3, x, x.clamp(-0.7, 0.7))
            + (x * 3 - (x * 3).detach() + torch.floor(x * 3).detach()) * 0.1
        )
        x = x + x.abs().amax(dim=1, keepdim=True) * 0.1 + torch.maximum(x, gate)
        x = x + F.max_pool1d(x.unsqueeze(1), 4).repeat_interleave(4, dim=2).squeeze(1)
        x = x + F.one_hot(x.argmax(dim=1), 16).to(x.dtype)
        return self.head(x)


class Recomputed(nn.Module):
    """Activation checkpointing of a block with dropout and a ReLU."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "classifier": Classifier,
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES)),
    "convolutions": Convolutions,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "tied": lambda: Embedded(sparse=False),
    "sparse": lambda: Embedded(sparse=True),
    "frozen": Frozen,
    "reassigned": Reassigned,
    "late": Late,
    "branches": Branches,
    "checkpointed": lambda: Recomputed(reentrant=False),
    "checkpointed-reentrant": lambda: Recomputed(reentrant=True),
}

Parameters = Any
OPTIMIZERS: Mapping[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, maximize=False),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-single": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.003, centered=True),
    "rmsprop-momentum": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adagrad-decay": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.02),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "sparse-adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "differentiable": lambda p: torch.optim.AdamW(p, lr=0.01, differentiable=True),
    "tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}

SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "none": lambda o, n: None,
    "lambda": lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1.0 + 0.3 * step)),
    "cosine": lambda o, n: lr_scheduler.CosineAnnealingLR(o, T_max=n),
    "onecycle": lambda o, n: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=n + 1),
    "step": lambda o, n: lr_scheduler.StepLR(o, step_size=3, gamma=0.7),
    "multistep": lambda o, n: lr_scheduler.MultiStepLR(o, milestones=[2, 5], gamma=0.3),
    "exponential": lambda o, n: lr_scheduler.ExponentialLR(o, gamma=0.93),
    "sequential": lambda o, n: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=n)],
        milestones=[4],
    ),
    "plateau": lambda o, n: lr_scheduler.ReduceLROnPlateau(o),
}


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; see the tables for what may be chosen."""
    steps = int(settings.get("steps", "30"))
    with initial_weights(int(settings.get("seed", "1"))):
        model = MODELS[settings.get("model", "classifier")]()
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if settings.get("groups") == "yes":
        parameters = [
            {"params": [p for p in parameters if p.dim() > 1], "lr": 0.02},
            {"params": [p for p in parameters if p.dim() <= 1]},
        ]
    optimizer = OPTIMIZERS[settings.get("optimizer", "adamw")](parameters)
    extra: dict[str, nn.Module] = {}
    after: Callable[[int], None] | None = None
    if settings.get("average") == "yes":
        averaged = copy.deepcopy(model).requires_grad_(False)
        extra["average"] = averaged

        def after(step: int) -> None:
            with torch.no_grad():
                for mean, p in zip(averaged.parameters(), model.parameters(), strict=True):
                    mean.data.lerp_(p.data.to(mean.dtype), 0.25)

    size = int(settings.get("batch", "8"))
    return Job(
        model=model,
        optimizer=optimizer,
        batch=lambda step: batch_of(step, size),
        loss=loss_of,
        steps=steps,
        scheduler=SCHEDULERS[settings.get("scheduler", "none")](optimizer, steps),
        accumulation=int(settings.get("accumulation", "1")),
        clip_norm=float(settings["clip"]) if "clip" in settings else None,
        extra=extra,
        after_step=after,
    )


def batch_of(step: int, size: int = 8) -> Batch:
    """Return inputs (size, 12) and labels (size,) of a step."""
    x = normal(stream_key(7, "zoo/x", step, 0, 0, 0), 0, size * WIDTH)
    y = randint(stream_key(7, "zoo/y", step, 0, 0, 0), 0, size, 0, CLASSES)
    return torch.from_numpy(x).float().reshape(size, WIDTH), torch.from_numpy(y)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy."""
    x, y = batch
    return F.cross_entropy(model(x), y)
