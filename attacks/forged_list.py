"""Defends a false state with a false list: one operator more, one less, another attribute, another input, another order."""

from dataclasses import replace

from forgery import Forger, find, with_operators
from stage import Stage, main

from tallystick.dispute.operator_list import Operator
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.testing.attacks import must


def attack(stage: Stage) -> str:
    forger = Forger(stage)
    place = [0]

    def at(side: TrainerSide) -> int:
        place[0] = find(side, lambda op: op.phase == "backward" and len(op.inputs) >= 2)
        return place[0]

    def extra(side: TrainerSide) -> TrainerSide:
        here = at(side)
        return with_operators(side, lambda ops: ops.insert(here, ops[here]))

    def missing(side: TrainerSide) -> TrainerSide:
        here = at(side)
        return with_operators(side, lambda ops: ops.__delitem__(here))

    def other(side: TrainerSide, edit: object) -> TrainerSide:
        here = at(side)
        assert callable(edit)
        return with_operators(side, lambda ops: ops.__setitem__(here, edit(ops[here])))

    def attribute(op: Operator) -> Operator:
        return replace(op, attributes={**op.attributes, "alpha": 2})

    def wiring(op: Operator) -> Operator:
        return replace(op, inputs=(replace(op.inputs[0], source=(0, 0)), *op.inputs[1:]))

    def swapped(op: Operator) -> Operator:
        return replace(op, inputs=(op.inputs[1], op.inputs[0], *op.inputs[2:]))

    def moved(side: TrainerSide) -> TrainerSide:
        here = at(side)

        def exchange(ops: list[Operator]) -> None:
            ops[here], ops[here - 1] = ops[here - 1], ops[here]

        return with_operators(side, exchange)

    forgeries = {
        "an operator twice": (extra, 1),
        "an operator left out": (missing, 0),
        "an attribute changed": (lambda side: other(side, attribute), 0),
        "wired to another result": (lambda side: other(side, wiring), 0),
        "two inputs exchanged": (lambda side: other(side, swapped), 0),
        "two operators exchanged": (moved, -1),
    }
    said: list[str] = []
    for what, (forge, after) in forgeries.items():
        ruling = forger.convicted(forge, naming="the trainer has")
        found = ruling.operator
        assert found is not None
        must(found.index == place[0] + after, f"{what}: {found.index}, expected {place[0] + after}")
        said.append(f"{what} ({ruling.reason})")
    return "judge: trainer loses at the first operator that is not the job's: " + "; ".join(said)


if __name__ == "__main__":
    main(attack, __doc__)
