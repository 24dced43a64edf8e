"""Random crops and flips, brightness and contrast, batch norm."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)


def one(image):
    padded = F.pad(image[None], (2, 2, 2, 2))[0]
    top, left = torch.randint(0, 5, (2,)).tolist()
    cut = padded[top : top + 8, left : left + 8]
    if torch.rand(()) < 0.5:
        cut = cut.flip(-1)
    brightness, contrast = torch.empty(2).uniform_(0.7, 1.3)
    return (cut - cut.mean()) * contrast + cut.mean() * brightness


def batch(step):
    torch.manual_seed(step)
    at = torch.randint(0, len(images), (32,))
    return torch.stack([one(images[i]) for i in at])[:, None], labels[at]


def build(settings):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
