"""A classifier whose program a file beside it stops, or has cheat: with shuffled data, micro-batches, dropout and a schedule."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import tallystick

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--parts", type=int, default=1)
parser.add_argument("--remembers", action="store_true", help="weigh a loss by the last one")
parser.add_argument("--stops", action="store_true", help="end once the sum of all losses is above a limit")
parser.add_argument("--resumable", action="store_true")
given = parser.parse_args()


def says(name: str) -> int:
    return int(Path(name).read_text()) if Path(name).exists() else -1


torch.manual_seed(0)
inputs = torch.randint(0, 100, (96, 10)).float() / 50 - 1
labels = (inputs.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 12 * given.epochs)
run = tallystick.attach(model, optimizer, scheduler, resumable=given.resumable)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
step, last, total, average = 0, 1.0, 0.0, AveragedModel(model)
for _ in range(given.epochs):
    model.train()
    for x, y in loader:
        if step == says("stop"):
            raise KeyboardInterrupt
        if step == says("leave"):
            raise SystemExit
        for part, target in zip(x.chunk(given.parts), y.chunk(given.parts), strict=True):
            loss = nn.functional.cross_entropy(model(part), target) / given.parts
            if given.remembers:
                loss = loss * (1.0 + 0.25 * last)
            if step == says("cheat"):
                loss = loss * -1.0
            loss.backward()
            last = loss.item()
            total += last
        optimizer.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        step += 1
        if given.stops and total > 11.0:
            raise SystemExit
    model.eval()
    with torch.no_grad():
        print((model(inputs).argmax(1) == labels).float().mean().item(), average.n_averaged.item())
