"""Classes drawn by their rarity: multinomial with and without replacement, bernoulli masks, permutations."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job


def build(settings):
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    weights = 1.0 / torch.bincount(y).float().sqrt()
    chances = weights[y] / weights[y].sum()

    def batch(step):
        torch.manual_seed(step)
        at = torch.cat([torch.multinomial(chances, 16), torch.multinomial(chances, 16, replacement=True)])
        at = at[torch.randperm(32)]
        kept = torch.bernoulli(torch.full((32, 64), 0.8)).bool()
        hardness = torch.empty(32).exponential_(2.0).clamp(max=3.0)
        return {"x": torch.where(kept, x[at], torch.rand(32, 64)), "y": y[at], "weight": hardness}

    def loss(net, given):
        return (F.cross_entropy(net(given["x"]), given["y"], reduction="none") * given["weight"]).mean()

    model = nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(48, 10))
    return Job(model, torch.optim.Adagrad(model.parameters(), lr=0.02), batch, loss, steps=8)
