"""The results of a disputed step by where they come from: an operator of the list, and which of its outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tallystick.dispute.bounds.formulas import Indexes
from tallystick.dispute.openings import widened
from tallystick.execution.step_trace import StepTrace

Source = tuple[int, int]
"""Number of an operator, and of one of its outputs."""


def reader_of(trace: StepTrace, at: int) -> Callable[[int, Indexes], np.ndarray]:
    """Return a reader of the inputs and outputs of operator ``at`` of a list."""
    op = trace.operators[at]

    def reading(slot: int, flat: Indexes) -> np.ndarray:
        if slot < 0:
            return trace.array((at, -1 - slot))[flat]
        source = op.inputs[slot].source
        stored = trace.operators[source[0]].outputs[source[1]].tensor.dtype
        return widened(trace.array(source)[flat], stored, op.inputs[slot].dtype)

    return reading
