"""States an infinite momentum in the first step, where none is used yet, and trains without any from then on.

An infinity was near every other number, so a follower took it over, and then whatever was stated after it.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import torch
from stage import Stage, main

from tallystick.execution.session.step import OpenStep
from tallystick.roles.trainer import record


def attack(stage: Stage) -> str:
    own, run = OpenStep.before_optimizer, stage.run()

    def stating(opened: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        if not opened.probing:
            group = opened.session.state.trained.optimizer.param_groups[0]
            group["momentum"] = 0.0 if opened.number else math.inf
        own(opened, optimizer)

    with patch.object(OpenStep, "before_optimizer", stating):
        record(stage.order(), run)
    return stage.caught_by_audit_and_dispute(run, step=0, verdicts={"mismatch"})


if __name__ == "__main__":
    main(attack, __doc__)
