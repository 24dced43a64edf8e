"""A job's plain loop in a process that registered itself with a chip: what the agent is measured on.

    python bench/tallystick_bench/observed_job.py text --chip DIR --steps 20

prints one JSON line when it is ready, one for each step with its seconds, and one at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from tallystick.execution.job import find_source
from tallystick.integrations.observed import observe
from tallystick.roles.plain_loop import PlainLoop


def main() -> None:
    """Train, registered after the first step if a chip is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--chip", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    chosen = parser.parse_args()
    job = find_source(chosen.job).build({})
    loop = PlainLoop(job, torch.float32)
    loop.step(0)  # the optimizer has its state
    registration = None if chosen.chip is None else observe(chosen.chip, job.model, job.optimizer)
    print(json.dumps({"ready": sum(p.numel() for p in job.model.parameters())}), flush=True)
    for number in range(1, chosen.steps + 1):
        started = time.monotonic()
        loop.step(number)
        print(
            json.dumps({"step": number, "began": started, "seconds": time.monotonic() - started}), flush=True
        )
    if registration is not None:
        registration.close()
    print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main()
