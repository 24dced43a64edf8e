"""Distillation: a teacher's answers are computed once, in build: floating ones, its choice, or the bucket of a fine code."""

import torch
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job


def build(settings):
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
    x = torch.randn(512, 16)
    with torch.no_grad():
        says = teacher(x) * 4
    labels = {
        "soft": says.softmax(1),
        "choice": says.argmax(1),
        "bucket": (says.softmax(1)[:, 0] * 2**24).long().remainder(6),
    }[settings.get("labels", "soft")]

    def batch(step):
        at = torch.arange(32 * step, 32 * step + 32) % 512
        return x[at], labels[at]

    student = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 6))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    return Job(student, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
