"""States one false element in the list: outside its bound, with partial sums made to fit, inside it, or opened falsely."""

from dataclasses import replace

import numpy as np
from forgery import Forger, find, with_element
from stage import Stage, main

from tallystick.commit.state import hold
from tallystick.dispute.bounds.formulas import Sum
from tallystick.dispute.bounds.steps import StepFacts, formula_for
from tallystick.dispute.openings import Opening
from tallystick.dispute.rulings import Accusation
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.testing.attacks import must

ELEMENT = 3


class LyingSums(TrainerSide):
    """States partial sums whose total is the false element."""

    def partials(self, accusation: Accusation, at: int, facts: StepFacts) -> tuple[tuple[float, float], ...]:
        honest = super().partials(accusation, at, facts)
        if not honest:
            return honest
        op = self.trace.operators[at]
        formula = formula_for(op, accusation.output, accusation.element, self.read(at), facts)
        assert isinstance(formula, Sum)
        stated = self.read(at)(-1, np.asarray([accusation.element]))[0].item()
        missing = stated - float(formula.total(honest).value)
        (first, magnitude), *rest = honest
        return ((first + missing, magnitude), *rest)


class NodesToo(LyingSums):
    """The same, and a node where none belongs: whoever then looks for a false node points at no false sum."""

    def nodes(self, at: int) -> tuple[bytes, ...]:
        return (bytes(32),)


class LyingOpening(TrainerSide):
    """Opens another input than the one that its list commits to, so that the false element would follow from it."""

    def open(self, accusation: Accusation, at: int, facts: StepFacts) -> Opening:
        honest = super().open(accusation, at, facts)
        slot = next(slot for slot in honest.pieces if slot >= 0)
        first, *rest = honest.pieces[slot]
        data = bytearray(first.data)
        data[0] ^= 1
        forged = replace(first, data=bytes(data))
        return replace(honest, pieces={**honest.pieces, slot: (forged, *rest)})


def attack(stage: Stage) -> str:
    forger = Forger(stage)
    place = [0]

    def at(side: TrainerSide) -> int:
        """The hidden layer's product: 256 terms an element, a long sum."""
        place[0] = find(side, lambda op: op.name == "aten::addmm" and op.module == "hidden")
        return place[0]

    def outside(side: TrainerSide, kind: type[TrainerSide] = TrainerSide) -> TrainerSide:
        trace = with_element(side, at(side), ELEMENT, lambda value: value + type(value)(0.25))
        return kind(trace, side.base, side.agreed, hold(side.claimed.values()))

    def inside(side: TrainerSide) -> TrainerSide:
        up = with_element(side, at(side), ELEMENT, lambda value: np.nextafter(value, type(value)(np.inf)))
        return TrainerSide(up, side.base, side.agreed, hold(side.claimed.values()))

    result = forger.convicted(outside, naming="must be")
    sums = forger.convicted(lambda side: outside(side, LyingSums), naming="partial sum 0")
    nodes = forger.convicted(lambda side: outside(side, NodesToo), naming="is opened by 1 nodes")
    opened = forger.convicted(lambda side: outside(side, LyingOpening), naming="does not fit")
    for ruling in (result, sums, nodes, opened):
        found = ruling.operator
        assert found is not None
        must(found.index == place[0], f"the judge names operator {found.index}, the lie is at {place[0]}")
    # One unit in the last place is within the bound, as on another honest machine: nobody objects to it, and the list is
    # convicted where it leaves the bounds, like the job's own.
    near = forger.ruling(inside)
    plain = forger.plain.operator
    assert near.operator is not None
    assert plain is not None
    must(
        (near.loser, near.operator.index) == ("trainer", plain.index),
        f"a last place within the bound ends in {near.loser}, operator {near.operator.index}: {near.reason}",
    )
    return (
        f"judge: trainer loses ({result.reason}); with partial sums to fit ({sums.reason}); and a node beside them "
        f"({nodes.reason}); with another input opened ({opened.reason}); inside the bound "
        f"nothing is gained, the list falls where it leaves it ({near.reason})"
    )


if __name__ == "__main__":
    main(attack, __doc__)
