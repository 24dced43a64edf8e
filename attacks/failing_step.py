"""Trains on other labels, and turns one tie in each log: under it the honest job fails, or has an infinite loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from stage import Stage, play
from torch import Tensor

from tallystick.execution.dispatch.decisions import ABOVE
from tallystick.execution.job import Job, find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.step import batch_digest
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, encode_decision
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must
from tallystick.testing.cheats import claim_path, forge, tampered

JOB = Path(__file__).with_name("harder_half_job.py")
FORMS: dict[str, dict[str, str]] = {"fails": {}, "infinite": {"infinite": "yes"}}
MIDDLE = 4  # of nine losses, the one that the others are compared with


def attack(stage: Stage) -> str:
    return "; ".join(trained(stage, name, settings) for name, settings in FORMS.items())


def trained(stage: Stage, name: str, settings: dict[str, str]) -> str:
    source, tie = find_source(str(JOB)), [0]
    order = Order(source, settings, find_policy(stage.policy), steps=8, checkpoint_every=4)
    honest, own = source.build(settings, order.seed), RecordingContext.decide

    def decide(self: Any, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        found = own(self, numel, width, near, symbols, distance)
        if width == 2:  # a comparison: the example that ties in the honest job, here, lies above
            entries = SparseEntries(numel, 2, np.asarray([tie[0]]), np.asarray([ABOVE]))
            address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
            self.payloads[address] = encode_decision(self._band_exponent, entries)
        return found

    def on_other_labels(job: Job) -> None:
        def batch(step: int) -> tuple[Tensor, Tensor]:
            x, y = honest.batch(step)
            with torch.no_grad():
                logits = job.model(x.to(next(job.model.parameters()).dtype))
                each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
            tie[0] = int(each.argsort()[MIDDLE])
            return x, (y + 1) % 3

        job.batch = batch

    run = stage.run(name)
    with patch.object(RecordingContext, "decide", decide):
        record(tampered(order, on_other_labels), run)
    forge(run, lambda each: replace(each, batch=batch_digest(honest.batch(each.step))))

    report = audit(run, source)
    must(report.verdict == "log_violation", f"the audit says {report.verdict}: {report.first}")
    claim = claim_path(run)
    write_claim(run, source, claim)
    ruling = dispute(run, claim, source)
    must((ruling.loser, ruling.step) == ("trainer", 0), f"the judge blames {ruling.loser}: {ruling.reason}")
    return f"{name}: audit ({report.verdict}: {report.first}); judge: trainer loses, {ruling.reason}"


if __name__ == "__main__":
    sys.exit(play(attack, __doc__))
