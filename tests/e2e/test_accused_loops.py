"""Honest loops that were accused, of models of the zoo: each recorded, and followed where arithmetic is another one.

As a program: ``test_accused_loops.py LOOP RUN`` records the loop into RUN, or follows it where TALLYSTICK_FOLLOW names it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.random import seed as seed_of_its_own

import tallystick
from tallystick.execution.determinism import parse_profile
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.numerics.log import Kind, decode, decode_frame
from tallystick.roles.follower import FOLLOW_VARIABLE
from tallystick.store.files import RunDirectory

STEPS, CHANNELS = 12, 128


class Reversible(torch.autograd.Function):
    """A block that keeps no activations: computed again on the way back, it seeds torch as it did before (Reformer)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, seed: int) -> Tensor:
        ctx.block, ctx.seed = block, seed
        ctx.save_for_backward(x)
        torch.manual_seed(seed)
        return block(x.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        torch.manual_seed(ctx.seed)
        with torch.enable_grad():
            ctx.block(x).backward(gradients[0])
        assert x.grad is not None
        return x.grad, None, None


class Reseeded(nn.Module):
    def __init__(self, seed: Callable[[], int]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.seed = seed

    def block(self, x: Tensor) -> Tensor:
        rotations = torch.randn(32, 8)  # which bucket a value hashes to, as Reformer has it
        at = torch.cat((x @ rotations, -(x @ rotations)), -1).argmax(-1)
        return F.dropout(self.inner(x), 0.3) * (1.0 + 0.1 * at[:, None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + Reversible.apply(x, self.block, self.seed()))  # pyright: ignore[reportUnknownMemberType]


class Quiet(nn.Module):
    """A batch norm whose inputs hardly vary: its variances are what is left of the first one, and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(64, CHANNELS),
            nn.BatchNorm1d(CHANNELS),
            nn.Linear(CHANNELS, 3),
        )
        with torch.no_grad():
            self.first.weight.mul_(0.0085)
            # Nine tenths of it, and a tenth of the variances of the first step, lie near a boundary of the buffer's grid.
            cast("Tensor", self.norm.running_var).fill_(1.0 - 8.0 * 2.0**-14)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.norm(self.first(x))))


class Masked(nn.Module):
    """Attention over what comes before, with a sink and its largest score taken off, then experts by two of eight scores.

    What is masked has ``least``: so much that no other number counts beside it.
    """

    def __init__(self, least: float, *, sink: bool = True) -> None:
        super().__init__()
        self.least, self.sink = least, sink
        self.first, self.score, self.last = nn.Linear(64, 32), nn.Linear(32, 8, bias=False), nn.Linear(32, 3)
        with torch.no_grad():
            self.score.weight.mul_(400.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.sink:
            ahead = torch.full((len(x), len(x)), self.least).triu(1)
            scores = torch.cat((x @ x.T + ahead, torch.zeros(len(x), 1)), -1)
            scores = scores - scores.max(-1, keepdim=True).values
            x = x + scores.softmax(-1)[:, :-1] @ x
        scores = self.score(x) + torch.tensor([0.0, self.least] * 4).nan_to_num(0.0, neginf=-math.inf)
        best, at = scores.topk(2)
        return self.last(x) + (best / 400.0).sigmoid().sum(-1, keepdim=True) * F.one_hot(at.sum(-1) % 3, 3)


def seed_by_torch() -> int:
    return torch.seed()


def seed_by_generator() -> int:
    return torch.default_generator.seed()


LOOPS: dict[str, Callable[[], nn.Module]] = {
    "torch.seed": lambda: Reseeded(seed_by_torch),
    "a name of its own": lambda: Reseeded(seed_of_its_own),
    "the generator's": lambda: Reseeded(seed_by_generator),
    "one seed": lambda: Reseeded(lambda: 5),
    "quiet": Quiet,
    "masked by the least number": lambda: Masked(torch.finfo(torch.float32).min),
    "masked by infinity": lambda: Masked(-math.inf, sink=False),
}


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    return torch.from_numpy(rng.uniform(-2.0, 2.0, (96, 64)).astype(np.float32)), torch.from_numpy(
        rng.integers(0, 3, 96)
    )


def train(loop: Any, name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LOOPS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with loop:
        loop.prepare(model, optimizer)
        for step in range(STEPS):
            with loop.step(data(step)) as (x, y):
                loop.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return loop.result


def record(name: str, run: Path) -> None:
    train(tallystick.Recorder(run, policy="fp32", steps=STEPS, program=__file__), name)


@pytest.mark.parametrize("name", LOOPS)
def test_it_matches_natively_and_under_jitter(name: str, tmp_path: Path) -> None:
    record(name, tmp_path / "run")
    native = train(tallystick.Follower(tmp_path / "run", program=__file__), name)
    with JitterMode(Jitter(11)):
        noisy = train(tallystick.Follower(tmp_path / "run", program=__file__), name)
    assert [(each.verdict, each.first) for each in (native, noisy)] == [("match", None)] * 2


def test_the_log_of_a_quiet_batch_norm_has_more_entries_than_chance_gives(tmp_path: Path) -> None:
    """The control: what lies together is near a boundary together."""
    record("quiet", tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    transcript = directory.load_transcript()
    most = 0
    for frame in directory.load_frames(transcript, 0, STEPS).values():
        for address, payload in decode_frame(frame):
            if address.kind == Kind.BUFFER:
                most = max(most, len(decode(payload, CHANNELS, 1)))
    assert most > 64


@pytest.mark.skipif(not hasattr(os, "fork"), reason="profiles are those of x86-64 under Linux")
@pytest.mark.parametrize("under", ["sse4,threads=1", pytest.param("avx2,threads=1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["torch.seed", "quiet", "masked by the least number", "masked by infinity"])
def test_it_matches_under_other_instructions(name: str, under: str, tmp_path: Path) -> None:
    record(name, tmp_path / "run")
    more = parse_profile(under).environment() | {FOLLOW_VARIABLE: str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, __file__, name, str(tmp_path / "run")],
        env=os.environ | more, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "match None", done.stderr


if __name__ == "__main__":
    loop, run = sys.argv[1:]
    found = train(tallystick.open_run(run, policy="fp32", steps=STEPS, program=__file__), loop)
    print(found.verdict, found.first)
