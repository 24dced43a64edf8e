"""Optimizers with portable arithmetic: which they are, that they leave torch's state, and that nothing of it is logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.job import Job
from tallystick.execution.portable_optimizers import why_not_portable
from tallystick.execution.session.session import Session
from tallystick.execution.session.state import FloatingState
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.numerics.log import (
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    decode_frame,
    encode,
    encode_frame,
)
from tallystick.numerics.optimizers import Marks
from tallystick.numerics.policy import find_policy
from tallystick.roles.acceptable_states import AcceptableStates
from tallystick.roles.auditor import audit
from tallystick.roles.replay import Replay
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])


class Mine(torch.optim.AdamW):
    """A subclass may compute anything."""


Make = Callable[[Any], torch.optim.Optimizer]
PORTABLE: dict[str, Make] = {
    "adam": lambda w: torch.optim.Adam(w, weight_decay=0.1),
    "adamw": torch.optim.AdamW,
    "adamw foreach": lambda w: torch.optim.AdamW(w, foreach=True),
    "sgd": lambda w: torch.optim.SGD(w, lr=1),
    "momentum": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True),
}
GENERAL: dict[str, tuple[Make, str]] = {
    "subclass": (Mine, "Mine is not torch's own"),
    "rmsprop": (torch.optim.RMSprop, "RMSprop is not torch's own"),
    "amsgrad": (lambda w: torch.optim.Adam(w, amsgrad=True), "group 0 has amsgrad switched on"),
    "maximize": (lambda w: torch.optim.SGD(w, maximize=True), "group 0 has maximize switched on"),
    "fused": (lambda w: torch.optim.AdamW(w, fused=True), "group 0 has fused switched on"),
    "differentiable": (lambda w: torch.optim.SGD(w, differentiable=True), "has differentiable switched on"),
    "tensor rate": (lambda w: torch.optim.SGD(w, lr=torch.tensor(0.1)), "group 0 has lr = tensor"),
}


@pytest.mark.parametrize("name", PORTABLE)
def test_torchs_adam_adamw_and_sgd_are_portable(name: str) -> None:
    assert why_not_portable(PORTABLE[name]([nn.Parameter(torch.ones(2))])) is None


@pytest.mark.parametrize("name", GENERAL)
def test_what_is_not_portable_says_why(name: str) -> None:
    make, reason = GENERAL[name]
    found = why_not_portable(make([nn.Parameter(torch.ones(2))]))
    assert found is not None
    assert reason in found


def trained_job(make: Make) -> Job:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1))
    data = torch.randn(16, 12, generator=torch.Generator().manual_seed(5))
    return Job(
        model=model,
        optimizer=make(model.parameters()),
        batch=lambda step: data * (step + 1),
        loss=lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean(),
        steps=9,
    )


@BOTH
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "momentum"])
def test_the_state_has_the_form_of_torchs_own(name: str, policy: str, record_run: Any) -> None:
    """Same keys, shapes and dtypes as after a plain step; torch goes on from its state_dict."""
    plain = trained_job(PORTABLE[name])
    plain.loss(plain.model, plain.batch(0)).backward()
    plain.optimizer.step()
    run = record_run(lambda: trained_job(PORTABLE[name]), policy, 1)
    run.session.close()

    def form(optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[Any, ...]]]:
        states = optimizer.state_dict()["state"].values()
        return [{k: (v.shape, v.dtype, v.is_contiguous()) for k, v in held.items()} for held in states]

    assert form(run.job.optimizer) == form(plain.optimizer)
    plain.optimizer.load_state_dict(run.job.optimizer.state_dict())
    plain.optimizer.step()


@BOTH
def test_a_portable_run_has_no_state_site_and_a_general_one_has(policy: str, record_run: Any) -> None:
    make = lambda: trained_job(torch.optim.AdamW)  # noqa: E731
    runs = {how: record_run(make, policy, 9, how) for how in ("portable", "general")}

    def kinds(how: str) -> set[int]:
        return {kind for kind, _ in runs[how].session.table.sites}

    assert Kind.STATE not in kinds("portable")
    assert Kind.STATE in kinds("general")
    assert not any(
        site.kind == Kind.STATE for frame in runs["portable"].frames for site, _ in decode_frame(frame)
    )
    assert runs["portable"].roots != runs["general"].roots
    losses = [[outcome.loss for outcome in runs[how].outcomes] for how in ("portable", "general")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@BOTH
def test_a_state_entry_in_a_portable_log_is_a_violation(policy: str, record_run: Any, open_job: Any) -> None:
    make = lambda: trained_job(torch.optim.AdamW)  # noqa: E731
    run = record_run(make, policy, 1)
    entry = encode(SparseEntries(240, 1, np.array([3]), np.array([1])))
    forged = Frame.of({**dict(decode_frame(run.frames[0])), SiteAddress(0, 0, int(Kind.STATE), 0): entry})
    honest, lying = (
        judged(make, run, open_job, policy, frame) for frame in (run.frames[0], encode_frame(forged))
    )

    assert honest.violations == []
    assert [violation.rule for violation in lying.violations] == [
        "the log has a site that the step does not have"
    ]


def judged(make: Callable[[], Job], run: Any, open_job: Any, policy: str, frame: bytes) -> AcceptableStates:
    """What a judge accepts after the first step."""
    job = make()
    session: Session = open_job(job, find_policy(policy, optimizer_arithmetic="portable"))
    session.table = run.initial
    return AcceptableStates(Replay(job, session), frame)


def with_element(entry: Entry, at: int, value: float) -> Entry:
    values = np.frombuffer(bytes(entry.data), dtype="<f4").copy()
    values[at] = value
    return Entry(entry.name, entry.dtype, entry.shape, values.tobytes())


def test_a_judge_accepts_one_state_for_each_choice_of_the_gradient(record_run: Any, open_job: Any) -> None:
    """A gradient near a boundary may go either way, with its own state; a state one ulp off is not acceptable."""
    make = lambda: trained_job(torch.optim.AdamW)  # noqa: E731
    run = record_run(make, "fp32", 1)
    accepted = judged(make, run, open_job, "fp32", run.frames[0])
    assert accepted.find_fault(accepted.entries) is None
    near = {
        place[1]: found.index
        for place, found in accepted.values.items()
        if place[0] == Kind.GRADIENT and found.index.size
    }
    assert near, "no gradient lies near a boundary: nothing is shown"
    position, at = next((position, int(index[0])) for position, index in near.items())
    name = accepted.parameters[position]
    subjects = [f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"]

    other = dict(accepted.entries)
    for subject in subjects:
        value = np.frombuffer(accepted.other_entries[subject].data, dtype="<f4")[at]
        other[subject] = with_element(other[subject], at, value)
    assert any(other[s].data != accepted.entries[s].data for s in subjects)
    assert accepted.find_fault(other) is None

    for subject in subjects:
        value = np.frombuffer(accepted.entries[subject].data, dtype="<f4")[at]
        moved = with_element(accepted.entries[subject], at, np.nextafter(value, np.float32(np.inf)))
        fault = accepted.find_fault({**accepted.entries, subject: moved})
        assert fault is not None
        assert fault.subject == subject


def test_portable_arithmetic_is_refused_where_there_is_none(open_job: Any) -> None:
    stated = find_policy("fp32", optimizer_arithmetic="portable")
    with pytest.raises(Nondeterminism, match=r"is to be portable, but RMSprop is not torch's own"):
        open_job(trained_job(torch.optim.RMSprop), stated)
    with pytest.raises(InvalidInput, match=r"arithmetic fast: unknown; known are auto, portable, general"):
        find_policy("fp32", optimizer_arithmetic="fast")


def test_an_option_switched_on_later_stops_the_run(record_run: Any) -> None:
    def make() -> Job:
        job = trained_job(torch.optim.AdamW)
        job.after_step = lambda step: job.optimizer.param_groups[0].update(maximize=step >= 1)
        return job

    record_run(make, "fp32", 2)
    with pytest.raises(Nondeterminism, match=r"step 2: .* stated to be portable, but group 0 has maximize"):
        record_run(make, "fp32", 3)


def test_a_scaler_that_leaves_its_work_to_the_optimizer_is_refused(record_run: Any) -> None:
    def make() -> Job:
        job = trained_job(torch.optim.AdamW)
        job.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
        return job

    with pytest.raises(Nondeterminism, match="step 0: a gradient scaler leaves the scaling"):
        record_run(make, "fp32", 1)


@BOTH
def test_a_state_that_overflows_is_named(policy: str, record_run: Any) -> None:
    def make() -> Job:
        job = trained_job(lambda w: torch.optim.SGD(w, lr=1e30))
        job.loss = lambda net, x: net(x).mean() * 1e12
        return job

    with pytest.raises(Nondeterminism, match=r"^step 0: \S+weight/parameter: element \d+ is not finite"):
        record_run(make, policy, 1)


@BOTH
def test_tensors_of_another_layout_or_dtype_are_made_ours(
    policy: str, open_job: Any, record_run: Any
) -> None:
    """A state of the user's own, in float64 and transposed, is taken up as float32 values."""

    def make() -> Job:
        job = trained_job(lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.9))
        weight = job.model[0].weight  # type: ignore[index]
        job.optimizer.state[weight]["momentum_buffer"] = torch.full((12, 20), 0.5, dtype=torch.float64).t()
        return job

    run = record_run(make, policy, 1)
    held = run.job.optimizer.state[run.job.model[0].weight]["momentum_buffer"]
    assert (held.dtype, held.is_contiguous(), tuple(held.shape)) == (torch.float32, True, (20, 12))


