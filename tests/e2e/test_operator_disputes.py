"""Disputes on real steps end at the right operator with the right party blamed; no honest operator is ever at fault."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tallystick.commit.state import hold
from tallystick.commit.tensors import chunk_size, digest_of
from tallystick.execution.job import find_source
from tallystick.execution.snapshot import copied, load_state, state_entries
from tallystick.numerics.policy import find_policy
from tallystick.protocol.operators import BATCH, END, LOAD, STORE, Objection, Operator, Output, base_of
from tallystick.protocol.rulings import Accusation, StepFacts, rule_on_operator
from tallystick.roles.auditor import Replay, open_replay, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.operators import TrainerSide, defend, examine
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import CHEATS

AT = 7
SETTINGS = {
    "digits": {"width": "4", "batch": "8"},
    "text": {"width": "16", "layers": "1", "heads": "2", "block": "12", "batch": "4"},
}


def order(job: str, policy: str, steps: int) -> Order:
    return Order(find_source(job), SETTINGS[job], find_policy(policy), steps=steps, checkpoint_every=5)


def test_a_trainer_who_cannot_open_its_claim_loses_at_the_end_of_its_list(tmp_path: Path) -> None:
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    source = find_source("digits")
    CHEATS["other_data"](AT).run(order("digits", "fp64", 11), run)
    write_claim(run, source, claim)

    result = dispute(run, claim, source)  # without the program that it really ran

    assert (result.loser, result.step) == ("trainer", AT)
    assert result.operator is not None
    assert result.operator.operator is not None
    assert result.operator.operator.name == END

    result = dispute(run, claim, source, level="steps")

    assert (result.loser, result.step, result.operator, result.record) == ("trainer", AT, None, None)


# -- one honest step, looked at closely ------------------------------------------------------------


class HonestStep:
    """The list of one honest step; ``jitter`` lets the trainer compute on another machine, as far as noise goes."""

    def __init__(self, job: str, policy: str, path: Path, *, jitter: bool) -> None:
        self.run = RunDirectory(path)
        self.source = find_source(job)
        record(order(job, policy, 3), self.run)
        transcript = self.run.load_transcript()
        self.record = transcript.record(2)
        self.frame = self.run.load_frames(transcript, 2, 3)[2]
        self.auditor = self._replay(jitter=False)
        self.trainer = self._replay(jitter=jitter)
        load_state(self.auditor.session, self.run.load_checkpoint(0))
        for step in range(2):
            self.auditor.follow(
                transcript.record(step), self.run.load_frames(transcript, step, step + 1)[step]
            )
        self.agreed = hold(copied(entry) for entry in state_entries(self.auditor.session))
        self.chunk = chunk_size(self.agreed.nbytes)
        self.base = base_of(
            agreed=self.agreed.root, specification=transcript.specification.leaf(), record=self.record.leaf(),
            chunk=self.chunk,
        )  # fmt: skip
        self.claimed = bytes.fromhex(str(self.record.state_root))
        grids = bytes(self.agreed.entries["document/grids"].data)
        self.facts = StepFacts(transcript.specification, self.record, self.frame, grids)
        self.side = defend(
            self.trainer, self.agreed, self.frame, self.record,
            base=self.base, chunk=self.chunk, claimed_root=self.claimed, claimed=None,
        )  # fmt: skip

    def _replay(self, *, jitter: bool) -> Replay:
        replay = open_replay(self.run.load_transcript().specification, self.source, jitter=jitter)
        assert isinstance(replay, Replay)
        return replay

    def close(self) -> None:
        self.auditor.session.close()
        self.trainer.session.close()

    def rule(self, side: TrainerSide, at: int, accusation: Accusation) -> tuple[str, str]:
        partials = side.partials(accusation, at, self.facts)
        if partials:
            accusation = replace(accusation, block=len(partials) // 2)
        finding = rule_on_operator(
            self.facts, self.base, self.chunk, agreed=side.leaves.commitment_at(at),
            claimed=side.leaves.commitment_at(at + 1), agreed_state=self.agreed.root, claimed_state=self.claimed,
            accusation=accusation, opening=side.open(accusation, at, self.facts),
        )  # fmt: skip
        return finding.fault, finding.reason

    def objection(self, side: TrainerSide) -> Objection | None:
        seen = examine(self.auditor, self.agreed, self.frame, self.record, side)
        return seen.objection(self.facts)


@pytest.fixture(
    scope="module",
    params=[
        ("digits", "fp64"),
        ("text", "fp32"),
        pytest.param(("digits", "fp32"), marks=pytest.mark.slow),
        pytest.param(("text", "fp64"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def honest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HonestStep]:
    job, policy = request.param
    step = HonestStep(job, policy, tmp_path_factory.mktemp("honest") / "run", jitter=True)
    yield step
    step.close()


def elements(op: Operator, rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    for output, result in enumerate(op.outputs):
        size = result.view.numel
        if size:
            yield from ((output, at) for at in {0, size - 1, *(rng.randrange(size) for _ in range(count))})


def test_no_accusation_of_an_honest_operator_holds_even_under_other_arithmetic(honest: HonestStep) -> None:
    """A lying auditor against a trainer whose last bits differ: each operator in turn, several elements of each."""
    rng, judged, seen = random.Random(5), 0, dict[str, int]()
    assert honest.side.trace.incomplete is None
    for at, op in enumerate(honest.side.trace.operators):
        seen[op.name] = seen.get(op.name, 0) + 1
        if op.name in (BATCH, END) or not op.outputs or (seen[op.name] > 4 and rng.random() > 0.15):
            continue
        for output, element in elements(op, rng, 1):
            fault, reason = honest.rule(honest.side, at, Accusation(output, element))
            assert fault == "sound", reason
            judged += 1
    assert judged > 150


def test_an_honest_auditor_objects_to_no_honest_list_and_its_own_bits_do_differ(honest: HonestStep) -> None:
    seen = examine(honest.auditor, honest.agreed, honest.frame, honest.record, honest.side)

    assert seen.objection(honest.facts) is None
    assert len(seen.suspects) > 20  # the control: operator by operator the two machines are not bit-equal


def lied(honest: HonestStep, at: int, output: int, element: int, factor: float) -> TrainerSide:
    """Return the honest list with one element of one result changed by ``factor`` of the result's size."""
    from copy import copy

    from tallystick.protocol.operator_table import stored_at

    trace = copy(honest.side.trace)
    trace.operators, trace.values = list(trace.operators), dict(trace.values)
    op = trace.operators[at]
    data = trace.array((at, output)).copy()
    position = stored_at(op.outputs[output].view, element)
    if data.dtype.kind == "f":
        largest = float(np.abs(data[np.isfinite(data)]).max(initial=1.0))
        data[position] = largest * factor + (data[position] if np.isfinite(data[position]) else 0.0)
    else:
        data[position] ^= 1
    trace.values[(at, output)] = replace(trace.values[(at, output)], data=data, hashes=None)
    tensor = op.outputs[output].tensor
    outputs = list(op.outputs)
    outputs[output] = Output(
        digest_of(tensor.dtype, tensor.elements, memoryview(data), honest.chunk), outputs[output].view
    )
    trace.operators[at] = replace(op, outputs=tuple(outputs))
    return TrainerSide(trace, honest.base, honest.agreed)


