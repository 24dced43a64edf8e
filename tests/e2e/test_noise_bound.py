"""What noise is said to explain is held against what noise does: a trainer whose sites are as loud as their bands is no freer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallystick.commit.state import Entry
from tallystick.dispute.terms import Party
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.job import Batch, Job, JobSource, find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.execution.step import batch_digest
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles import noise_bound, step_judge, trainer
from tallystick.roles.audit_report import EVERYTHING, Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.noise_bound import farther_than_noise
from tallystick.roles.replay import open_replay
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge, honest_defence, tampered

SETTINGS = {"width": "8", "batch": "16"}
LEAST_BAND = -18  # of the policy, which a trainer may declare whatever its noise is
FIRST = 1  # step that is not taken


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that holds every site to be as loud as its band: what its processor has is another matter."""
    told = Deviation(0, "cannot_reproduce", EVERYTHING, None, "noise", "less", "noise")
    monkeypatch.setattr(step_judge, "find_noisy_sites", lambda *_: [told])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A trainer that declares the narrowest bands, below its noise; the result ends that."""
    own = Session.recording_context

    def narrower(session: Session, before: GridTable) -> RecordingContext:
        made, sites = own(session, before), {}
        for at, grid in made.table.sites.items():
            sites[at] = grid
            if at[0] == Kind.GRADIENT and not is_noise_only(grid):
                band = max(grid.band - 4, LEAST_BAND)
                sites[at] = replace(grid, band=band, floor=grid.floor - (grid.band - band))
        made.table, made._grids = GridTable(sites), sites  # pyright: ignore[reportPrivateUsage]
        return made

    monkeypatch.setattr(Session, "recording_context", narrower)
    return lambda: monkeypatch.setattr(Session, "recording_context", own)


def ordered() -> tuple[JobSource, Order]:
    """The job, and an order of eight steps."""
    source = find_source("digits")
    return source, Order(source, SETTINGS, find_policy("fp32"), steps=8, checkpoint_every=4)


def idle(job: Job) -> None:
    """Take no step from ``FIRST`` on, and leave the rates as they are."""
    rates: list[float] = []
    own, now = job.batch, [0]

    def batch(step: int) -> Batch:
        now[0] = step
        return own(step)

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if now[0] < FIRST else 1e-30

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    job.batch = batch
    job.optimizer.register_step_pre_hook(before)
    job.optimizer.register_step_post_hook(after)


def idled(tmp_path: Path, narrow: Callable[[], None]) -> tuple[JobSource, RunDirectory, RunDirectory]:
    """The job, a run whose trainer took no step from ``FIRST`` on and states the job's rates, and where a claim goes."""
    run, claim, honest = (RunDirectory(tmp_path / name) for name in ("run", "claim", "honest"))
    source, order = ordered()
    record(tampered(order, idle), run)
    record(order, honest)
    narrow()
    stated = honest.load_transcript()
    forge(run, lambda each: replace(each, schedule=stated.record(each.step).schedule))
    return source, run, claim


def test_a_step_that_was_not_taken_is_no_noise(tmp_path: Path, narrow: Callable[[], None]) -> None:
    """Control: without the bound a site that is as loud as its band excuses it."""
    source, run, claim = idled(tmp_path, narrow)
    assert audit(run, source).verdict in ("cannot_reproduce", "mismatch")
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    found = dispute(run, claim, source, level="steps")
    assert (found.loser, found.step) == ("trainer", FIRST), found.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_judge, "farther_than_noise", lambda *_: None)
        assert dispute(run, claim, source, level="steps").outcome == "cannot_reproduce"


