"""Disputes on real steps end at the right operator with the right party blamed; no honest operator is ever at fault."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import hold
from tallystick.commit.tensors import chunk_size, digest_of
from tallystick.dispute import rulings
from tallystick.dispute.bounds import table
from tallystick.dispute.bounds.formulas import UNIT, Point
from tallystick.dispute.bounds.operands import stored_at
from tallystick.dispute.bounds.steps import StepFacts
from tallystick.dispute.exchange import MOST_PARTS
from tallystick.dispute.objections import Objection
from tallystick.dispute.openings import store_nodes
from tallystick.dispute.operator_list import BATCH, END, LOAD, STORE, Operator, Output, base_of
from tallystick.dispute.rulings import Accusation, rule_on_operator
from tallystick.dispute.terms import Ruling
from tallystick.execution.job import find_source
from tallystick.execution.snapshot import copied, load_state, state_entries
from tallystick.numerics.policy import find_policy
from tallystick.roles import parties, referee, step_judge
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.operator_examination import Examination, Wanted, end_root
from tallystick.roles.operator_replay import defend, own_step
from tallystick.roles.operator_trainer import TrainerSide, nodes_of
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import CHEATS, claim_path, forge, honest_defence

AT = 7
SETTINGS = {
    "digits": {"width": "4", "batch": "8"},
    "text": {"width": "16", "layers": "1", "heads": "2", "block": "12", "batch": "4"},
}


ODD = str(Path(__file__).parent / "honest_jobs" / "odd_numbers.py")


def order(job: str, policy: str, steps: int) -> Order:
    return Order(
        find_source(job), SETTINGS.get(job, {}), find_policy(policy), steps=steps, checkpoint_every=5
    )


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

    def examination(self, side: TrainerSide) -> Examination:
        own = own_step(self.auditor, self.agreed, self.frame, self.record, chunk=self.chunk)
        return Examination(own, side.trace.operators, self.agreed)

    def objection(self, side: TrainerSide) -> Objection | None:
        return self.looked(self.examination(side), side)

    def looked(self, seen: Examination, side: TrainerSide) -> Objection | None:
        while isinstance(found := seen.next(self.facts), Wanted):
            seen.show([side.show(source) for source in found.sources])
        return found


@pytest.fixture(
    scope="module",
    params=[
        ("digits", "fp64"),
        pytest.param(("text", "fp32"), marks=pytest.mark.slow),
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


@pytest.fixture(scope="module", params=["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HonestStep]:
    step = HonestStep(ODD, request.param, tmp_path_factory.mktemp("odd") / "run", jitter=True)
    yield step
    step.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_operator_on_odd_numbers_convicts_an_honest_trainer(odd: HonestStep) -> None:
    """Of what no rule covers, or what not every machine has, the judge says nothing: the whole step is repeated then."""
    rng, judged = random.Random(5), {"sound": 0, "unknown": 0}
    assert odd.side.trace.incomplete is None
    for at, op in enumerate(odd.side.trace.operators):
        if op.name in (BATCH, END):
            continue
        for output, element in elements(op, rng, 9 if op.phase == "forward" else 1):
            fault, reason = odd.rule(odd.side, at, Accusation(output, element))
            assert fault != "faulty", reason
            judged[fault] += 1
    assert judged["sound"] > 600
    assert odd.objection(odd.side) is None


def test_no_operator_names_a_decision_that_it_does_not_take(odd: HonestStep) -> None:
    """Of whole numbers there is none: the number would be that of another site, or -1."""
    relus = [op for op in odd.side.trace.operators if op.name == "aten::relu"]
    assert {(op.outputs[0].tensor.dtype, "decision" in op.attributes) for op in relus} == {("I64", False)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_false_element_among_odd_numbers_convicts(odd: HonestStep) -> None:
    """Whole numbers, truths, and a product of ordinary numbers."""
    rng, seen = random.Random(5), set[tuple[str, str]]()
    for at, op in enumerate(odd.side.trace.operators):
        if op.name in (BATCH, STORE) or not op.outputs or not op.name.startswith("aten::"):
            continue
        dtype = op.outputs[0].tensor.dtype
        if (op.name, dtype) in seen or (dtype in UNIT and op.name != "aten::addmm"):
            continue
        accusation = Accusation(0, rng.randrange(op.outputs[0].view.numel))
        if odd.rule(odd.side, at, accusation)[0] == "unknown":
            continue
        side = lied(odd, at, 0, accusation.element, 0.25)
        fault, reason = odd.rule(side, at, accusation)
        assert fault == "faulty", f"{op}: {reason}"
        assert odd.objection(side) == Objection(at, 0, accusation.element), str(op)
        seen.add((op.name, dtype))
    assert {dtype for _, dtype in seen} >= {"I64", "I32", "I16", "U8", "BOOL"}
    assert any(name == "aten::addmm" for name, _ in seen)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_auditor_objects_to_nothing_that_the_judge_says_nothing_of(odd: HonestStep) -> None:
    """It would be false by the numbers, and its auditor would have a whole step judged over it."""
    at = next(at for at, op in enumerate(odd.side.trace.operators) if op.name == "aten::linalg_vector_norm")
    side = lied(odd, at, 0, 0, 1e30)
    seen = odd.examination(side)

    assert odd.rule(side, at, Accusation(0, 0))[0] == "unknown"
    assert odd.looked(seen, side) is None
    assert "some machines" in str(seen.unknown)


def test_an_auditor_asks_for_no_more_results_at_once_than_a_question_may_bring(honest: HonestStep) -> None:
    seen = honest.examination(honest.side)
    while isinstance(found := seen.next(honest.facts), Wanted):
        seen.show([honest.side.show(source) for source in found.sources])
    one = next(at for at, op in enumerate(honest.side.trace.operators) if op.name == LOAD)
    left = [(one, 0)] * (MOST_PARTS + 7)
    seen._next_most = seen.most = 1 << 60  # pyright: ignore[reportPrivateUsage]
    asked = [len(seen._want(left).sources)]  # pyright: ignore[reportPrivateUsage]
    seen._asked = []  # pyright: ignore[reportPrivateUsage]
    asked.append(len(seen._want(left).sources))  # pyright: ignore[reportPrivateUsage]
    assert asked == [MOST_PARTS, 7]


BEYOND = 1 << 40


@pytest.mark.parametrize(
    "odd",
    [
        (7, 0, -1),
        (0, (1 << 31) - 1, -1),
        (0, BEYOND, -1),
        (0, 0, 10**6),
        (0, 0, 1 << 62),
        (255, BEYOND, 1 << 62),
    ],
    ids=str,
)
def test_an_accusation_of_what_no_operator_has_loses_and_ends_no_trainers_program(
    odd: tuple[int, int, int], honest: HonestStep
) -> None:
    """Before, the trainer's program failed over the opening, and it lost by silence."""
    output, element, block = odd
    seen = set[str]()
    for at, op in enumerate(honest.side.trace.operators):
        if op.name in seen:
            continue
        seen.add(op.name)
        side, accusation = honest.side, Accusation(output, element, block)
        opening = side.open(accusation, at, honest.facts)
        partials, nodes = side.partials(accusation, at, honest.facts), side.nodes(at)
        finding = rule_on_operator(
            honest.facts, honest.base, honest.chunk, agreed=side.leaves.commitment_at(at),
            claimed=side.leaves.commitment_at(at + 1), agreed_state=honest.agreed.root, claimed_state=honest.claimed,
            accusation=accusation, opening=replace(opening, partials=partials, nodes=nodes),
        )  # fmt: skip
        assert finding.fault != "faulty", (str(op), finding.reason)
    assert len(seen) > 15


