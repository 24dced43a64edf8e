"""A script in which several things are refused, one of them twice."""

import torch
from torch import nn

import tallystick

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
tallystick.attach(model, optimizer, scheduler)
for step in range(8):
    x = torch.arange(32.0).reshape(4, 8) / 32 + step
    hidden = model(x)
    hidden = hidden.cummax(1).values + hidden.cummax(0).values
    loss = nn.functional.cross_entropy(hidden, torch.arange(4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step(float(loss.detach()))
