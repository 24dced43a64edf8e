"""States a grid seven octaves too coarse in the log's header, so that ordinary rounding steers the weights."""

from typing import Any
from unittest.mock import patch

from stage import AT, Stage, main

from tallystick.execution.rounding import context
from tallystick.numerics.log import Kind
from tallystick.roles.trainer import record


def attack(stage: Stage) -> str:
    honest, real = context.settled_scales, context.RecordingContext.round

    def lying(self: context.RecordingContext, kind: Kind, *arguments: Any, **more: Any) -> None:
        coarse = kind == Kind.GRADIENT and more["name"].startswith(f"step {AT}: gradient of hidden.weight")
        with patch.object(context, "settled_scales", lambda *given: honest(*given) + (7 if coarse else 0)):
            real(self, kind, *arguments, **more)

    with patch.object(context.RecordingContext, "round", lying):
        record(stage.order(), stage.run())
    return stage.caught_by_audit_and_dispute(stage.run(), step=AT, verdicts={"log_violation"})


if __name__ == "__main__":
    main(attack, __doc__)
