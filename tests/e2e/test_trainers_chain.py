"""What a step that convicts nobody must not hide: false steps behind it, which the trainer's own states show."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tallystick.execution.rounding.context as recording
from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, HeldState, hold
from tallystick.dispute.terms import Ruling
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.errors import Mismatch
from tallystick.execution.job import Batch, Job, JobSource, find_source
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.execution.step import StepOutcome, batch_digest
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles import log_judge, panel
from tallystick.roles.audit_report import Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.chain_judge import ChainJudge
from tallystick.roles.claim import AuditorClaim, _ClaimWriter, write_claim  # pyright: ignore[reportPrivateUsage]
from tallystick.roles.costs import Ledger
from tallystick.roles.judge import dispute
from tallystick.roles.log_judge import LogRuling
from tallystick.roles.panel import Panel, PanelQuestion
from tallystick.roles.referee import DisputeResult
from tallystick.roles.replay import open_replay
from tallystick.roles.step_judge import StepJudge
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge, forge_state, honest_defence, record_turned, tampered

DRAWING = Path(__file__).parent / "honest_jobs" / "drawing.py"
SETTINGS = {"width": "8", "batch": "16"}
EVERY = 4  # steps of a segment
ENDS = 3  # the step that parts the runs: the last of its segment, so that its state is committed to


def cheated(
    place: Path, false_from: int, *, keeps_entry: bool, turned: Sequence[int] = (ENDS,)
) -> tuple[JobSource, RunDirectory]:
    """A run in which one element of some steps goes the other way, and all labels from ``false_from`` on are others."""
    run = RunDirectory(place / "run")
    order = Order(find_source("digits"), SETTINGS, find_policy("fp32"), steps=16, checkpoint_every=EVERY)
    record_turned(order, run, turned, false_from, keeps_entry=keeps_entry)
    return order.source, run


def disputed(source: JobSource, run: RunDirectory, claim: RunDirectory) -> DisputeResult:
    """The dispute that follows the auditor's claim, and what its verdict rests on, checked as a reader would."""
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    found = dispute(run, claim, source, level="steps", defence=honest_defence(source))
    ours, theirs = run.load_transcript(), claim.load_transcript()
    if found.outcome == "fault":
        said = verify_verdict(
            parse_verdict(found.encode()), ours.statement(), theirs.statement(), ours.specification
        )
        assert ("the trainer's own steps" in said) == (found.chain is not None)
    return found


@pytest.mark.parametrize("first", [4, 9])
def test_a_step_that_either_value_explains_hides_no_false_step_behind_it(first: int, tmp_path: Path) -> None:
    source, run = cheated(tmp_path, first, keeps_entry=False)
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", first), found.reason
    assert found.chain is not None
    assert not found.clears
    ours = run.load_transcript()
    statements = ours.statement(), RunDirectory(tmp_path / "claim").load_transcript().statement()
    at_parting = replace(parse_verdict(found.encode()), step=ENDS, chain=ours.prove_step(ENDS))
    with pytest.raises(Mismatch, match="moves lead to step 3, and it rests on the trainer's own"):
        verify_verdict(at_parting, *statements, ours.specification)
    bare = replace(parse_verdict(found.encode()), ends=None, moves=())
    said = verify_verdict(bare, statements[0], statements[0], ours.specification)
    assert said.endswith("both parties published the same run")


def test_a_conviction_behind_two_steps_that_convict_nobody_is_one_of_a_fault(tmp_path: Path) -> None:
    source, run = cheated(tmp_path, 9, keeps_entry=False, turned=(3, 7))
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", 9), found.reason
    assert found.accuses


