"""A script that tries each step again, whatever ends it."""

import torch
from torch import nn

import tallystick

torch.manual_seed(0)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tallystick.attach(model, optimizer)
taken = 0
while taken < 8:
    try:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
    except BaseException as problem:  # noqa: BLE001
        print("again:", type(problem).__name__)
