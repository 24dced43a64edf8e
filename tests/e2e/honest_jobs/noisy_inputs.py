"""A denoising autoencoder: images that come with scikit-learn, with noise and dead pixels."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16


def batch(step):
    torch.manual_seed(step)
    clean = images[torch.randint(0, len(images), (32,))]
    noisy = clean + 0.3 * torch.randn_like(clean)
    noisy = torch.sigmoid(6 * noisy - 3) * torch.empty_like(clean).bernoulli_(0.9)
    return noisy, clean


def build(settings):
    model = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Job(model, optimizer, batch, lambda net, xy: F.mse_loss(net(xy[0]), xy[1]), steps=8)
