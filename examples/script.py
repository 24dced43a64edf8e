"""A training script as anybody writes it, with the two lines that let tally record and follow it.

tally record --policy fp32 --run runs/spirals -- python examples/script.py --epochs 2
tally audit runs/spirals -- python examples/script.py --epochs 2          # a stranger, on another machine
python examples/script.py --epochs 2                                      # trains, and nothing else

Without tally it trains, and does nothing else.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tallystick  # 1


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two interleaved spirals, the same on every machine."""
    rng = np.random.default_rng(0)
    turn, arm = rng.uniform(0.5, 3.0, count), rng.integers(0, 2, count)
    angle = turn * 3.0 + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + rng.normal(
        0.0, 0.05, (count, 2)
    )
    return torch.from_numpy(points.astype(np.float32).round(4)), torch.from_numpy(arm)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
points, arms = spirals(640)
loader = DataLoader(TensorDataset(points, arms), batch_size=64, shuffle=True)
model = nn.Sequential(
    nn.Linear(2, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 2),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
criterion = nn.CrossEntropyLoss()
tallystick.attach(model, optimizer, scheduler)  # 2

for epoch in range(epochs):
    model.train()
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = (model(points).argmax(1) == arms).float().mean()
    print(f"epoch {epoch + 1}: {right:.1%} right")