def test_other_arithmetics_judge_the_trainers_own_steps_without_the_auditor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has no state there: one site as loud as its band excused that, and so the trainer."""
    monkeypatch.setattr(StepJudge, "_find_unopened", lambda *_: None)  # which would convict by bytes
    asked: list[PanelQuestion] = []
    monkeypatch.setattr(panel, "find_dissent", lambda question, *_: asked.append(question))
    source, run = cheated(tmp_path, 4, keeps_entry=False)
    assert disputed(source, run, RunDirectory(tmp_path / "claim")).loser == "trainer"
    assert [(each.kind, each.step, each.parties) for each in asked][-1] == ("state", 4, ["trainer"])


def test_a_step_that_either_value_explains_and_nothing_behind_it_convicts_nobody(tmp_path: Path) -> None:
    source, run = cheated(tmp_path, 16, keeps_entry=False)
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    assert (found.loser, found.outcome, found.step) == ("none", "both_acceptable", ENDS), found.reason
    assert found.clears


def test_a_trainers_state_lies_on_the_side_that_its_own_log_names(tmp_path: Path) -> None:
    source, run = cheated(tmp_path, 16, keeps_entry=True)
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", ENDS), found.reason
    assert found.chain is None


def test_what_is_not_found_out_behind_a_step_that_either_value_explains_clears_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = cheated(tmp_path, 16, keeps_entry=False)
    monkeypatch.setattr(
        ChainJudge, "find_fault", lambda self, parted: self.doubts.append("step 5: who knows")
    )
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    assert (found.loser, found.outcome, found.step) == ("none", "cannot_reproduce", ENDS)
    assert "of the steps behind it: step 5: who knows" in found.reason
    assert not found.clears


@pytest.mark.parametrize("first", [0, EVERY])
def test_one_objection_hides_no_grid_that_the_policy_does_not_have(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auditor claims another log of a step to which it would object, had it not objected to one where nothing is found."""
    source, run, claim = (
        find_source("digits"),
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
    )
    own = Session.recording_context

    def coarser(session: Session, before: GridTable) -> recording.RecordingContext:
        made = own(session, before)
        wide = {
            at: replace(grid, band=min(grid.band + 6, -1), floor=grid.floor + 6)
            if at[0] == Kind.GRADIENT and not is_noise_only(grid) and grid.floor <= -6 and session.step > first else grid
            for at, grid in made.table.sites.items()
        }  # fmt: skip
        made.table, made._grids = GridTable(wide), wide  # pyright: ignore[reportPrivateUsage]
        return made

    def objecting(writing: _ClaimWriter, step: int, frame: bytes) -> StepOutcome | None:
        found = follow(writing, step, frame)
        if step == first:
            writing._object(step, "gradient of conv1.weight", 5, "lies at the edge")  # pyright: ignore[reportPrivateUsage]
            writing.has_objected = True
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "recording_context", coarser)
        policy = find_policy("fp32", recalibrate_every=4)
        record(Order(source, {"width": "8", "batch": "16"}, policy, steps=12, checkpoint_every=EVERY), run)
    follow = _ClaimWriter._follow  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(_ClaimWriter, "_follow", objecting)
    written = write_claim(run, source, claim)
    assert isinstance(written, AuditorClaim)
    assert written.objection is not None
    assert written.objection.step == first
    nobody = LogRuling(Ruling("none", "too near a limit"), "cannot_reproduce")
    own_rule = log_judge.rule_on_log
    monkeypatch.setattr(
        log_judge, "rule_on_log", lambda *of: nobody if of[3].step == first else own_rule(*of)
    )
    found = dispute(run, claim, source, level="steps", defence=honest_defence(source))
    assert (found.loser, found.outcome) == ("trainer", "fault"), found.reason
    assert found.step is not None
    assert found.step > first
    assert "the policy has" in found.reason


@pytest.mark.parametrize("has_grids", [True, False])
def test_data_that_noise_explains_hide_no_grid_behind_them_that_the_policy_does_not_have(
    tmp_path: Path, has_grids: bool
) -> None:
    """Such a log moves nothing: the auditor objects to it, and is in the trainer's state where its segment begins."""
    path = tmp_path / "job.py"
    path.write_text(DRAWING.read_text())
    source, run = find_source(str(path)), RunDirectory(tmp_path / "run")
    order = Order(source, {}, find_policy("fp32", recalibrate_every=4), steps=8, checkpoint_every=EVERY)
    honest, own = source.build({}, order.seed), Session.recording_context

    def coarser(session: Session, before: GridTable) -> recording.RecordingContext:
        made = own(session, before)
        wide = {
            at: replace(grid, band=min(grid.band + 6, -1), floor=grid.floor + 6)
            if at[0] == Kind.GRADIENT and not is_noise_only(grid) and grid.floor <= -6 and session.step == 7 else grid
            for at, grid in made.table.sites.items()
        }  # fmt: skip
        made.table, made._grids = GridTable(wide), wide  # pyright: ignore[reportPrivateUsage]
        return made

    def other(job: Job) -> None:
        def batch(step: int) -> Batch:
            x, y = honest.batch(step)
            return x * (1 + 2.0**-14) if step == 0 else x, y

        job.batch = batch

    with pytest.MonkeyPatch.context() as patch:
        if has_grids:
            patch.setattr(Session, "recording_context", coarser)
        record(tampered(order, other), run)
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    expected = ("trainer", "fault", 7) if has_grids else ("none", "cannot_reproduce", 0)
    assert (found.loser, found.outcome, found.step) == expected, found.reason


