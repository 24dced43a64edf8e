"""Points on noisy rings from numpy's generator; model and constants come from beside this file."""

import made_up
import numpy as np
import torch
from shapes import LEARNING_RATE, net
from torch.nn import functional as F

from tallystick.execution.job import Job


def batch(step):
    rng = np.random.default_rng([made_up.SEED, step])
    points, labels = made_up.rings(rng, 48)
    shift = rng.normal(0.0, 0.05, points.shape) + rng.laplace(0.0, 0.01, points.shape)
    return torch.from_numpy((points + shift).astype(np.float32)), torch.from_numpy(labels)


def build(settings):
    model = net.classifier(made_up.RINGS)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LEARNING_RATE)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
