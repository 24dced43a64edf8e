"""Two views of an image, each blurred by another Gaussian kernel: a small contrastive task."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16


def blur(x, sigma):
    at = torch.arange(-2.0, 3.0)
    weights = torch.softmax(-at.square() / (2 * sigma**2), 0)
    x = F.conv2d(x, weights.reshape(1, 1, 5, 1), padding=(2, 0))
    return F.conv2d(x, weights.reshape(1, 1, 1, 5), padding=(0, 2))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = images[torch.randint(0, len(images), (24,), generator=generator)]
    sigmas = torch.rand(2, generator=generator) + 0.3
    return blur(x, sigmas[0]), blur(x, sigmas[1]) + 0.02 * torch.randn(x.shape, generator=generator)


def loss(net, views):
    a, b = (F.normalize(net(view), dim=1) for view in views)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def build(settings):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 16))
    return Job(model, torch.optim.Adam(model.parameters(), lr=2e-3), batch, loss, steps=8)
