"""A script whose data say how often it has run; or that is refused at once, with --tensor."""

import sys
from pathlib import Path

import torch
from torch import nn

import tallystick

counter = Path(sys.argv[1])
runs = len(counter.read_text()) if counter.exists() else 0
counter.write_text("x" * (runs + 1))
torch.manual_seed(0)
model = nn.Linear(2, 2)
rate = torch.tensor(0.1) if "--tensor" in sys.argv else 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
tallystick.attach(model, optimizer)
for _ in range(2):
    model(torch.full((1, 2), float(runs))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
