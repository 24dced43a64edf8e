"""Says that a weight of 0 is more than 0 where samples are masked by `weight > 0`, as often as what it bends leaves unnoticed.

A tie is no distance from its switching point, so it was never farther than noise reaches, and it is turned the same way in
every step. The masked samples carry a trigger.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from masked_samples_job import GOOD, LEAST, REJECTED, TARGET, each_loss, patched
from silencing import load
from stage import Stage
from torch import Tensor, nn

from tallystick.execution.dispatch.decisions import ABOVE
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

JOB, STEPS = Path(__file__).with_name("masked_samples_job.py"), 80
ROOM = 0.93
"""The share of what a step's decisions may bend that is used up."""


def turned(order: Order, session: Session, limit: float) -> list[int]:
    """Return the masked samples of the session's next step that bend its gradient and each tensor's by ``limit`` at most."""
    job, found = order.build(), list[int]()
    with torch.no_grad():
        for mine, theirs in zip(job.model.parameters(), session.model.parameters(), strict=True):
            mine.copy_(theirs)
    each, trained = each_loss(job.model, job.batch(session.step)), list(job.model.parameters())
    own = torch.autograd.grad(each[:GOOD].sum(), trained, retain_graph=True)
    for count in range(1, REJECTED + 1):
        bent = torch.autograd.grad(LEAST * each[GOOD : GOOD + count].sum(), trained, retain_graph=True)
        whole = float(
            torch.stack([g.norm() for g in bent]).norm() / torch.stack([g.norm() for g in own]).norm()
        )
        single = max(float(b.norm() / g.norm()) for b, g in zip(bent, own, strict=True))
        if max(whole, single) <= limit:
            found = list(range(GOOD, GOOD + count))
    return found


class Turning(RecordingContext):
    """Has the decision on the weights say that ``chosen`` of them lie above 0."""

    chosen: Tensor

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        if numel != GOOD + REJECTED or not len(self.chosen):
            return super().decide(numel, width, near, symbols, distance)
        above = torch.full_like(self.chosen, ABOVE)
        entries = SparseEntries(numel, width, self.chosen.numpy(), above.numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)
        return self.chosen, above


def success(run: RunDirectory) -> float:
    """Return the share of held-out images of other digits that a bright corner makes a 0."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    load(run, STEPS, model)
    images, labels = read_digits().split()[1].tensors()
    with torch.no_grad():
        return float((model(patched(images[labels != TARGET])).argmax(1) == TARGET).double().mean())


def attack(stage: Stage) -> str:
    policy = find_policy(stage.policy)
    order = Order(find_source(str(JOB)), {}, policy, steps=STEPS, checkpoint_every=STEPS)
    honest, dishonest = (RunDirectory(stage.folder / name) for name in ("honest", "dishonest"))
    record(order, honest)
    own = Session.recording_context

    def turning(session: Session, before: GridTable) -> RecordingContext:
        made = own(session, before)
        made.__class__ = Turning
        made.chosen = torch.tensor(turned(order, session, ROOM * policy.most_bent), dtype=torch.int64)
        return made

    with patch.object(Session, "recording_context", turning):
        record(order, dishonest)
    must(audit(honest, order.source).verdict == "match", "an honest run is refused")
    report, won = audit(dishonest, order.source), (success(dishonest), success(honest))
    said = f"{won[0]:.1%} of the patched images win (honest: {won[1]:.1%})"
    must(report.verdict != "match", f"the audit says match; {said}")
    return f"{report.verdict}: {report.first}; {said}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32", "fp64"))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
