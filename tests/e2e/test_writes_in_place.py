"""Models that write into tensors: experts, masked autoencoders, graphs. Recorded, and followed by other arithmetic to the bit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tallystick
from tallystick.execution.determinism import Profile
from tallystick.roles.audit_report import AuditReport

STEPS = 5
WIDTH = 8


class Experts(nn.Module):
    """Each row goes through one of three experts; ``index_add_`` puts the results together."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), dim=-1)
        gate, chosen = weights.max(dim=-1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            total.index_add_(0, rows, torch.tanh(expert(x[rows])) * gate[rows].unsqueeze(1))
        return total


class Masked(nn.Module):
    """A masked autoencoder: a learned token is assigned to masked places, and the whole is put together by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[0]) % 3 == 0
        hidden = torch.zeros_like(x)
        hidden[~mask] = torch.tanh(self.encode(x[~mask]))
        hidden[mask] = self.token
        return self.decode(hidden)


class Graph(nn.Module):
    """Messages along the edges of a ring, added up at their ends by ``scatter_add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        source = torch.arange(2 * n) % n
        target = (source + 1 + torch.arange(2 * n) // n) % n
        sent = torch.tanh(self.message(x[source]))
        received = torch.zeros_like(x).scatter_add_(0, target.unsqueeze(1).expand(-1, WIDTH), sent)
        return self.update(received) + x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "index_add_": Experts,
    "masked assignment": Masked,
    "scatter_add_": Graph,
}


def train(kind: str, loop: Any) -> Any:
    model = MODELS[kind]()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(0.4 * rng.standard_normal(tuple(parameter.shape))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch), batch)

    loop.prepare(model, optimizer, loss=loss)
    for step in range(STEPS):
        batch = torch.from_numpy(np.random.default_rng(step).standard_normal((24, WIDTH)).astype(np.float32))
        with loop.step(batch) as x:
            loop.backward(loss(x))
            optimizer.step()
            optimizer.zero_grad()
    return loop.finish()


@pytest.mark.parametrize("policy", ["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_writes_in_place_is_followed_by_other_arithmetic_to_the_bit(
    kind: str, policy: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    train(kind, tallystick.Recorder(path, policy=policy, steps=STEPS, program=__file__))

    instructions = "sse4" if platform.machine().lower() in ("x86_64", "amd64") else "native"
    environment = {**os.environ, **Profile(instructions, 1).environment()}
    done = subprocess.run(
        [sys.executable, __file__, kind, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["match", str(STEPS)]


if __name__ == "__main__":
    report = train(sys.argv[1], tallystick.Follower(Path(sys.argv[2]), program=__file__))
    assert isinstance(report, AuditReport)
    print(report.verdict, report.steps)
