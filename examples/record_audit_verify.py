"""A job recorded, checked without repeating it, and repeated: the three calls that most programs need.

    python examples/record_audit_verify.py runs/spirals

The job is this file: ``tallystick.record`` and ``tallystick.audit`` load it again and call ``build``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

import tallystick
from tallystick.execution.job import Job


def build(settings: Mapping[str, str]) -> Job:
    """Two interleaved spirals, told apart by a small network."""
    generator = torch.Generator().manual_seed(int(settings.get("init_seed", "0")))
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-64, 64, parameter.shape, generator=generator) / 128)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(step)
        turn, arm = rng.integers(32, 192, 64) / 64, rng.integers(0, 2, 64)
        points = np.stack([turn * (1 - 2 * arm), turn * turn / 4], axis=1)
        return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(arm)

    return Job(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        batch=batch,
        loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
        steps=int(settings.get("steps", "20")),
    )


def main(path: str) -> int:
    statement = tallystick.record(__file__, path, policy="fp32", checkpoint_every=10)
    print(f"recorded {statement.steps} steps, root {statement.root}")

    checked = tallystick.verify(path, root=statement.root)
    print(f"verified: {checked.accepted}, {len(checked.checks)} checks")
    for finding in checked.findings:
        print(f"  {finding.claim}: {finding.detail}")

    report = tallystick.audit(path, __file__)
    print(f"audited: {report.verdict}, {report.steps} steps repeated")
    if report.first is not None:
        print(f"  {report.first}")
    return 0 if checked.accepted and report.verdict == "match" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
