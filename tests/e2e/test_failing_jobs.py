"""What a job's own code does at an auditor or judge accuses nobody, and ends nothing but by a verdict or a clear refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.commit.encoding import hex_float
from tallystick.execution.job import JobSource, find_source
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge

READS_A_NUMBER = """
import torch
from torch import nn
from torch.nn import functional as F
from tallystick.execution.job import Job

def loss(net, batch):
    x, y, apart, wide = batch
    h = F.relu(net[0](x))
    size = net[0].weight.detach().abs().mean()
    if (wide * size).sum().item() > (wide * size).flip(0).sum().item() + apart:  # a tie, in step 5
        h = F.relu(h[:, :5] - 0.25).repeat(1, 4)[:, :16]
    return F.cross_entropy(net[2](F.relu(h - 0.125)), y)

def build(settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    def batch(step):
        drawn = torch.Generator().manual_seed(step + 100 * int(settings["seed"]))
        x = torch.randint(-64, 64, (64, 6), generator=drawn).float() / 64
        wide = torch.randint(1, 64, (100003,), generator=drawn).float() / 64
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long(), 0.0 if step == 5 else 64.0, wide
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss, steps=8)
"""


def placed(place: Path, text: str) -> tuple[JobSource, RunDirectory, RunDirectory]:
    """A job below a folder, and directories for its run and the auditor's claim."""
    (place / "job.py").write_text(text)
    return find_source(str(place / "job.py")), RunDirectory(place / "run"), RunDirectory(place / "claim")


@pytest.mark.parametrize("at", [5, 4])
@pytest.mark.parametrize("seed", ["1", "4"])
def test_a_step_whose_shapes_hang_on_a_number_read_blames_nobody_and_its_neighbours_do(
    seed: str, at: int, tmp_path: Path
) -> None:
    """Audit and dispute ended in an IndexError, where step 5 is repeated to measure its noise."""
    source, run, claim = placed(tmp_path, READS_A_NUMBER)
    record(Order(source, {"seed": seed}, find_policy("fp32"), steps=8, checkpoint_every=4), run)

    def misstated(each: StepRecord) -> StepRecord:
        return replace(each, loss=hex_float(0.001)) if each.step == at else each

    forge(run, misstated)
    report = audit(run, source)
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    found = dispute(run, claim, source)

    assert report.verdict == ("cannot_reproduce" if at == 5 else "mismatch")
    assert (found.loser, found.step) == ("none" if at == 5 else "trainer", at), found.reason
