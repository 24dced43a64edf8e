"""Images turned, their gamma changed, and stored as bytes again, as image libraries do: whole numbers made of floating ones."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] * 15.9375
labels = torch.tensor(digits.target)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    at = torch.randint(0, len(images), (64,), generator=generator)
    angle = torch.randn(64, generator=generator) * 0.3
    turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0], 1)
    grid = F.affine_grid(turn.reshape(-1, 2, 3), [64, 1, 16, 16], align_corners=False)
    larger = F.interpolate(images[at], scale_factor=2, mode="bicubic", align_corners=False)
    turned = F.grid_sample(larger, grid, padding_mode="border", align_corners=False)
    gamma = torch.exp(0.3 * torch.randn(64, 1, 1, 1, generator=generator))
    bright = 255 * (turned.clamp(0, 255) / 255).pow(gamma) + 4 * torch.randn(
        turned.shape, generator=generator
    )
    return bright.clamp(0, 255).round().to(torch.uint8), labels[at]


def loss(net, both):
    return F.cross_entropy(net(both[0].float() / 255), both[1])


def build(settings):
    model = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batch, loss, steps=8)