def test_an_honest_auditor_objects_to_no_honest_list_and_its_own_bits_do_differ(honest: HonestStep) -> None:
    seen = honest.examination(honest.side)

    assert honest.looked(seen, honest.side) is None
    assert len(seen.suspects) > 20  # the control: operator by operator the two machines are not bit-equal


def with_result(honest: HonestStep, at: int, output: int, data: np.ndarray) -> TrainerSide:
    """Return the honest list with one result replaced."""
    trace = copy(honest.side.trace)
    trace.operators, trace.values = list(trace.operators), dict(trace.values)
    op = trace.operators[at]
    trace.values[(at, output)] = replace(trace.values[(at, output)], data=data, hashes=None)
    tensor = op.outputs[output].tensor
    outputs = list(op.outputs)
    outputs[output] = Output(
        digest_of(tensor.dtype, tensor.elements, memoryview(data), honest.chunk), outputs[output].view
    )
    trace.operators[at] = replace(op, outputs=tuple(outputs))
    return TrainerSide(trace, honest.base, honest.agreed)


def lied(honest: HonestStep, at: int, output: int, element: int, factor: float) -> TrainerSide:
    """Return the honest list with one element of one result changed by ``factor`` of the result's size."""
    data = honest.side.trace.array((at, output)).copy()
    position = stored_at(honest.side.trace.operators[at].outputs[output].view, element)
    if data.dtype.kind == "f":
        largest = float(np.abs(data[np.isfinite(data)]).max(initial=1.0))
        data[position] = largest * factor + (data[position] if np.isfinite(data[position]) else 0.0)
    else:
        data[position] ^= 1
    return with_result(honest, at, output, data)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_is_looked_at_before_what_differs_by_a_last_bit(honest: HonestStep) -> None:
    """A trainer that moves the first element by a last bit hides no infinity behind it, nor ends an auditor's program."""
    for name in ("aten::addmm", "aten::mm"):
        at = next(at for at, op in enumerate(honest.side.trace.operators) if op.name == name)
        for odd in (np.inf, np.nan):
            data = honest.side.trace.array((at, 0)).copy()
            data[0] = np.nextafter(data[0], data.dtype.type(1e3))
            data[3::2], data[4::2] = odd, -odd
            side = with_result(honest, at, 0, data)

            objection = honest.objection(side)

            assert (objection is not None and (objection.index, objection.output)) == (at, 0)
            assert objection is not None
            assert stored_at(honest.side.trace.operators[at].outputs[0].view, objection.element) == 3
            assert honest.rule(side, at, Accusation(0, objection.element))[0] == "faulty"


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


