"""The state as entries and back: nothing lost, nothing let in that does not belong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tallystick.commit.encoding import canonical_json, parse_canonical_json
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput
from tallystick.execution.job import Job
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import (
    copied_state,
    load_state,
    state_documents,
    state_entries,
    state_tensors,
)
from tallystick.execution.step import batch_bytes, batch_digest, run_step
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.policy import POLICIES, find_policy
from tallystick.roles.trainer import open_session

PAGE = Path(__file__).parents[3] / "spec" / "transcript.md"
BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])
OPTIMIZERS = "sgd nesterov adam amsgrad adamw adamax rmsprop-momentum adagrad adadelta nadam radam".split()
SCHEDULERS = "none lambda cosine onecycle step multistep exponential sequential".split()


def entries_of(session: Session) -> dict[str, Entry]:
    """A copy of a session's state that later steps do not touch."""
    return {entry.name: replace(entry, data=bytes(entry.data)) for entry in state_entries(session)}


def gridded(session: Session) -> Session:
    """The session with a grid for each of its sites, as if noise had been measured."""
    session.table = GridTable({(site.kind, site.ordinal): SiteGrid(24, -30, -149) for site in session.sites})
    return session


def go_on(session: Session, job: Job, frames: list[bytes]) -> None:
    for frame in frames:
        context = session.following_context(frame)
        run_step(session, job, context)
        context.finish()
        assert context.violations == []
        session.settle(context)


@BOTH
@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [*((o, "none") for o in OPTIMIZERS), *(("momentum", s) for s in SCHEDULERS)]
)
def test_going_on_from_a_checkpoint_is_going_on(
    optimizer: str, scheduler: str, policy: str, zoo: Any, record_run: Any, open_job: Any, state_root: Any
) -> None:
    settings = {
        "model": "plain",
        "optimizer": optimizer,
        "scheduler": scheduler,
        "groups": "yes",
        "steps": "9",
    }
    run = record_run(lambda: zoo.build(settings), policy, 9)
    for middle in (0, 1, 5):
        first_job = zoo.build(settings)
        first = open_job(first_job, POLICIES[policy])
        first.table = run.initial
        go_on(first, first_job, run.frames[:middle])
        saved = entries_of(first)
        second_job = zoo.build({**settings, "seed": "77"})
        second = open_job(second_job, POLICIES[policy])
        assert state_root(second) != state_root(first)
        load_state(second, saved)
        assert entries_of(second).keys() == saved.keys()
        assert state_root(second) == state_root(first)
        go_on(second, second_job, run.frames[middle:])
        assert state_root(second) == run.roots[-1]
        if middle == 5:
            assert second_job.optimizer.param_groups[0]["lr"] == run.job.optimizer.param_groups[0]["lr"]


@BOTH
def test_every_kind_of_tensor_comes_back(
    policy: str, zoo: Any, record_run: Any, open_job: Any, state_root: Any
) -> None:
    settings = {"model": "convolutions", "average": "yes", "optimizer": "adam"}
    run = record_run(lambda: zoo.build(settings), policy, 3)
    saved = entries_of(run.session)
    assert saved["model/buffer/norm1.num_batches_tracked"].dtype == "I64"
    assert {
        "extra/average/stem.weight",
        "optimizer/stem.weight/exp_avg",
        "optimizer/stem.weight/step",
    } <= saved.keys()
    other = open_job(zoo.build({**settings, "seed": "5"}), POLICIES[policy])
    load_state(other, saved)
    assert state_root(other) == run.roots[-1]
    for tensor in state_tensors(run.session).values():
        assert tensor.dtype in (torch.float32, torch.int64)
        assert not (torch.signbit(tensor.double()) & (tensor == 0)).any() or tensor.dtype == torch.int64


def test_values_between_steps_are_float32_values(zoo: Any, record_run: Any) -> None:
    session = record_run(lambda: zoo.build({"model": "convolutions", "average": "yes"}), "fp64", 3).session
    for name, tensor in session.state:
        assert torch.equal(tensor, tensor.float().to(tensor.dtype)), name


