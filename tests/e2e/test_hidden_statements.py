"""What one record that blames nobody must not hide: a log that an auditor was not served, and false records of other steps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallystick.commit.encoding import hex_float
from tallystick.dispute.verdict import LogObjection
from tallystick.errors import JobFailed, StepFailed
from tallystick.execution.job import JobSource, find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import StepOutcome
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, encode_decision
from tallystick.numerics.policy import find_policy
from tallystick.roles import acceptance, comparison, step_judge, trainer
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import claim_other_data, forge, honest_defence

JOB = (Path(__file__).parent / "honest_jobs" / "drawing.py").read_text()


def placed(place: Path) -> tuple[JobSource, RunDirectory, RunDirectory]:
    """The job below a folder, and directories for its run and the auditor's claim."""
    (place / "job.py").write_text(JOB)
    return find_source(str(place / "job.py")), RunDirectory(place / "run"), RunDirectory(place / "claim")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of data that every machine computes a little otherwise, whose first record states a digest that nobody has."""
    path = tmp_path / "job.py"
    path.write_text(JOB)
    run = RunDirectory(tmp_path / "run")
    policy = find_policy("fp32", recalibrate_every=4)
    record(Order(find_source(str(path)), {}, policy, steps=8, checkpoint_every=4), run)
    forge(run, lambda each: replace(each, batch="ab" * 32) if each.step == 0 else each)
    return run


def test_an_auditor_that_was_served_a_spoilt_log_says_so_whatever_records_state(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Its own later states have no noise measured at step 4: held against it, they would convict it."""
    source, served, claim = find_source(str(tmp_path / "job.py")), tmp_path / "served", tmp_path / "claim"
    forge(run, lambda each: replace(each, fingerprint="ab" * 8) if each.step == 1 else each)
    shutil.copytree(run.path, served)
    log = RunDirectory(served).log_path(4)
    log.write_bytes(bytes([log.read_bytes()[0] ^ 255]) + log.read_bytes()[1:])

    written = write_claim(RunDirectory(served), source, RunDirectory(claim))
    found = dispute(run, RunDirectory(claim), source, defence=honest_defence(source))

    assert isinstance(written, AuditorClaim)
    assert written.objection is not None
    assert (written.first_deviation, written.objection.step, written.objection.site) == (0, 4, "log")
    assert (found.loser, found.step) == ("trainer", 1), found.reason


@pytest.mark.parametrize("what", ["rate", "loss", "no loss"])
def test_data_that_noise_explains_excuse_no_other_rate_and_no_loss_far_away(
    run: RunDirectory, what: str, tmp_path: Path
) -> None:
    source, claim = find_source(str(tmp_path / "job.py")), RunDirectory(tmp_path / "claim")

    def misstated(each: StepRecord) -> StepRecord:
        if each.step < 1:
            return each
        if "loss" in what:
            return replace(each, loss=None if what == "no loss" else hex_float(0.001))
        schedule = tuple((group, name, hex_float(0.5)) for group, name, _ in each.schedule)
        return replace(each, schedule=schedule)

    assert audit(run, source).verdict == "cannot_reproduce"
    forge(run, misstated)
    assert audit(run, source).verdict == "mismatch"
    write_claim(run, source, claim)
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert (found.loser, found.step) == ("trainer", 1), found.reason


@pytest.mark.parametrize(("digests", "is_apart"), [((0,), False), ((0, 4), False), ((0,), True)])
def test_data_that_noise_explains_excuse_no_grid_that_the_policy_does_not_have(
    digests: tuple[int, ...], is_apart: bool, tmp_path: Path
) -> None:
    """Nor does an objection to one keep an auditor from saying nothing of states behind a log that it was not served."""
    path = tmp_path / "job.py"
    path.write_text(JOB)
    source, run, served = find_source(str(path)), RunDirectory(tmp_path / "run"), tmp_path / "served"
    policy = find_policy("fp32", recalibrate_every=4)

    honest = Session.recording_context

    def coarser(session: Session, before: GridTable) -> RecordingContext:
        made = honest(session, before)
        wide = {
            at: replace(grid, band=min(grid.band + 6, -1), floor=grid.floor + 6)
            if at[0] == Kind.GRADIENT and not is_noise_only(grid) and grid.floor <= -6 else grid
            for at, grid in made.table.sites.items()
        }  # fmt: skip
        made.table, made._grids = GridTable(wide), wide  # pyright: ignore[reportPrivateUsage]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "recording_context", coarser)
        record(Order(source, {}, policy, steps=8, checkpoint_every=4), run)
    forge(run, lambda each: replace(each, batch="ab" * 32) if each.step in digests else each)
    if is_apart:
        forge(run, lambda each: replace(each, fingerprint="ab" * 8) if each.step == 0 else each)
    shutil.copytree(run.path, served)
    log = RunDirectory(served).log_path(4)
    log.write_bytes(bytes([log.read_bytes()[0] ^ 255]) + log.read_bytes()[1:])

    assert audit(run, source).verdict in ("mismatch", "log_violation")
    claim = RunDirectory(tmp_path / "claim")
    write_claim(RunDirectory(served), source, claim)
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert found.loser == "trainer", found.reason


