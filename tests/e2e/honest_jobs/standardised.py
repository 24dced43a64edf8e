"""Regression on a table: columns less their means over their standard deviations, taken in build, cosine schedule."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

STEPS = 8


def build(settings):
    table = load_diabetes(scaled=False)
    x, y = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    x = torch.cat([x, torch.tanh(x), x.pow(3) / x.pow(3).abs().amax(0)], 1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))

    def batch(step):
        at = order[32 * step % 384 :][:32]
        return x[at], y[at]

    model = nn.Sequential(nn.Linear(30, 32), nn.SELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return Job(
        model, optimizer, batch, lambda net, xy: F.smooth_l1_loss(net(xy[0])[:, 0], xy[1]), STEPS,
        scheduler=scheduler, clip_norm=1.0,
    )  # fmt: skip
