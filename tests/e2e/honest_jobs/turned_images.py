"""Digits turned, scaled and sheared by chance: affine_grid and grid_sample in batch."""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)


def augment(x):
    n = len(x)
    angle = (torch.rand(n) - 0.5) * math.pi / 3
    size = torch.exp(0.2 * torch.randn(n))
    turn = torch.zeros(n, 2, 3)
    turn[:, 0, 0], turn[:, 0, 1] = size * angle.cos(), -size * angle.sin()
    turn[:, 1, 0], turn[:, 1, 1] = size * angle.sin(), size * angle.cos()
    turn[:, :, 2] = 0.2 * torch.randn(n, 2)
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def batch(step):
    torch.manual_seed(step)
    at = torch.randperm(len(images))[:32]
    return augment(images[at]), labels[at]


def build(settings):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