def test_sixteen_records_that_blame_nobody_hide_none_that_is_false(tmp_path: Path) -> None:
    source, run, claim = placed(tmp_path)
    record(Order(source, {}, find_policy("fp32"), steps=24, checkpoint_every=8), run)

    def misstated(each: StepRecord) -> StepRecord:
        if each.step >= 16:
            return replace(each, loss=hex_float(0.001), fingerprint="ab" * 8)
        return replace(each, batch="ab" * 32, loss=hex_float(1.1 * float.fromhex(str(each.loss))))

    forge(run, misstated)
    write_claim(run, source, claim)
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert (found.loser, found.step) == ("trainer", 16), found.reason


def test_a_job_that_fails_where_noise_is_measured_ends_no_audit_and_no_dispute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run, claim = placed(tmp_path)
    order = Order(source, {}, find_policy("fp32"), steps=8, checkpoint_every=4)
    claim_other_data(order, run, lambda batch, step: (batch(step)[0], (batch(step)[1] + 1) % 4))

    def failing(*given: object, **more: object) -> None:
        raise JobFailed("job: step 5: loss raised RuntimeError: no probability")

    for where in (comparison, acceptance):
        monkeypatch.setattr(where, "calibrate", failing)
    assert audit(run, source).verdict in ("mismatch", "cannot_reproduce")
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert (found.loser, found.outcome) in (("trainer", "fault"), ("none", "cannot_reproduce")), found.reason


@pytest.mark.parametrize(
    ("fails", "expected"),
    [((True, True, True), True), ((True, False, True), False), ((True, True, False), False)],
)
def test_a_step_has_to_fail_under_a_log_each_time_before_that_is_the_logs(
    fails: tuple[bool, ...],
    expected: bool,
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that fails now and then does so without a log too."""
    transcript, source = run.load_transcript(), find_source(str(tmp_path / "job.py"))
    replay = open_replay(transcript.specification, source)
    assert isinstance(replay, Replay)
    follow, left = replay.follow, list(fails)

    def sometimes(record: StepRecord, frame: bytes) -> object:
        if left.pop(0):
            raise StepFailed("now and then")
        return follow(record, frame)

    monkeypatch.setattr(replay, "follow", sometimes)
    first = run.load_checkpoint(0)
    frame = run.load_frames(transcript, 0, 1)[0]
    assert (
        replay.ends_without(transcript.record(0), frame, lambda: load_state(replay.session, first))
        is expected
    )
    replay.session.close()


@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_job_that_fails_every_other_time_or_third_convicts_nobody_by_its_log(
    period: int, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcript, source = run.load_transcript(), find_source(str(tmp_path / "job.py"))
    replay = open_replay(transcript.specification, source)
    assert isinstance(replay, Replay)
    draw, calls = replay.job.batch, 0

    def failing(step: int) -> object:
        nonlocal calls
        calls += 1
        if calls % period == 1:
            raise RuntimeError("now and then")
        return draw(step)

    monkeypatch.setattr(replay.job, "batch", failing)
    first, frame = run.load_checkpoint(0), run.load_frames(transcript, 0, 1)[0]

    assert not replay.ends_without(transcript.record(0), frame, lambda: load_state(replay.session, first))
    replay.session.close()


@pytest.mark.parametrize(
    ("what", "named"), [("loss", "loss is"), ("rate", "hyper-parameter lr"), ("nothing", "")]
)
def test_rates_that_are_near_enough_hide_no_record_that_is_false(
    what: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than a judge looks at are trained at rates that differ in last bits, as other libraries compute them."""
    (source, run, claim), own = placed(tmp_path), trainer.run_step

    def run_step(session: Session, *given: Any) -> StepOutcome:
        if session.step < 16:
            session.optimizer.param_groups[0]["lr"] *= 1 + 2.0**-38
        return own(session, *given)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "run_step", run_step)
        record(Order(source, {}, find_policy("fp32"), steps=24, checkpoint_every=8), run)

    def misstated(each: StepRecord) -> StepRecord:
        if each.step < 20 or what == "nothing":
            return each
        if what == "loss":
            return replace(each, loss=hex_float(0.001))
        schedule = tuple((g, n, hex_float(0.01) if n == "lr" else value) for g, n, value in each.schedule)
        return replace(each, schedule=schedule)

    forge(run, misstated)
    write_claim(run, source, claim)
    pairs = zip(run.load_transcript().records, claim.load_transcript().records, strict=True)
    assert sum(ours.schedule != theirs.schedule for ours, theirs in pairs) >= 15
    found = dispute(run, claim, source, defence=honest_defence(source))
    loser, step = ("none", None) if what == "nothing" else ("trainer", 20)
    assert (found.loser, found.step) == (loser, step), found.reason
    assert named in found.reason