@pytest.mark.parametrize("first", [4, 8])
def test_data_that_noise_explains_hide_no_false_step_behind_them(first: int, tmp_path: Path) -> None:
    """Control: with honest steps behind it the same step convicts nobody, and clears nobody."""
    path = tmp_path / "job.py"
    path.write_text(DRAWING.read_text())
    source, run = find_source(str(path)), RunDirectory(tmp_path / "run")
    order = Order(source, {}, find_policy("fp32", recalibrate_every=4), steps=8, checkpoint_every=EVERY)
    honest = source.build({}, order.seed)

    def other(job: Job) -> None:
        def batch(step: int) -> Batch:
            x, y = honest.batch(step)
            return x * (1 + 2.0**-14) if step == 0 else x, (y + 1) % 4 if step >= first else y

        job.batch = batch

    record(tampered(order, other), run)
    forge(run, lambda each: replace(each, batch=batch_digest(honest.batch(each.step))) if each.step else each)
    found = disputed(source, run, RunDirectory(tmp_path / "claim"))
    expected = ("trainer", "fault", first) if first < 8 else ("none", "cannot_reproduce", 0)
    assert (found.loser, found.outcome, found.step) == expected, found.reason
    assert not found.clears


def test_a_claim_begins_each_segment_in_the_trainers_state(tmp_path: Path) -> None:
    """So where one segment is false and those behind it follow from its end, that one alone differs."""
    source, run, claim = (
        find_source("digits"),
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
    )
    settings = {"width": "8", "batch": "16"}
    order = Order(source, settings, find_policy("fp32"), steps=12, checkpoint_every=EVERY)
    honest = source.build(settings, order.seed)

    def other(job: Job) -> None:
        job.batch = lambda step: (honest.batch(step)[0], (honest.batch(step)[1] + (step == 5)) % 10)

    record(tampered(order, other), run)
    forge(run, lambda each: replace(each, batch=batch_digest(honest.batch(each.step))))
    assert [each.verdict for each in audit(run, source).segments] == ["match", "mismatch", "match"]
    written = write_claim(run, source, claim)
    assert isinstance(written, AuditorClaim)
    assert written.first_deviation == 5
    ours, theirs = run.load_transcript(), claim.load_transcript()
    same = [ours.record(step).state_root == theirs.record(step).state_root for step in (3, 7, 11)]
    assert same == [True, False, True]
    found = dispute(run, claim, source, level="steps", defence=honest_defence(source))
    assert (found.loser, found.step) == ("trainer", 5), found.reason


KEEPS = """
import torch
from tallystick.execution.job import Job


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))
        self.register_buffer("last", torch.zeros(1))


def build(settings):
    net = Net()

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randint(-3, 4, (32, 12), generator=generator), torch.randint(0, 4, (32,), generator=generator)

    def loss(net, both):
        found = torch.nn.functional.cross_entropy(net.layers(both[0].float()), both[1])
        found = found + net.last.detach().clone().sum()
        with torch.no_grad():
            net.last.fill_(0.5)
        return found

    return Job(net, torch.optim.SGD(net.parameters(), lr=0.2), batch, loss, steps=16)
"""


@pytest.mark.parametrize("is_served", [False, True])
def test_an_auditor_that_was_not_served_a_state_says_nothing_of_the_segment_behind_it(
    is_served: bool, tmp_path: Path
) -> None:
    """The state is false in what the next step overwrites: loss and state there follow from it, not from the auditor's own."""
    (tmp_path / "job.py").write_text(KEEPS)
    source, run = find_source(str(tmp_path / "job.py")), RunDirectory(tmp_path / "run")
    order = Order(source, {}, find_policy("fp32"), steps=12, checkpoint_every=EVERY)
    honest = source.build({}, order.seed)

    def other(job: Job) -> None:
        def batch(step: int) -> Batch:
            if step == EVERY:
                with torch.no_grad():
                    torch.as_tensor(job.model.last).fill_(0.75)
            x, y = honest.batch(step)
            return x, (y + 1) % 4 if step >= 9 else y

        job.batch = batch

    record(tampered(order, other), run)
    forge(run, lambda each: replace(each, batch=batch_digest(honest.batch(each.step))))
    own, false = run.checkpoint_path(EVERY).read_bytes(), run.load_checkpoint(EVERY)
    name = next(each for each in false if each.endswith("last"))
    false[name] = Entry(name, "F32", (1,), np.array([0.75], "<f4").tobytes())
    forge_state(run, EVERY, false)
    committed, claim = run.checkpoint_path(EVERY).read_bytes(), RunDirectory(tmp_path / "claim")
    if not is_served:
        run.checkpoint_path(EVERY).write_bytes(own)  # another file than the committed one
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    logs = ([record.log for record in side.load_transcript().records] for side in (run, claim))
    behind = [ours == theirs for ours, theirs in zip(*logs, strict=True)][EVERY : 2 * EVERY]
    assert (
        behind == [is_served] * EVERY
    )  # it claims to have followed no log there that it was not served the state for
    run.checkpoint_path(EVERY).write_bytes(committed)
    found = dispute(run, claim, source, level="steps", defence=honest_defence(source))
    assert found.loser == "trainer", found.reason