def end_of(honest: HonestStep, side: TrainerSide, block: int, nodes: tuple[bytes, ...]) -> tuple[str, str]:
    at = len(side.trace.operators) - 1
    opening = replace(side.open(Accusation(0, 0, block), at, honest.facts), nodes=nodes)
    claimed = side.trace.operators[at].attributes["state_root"]
    finding = rule_on_operator(
        honest.facts, honest.base, honest.chunk, agreed=side.leaves.commitment_at(at),
        claimed=side.leaves.commitment_at(at + 1), agreed_state=honest.agreed.root,
        claimed_state=bytes.fromhex(str(claimed)), accusation=Accusation(0, 0, block), opening=opening,
    )  # fmt: skip
    return finding.fault, finding.reason


def test_an_honest_end_stands_whichever_node_an_auditor_points_at(honest: HonestStep) -> None:
    at = len(honest.side.trace.operators) - 1
    nodes = honest.side.nodes(at)
    assert len(nodes) > 2
    for block in (*range(-1, len(nodes)), len(nodes), 10**6):
        assert end_of(honest, honest.side, block, nodes)[0] == "sound"


def test_a_false_end_is_convicted_by_the_node_that_its_stores_do_not_make_up(honest: HonestStep) -> None:
    """The trainer claims another state, and opens nodes that do make that up."""
    trace = copy(honest.side.trace)
    at, stores = len(trace.operators) - 1, [op for op in trace.operators if op.name == STORE]
    changed = len(stores) // 2
    entry = dict(cast("dict[str, object]", stores[changed].attributes["entry"]))
    entry["tensor_root"] = "11" * 32
    other = [*stores[:changed], replace(stores[changed], attributes={"entry": entry}), *stores[changed + 1 :]]
    claimed = store_nodes(other)
    root = merkle_root(claimed)
    trace.operators = [
        *trace.operators[:-1],
        replace(trace.operators[-1], attributes={"state_root": root.hex()}),
    ]
    side = TrainerSide(trace, honest.base, honest.agreed)

    assert end_root(stores) != root.hex()
    assert end_root(other) == root.hex()  # nodes of sixteen make up the state tree's root
    objection = honest.objection(side)
    assert objection == Objection(at)
    own = nodes_of(trace.operators, at)
    block = next(number for number, node in enumerate(own) if node != claimed[number])
    assert block == changed // 16
    fault, reason = end_of(honest, side, block, claimed)
    assert (fault, f"node {block}" in reason) == ("faulty", True), reason
    # Refused neighbours: nodes of the stores do not make up the claim; too few nodes; a node where nothing is false.
    assert end_of(honest, side, block, own)[0] == "faulty"
    assert end_of(honest, side, block, claimed[:-1])[0] == "faulty"
    assert end_of(honest, side, (block + 1) % len(own), claimed)[0] == "sound"


def test_fingerprints_that_lie_about_where_the_runs_part_cost_time_and_change_nothing(tmp_path: Path) -> None:
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    source, cheat = find_source("digits"), CHEATS["other_data"](AT)
    cheat.run(order("digits", "fp64", 10), run)
    write_claim(run, source, claim)
    plain = dispute(run, claim, source, defence=cheat.defence(source))
    assert ("trainer", "traced") in plain.ledger.spent
    assert ("trainer", "again") not in plain.ledger.spent  # the segment was repeated once

    forge(run, lambda each: replace(each, fingerprint="00" * 8) if each.step == AT - 1 else each)
    lied = dispute(run, claim, source, defence=cheat.defence(source))

    assert (plain.loser, plain.step) == (lied.loser, AT) == ("trainer", AT)


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