def test_a_run_says_which_arithmetic_it_has_and_is_audited_with_it(zoo: Any, tmp_path: Path) -> None:
    settings = {"model": "plain", "optimizer": "adamw", "steps": "6"}
    roots: dict[str, str] = {}
    for how, stated in (("auto", "portable"), ("portable", "portable"), ("general", "general")):
        directory = RunDirectory(tmp_path / how)
        order = Order(zoo, settings, find_policy("fp32", optimizer_arithmetic=how), checkpoint_every=3)
        roots[how] = record(order, directory).final_state
        assert directory.load_specification().policy.parameters["optimizer_arithmetic"] == stated
        assert audit(directory, zoo, jitter=True).verdict == "match"
    assert roots["auto"] == roots["portable"] != roots["general"]

    other = Order(zoo, settings, find_policy("fp32", optimizer_arithmetic="general"), checkpoint_every=3)
    with pytest.raises(InvalidInput, match="--resume: policy of the run is"):
        record(other, RunDirectory(tmp_path / "auto"), resume=True)


@BOTH
def test_going_on_from_a_loaded_state_is_going_on(policy: str, record_run: Any, open_job: Any) -> None:
    make = lambda: trained_job(PORTABLE["momentum"])  # noqa: E731
    run = record_run(make, policy, 4)
    entries = {entry.name: entry for entry in state_entries(run.session)}
    again = open_job(make(), find_policy(policy))
    load_state(again, entries)
    assert {e.name: bytes(e.data) for e in state_entries(again)} == {
        name: bytes(e.data) for name, e in entries.items()
    }


@BOTH
@pytest.mark.parametrize("name", PORTABLE)
def test_the_closing_fingerprint_is_that_of_the_state(
    name: str, policy: str, record_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put together from what the optimizer's pass took and a pass over the rest."""
    seen: list[tuple[int, int, int]] = []
    honest = FloatingState.closing_fingerprint

    def noting(state: FloatingState, marks: Marks | None) -> int:
        taken = 0 if marks is None else len(marks.held)
        found = honest(state, marks)
        seen.append((found, state.fingerprint(), taken))
        return found

    monkeypatch.setattr(FloatingState, "closing_fingerprint", noting)
    record_run(lambda: trained_job(PORTABLE[name]), policy, 3)
    assert all(found == whole for found, whole, _ in seen)
    assert len({found for found, _, _ in seen}) == 3, "control: the state moves"
    assert seen[-1][2] >= 4, "the four parameters, at least, are not read again"