def test_an_auditor_that_was_not_served_a_state_objects_to_no_log_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed from another state, an honest log breaks rules: an honest auditor would lose by saying so."""
    source, run, claim = (
        find_source("digits"),
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
    )
    record(Order(source, SETTINGS, find_policy("fp32"), steps=8, checkpoint_every=EVERY), run)
    stated = moved(hold(run.load_checkpoint(EVERY).values()))
    forge(run, lambda each: replace(each, state_root=stated.root.hex()) if each.step == ENDS else each)
    own, breaks = _ClaimWriter._follow, Violation("gradient of conv1.weight", 5, "far from a boundary")  # pyright: ignore[reportPrivateUsage]

    def follow(writing: _ClaimWriter, step: int, frame: bytes) -> StepOutcome | None:
        found = own(writing, step, frame)
        if step == EVERY:
            writing._object_unless_noisy(step, [breaks], is_doubtful=False)  # pyright: ignore[reportPrivateUsage]
        return found

    monkeypatch.setattr(_ClaimWriter, "_follow", follow)
    written = write_claim(run, source, claim)
    assert isinstance(written, AuditorClaim)
    assert written.objection is None


def test_steps_that_do_not_end_without_the_log_either_keep_nobody_from_a_dispute(tmp_path: Path) -> None:
    """First weights are the trainer's word: it takes some with which honest training is not finite, and trains otherwise."""
    source, run, claim = (
        find_source("digits"),
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
    )
    settings = {"width": "8", "batch": "16"}
    order = Order(source, settings, find_policy("fp32"), steps=8, checkpoint_every=EVERY)

    def other(job: Job) -> None:
        with torch.no_grad():
            list(job.model.parameters())[-2].mul_(1e20)
        rates: list[float] = []

        def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 1e-26

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        job.optimizer.register_step_pre_hook(before)
        job.optimizer.register_step_post_hook(after)

    record(tampered(order, other), run)
    record(order, RunDirectory(tmp_path / "honest"))
    honest = RunDirectory(tmp_path / "honest").load_transcript()
    forge(run, lambda each: replace(each, schedule=honest.record(each.step).schedule))
    assert audit(run, source).verdict != "match"
    found = disputed(source, run, claim)
    assert found.loser == "trainer", found.reason


def other_than_here(
    place: Path, turned: int
) -> tuple[JobSource, RunDirectory, RunDirectory, list[StepOutcome]]:
    """A run in one step of which an element goes the other way, a claim that has it so too, and what steps give this machine."""
    source, run = cheated(place, 16, keeps_entry=False, turned=(turned,))
    transcript, claim = run.load_transcript(), RunDirectory(place / "claim")
    shutil.copytree(run.path, claim.path)
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(0))
    frames = run.load_frames(transcript, 0, EVERY)
    own = [replay.follow(transcript.record(step), frames[step])[0] for step in range(EVERY)]
    replay.session.close()
    assert f"{own[turned].fingerprint:016x}" != transcript.record(turned).fingerprint
    return source, run, claim, own


@pytest.mark.parametrize("where", ["past", "step"])
def test_a_past_that_the_judge_repeats_otherwise_convicts_nobody(where: str, tmp_path: Path) -> None:
    """Both took the other value in step 1. The trainer then states of that step, or of the next, what the judge would find."""
    source, run, claim, own = other_than_here(tmp_path, 1)
    false = 1 if where == "step" else 2

    def stated(each: StepRecord) -> StepRecord:
        if each.step != false:
            return each
        here = own[false]
        return replace(each, loss=hex_float(here.loss), fingerprint=f"{here.fingerprint:016x}")

    forge(run, stated)
    found = dispute(run, claim, source, level="steps")
    assert (found.loser, found.outcome) == ("none", "cannot_reproduce"), found.reason


