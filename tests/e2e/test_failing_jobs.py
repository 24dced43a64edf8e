"""What a job's own code does at an auditor or judge accuses nobody, and ends nothing but by a verdict or a clear refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tallystick.commit.encoding import hex_float
from tallystick.errors import JobFailed
from tallystick.execution.job import Job, JobSource, find_source
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import TamperedSource, forge, honest_defence

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


LACKS = """
import os
import torch
from torch.nn import functional as F
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, ProtocolViolation
from tallystick.execution.job import Job

class Mute(Exception):
    def __str__(self):
        return 1 / 0

def build(settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    def lacks(step):
        return step == 3 and not os.path.exists({flag!r})
    def batch(step):
        {batch}
        drawn = torch.Generator().manual_seed(step)
        x = torch.randint(-64, 64, (4, 10), generator=drawn) / 64
        return x, x[:, :3].argmax(1), torch.tensor(step)
    def loss(net, b):
        step = at[0] = int(b[2])
        {loss}
        return F.cross_entropy(net(b[0]), b[1])
    def rate(step):
        {rate}
        return 1.0
    at = [0]
    def hook(gradient):
        step = at[0]
        {hook}
    model[0].weight.register_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return Job(model, optimizer, batch, loss, steps=8, scheduler=scheduler)
"""
"""A job that reads a file at step 3, say, which the trainer has."""

IN_LOSS = {
    "invalid": "raise InvalidInput('own')",
    "mismatch": "raise Mismatch('own')",
    "nondeterminism": "raise Nondeterminism('own')",
    "protocol": "raise ProtocolViolation('own')",
    "import": "import a_module_that_is_not_there",
    "exit": "raise SystemExit(0)",
    "generator": "raise GeneratorExit",
    "mute": "raise Mute",
    "memory": "raise torch.OutOfMemoryError('')",
    "nothing": "return None",
    "text": "return 'a'",
    "vector": "return net(b[0])",
    "detached": "return net(b[0]).detach().sum()",
    "whole": "return b[1].sum()",
    "complex": "return net(b[0]).sum() + 0j",
    "not finite": "return net(b[0]).sum() * float('nan')",
}
ELSEWHERE = {
    "import in batch": ("batch", "import a_module_that_is_not_there"),
    "mismatch in batch": ("batch", "raise Mismatch('own')"),
    "scheduler": ("rate", "raise IndexError('own')"),
    "hook": ("hook", "raise InvalidInput('own')"),
}
EVERYWHERE = {what: ("loss", does) for what, does in IN_LOSS.items()} | ELSEWHERE


def lacking(place: Path, what: str) -> tuple[JobSource, RunDirectory, RunDirectory, Path]:
    """A job of ``EVERYWHERE``, directories for run and claim, and the file without which it fails at step 3."""
    flag, (where, does) = place / "flag", EVERYWHERE[what]
    fails = f"if lacks({'step - 1' if where == 'rate' else 'step'}): {does}"
    pieces = {name: fails if name == where else "pass" for name in ("loss", "batch", "rate", "hook")}
    flag.touch()
    return *placed(place, LACKS.format(flag=str(flag), **pieces)), flag


@pytest.mark.parametrize("what", EVERYWHERE)
def test_a_step_that_fails_at_the_auditor_for_whatever_reason_accuses_nobody(
    what: str, tmp_path: Path
) -> None:
    """Some accused the honest trainer of its log, and some ended in no verdict."""
    source, run, _, flag = lacking(tmp_path, what)
    record(Order(source, {}, find_policy("fp32"), steps=8, checkpoint_every=4), run)
    flag.unlink()

    report = audit(run, source)

    assert (report.verdict, report.first and report.first.step) == ("cannot_reproduce", 3), report.first
    assert report.first is not None and report.first.about == "program"


def with_other_labels(job: Job) -> None:
    own = job.batch

    def batch(step: int) -> Any:
        x, y, number = own(step)
        return x, (y + 1) % 3 if step == 3 else y, number

    job.batch = batch


@pytest.mark.parametrize("what", EVERYWHERE)
def test_a_lying_auditor_gains_nothing_by_a_judge_where_the_step_fails(what: str, tmp_path: Path) -> None:
    """The trainer lost where the job raised this package's own errors there, or its loss was none."""
    source, run, claim, flag = lacking(tmp_path, what)
    record(Order(source, {}, find_policy("fp32"), steps=8, checkpoint_every=4), run)
    write_claim(run, source, claim)
    lying = RunDirectory(tmp_path / "lying")
    write_claim(run, TamperedSource(source.path, source.source, with_other_labels), lying)
    forge(claim, lambda each: replace(each, loss=hex_float(9.5)) if each.step == 3 else each)
    flag.unlink()

    for claimed, level in ((claim, "operators"), (lying, "operators"), (lying, "steps")):
        try:
            found = dispute(run, claimed, source, defence=honest_defence(source), level=level)
        except JobFailed as problem:  # of the data, say, that a judge needs whatever it rules on
            assert what in ("import in batch", "mismatch in batch", "memory"), problem
        else:
            assert (found.loser, found.step) == ("none", 3), found.reason

    flag.touch()  # the control
    for claimed in (claim, lying):
        found = dispute(run, claimed, source, defence=honest_defence(source))
        assert (found.loser, found.step) == ("auditor", 3), found.reason


EXACT = """
import torch
from torch.nn import functional as F
from tallystick.execution.job import Job

def build(settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    def batch(step):
        x = torch.randint(-8, 8, (4, 4), generator=torch.Generator().manual_seed(step))
        numbers = torch.arange(4.0) * 0.1
        if not torch.equal(numbers * 3 + 0.7, torch.arange(4.0) * 0.1 * 3 + 0.7):
            raise {raised}
        return x, (x.sum(1) > 0).long()
    def loss(net, b):
        return F.cross_entropy(net(b[0].to(net.weight.dtype) / 8), b[1])
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss, steps=4)
"""


@pytest.mark.parametrize("raised", ["ValueError", "KeyError", "__import__('tallystick').errors.InvalidInput"])
def test_data_that_a_job_refuses_under_noise_are_no_word_for_a_false_digest(
    raised: str, tmp_path: Path
) -> None:
    """The audit ended without a verdict."""
    source, run, claim = placed(tmp_path, EXACT.format(raised=raised))
    record(Order(source, {}, find_policy("fp32"), steps=4, checkpoint_every=2), run)
    assert audit(run, source).verdict == "match"
    forge(run, lambda each: replace(each, batch="ab" * 32) if each.step == 1 else each)

    assert audit(run, source).verdict == "mismatch"
    write_claim(run, source, claim)
    found = dispute(run, claim, source)
    assert (found.loser, found.step) == ("trainer", 1), found.reason