@BOTH
def test_an_optimizer_that_counts_in_integers_is_saved(
    policy: str, zoo: Any, record_run: Any, open_job: Any, state_root: Any
) -> None:
    """State that is no floating tensor and no plain number is state all the same."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        count = self.state[p].setdefault("count", torch.zeros((), dtype=torch.int64))
                        count += 1
            return super().step(closure)

    def make() -> Job:
        job = zoo.build({"model": "plain"})
        job.optimizer = Counting(job.model.parameters(), lr=0.1, momentum=0.9)
        return job

    run = record_run(make, policy, 3)
    saved = entries_of(run.session)
    assert saved["optimizer/0.weight/count"].dtype == "I64"
    other = open_job(make(), POLICIES[policy])
    load_state(other, saved)
    assert int(other.optimizer.state[other.model[0].weight]["count"]) == 3
    assert state_root(other) == run.roots[-1]


Change = Callable[[dict[str, Entry]], None]


def without(name: str) -> Change:
    return lambda entries: entries.pop(name) and None


def with_tensor(name: str, tensor: torch.Tensor) -> Change:
    code = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}[tensor.dtype]

    def change(entries: dict[str, Entry]) -> None:
        entries[name] = Entry(name, code, tuple(tensor.shape), tensor.numpy().tobytes())

    return change


def document(name: str, edit: Callable[[Any], Any]) -> Change:
    """Edit one document as JSON."""

    def change(entries: dict[str, Entry]) -> None:
        value = parse_canonical_json(bytes(entries[name].data), what=name, limit=1 << 20)
        data = canonical_json(edit(value))
        entries[name] = Entry(name, "U8", (len(data),), data)

    return change


def raw(name: str, data: bytes) -> Change:
    return lambda entries: entries.update({name: Entry(name, "U8", (len(data),), data)})


def group_value(key: str, value: Any) -> Callable[[Any], Any]:
    def edit(document: Any) -> Any:
        pairs = document["groups"][0]["values"]["map"]
        document["groups"][0]["values"]["map"] = sorted(
            ([k, value if k == key else v] for k, v in pairs), key=lambda pair: canonical_json(pair[0])
        )
        return document

    return edit


def scheduler_value(key: str, value: Any) -> Callable[[Any], Any]:
    def edit(document: Any) -> Any:
        pairs = [pair for pair in document["state"]["map"] if pair[0] != key] + [[key, value]]
        document["state"]["map"] = sorted(pairs, key=lambda pair: canonical_json(pair[0]))
        return document

    return edit


WEIGHT = "model/stem.weight"
MOMENT = "optimizer/stem.weight/exp_avg"
STEP = "optimizer/stem.weight/step"
BAD: dict[str, tuple[Change, str]] = {
    "a parameter missing": (without(WEIGHT), f"entry {WEIGHT} is missing"),
    "a buffer missing": (
        without("model/buffer/norm1.running_mean"),
        "entry model/buffer/norm1.running_mean is missing",
    ),
    "an extra module's tensor missing": (
        without("extra/average/head.bias"),
        "extra/average/head.bias is missing",
    ),
    "a moment missing": (without(MOMENT), "optimizer values for stem.weight must be"),
    "a counter missing": (without(STEP), "optimizer values for stem.weight must be"),
    "all of a parameter's moments but one missing": (
        lambda entries: [entries.pop(n) for n in (MOMENT, STEP)] and None,
        "optimizer values for stem.weight must be",
    ),
    "a tensor left over": (
        with_tensor("model/other", torch.zeros(3)),
        "entry model/other belongs to nothing",
    ),
    "an optimizer tensor left over": (
        with_tensor("optimizer/stem.weight/other", torch.zeros(6, 1, 3, 3)),
        "entry optimizer/stem.weight/other belongs to nothing",
    ),
    "an optimizer tensor of nobody": (
        with_tensor("optimizer/ghost/exp_avg", torch.zeros(3)),
        "belongs to nothing",
    ),
    "a parameter of another shape": (
        with_tensor(WEIGHT, torch.zeros(6, 9)),
        r"float32\[6, 9\], the job has .*\[6, 1, 3, 3\]",
    ),
    "a parameter of another dtype": (
        with_tensor(WEIGHT, torch.zeros(6, 1, 3, 3, dtype=torch.int32)),
        r"int32\[6, 1, 3, 3\], the job has torch\.float32",
    ),
    "a counter of another dtype": (
        with_tensor("model/buffer/norm1.num_batches_tracked", torch.zeros((), dtype=torch.int32)),
        r"torch\.int32\[\], the job has torch\.int64",
    ),
    "a moment of another shape": (
        with_tensor(MOMENT, torch.zeros(54)),
        "does not keep for a parameter of shape",
    ),
    "a moment of another dtype": (
        with_tensor(MOMENT, torch.zeros(6, 1, 3, 3, dtype=torch.int64)),
        "does not keep for a parameter of shape",
    ),
    "a counter that is no scalar": (
        with_tensor(STEP, torch.zeros(2)),
        "does not keep for a parameter of shape",
    ),
    "no cursor": (without("document/cursor"), "document/cursor is missing"),
    "a negative step": (
        document("document/cursor", lambda d: {**d, "step": -1}),
        "cursor's step must be a whole number",
    ),
    "a step that is true": (
        document("document/cursor", lambda d: {**d, "step": True}),
        "cursor's step must be",
    ),
    "a cursor that is a list": (document("document/cursor", lambda d: [d]), "cursor must be an object"),
    "a cursor that is no JSON": (raw("document/cursor", b"{"), "cursor"),
    "grids that are no table": (raw("document/grids", b"\x01\x05"), "grid table"),
    "another seed": (
        lambda entries: raw(
            "document/configuration",
            bytes(entries["document/configuration"].data).replace(b'"seed":3', b'"seed":4'),
        )(entries),
        "its policy, its numbers, its seed or its rank are not this run's",
    ),
    "another number of groups": (
        document("document/optimizer", lambda d: {**d, "groups": d["groups"] * 2}),
        "another number of parameter groups",
    ),
    "a group of other parameters": (
        document(
            "document/optimizer",
            lambda d: {**d, "groups": [{**d["groups"][0], "parameters": d["groups"][0]["parameters"][1:]}]},
        ),
        "optimizer group 0 holds other parameters",
    ),
    "a rate that is text": (
        document("document/optimizer", group_value("lr", "fast")),
        "group 0 has other settings",
    ),
    "a rate that is nothing": (
        document("document/optimizer", group_value("lr", None)),
        "group 0 has other settings",
    ),
    "one beta": (
        document("document/optimizer", group_value("betas", {"tuple": [{"float": "0x1.0000000000000p-1"}]})),
        "group 0 has other settings",
    ),
    "a flag that is a number": (
        document("document/optimizer", group_value("amsgrad", 1)),
        "group 0 has other settings",
    ),
    "a float that is none": (
        document("document/optimizer", group_value("lr", {"float": "fast"})),
        "optimizer group 0",
    ),
    "an unknown tag": (
        document("document/optimizer", group_value("lr", {"code": "x"})),
        "is not a tagged value",
    ),
    "plain values of a stranger": (
        document("document/optimizer", lambda d: {**d, "plain": {"ghost": {"map": []}}}),
        "optimizer values for ghost, which the job does not train",
    ),
    "plain values that are a list": (
        document("document/optimizer", lambda d: {**d, "plain": {"stem.weight": [1]}}),
        "optimizer values for stem.weight must be",
    ),
    "plain values nobody keeps": (
        document("document/optimizer", lambda d: {**d, "plain": {"stem.weight": {"map": [["n", 1]]}}}),
        "optimizer values for stem.weight must be",
    ),
    "another scheduler": (
        document("document/scheduler", lambda d: {**d, "kind": "StepLR"}),
        "scheduler is a StepLR, the job has a CosineAnnealingLR",
    ),
    "a scheduler with a method replaced": (
        document("document/scheduler", scheduler_value("get_lr", "mine")),
        "the scheduler's values are not those",
    ),
    "a scheduler with text for a number": (
        document("document/scheduler", scheduler_value("T_max", "many")),
        "the scheduler's values are not those",
    ),
    "a scheduler with one rate too many": (
        document("document/scheduler", scheduler_value("base_lrs", [{"float": "0x1.0000000000000p-1"}] * 2)),
        "the scheduler's values are not those",
    ),
    "a scheduler that is nothing": (
        document("document/scheduler", lambda d: {**d, "state": None}),
        "the scheduler's values are not those",
    ),
}


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest) -> dict[str, Entry]:
    return {}


@pytest.mark.parametrize("name", BAD)
def test_a_state_that_does_not_fit_is_refused_with_the_reason(
    name: str, saved: dict[str, Entry], zoo: Any, record_run: Any, open_job: Any
) -> None:
    settings = {"model": "convolutions", "average": "yes", "optimizer": "adam", "scheduler": "cosine"}
    if not saved:
        saved.update(entries_of(record_run(lambda: zoo.build(settings), "fp32", 2).session))
    session = open_job(zoo.build(settings), POLICIES["fp32"])
    load_state(session, saved)  # the accepted neighbour
    change, reason = BAD[name]
    entries = dict(saved)
    change(entries)
    assert entries != saved
    with pytest.raises(InvalidInput, match=reason):
        load_state(session, entries)
    load_state(session, saved)


@BOTH
def test_a_state_without_any_optimizer_tensor_is_one_before_the_first_step(
    policy: str, zoo: Any, open_job: Any, state_root: Any
) -> None:
    session = gridded(open_job(zoo.build({"optimizer": "adam"}), POLICIES[policy]))
    before = entries_of(session)
    assert not [name for name in before if name.startswith("optimizer/")]
    load_state(session, before)
    assert state_root(session) == state_root(
        gridded(open_job(zoo.build({"optimizer": "adam"}), POLICIES[policy]))
    )


def test_a_state_without_the_grid_of_a_site_is_none_of_the_jobs(zoo: Any, open_job: Any) -> None:
    session = gridded(open_job(zoo.build({"model": "plain"}), POLICIES["fp32"]))
    table = session.table
    load_state(session, entries_of(session))
    for place in table.sites:
        session.table = GridTable({at: grid for at, grid in table.sites.items() if at != place})
        with pytest.raises(InvalidInput, match=re.escape(f"state: {session.site_name(place)} has no grid")):
            load_state(session, entries_of(session))


def test_an_optimizer_value_that_cannot_be_committed_is_refused(zoo: Any, open_job: Any) -> None:
    job = zoo.build({})
    session = open_job(job, POLICIES["fp32"])
    job.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(InvalidInput, match="optimizer group 0: a value of type object cannot be committed"):
        state_entries(session)


def test_every_entry_enters_the_root(zoo: Any, record_run: Any, open_job: Any, state_root: Any) -> None:
    """A change in any entry that can be loaded changes the root of what was loaded."""
    settings = {"model": "plain", "optimizer": "adam", "scheduler": "cosine"}
    run = record_run(lambda: zoo.build(settings), "fp32", 2)
    whole = entries_of(run.session)
    seen = {run.roots[-1]}
    for name, entry in whole.items():
        if entry.dtype != "F32" or not entry.data:
            continue
        data = bytearray(entry.data)
        data[-2] ^= 1
        session = open_job(zoo.build(settings), POLICIES["fp32"])
        load_state(session, {**whole, name: replace(entry, data=bytes(data))})
        seen.add(state_root(session))
    assert len(seen) == 1 + sum(1 for entry in whole.values() if entry.dtype == "F32")


def test_the_page_shows_a_batchs_parts_and_digest() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## 11.")[2].partition("## 12.")[0]
    drawn = re.findall(r"^```text\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)[0]
    batch = {"x": torch.tensor([[1.0], [-2.0]]), "n": 3}
    assert bytes.fromhex(re.sub(r"#.*", "", drawn)) == batch_bytes(batch)
    assert re.findall(r"`([0-9a-f]{64})`", section) == [batch_digest(batch)]


def test_the_page_shows_the_documents_of_an_optimizer_and_a_scheduler(open_job: Any) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## 12.")[2]
    drawn = re.findall(r"^```text\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)[0]
    shown = re.split(r"\n(?=\{\"kind\")", drawn)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    job = Job(
        model, optimizer, lambda step: torch.ones(2, 1), lambda m, x: m(x).sum(), steps=3, scheduler=scheduler
    )
    found = state_documents(open_job(job, POLICIES["fp64"]))
    assert [text.replace("\n", "").encode() for text in shown] == [
        found["document/optimizer"], found["document/scheduler"],
    ]  # fmt: skip
    assert found["document/cursor"] == b'{"step":0}'


def test_what_a_stated_state_left_behind_makes_no_other_state_unfit() -> None:
    """A number where the job has none, or what its scheduler cannot take: the job's own state fits all the same afterwards."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    job = Job(
        model, optimizer, lambda step: torch.ones(1, 2), lambda net, x: net(x).sum(), 2, scheduler=scheduler
    )
    session = gridded(open_session(job, find_policy("fp32"), 0))
    own = copied_state(session)

    def stated(name: str, old: bytes, new: bytes) -> dict[str, Entry]:
        data = bytes(own[name].data).replace(old, new)
        assert data != bytes(own[name].data)
        return {**own, name: Entry(name, "U8", (len(data),), data)}

    load_state(session, stated("document/optimizer", b'["fused",null]', b'["fused",7]'))
    load_state(session, own)
    with pytest.raises(InvalidInput, match="the job's scheduler does not take what is stated: TypeError"):
        load_state(session, stated("document/scheduler", b'["lr_lambdas",[null]]', b'["lr_lambdas",[7]]'))
    load_state(session, own)
    session.close()
