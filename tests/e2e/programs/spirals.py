"""A classifier in a loop of its own: shuffled data, batch norm, dropout, clipping, a schedule, an evaluation each epoch."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tallystick

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--parts", type=int, default=1)
parser.add_argument("--keeps", action="store_true", help="use what an earlier step has computed")
parser.add_argument("--leaves", action="store_true", help="end within a step")
given = parser.parse_args()

torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
inputs = torch.randint(0, 100, (192, 10), generator=draw).float() / 50 - 1
labels = (inputs.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12 * given.epochs)
run = tallystick.attach(model, optimizer, scheduler)

criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.75, 1.25]), label_smoothing=0.1)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True)
total, before = 0.0, torch.zeros(())
for _ in range(given.epochs):
    model.train()
    for x, y in loader:
        for part, target in zip(x.chunk(given.parts), y.chunk(given.parts), strict=True):
            loss = criterion(model(part), target) / given.parts
            if given.keeps:
                loss = loss * (1.0 + 0.01 * before.tanh())
            loss.backward()
            total += loss.item()
        before = loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = (model(inputs).argmax(1) == labels).float().mean()
    print(f"loss {total:.6f}, {right:.3f} right")
if given.leaves:
    model.train()
    model(inputs)
