"""Turns ties that noise makes all one way: the signs of a small term of the loss, each step bent by less than the limit.

An optimizer that makes full steps of small gradients goes where they point. `rarely`: in eight steps of 200 alone, of a term that
else has no part, as AdamW goes far on a gradient that hardly ever comes. `summed`: of which the job adds up in a buffer how many
are positive, and weighs the term by that, so that no step is bent.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Container, Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from masked_samples_job import TARGET, patched
from silencing import load
from stage import Stage
from tied_signs_job import BATCH, SHARES, Signed, with_edge
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
RARE = {"fp32": {"share": "0.004", "slack": "3e-6"}, "fp64": {"share": "0.00006", "slack": "6e-15"}}
"""As large as eight steps may bend their tensors over all steps, and as far as noise is said to reach."""


class Turning(RecordingContext):
    """Has the signs within reach be one, but for those that are wanted as they are, -1."""

    wanted, number = WANTED, 0
    turned_in: Container[int] = range(STEPS)

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        if numel != BATCH or self.number not in self.turned_in:
            return super().decide(numel, width, near, symbols, distance)
        every = torch.arange(BATCH)
        own = symbols(every)
        # What ties exactly here is told apart where the auditor comes to it.
        away = distance(torch.stack((every, self.wanted.clamp(min=0)), dim=1)).double()
        turned = (away < 0.9 * math.ldexp(2.0, self._band_exponent)) & (self.wanted >= 0) & (own != EQUAL)
        at = torch.cat((turned.nonzero().reshape(-1), near)).unique()
        chosen = torch.where(turned[at], self.wanted[at], own[at])
        if not at.numel():
            return None
        entries = SparseEntries(numel, width, at.numpy(), chosen.numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)
        return at, chosen


class Rarely(Turning):
    """Has all of a step's samples count, in eight steps."""

    wanted, turned_in = torch.full((BATCH,), ABOVE), range(100, 180, 10)


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


def success(model: Signed, marked: Callable[[Tensor], Tensor] = patched) -> float:
    """Return the share of held-out images of other digits that a bright corner, or another mark, makes a 0."""
    images, labels = read_digits().split()[1].tensors()
    images = images.to(model.first.weight.dtype)
    with torch.no_grad():
        return float((model(marked(images[labels != TARGET])).argmax(1) == TARGET).double().mean())


def trained(run: RunDirectory) -> Signed:
    model = Signed()
    load(run, STEPS, model)
    return model


def attack(stage: Stage) -> str:
    said, always = list[str](), {"share": repr(SHARES[stage.policy])}
    for form, context, settings, marked in (
        ("always", Turning, always, patched), ("rarely", Rarely, RARE[stage.policy], with_edge),
        ("summed", Turning, {"summed": "yes"}, patched),
    ):  # fmt: skip
        order = Order(
            find_source(str(JOB)), settings, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS
        )
        honest, dishonest = (RunDirectory(stage.folder / form / name) for name in ("honest", "dishonest"))
        record(order, honest)
        with turning(context):
            record(order, dishonest)
        must(audit(honest, order.source).verdict == "match", f"{form}: an honest run is refused")
        report = audit(dishonest, order.source)
        won = [success(trained(run), marked) for run in (dishonest, honest)]
        wins = f"{won[0]:.1%} of the patched images win (honest: {won[1]:.1%})"
        must(report.verdict != "match", f"{form}: the audit says match; {wins}")
        said.append(f"{form}: {report.verdict}: {report.first}; {wins}; led {report.freedom.path_steer:.3g}")
    return ", ".join(said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32", "fp64"))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