IN_MEMORY = """
import torch
from tallystick.jobs import digits


def build(settings):
    job = digits.build({{"width": "4", "batch": "8"}})
    job.model.register_buffer("held", {})
    return job
"""


@pytest.mark.parametrize(
    ("buffer", "is_complete"),
    [
        ("torch.arange(6).reshape(3, 2)", True),
        ("torch.arange(6).reshape(3, 2).t()", False),
        ("torch.arange(6)[:3]", False),
        ("torch.arange(6)[::2]", False),
    ],
    ids=["in rows", "in columns", "part of more", "every other"],
)
def test_a_state_that_lies_otherwise_in_memory_than_in_its_file_has_no_list(
    buffer: str, is_complete: bool, tmp_path: Path
) -> None:
    """A view's strides are those of memory; the entry's elements would be read at other places."""
    (tmp_path / "job.py").write_text(IN_MEMORY.format(buffer))
    step = HonestStep(str(tmp_path / "job.py"), "fp32", tmp_path / "run", jitter=False)
    step.close()
    assert (step.side.trace.incomplete is None) == is_complete
    if buffer.endswith(".t()"):
        assert "model/buffer/held lies in memory otherwise" in str(step.side.trace.incomplete)


def test_an_honest_trainer_of_such_a_state_is_not_convicted(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(IN_MEMORY.format("torch.arange(6).reshape(3, 2).t()"))
    source, run = find_source(str(tmp_path / "job.py")), RunDirectory(tmp_path / "run")
    CHEATS["lying_auditor"](1).run(Order(source, {}, find_policy("fp32"), steps=2, checkpoint_every=2), run)

    result = dispute(
        run, claim_path(run), source, defence=honest_defence(source), objection=Objection(0, 0, 1)
    )

    assert result.loser == "auditor", result.reason
    assert result.operator is None or result.operator.loser is None


@pytest.mark.parametrize("spare", [-1, 0], ids=["larger than can be shown", "as large as can be shown"])
def test_an_honest_trainer_loses_by_no_opening_that_is_too_long(
    spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the leaf alone; of an operator that reads and gives more than can be shown the whole step is judged."""
    step, source = HonestStep("digits", "fp32", tmp_path / "probe", jitter=False), find_source("digits")
    step.close()
    operators = step.side.trace.operators
    at = next(at for at, op in enumerate(operators) if op.name == "aten::native_batch_norm_backward")
    read = [
        operators[leaf].outputs[output] for leaf, output in (each.source for each in operators[at].inputs)
    ]
    size = sum(each.tensor.nbytes for each in (*read, *operators[at].outputs))
    run = RunDirectory(tmp_path / "run")
    CHEATS["lying_auditor"](2).run(order("digits", "fp32", 3), run)
    monkeypatch.setattr(parties, "OPENING_LIMIT", 100)
    monkeypatch.setattr(rulings, "SHOWN_WHOLE", size + spare)

    result = dispute(
        run, claim_path(run), source, defence=honest_defence(source), objection=Objection(at, 0, 1)
    )

    assert result.loser == "auditor", result.reason
    assert result.operator is not None
    assert result.operator.loser is None
    alone = "reads and gives more than can be shown" if spare else "what the trainer opened does not fit"
    assert alone in result.operator.reason


def test_whatever_the_table_says_of_an_operator_no_honest_trainer_is_convicted_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that is wrong about torch would be found by a lying auditor first: the whole step has to convict as well."""
    run, source = RunDirectory(tmp_path / "run"), find_source("digits")
    CHEATS["lying_auditor"](2).run(replace(order("digits", "fp32", 3), checkpoint_every=1), run)
    honest = HonestStep("digits", "fp32", tmp_path / "honest", jitter=False)
    operators = honest.side.trace.operators
    at = next(at for at, op in enumerate(operators) if op.name == "aten::relu")
    honest.close()
    rules = cast("dict[str, object]", table._RULES)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(rules, "aten::relu", lambda *_: Point(7.0, exact=True))
    objection = Objection(at, 0, 0)

    found = dispute(run, claim_path(run), source, defence=honest_defence(source), objection=objection)

    assert found.operator is not None
    assert "must be" in found.operator.reason
    assert "the whole step does not convict the trainer" in found.operator.reason
    assert (found.loser, found.record) == ("auditor", None)


@pytest.mark.parametrize(
    ("is_noisy", "is_unsteady", "loser"),
    [(False, False, "trainer"), (True, False, "none"), (False, True, "none")],
)
def test_a_list_with_other_data_than_were_committed_convicts_whatever_noise_explains_of_the_step(
    is_noisy: bool, is_unsteady: bool, loser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless noise reaches the data, or the job has others in each process."""
    run, claim, source = (
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
        find_source("digits"),
    )
    cheat = CHEATS["other_data"](2)
    cheat.run(replace(order("digits", "fp32", 3), checkpoint_every=1), run)
    write_claim(run, source, claim)
    says_nothing = Ruling("none", "noise explains the state")
    monkeypatch.setattr(step_judge.StepJudge, "rule", lambda *given: says_nothing)
    monkeypatch.setattr(step_judge.StepJudge, "rule_on_agreed", lambda *given: [])
    monkeypatch.setattr(Replay, "may_be_noise", lambda *given: is_noisy)
    monkeypatch.setattr(referee, "find_unsteady", lambda *given: "another" if is_unsteady else None)

    found = dispute(run, claim, source, defence=cheat.defence(source))

    assert found.loser == loser, found.reason
    assert found.operator is not None
    assert "is not the committed data" in found.operator.reason


@pytest.mark.parametrize(("structure", "decides"), [(False, True), (True, False)])
def test_where_a_list_has_its_data_decides_nothing_by_itself(
    structure: bool, decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest lists may differ: a leaf of data in place of another one is none with other data."""
    monkeypatch.setattr(referee, "find_unsteady", lambda *given: None)
    held: Any = SimpleNamespace(
        answers_itself=True,
        replay=SimpleNamespace(may_be_noise=lambda step: False),
        panel=SimpleNamespace(trainer=None, source=None),
    )
    found: Any = SimpleNamespace(
        loser="trainer",
        operator=SimpleNamespace(name=BATCH),
        accusation=Accusation(0, 0, structure=structure),
    )
    assert referee.Referee._contradicts_itself(held, found, 2) is decides  # pyright: ignore[reportPrivateUsage]


CHANGED_UNSEEN = """

def changed_unseen(h):
    m = torch.zeros(4, dtype=h.dtype)
    m.numpy()[1] = 1.0
    return (h.mean() * m).sum()
"""


@pytest.mark.parametrize(
    "form",
    [
        "torch.stack([ids[0] + 0] * 2000).to(h.dtype).mean()",
        "ids.view(torch.int32).clone().to(h.dtype).mean()",
        "(torch._neg_view(h) + 1.0).mean()",
        "changed_unseen(h)",
    ],
    ids=[
        "a leaf that is too long",
        "bits of another dtype",
        "a sign that no byte says",
        "memory that numpy writes",
    ],
)
def test_a_list_that_no_judge_can_read_is_not_handed_over(tmp_path: Path, form: str) -> None:
    """An answer that is refused would be a forfeit, and a reading that does not fit the trainer's fault."""
    text = (
        Path(ODD)
        .read_text()
        .replace("def seldom(self, ids, h):", f"def seldom(self, ids, h):\n        return {form}")
    )
    path = tmp_path / "odd.py"
    path.write_text(text)
    path.write_text(path.read_text() + CHANGED_UNSEEN)
    honest = HonestStep(str(path), "fp32", tmp_path / "run", jitter=False)
    assert honest.side.trace.incomplete is not None
    honest.close()


def test_an_objection_that_is_false_does_not_save_a_trainer_whose_state_is_false(tmp_path: Path) -> None:
    """An honest auditor may be wrong about an operator, whose leaf differs with the machine: the whole step has the last word."""
    run, claim, source = (
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
        find_source("digits"),
    )
    cheat = CHEATS["edited_weights"](2)
    cheat.run(replace(order("digits", "fp32", 3), checkpoint_every=1), run)
    write_claim(run, source, claim)
    honest = HonestStep("digits", "fp32", tmp_path / "honest", jitter=False)
    at = next(at for at, op in enumerate(honest.side.trace.operators) if op.name == "aten::relu")
    honest.close()

    found = dispute(run, claim, source, defence=cheat.defence(source), objection=Objection(at, 0, 0))

    assert found.operator is not None
    assert "the whole step does not convict the auditor" in found.operator.reason
    assert found.loser == "trainer"
