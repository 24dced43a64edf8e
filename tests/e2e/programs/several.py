"""A script with two optimizers over one model; with ``--in-turn`` each trains on a loss of its own, one after the other.

With ``--leaves-out`` the second does not take the last step.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import tallystick

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01)
schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.7) for each in (muon, adamw)]
tallystick.attach(model, [muon, adamw], schedulers)
for step in range(12):
    rng = np.random.default_rng(step)
    x = torch.from_numpy(rng.integers(-64, 64, (32, 16)).astype(np.float32) / 32.0)
    y = torch.from_numpy(rng.integers(0, 4, 32))
    F.cross_entropy(model(x), y).backward()
    muon.step()
    if "--in-turn" in sys.argv:
        adamw.zero_grad()
        F.cross_entropy(model(x), y).backward()
    if "--leaves-out" in sys.argv and step == 11:
        break
    adamw.step()
    for each in schedulers:
        each.step()
    model.zero_grad()
