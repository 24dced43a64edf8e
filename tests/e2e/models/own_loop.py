"""A loop of one's own over a job's model, data and loss: ``own_loop.py JOB RUN POLICY STEPS [PARTS]``.

It records into RUN, or follows that run where TALLYSTICK_FOLLOW names it, and then prints what it found.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import tallystick
from tallystick.execution.job import find_source
from tallystick.roles.audit_report import AuditReport


def train(file: str, run: str, policy: str, steps: int, parts: int = 1) -> Any:
    """Train with the job's optimizer and schedule, each batch taken ``parts`` times; return the run or the report."""
    sys.path.insert(0, str(Path(file).parent))
    importlib.import_module(Path(file).stem)  # so that the loop commits to the job's file
    job = find_source(file).build({})
    with tallystick.open_run(run, policy=policy, steps=steps, checkpoint_every=steps) as loop:
        loop.prepare(job.model, job.optimizer, job.scheduler, loss=lambda batch: job.loss(job.model, batch))
        for step in range(steps):
            with loop.step(job.batch(step)) as batch:
                for _ in range(parts):
                    loop.backward(job.loss(job.model, batch) / parts)
                job.optimizer.step()
                if job.scheduler is not None:
                    job.scheduler.step()
                job.optimizer.zero_grad()
    return loop.result


if __name__ == "__main__":
    file, run, policy, *numbers = sys.argv[1:]
    found = train(file, run, policy, *map(int, numbers))
    if isinstance(found, AuditReport):
        print(found.verdict, found.steps, found.first)
