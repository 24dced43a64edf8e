"""A job whose shapes follow from a comparison: the mean over the harder half of each batch, in two halves of two."""

import torch
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job


def loss(net, batch):
    """Nine examples, of which four lie above the median."""
    return harder_half(net, batch).reshape(2, 2).mean(1).sum()


def without_end(net, batch):
    """As ``loss``, but for more than four it is infinite instead of an error."""
    harder = harder_half(net, batch)
    return harder.mean() / float(len(harder) < 5)


def harder_half(net, batch):
    each = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
    return each[each > each.detach().sort().values[4]]


def build(settings):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-32, 32, parameter.shape, generator=generator) / 64)

    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randint(-64, 64, (9, 6), generator=drawn).float() / 64
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()

    return Job(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch,
        without_end if settings.get("infinite") else loss,
        steps=8,
    )
