"""Mixup with Beta numbers and a Dirichlet mixture of three; soft labels."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
targets = F.one_hot(torch.tensor(digits.target), 10).float()
beta = torch.distributions.Beta(0.4, 0.4)
three = torch.distributions.Dirichlet(torch.ones(3))


def batch(step):
    torch.manual_seed(step)
    at = torch.randint(0, len(images), (32,))
    x, y = images[at], targets[at]
    share, other = beta.sample((32, 1)), torch.randperm(32)
    x, y = share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]
    parts = three.sample((32,))
    mix = torch.stack([torch.randperm(32) for _ in range(3)])
    return torch.einsum("nk,knf->nf", parts, x[mix]), torch.einsum("nk,knf->nf", parts, y[mix])


def build(settings):
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
