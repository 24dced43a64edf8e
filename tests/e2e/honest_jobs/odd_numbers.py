"""Operators on numbers that wrap, are truths, overflow, are masked out or are rounded on the way, as attention and hashes do."""

import torch
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden, self.last = nn.Embedding(11, 4), nn.Linear(4, 80), nn.Linear(80, 3)

    def forward(self, ids):
        x = self.table(ids)
        h = self.hidden((self.attended(x, ids) @ x).mean(1)).tanh()
        return self.last(
            h + 1e-3 * (self.wrapped(ids, h.dtype) + self.huge(h.detach()) + self.seldom(ids, h.detach()))
        )

    def attended(self, x, ids):
        """Attention under two masks that add up to minus infinity, and one with rows in which nothing is left."""
        scores, least, real = x @ x.transpose(1, 2), torch.finfo(x.dtype).min, ids.bool()
        padding = torch.zeros_like(scores).masked_fill(~real[:, None].expand_as(scores), least)
        causal = torch.full(scores.shape[1:], least, dtype=x.dtype).triu(1)
        dead = (ids.eq(0) + ids.ge(9))[:, :, None].expand_as(scores)
        none = torch.softmax(scores.masked_fill(dead, float("-inf")), -1).masked_fill(dead, 0.0)
        return torch.softmax(scores + (padding + causal), -1) + none

    def wrapped(self, ids, dtype):
        """Hashes and counters of every width, truths of numbers, and numbers that a float does not hold."""
        hashed = ((ids + 7) * 6364136223846793005 + 1442695040888963407).to(dtype) * 1e-19
        narrow = (ids * 3000000000).to(torch.int32).to(dtype) * 1e-9
        large = (ids * 16777217).to(dtype) * 1e-9
        small = (ids.to(torch.uint8) * 100 + 200).to(dtype) + (-ids.to(torch.uint8)).to(dtype)
        short = ids.to(torch.int16).mul(9000).to(dtype) * 1e-3 + ids.pow(20).to(dtype) * 1e-19
        truth = torch.full((6,), 3, dtype=torch.bool).to(dtype) + (ids.eq(3) + ids.le(4)).to(dtype)
        padded = F.pad(hashed, (2, 0), value=0.3)
        return (padded[:, 2:] + padded[:, :6] + narrow + large + 0.01 * small + short + truth).mean(
            1, keepdim=True
        )

    def seldom(self, ids, h):
        """Forms of common operators that hardly anybody writes: other overloads, scalars that a float does not hold."""
        spoilt = torch.frombuffer(bytearray([255, 0, 255]), dtype=torch.bool)
        found = [
            torch.relu(ids - 3).to(h.dtype),
            torch.clamp(h, min=torch.tensor(-0.3), max=torch.tensor(0.5)),
            torch.empty_like(h).bernoulli_(torch.full_like(h, 0.25)),
            torch.cat([spoilt, spoilt]).to(h.dtype).expand(3, 6),
            (16777216 + ids == 16777217.0).to(h.dtype),
            ((h.abs() + 0.01) * 1e28).pow(1.3) * 1e-36,
            (h * 1e9) / 1e40,
            torch.zeros_like(h).add(h * 1e30, alpha=1e-40),
            F.threshold(h, 0.1, 0.05),
            (ids.to(torch.uint8) > -1).to(h.dtype),
            torch.mul(h, h * 0.3, out=torch.zeros(h.shape, dtype=torch.float64)).to(h.dtype),
            *torch._foreach_mul([h, h + 1], 0.5),
            torch.nan_to_num(h.masked_fill(h.lt(-0.3), float("-inf")) ** 0.5),
            *(
                torch.tensor([1.0, 2.5, 0.5], dtype=t).to(h.dtype)[:, None]
                for t in (torch.float16, torch.bfloat16)
            ),
        ]
        return (
            sum(each.mean(1, keepdim=True) for each in found) + F.threshold(self.last.bias, 0.1, 0.05).sum()
        )

    def huge(self, h):
        """Nothing, by norms, means and exponentials that overflow, and a long product of scores that are masked."""
        masked = h.masked_fill(h.lt(-0.5), float("-inf")) @ self.last.weight.detach().t()
        largest = torch.finfo(h.dtype).max
        found = (h * largest).mean(1), (h * largest).norm(dim=1), torch.exp(1000.0 * h[:, 0]), masked.sum(1)
        return sum(torch.where(torch.isfinite(each), 0 * each, torch.zeros_like(each)) for each in found)[
            :, None
        ]


def build(settings):
    generator, model = torch.Generator().manual_seed(0), Odd()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-32, 32, parameter.shape, generator=generator) / 64)
        model.last.bias[0] = 0.1

    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 11, (3, 6), generator=drawn)
        ids[:, 4:] = 0
        return ids, torch.randint(0, 3, (3,), generator=drawn)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=3)
