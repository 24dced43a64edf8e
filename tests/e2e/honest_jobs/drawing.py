"""Data of torch's own normal numbers, drawn anew from each step's seed: every machine may have other last bits."""

import torch

from tallystick.execution.job import Job


def build(settings):
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))
    torch.nn.init.normal_(model[0].weight, std=0.3)

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 12, generator=generator) + 0.1 * torch.randn(32, 12)
        return x, torch.randint(0, 4, (32,), generator=generator)

    def loss(net, both):
        return torch.nn.functional.cross_entropy(net(both[0]), both[1])

    return Job(model, torch.optim.SGD(model.parameters(), lr=0.2), batch, loss, steps=6)
