"""PCA whitening in build: by eigh of the covariance, or by an svd of the data themselves, torch's or numpy's (setting by)."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job


def build(settings):
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    x = x - x.mean(0)
    if settings.get("by") == "svd":
        _, size, directions = torch.linalg.svd(x, full_matrices=False)
        white = x @ directions[:16].T / size[:16] * len(x) ** 0.5
    elif settings.get("by") == "numpy":
        _, size, directions = np.linalg.svd(x.numpy(), full_matrices=False)
        white = torch.from_numpy(x.numpy() @ directions[:16].T / size[:16] * len(x) ** 0.5)
    else:
        values, vectors = torch.linalg.eigh(x.T @ x / len(x))
        white = x @ vectors[:, -16:] / values[-16:].sqrt()

    def batch(step):
        at = torch.randint(0, len(x), (32,), generator=torch.Generator().manual_seed(step))
        return white[at], y[at]

    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