def test_records_that_nobody_looked_at_are_not_agreed_on(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge who is at the end of its patience says so."""
    source, claim = find_source(str(tmp_path / "job.py")), RunDirectory(tmp_path / "claim")
    forge(run, lambda each: replace(each, loss=hex_float(0.001)) if each.step == 6 else each)
    write_claim(run, source, claim)
    monkeypatch.setattr(step_judge, "MOST_RECORDS", 1)
    monkeypatch.setattr(step_judge, "excusable", lambda ours, theirs: ())  # in the order of steps
    monkeypatch.setattr(step_judge.StepJudge, "who_misstates", lambda judge, step: None)
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert (found.loser, found.outcome, found.clears) == ("none", "cannot_reproduce", False), found.reason
    assert "nobody misstates" in found.reason


def test_a_doubtful_objection_hides_no_log_that_cannot_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run, claim = placed(tmp_path)
    own, steps = RecordingContext.finish, count()

    def finish(context: RecordingContext) -> bytes:
        step = next(steps)
        if step == 0:  # a decision that the step does not have
            extra = encode_decision(-10, SparseEntries(4, 1, np.asarray([0]), np.asarray([1])))
            context.payloads[SiteAddress(context.rank, 0, Kind.DECISION, 7)] = extra
        frame = own(context)
        return b"nobody reads this" if step == 1 else frame

    with monkeypatch.context() as patch:
        patch.setattr(RecordingContext, "finish", finish)
        record(Order(source, {}, find_policy("fp32"), steps=8, checkpoint_every=4), run)
    forge(run, lambda each: replace(each, batch="ab" * 32) if each.step == 0 else each)

    written = write_claim(run, source, claim)

    assert isinstance(written, AuditorClaim)
    assert written.objection is not None
    assert (written.objection.step, written.objection.site) == (1, "log")
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert (found.loser, found.step) == ("trainer", 1), found.reason


@pytest.mark.parametrize(("has_noisy_data", "loser"), [(True, "none"), (False, "auditor")])
def test_an_auditor_whose_own_data_are_noise_is_not_convicted_of_its_objection(
    has_noisy_data: bool, loser: str, tmp_path: Path
) -> None:
    """It saw another step, in which the log may break a rule."""
    source, run, claim = placed(tmp_path)
    record(Order(source, {}, find_policy("fp32"), steps=8, checkpoint_every=4), run)
    write_claim(run, source, claim)
    if has_noisy_data:
        forge(claim, lambda each: replace(each, batch="ab" * 32) if each.step == 6 else each)
    objection = LogObjection(
        run.load_transcript().root().hex(), 6, "gradient of net.weight", 0, "past half a quantum"
    )
    claim.write_document(claim.objection_path, objection.encode())
    found = dispute(run, claim, source, defence=honest_defence(source))
    assert (found.loser, found.clears) == (loser, loser == "auditor"), found.reason