def test_one_false_element_of_any_operator_is_found_and_convicts(honest: HonestStep) -> None:
    """A twentieth of the operators, at least one of each name."""
    rng, seen = random.Random(7), set[str]()
    for at, op in enumerate(honest.side.trace.operators):
        if not op.outputs or op.name in (STORE, END, BATCH):
            continue
        if op.name in seen and rng.random() > 0.03:
            continue
        sizes = [result.view.numel for result in op.outputs]
        output = rng.randrange(len(sizes))
        if not sizes[output] or not honest.side.trace.array((at, output)).size:
            continue
        element = rng.randrange(sizes[output])
        seen.add(op.name)
        side = lied(honest, at, output, element, 0.25)

        objection = honest.objection(side)

        assert objection == Objection(at, output, element), f"{at} {op}"
        fault, reason = honest.rule(side, at, Accusation(output, element))
        assert fault == "faulty", reason
    assert LOAD in seen
    assert len(seen) > 15


def test_swapped_wiring_attributes_and_extra_operators_are_structural(honest: HonestStep) -> None:
    operators = honest.side.trace.operators
    at = next(i for i, op in enumerate(operators) if op.phase == "backward" and len(op.inputs) >= 2)
    op = operators[at]
    swapped = replace(op, inputs=(replace(op.inputs[0], source=(0, 0)), *op.inputs[1:]))
    renamed = replace(op, attributes={**op.attributes, "alpha": 2})
    for changed in ([swapped], [renamed], [op, op], []):
        from copy import copy

        trace = copy(honest.side.trace)
        trace.operators = [*operators[:at], *changed, *operators[at + 1 :]]
        side = TrainerSide(trace, honest.base, honest.agreed)
        # the first place where the two lists differ; two equal operators in a row differ at the second
        expected = at + (1 if len(changed) == 2 else 0)

        objection = honest.objection(side)

        assert objection is not None
        assert objection.structure
        assert objection.index == expected
        finding = rule_on_operator(
            honest.facts, honest.base, honest.chunk, agreed=side.leaves.commitment_at(expected),
            claimed=side.leaves.commitment_at(expected + 1), agreed_state=honest.agreed.root,
            claimed_state=honest.claimed, accusation=Accusation(0, 0, structure=True),
            opening=side.open(Accusation(0, 0, structure=True), expected, honest.facts),
            own_structure=operators[expected].structure,
        )  # fmt: skip
        assert finding.fault == "faulty"


def test_an_optimizer_outside_the_table_falls_back_to_the_step_and_says_so(tmp_path: Path) -> None:
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    policy = replace(find_policy("fp32"), optimizer_arithmetic="general")
    cheat = CHEATS["other_data"](3)
    cheat.run(Order(find_source("digits"), SETTINGS["digits"], policy, steps=5, checkpoint_every=5), run)
    write_claim(run, find_source("digits"), claim)

    result = dispute(run, claim, find_source("digits"))

    assert (result.loser, result.step) == ("trainer", 3)
    assert result.operator is not None
    assert result.operator.loser is None
    assert "general arithmetic" in str(result.operator.fields()["fallback"])
