"""A loop over Lightning's Fabric, with the two lines that let tally record and follow it.

tally record --policy fp32 --run runs/fabric -- python examples/fabric_loop.py
tally audit runs/fabric -- python examples/fabric_loop.py

Without tally it trains, and does nothing else.
"""

from __future__ import annotations

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tallystick.integrations.lightning import attach  # 1


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two interleaved spirals, the same on every machine."""
    rng = np.random.default_rng(0)
    turn, arm = rng.uniform(0.5, 3.0, count), rng.integers(0, 2, count)
    angle = turn * 3.0 + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + rng.normal(
        0.0, 0.05, (count, 2)
    )
    return torch.from_numpy(points.astype(np.float32).round(4)), torch.from_numpy(arm)


torch.manual_seed(0)
fabric = lightning.Fabric(accelerator="cpu")
plain = nn.Sequential(
    nn.Linear(2, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 2),
)
model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*spirals(640)), batch_size=64, shuffle=True))
attach(model, optimizer)  # 2

for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
