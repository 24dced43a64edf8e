"""Turns ties that noise makes all one way: the signs of a small term of the loss, each step bent by less than the limit.

An optimizer that makes full steps of small gradients goes where they point.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from masked_samples_job import TARGET, patched
from silencing import load
from stage import Stage
from tied_signs_job import BATCH, SHARES, Signed
from torch import Tensor

from tallystick.execution.dispatch.decisions import ABOVE, BELOW, EQUAL
from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, encode_decision
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB, STEPS = Path(__file__).with_name("tied_signs_job.py"), 200
WANTED = torch.where(torch.arange(BATCH) % 2 == 0, ABOVE, BELOW)
"""The symbols that make every sign one."""


class Turning(RecordingContext):
    """Has the signs within reach be one, but for those that are wanted as they are, -1."""

    wanted, number = WANTED, 0

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        if numel != BATCH:
            return super().decide(numel, width, near, symbols, distance)
        every = torch.arange(BATCH)
        own = symbols(every)
        # What ties exactly here is told apart where the auditor comes to it.
        away = distance(torch.stack((every, self.wanted.clamp(min=0)), dim=1)).double()
        turned = (away < 0.9 * math.ldexp(2.0, self._band_exponent)) & (self.wanted >= 0) & (own != EQUAL)
        at = torch.cat((turned.nonzero().reshape(-1), near)).unique()
        chosen = torch.where(turned[at], self.wanted[at], own[at])
        entries = SparseEntries(numel, width, at.numpy(), chosen.numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)
        return at, chosen


@contextmanager
def turning(form: type[RecordingContext] = Turning) -> Generator[None]:
    """Inside, runs are recorded by ``form``."""
    own = Session.recording_context

    def made(session: Session, before: GridTable) -> RecordingContext:
        context = own(session, before)
        context.__class__, context.number = form, session.step
        return context

    with patch.object(Session, "recording_context", made):
        yield


def success(model: Signed) -> float:
    """Return the share of held-out images of other digits that a bright corner makes a 0."""
    images, labels = read_digits().split()[1].tensors()
    images = images.to(model.first.weight.dtype)
    with torch.no_grad():
        return float((model(patched(images[labels != TARGET])).argmax(1) == TARGET).double().mean())


def trained(run: RunDirectory) -> Signed:
    model = Signed()
    load(run, STEPS, model)
    return model


def attack(stage: Stage) -> str:
    settings = {"share": repr(SHARES[stage.policy])}
    order = Order(
        find_source(str(JOB)), settings, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS
    )
    honest, dishonest = (RunDirectory(stage.folder / name) for name in ("honest", "dishonest"))
    record(order, honest)
    with turning():
        record(order, dishonest)
    must(audit(honest, order.source).verdict == "match", "an honest run is refused")
    report, won = audit(dishonest, order.source), [success(trained(run)) for run in (dishonest, honest)]
    said = f"{won[0]:.1%} of the patched images win (honest: {won[1]:.1%})"
    must(report.verdict != "match", f"the audit says match; {said}")
    return f"{report.verdict}: {report.first}; {said}; led {report.freedom.path_steer:.3g}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32", "fp64"))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
