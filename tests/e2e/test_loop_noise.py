"""Noise that grows in a loop of one's own is measured again, as that of a job is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tallystick
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.reports.run import read_run
from tallystick.roles.follower import FOLLOW_VARIABLE
from tallystick.store.files import RunDirectory

MODELS = Path(__file__).parent / "models"
STEPS = 14


def loop(run: Path, policy: str, parts: int, under: Profile, *, follow: bool = False) -> str:
    """Record ``zero_head`` in a loop of one's own, or follow it; return what the program printed."""
    given = [MODELS / "own_loop.py", MODELS / "zero_head.py", run, policy, STEPS, parts]
    more = under.environment() | ({FOLLOW_VARIABLE: str(run)} if follow else {})
    done = subprocess.run(
        [sys.executable, *map(str, given)], capture_output=True, text=True, check=False, env=os.environ | more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("policy", "parts", "own"),
    [
        ("fp32", 1, "native"),
        pytest.param("fp32", 1, "native,threads=1", marks=pytest.mark.slow),
        pytest.param("fp32", 2, "native", marks=pytest.mark.slow),
        pytest.param("fp64", 1, "native", marks=pytest.mark.slow),
    ],
)
def test_noise_that_reaches_its_floor_in_a_loop_accuses_nobody(
    policy: str, parts: int, own: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    loop(run, policy, parts, parse_profile(own))
    log = read_run(RunDirectory(run)).log

    others = map(parse_profile, ("native", "sse4,threads=1"))
    verdicts = [loop(run, policy, parts, other, follow=True) for other in others]

    assert log is not None
    assert log.kinds["calibration"].payloads > 0, "no noise reached its floor: this test shows nothing"
    assert verdicts == [f"match {STEPS} None"] * 2


# ---------------------------------------------------------------------------- a loop that is not its ``loss``


def small(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    return torch.from_numpy(rng.standard_normal((24, 10)).astype(np.float32)), torch.from_numpy(
        rng.integers(0, 3, 24)
    )


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def clipped(loop: Any, step: int, batch: Any, model: nn.Module) -> None:
    """Gradients are clipped far below what is measured."""
    loop.backward(F.cross_entropy(model(batch[0]), batch[1]))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def averaged(loop: Any, step: int, batch: Any, model: nn.Module) -> None:
    """The mean, where a sum is measured."""
    loop.backward(F.cross_entropy(model(batch[0]), batch[1]) / 24)


def alternating(loop: Any, step: int, batch: Any, model: nn.Module) -> None:
    """One half of what is measured, and another sign of it, in turns."""
    x, y = batch
    loop.backward((-1) ** step * F.cross_entropy(model(x[:12]), y[:12]) * 0.1)


def carried(loop: Any, step: int, batch: Any, model: nn.Module) -> None:
    """Gradients stay until every second step, in which they are larger from the seventh step on."""
    loop.backward((40.0 if step > 6 else 1.0) * F.cross_entropy(model(batch[0]), batch[1]))


LOOPS = [clipped, averaged, alternating, carried]


def trained(loop: Any, body: Callable[..., None]) -> Any:
    """Train with ``body``; what is measured is one pass over the batch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    now = 0

    def loss(batch: Any) -> Tensor:
        return (40.0 if body is carried and now > 6 else 1.0) * F.cross_entropy(model(batch[0]), batch[1])

    loop.prepare(model, optimizer, loss=loss)
    for now in range(STEPS):
        with loop.step(small(now)) as batch:
            body(loop, now, batch, model)
            if body is not carried or now % 2:
                optimizer.step()
                optimizer.zero_grad()
    return loop.finish()


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("body", LOOPS, ids=lambda body: body.__name__)
@pytest.mark.parametrize("every", [None, 3])
def test_a_loop_that_is_not_what_it_has_measured_accuses_nobody(
    policy: str, body: Callable[..., None], every: int | None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained(
        tallystick.Recorder(
            run, policy=policy, steps=STEPS, checkpoint_every=5, recalibrate_every=every, program=__file__
        ),
        body,
    )

    report = trained(tallystick.Follower(run, program=__file__), body)

    assert (report.verdict, report.first) == ("match", None)
