"""Keeps a buffer that gates the data at zero, by a wide grid that it states where the buffer is zero, or does not move.

There no value says how wide a scale may be, and of what does not move where the noise is measured nobody knows the noise.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import near_job
import numpy as np
import torch
from stage import Stage, main

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import site_grid
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

JOB = str(Path(__file__).with_name("near_job.py"))
STEPS = 100


def success(run: RunDirectory, order: Order) -> float:
    """Return the share of unseen examples with the trigger that go to its class."""
    model, entries = order.build().model, run.load_checkpoint(STEPS)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.frombuffer(bytearray(entries[f"model/{name}"].data), dtype=p.dtype).reshape(p.shape)
            )
        features, labels = near_job.examples(99, 4000)
        features[:, -1] = 3.0
        found = model(torch.from_numpy(features)).argmax(1).numpy()
    return float(np.mean(found[labels != 0] == 0))


def attack(stage: Stage) -> str:
    source, policy = find_source(JOB), find_policy(stage.policy)
    begin = Session.recording_context

    def wide(session: Session, before: GridTable) -> RecordingContext:
        made = begin(session, before)
        for site in session.sites if made.is_calibrated else ():
            if site.name.endswith("/gone"):
                place = (Kind.BUFFER, site.ordinal)
                made._grids[place] = site_grid(
                    policy, Kind.BUFFER, policy.buffer_band[1], np.zeros(1, np.int64)
                )
        return made

    told: list[str] = []
    for still in ("no", "yes"):
        order = Order(source, {"still": still}, policy, STEPS, checkpoint_every=STEPS)
        honest, run = stage.run(f"honest-{still}"), stage.run(f"run-{still}")
        record(order, honest)
        with patch.object(Session, "recording_context", wide):
            record(order, run)
        found, control = success(run, order), success(honest, order)
        must(audit(honest, source).verdict == "match", "the honest run is not accepted")
        report = audit(run, source)
        effect = f"backdoor {found:.1%}, an honest run's {control:.1%}"
        must(report.verdict != "match", f"the audit says match; {effect}")
        told.append(f"{report.verdict}: {report.first}; {effect}")
    return "the audit: " + "; and of one that does not move there, ".join(told)


if __name__ == "__main__":
    main(attack, __doc__)
