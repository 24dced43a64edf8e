"""What the attacks on level three share: a trainer whose last state is false, and who defends it with a forged list."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from court import AUDITOR, TRAINER
from stage import STEPS, Stage, claim_path

from tallystick.commit.state import hold
from tallystick.commit.tensors import digest_of
from tallystick.dispute.bounds.operands import stored_at
from tallystick.dispute.objections import Objection
from tallystick.dispute.operator_list import Operator, Output
from tallystick.dispute.terms import Party
from tallystick.execution.step_trace import StepTrace
from tallystick.roles import operator_replay, referee
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.roles.referee import DisputeResult
from tallystick.signing.keys import Signer
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import EditedWeights, honest_defence

Change = Callable[[TrainerSide], TrainerSide]
HANDS: Mapping[Party, Signer] = {"trainer": TRAINER, "auditor": AUDITOR}


class Forger:
    """A run with five edited weights, the auditor's claim about it, and disputes over it under a forged list."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.run = stage.run()
        EditedWeights().run(stage.order(), self.run)
        self.claim: RunDirectory = claim_path(self.run)
        write_claim(self.run, stage.source, self.claim)
        self.plain = self.ruling(lambda side: side)
        where = self.plain.operator
        must(
            (self.plain.loser, self.plain.step, where and str(where.operator and where.operator.name))
            == ("trainer", STEPS - 1, "tallystick::sgd"),
            f"the control, the list of the job itself, ends in {self.plain.reason}",
        )

    def ruling(self, change: Change) -> DisputeResult:
        """Return how the dispute ends for a trainer who answers with a list that ``change`` has forged."""
        with forging(change):
            defence = honest_defence(self.stage.source)
            return dispute(self.run, self.claim, self.stage.source, defence=defence, signers=HANDS)

    def objecting(self, change: Change, *, at: int) -> DisputeResult:
        """Return how the dispute ends for an auditor who objects to the operator ``at`` of that list, whatever it is."""
        source = self.stage.source
        with forging(change):
            return dispute(
                self.run,
                self.claim,
                source,
                defence=honest_defence(source),
                objection=Objection(at),
                signers=HANDS,
            )

    def convicted(self, change: Change, *, naming: str, index: int | None = None) -> DisputeResult:
        """Return the ruling, which must be against the trainer at an operator, for that reason and there."""
        found = self.ruling(change)
        where = found.operator
        must(found.loser == "trainer", f"the judge blames {found.loser}: {found.reason}")
        must(where is not None and where.loser == "trainer", f"no operator was judged: {found.reason}")
        assert where is not None
        must(index in (None, where.index), f"the judge names operator {where.index}, the crime is at {index}")
        must(naming in found.reason, f"the judge says {found.reason!r}, expected {naming!r}")
        return found


@contextmanager
def forging(change: Change) -> Generator[None]:
    honest = operator_replay.defend

    def defend(*arguments: Any, **more: Any) -> TrainerSide:
        return change(honest(*arguments, **more))

    # Who forges a record is its judge too, and looks at no whole step.
    with patch.object(operator_replay, "defend", defend), patch.object(referee, "stands", lambda *_: True):
        yield


def outside_its_bound(side: TrainerSide, element: int = 3) -> TrainerSide:
    """Return the side with a list in which one element of the hidden layer's product is false."""
    at = find(side, lambda op: op.name == "aten::addmm" and op.module == "hidden")
    trace = with_element(side, at, element, lambda value: value + type(value)(0.25))
    return TrainerSide(trace, side.base, side.agreed, hold(side.claimed.values()))


def with_operators(side: TrainerSide, edit: Callable[[list[Operator]], None]) -> TrainerSide:
    """Return the side with another list over the same results."""
    trace = copied(side.trace)
    edit(trace.operators)
    return TrainerSide(trace, side.base, side.agreed, hold(side.claimed.values()))


def copied(trace: StepTrace) -> StepTrace:
    other = copy(trace)
    other.operators, other.values = list(trace.operators), dict(trace.values)
    return other


def find(side: TrainerSide, wanted: Callable[[Operator], bool]) -> int:
    return next(at for at, op in enumerate(side.trace.operators) if wanted(op))


def with_element(side: TrainerSide, at: int, element: int, value: Callable[[Any], Any]) -> StepTrace:
    """Return the trace with one element of one result changed."""
    trace = copied(side.trace)
    op = trace.operators[at]
    data = trace.array((at, 0)).copy()
    position = stored_at(op.outputs[0].view, element)
    data[position] = value(data[position])
    trace.values[(at, 0)] = replace(trace.values[(at, 0)], data=data, hashes=None)
    tensor = op.outputs[0].tensor
    digested = digest_of(tensor.dtype, tensor.elements, memoryview(np.ascontiguousarray(data)), trace.chunk)
    trace.operators[at] = replace(op, outputs=(Output(digested, op.outputs[0].view), *op.outputs[1:]))
    return trace
