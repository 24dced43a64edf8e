"""Text split into words and masked by chance; a small transformer with dropout names the words under the masks."""

import re

import torch
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

TEXT = """Whoever sells wheat cuts notches into a stick and splits it. One half stays with the seller, the other goes
to the buyer; when the debt is paid they lay both halves side by side. A notch that one has added the other half does not
have, and neither can say that it was always there. Nobody has to trust anybody, and nobody has to read or write."""
words = re.findall(r"\w+|[^\w\s]", TEXT.lower())
vocabulary = {word: number for number, word in enumerate(["[mask]", *sorted(set(words))])}
tokens = torch.tensor([vocabulary[word] for word in words])
LENGTH, WIDTH = 12, 32


def batch(step):
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(tokens) - LENGTH, (16, 1), generator=generator)
    given = tokens[starts + torch.arange(LENGTH)]
    chance = torch.rand(given.shape, generator=generator)
    other = torch.randint(1, len(vocabulary), given.shape, generator=generator)
    seen = torch.where(chance < 0.12, 0, torch.where(chance < 0.15, other, given))
    return seen, torch.where(chance < 0.15, given, -100)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(vocabulary), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.says = nn.Linear(WIDTH, len(vocabulary))

    def forward(self, seen):
        return self.says(self.layer(self.words(seen) + self.places))


def loss(net, both):
    return F.cross_entropy(net(both[0]).flatten(0, 1), both[1].flatten(), ignore_index=-100)


def build(settings):
    model = Model()
    return Job(model, torch.optim.AdamW(model.parameters(), lr=2e-3), batch, loss, steps=8)
