"""A training loop of one's own, recorded; and followed by whoever runs it again with TALLYSTICK_FOLLOW set.

    python examples/own_loop.py runs/mine                                  # records
    TALLYSTICK_FOLLOW=runs/mine python examples/own_loop.py                # repeats it and compares, bit for bit

The five lines that make the difference are marked.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

import tallystick

STEPS = 40


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two interleaved spirals, the same for everybody who asks for this step."""
    rng = np.random.default_rng(step)
    turn, arm = rng.uniform(0.5, 3.0, 64), rng.integers(0, 2, 64)
    angle = turn * 3.0 + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + rng.normal(0.0, 0.05, (64, 2))
    return torch.from_numpy(points.astype(np.float32).round(4)), torch.from_numpy(arm)


def main(path: str) -> None:
    torch.manual_seed(0)  # the initial weights are committed as bytes, so this need not be portable
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    run = tallystick.open_run(path, policy="fp32", steps=STEPS)  # 1
    run.prepare(model, optimizer)  # 2
    for step in range(STEPS):
        with run.step(batch_of(step)) as (points, arms):  # 3
            loss = criterion(model(points), arms)
            run.backward(loss)  # 4
            optimizer.step()
            optimizer.zero_grad()
    result = run.finish()  # 5

    if isinstance(result, tallystick.AuditReport):
        print(f"{result.verdict}: {result.steps} steps followed")
    else:
        print(f"recorded {result.steps} steps, root {result.root}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unused")