def test_a_committed_state_is_what_its_record_says(tmp_path: Path) -> None:
    source, run, claim, own = other_than_here(tmp_path, ENDS)
    here = f"{own[ENDS].fingerprint:016x}"
    forge(run, lambda each: replace(each, fingerprint=here) if each.step == ENDS else each)
    found = dispute(run, claim, source, level="steps")
    assert (found.loser, found.step) == ("trainer", ENDS), found.reason
    assert "the record says" in found.reason


class ClaimingSeat:
    """A trainer's seat with the states that it is given."""

    def __init__(self, run: RunDirectory, states: Sequence[HeldState], *, opens_all: bool = True) -> None:
        self.run, self.states, self.opens_all = run, states, opens_all
        self.transcript = run.load_transcript()

    def witness_at(self, index: int, names: Sequence[str] | None = None) -> HeldState | None:
        """Return one of the states."""
        del names
        return self.states[index] if self.opens_all or index % EVERY == 0 else None

    def commitment_at(self, index: int) -> bytes:
        """Return the root of one of the states, or what no state has."""
        return self.states[index].root if self.opens_all or index % EVERY == 0 else b"\xaa" * 32

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return nothing: all of them are opened."""
        del index

    def frame(self, step: int) -> bytes:
        """Return the log of a step."""
        return self.run.load_frames(self.transcript, step, step + 1)[step]

    def forget(self, index: int) -> None:
        """Go on holding the state."""


def moved(state: HeldState) -> HeldState:
    """The state with one weight changed."""
    entries = dict(state.entries)
    name = next(each for each in entries if each.startswith("model/") and each.endswith("weight"))
    values = np.frombuffer(bytes(entries[name].data), dtype="<f4").copy()
    values[0] += 1
    entries[name] = Entry(name, entries[name].dtype, entries[name].shape, values.tobytes())
    return hold(entries.values())


def test_a_state_within_a_segment_that_its_record_does_not_speak_of_is_judged_where_it_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record's fingerprints and the log are honest; from step 5 on the trainer claims other states, the committed one too.

    And where it opens none of them, and its log leads to the committed ones, a false loss is judged from what that leads to.
    """
    source, run = find_source("digits"), RunDirectory(tmp_path / "run")
    settings = {"width": "8", "batch": "16"}
    record(Order(source, settings, find_policy("fp32"), steps=8, checkpoint_every=EVERY), run)
    transcript = run.load_transcript()
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(0))
    states = [hold(copied_state(replay.session).values())]
    for step in range(8):
        replay.follow(transcript.record(step), run.load_frames(transcript, step, step + 1)[step])
        states.append(hold(copied_state(replay.session).values()))
    honest, false = states, [*states[:5], *(moved(state) for state in states[5:])]
    ours = replace(transcript, records=tuple(
        replace(each, loss="0x1.0000000000000p+0") if each.step == 6 else each for each in transcript.records
    ))  # fmt: skip
    unopened = ClaimingSeat(run, honest, opens_all=False)
    judge = ChainJudge(
        ours, transcript, replay, unopened, Panel(run.path, run.path, source, Ledger()), answers_itself=False
    )
    monkeypatch.setattr(panel, "find_dissent", lambda *_: None)
    finding = judge.find_fault(None)
    assert finding is not None
    assert (finding.ruling.loser, finding.step) == ("trainer", 6), finding.ruling.reason
    monkeypatch.undo()

    forged = false[8].root.hex()

    for claimed, steps in ((honest, None), (false, 4)):
        if claimed is false:
            forge(run, lambda each: replace(each, state_root=forged) if each.step == 7 else each)
        ours = run.load_transcript()
        theirs = replace(
            transcript,
            records=(*transcript.records[:-1], replace(transcript.records[-1], loss="0x1.0000000000000p+0")),
        )
        judge = ChainJudge(
            ours, theirs, replay, ClaimingSeat(run, claimed), Panel(run.path, run.path, source, Ledger()), answers_itself=True
        )  # fmt: skip
        found = judge.find_fault(None)
        assert judge.doubts == []
        if steps is None:
            assert found is None
        else:
            assert found is not None
            assert (found.ruling.loser, found.step) == ("trainer", steps), found.ruling.reason
    replay.session.close()