def test_noise_that_reaches_a_state_is_nobodys_fault(
    tmp_path: Path, narrow: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with an honest trainer whose machine is several times as noisy as machines are."""
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    source, order = ordered()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Jitter", partial(Jitter, units=12.0))
        record(replace(order, jitter=True), run)
    narrow()
    assert audit(run, source).verdict != "match"
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    found = dispute(run, claim, source, level="steps")
    assert (found.loser, found.outcome) == ("none", "cannot_reproduce"), found.reason
    assert not found.clears


def test_an_auditors_noise_excuses_no_trainer(
    tmp_path: Path, narrow: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's state is false whatever the auditor's is, which nobody asks for then."""
    source, run, claim = idled(tmp_path, narrow)
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    asked: list[str] = []
    own = step_judge.StepJudge._find_fault  # pyright: ignore[reportPrivateUsage]

    def finding(judge: step_judge.StepJudge, party: Party, *of: Any) -> Deviation | None:
        asked.append(party)
        fault = own(judge, party, *of)
        return (
            replace(fault, about="state")
            if fault is not None
            else Deviation(1, "mismatch", "x", 0, "1", "2", "state")
        )

    monkeypatch.setattr(step_judge.StepJudge, "_find_fault", finding)
    monkeypatch.setattr(step_judge.StepJudge, "_is_far", lambda _, party, *of: party == "trainer")
    found = dispute(run, claim, source, level="steps")
    assert (found.loser, set(asked)) == ("trainer", {"trainer"}), found.reason


def test_what_noise_does_not_move_is_what_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry too many, and an optimizer's document; where a repetition has it too, noise may have led there."""
    monkeypatch.setattr(noise_bound, "REPEATED", 4)
    source, order = ordered()
    run = RunDirectory(tmp_path / "run")
    record(replace(order, steps=1), run)
    transcript, before, own = run.load_transcript(), run.load_checkpoint(0), run.load_checkpoint(1)
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    frames = run.load_frames(transcript, 0, 1)
    name, settings = "optimizer/conv1.weight/kept", own["document/optimizer"]
    more = own | {name: Entry(name, "I64", (1,), bytes(8))}
    other = own | {"document/optimizer": replace(settings, data=bytes(settings.data).replace(b"0", b"1"))}

    def far(stated: dict[str, Entry]) -> str | None:
        return farther_than_noise(replay, transcript, frames, before, stated)

    assert [far(each) for each in (own, more, other)] == [None, name, "document/optimizer"]
    repeated = noise_bound._repeated  # pyright: ignore[reportPrivateUsage]

    def moving(*of: Any) -> Any:
        found = repeated(*of)
        return found if of[-1] is None or found is None else more

    monkeypatch.setattr(noise_bound, "_repeated", moving)
    assert far(more) is None

    def counted(state: Any, *counts: int) -> dict[str, Entry]:
        return {**state, "model/usage": Entry("model/usage", "I64", (3,), np.array(counts, "<i8").tobytes())}

    def counting(*of: Any) -> Any:
        found = repeated(*of)
        return found if found is None else counted(found, 5 if of[-1] is None else 6, 6, 2**53)

    monkeypatch.setattr(noise_bound, "_repeated", counting)
    cases = [(5, 6, 2**53), (7, 6, 2**53), (8, 6, 2**53), (5, 7, 2**53), (5, 6, 2**53 + 1), (10**9, 6, 2**53)]
    name = "model/usage"
    assert [far(counted(own, *counts)) for counts in cases] == [None, None, name, name, name, name]
    replay.session.close()


@pytest.mark.parametrize("answers", [False, True])
def test_a_log_that_cannot_be_read_hides_no_steps_before_it(tmp_path: Path, answers: bool) -> None:
    """All labels are false, and the judge cannot have the states within the segment, whose last log has a byte too many.

    A trainer that answers itself has to open the first of them, whatever its log breaks.
    """
    source, order = ordered()
    run, claim, finish = (
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
        RecordingContext.finish,
    )
    honest, written = source.build(SETTINGS, order.seed), list[bytes]()

    def other(job: Job) -> None:
        job.batch = lambda step: (honest.batch(step)[0], (honest.batch(step)[1] + 1) % 10)

    def longer(made: RecordingContext) -> bytes:
        written.append(finish(made))
        return written[-1] + b"\0" * (len(written) == 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordingContext, "finish", longer)
        record(tampered(replace(order, steps=4), other), run)
    forge(run, lambda each: replace(each, batch=batch_digest(honest.batch(each.step))))
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    found = dispute(run, claim, source, level="steps", defence=honest_defence(source) if answers else None)
    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", 0 if answers else 3), found.reason
    assert ("is not handed over" if answers else "the log cannot be used") in found.reason
