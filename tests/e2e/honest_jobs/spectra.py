"""Sounds made of sines, given to the model as log spectra: FFT, window and logarithm in batch."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job

window = torch.hann_window(64)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    pitch = torch.randint(0, 5, (24,), generator=generator)
    phase = 2 * math.pi * torch.rand(24, 1, generator=generator)
    time = torch.arange(256) / 256
    sound = torch.sin(2 * math.pi * (10 + 12 * pitch[:, None]) * time + phase)
    sound = sound + 0.3 * torch.randn(24, 256, generator=generator)
    spectrum = torch.stft(sound, 64, 32, window=window, return_complex=True).abs()
    return torch.log1p(spectrum).flatten(1), pitch


def build(settings):
    model = nn.Sequential(nn.LazyLinear(32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))
    model(batch(0)[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Job(model, optimizer, batch, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), steps=8)
