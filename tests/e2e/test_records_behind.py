"""What records say beside a state that honest arithmetic can give is judged too: a loss, a fingerprint, the steps before."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tallystick.execution.rounding.context as recording
from tallystick.commit.encoding import hex_float
from tallystick.commit.state import hold
from tallystick.dispute.terms import DisputedPosition
from tallystick.dispute.verdict import LogObjection
from tallystick.execution.job import Job, JobSource, find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.execution.step import batch_digest, run_step, under_log
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Frame,
    Kind,
    Residues,
    SiteAddress,
    SparseEntries,
    decode_frame,
    encode_frame,
)
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import find_candidates, round_recorded, round_recorded_residues
from tallystick.roles import step_judge
from tallystick.roles.acceptable_states import AcceptableStates
from tallystick.roles.audit_report import EVERYTHING, Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.log_judge import DoubtingContext
from tallystick.roles.panel_member import HandedSeat
from tallystick.roles.referee import DisputeResult
from tallystick.roles.replay import adopting, open_replay
from tallystick.roles.step_judge import StepJudge
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.testing.cheats import forge, forge_state, honest_defence, record_turned, tampered

SETTINGS = {"width": "8", "batch": "16"}
TEXT = {"width": "32", "layers": "2", "batch": "8", "block": "16", "heads": "2"}
BESIDE = 0.021805  # the last bias's first number, with which the first loss lies a quarter of a band beside a boundary
FARTHER = 2.7e-4  # with which it lies a band and three quarters beside it
NEIGHBOURS = ["0x1.39a0000000000p+1", "0x1.39c0000000000p+1"]  # the two values of that loss
AFAR = "0x1.3980000000000p+1"


def ordered(steps: int, every: int) -> tuple[JobSource, Order]:
    """The job, and an order of some steps."""
    source = find_source("digits")
    return source, Order(source, SETTINGS, find_policy("fp32"), steps=steps, checkpoint_every=every)


def turned(place: Path, steps: int, at: Sequence[int]) -> tuple[JobSource, RunDirectory]:
    """A run of one segment in whose steps ``at`` one element goes the other way, of which the log says nothing."""
    source, order = ordered(steps, steps)
    run = RunDirectory(place / "run")
    record_turned(order, run, at, steps, keeps_entry=False)
    return source, run


def claimed(source: JobSource, run: RunDirectory) -> RunDirectory:
    """The auditor's claim."""
    claim = RunDirectory(run.path.parent / "claim")
    assert isinstance(write_claim(run, source, claim), AuditorClaim)
    return claim


def ruled(source: JobSource, run: RunDirectory, claim: RunDirectory) -> DisputeResult:
    """The ruling on the whole step, of a trainer that answers itself."""
    return dispute(run, claim, source, level="steps", defence=honest_defence(source))


def with_loss_beside(run: RunDirectory, order: Order, entry: str) -> str:
    """Record a run whose first loss lies beside a boundary, which its log says, or does not; return that loss.

    Or whose log says that a loss which lies above the boundary, almost two bands from it, went down.
    """
    own, noted, recorded = recording.round_recorded, list[int](), Session.recording_context

    def with_band(session: Session, before: GridTable) -> RecordingContext:
        made = recorded(session, before)
        sites = {
            at: replace(grid, band=-19, floor=-15) if at[0] == Kind.LOSS else grid
            for at, grid in made.table.sites.items()
        }
        made.table, made._grids = GridTable(sites), sites  # pyright: ignore[reportPrivateUsage]
        return made

    def noting(
        x: Tensor,
        grid: SiteGrid,
        *,
        out: Tensor,
        old: Tensor | None = None,
        key: Key = NO_KEY,
        name: str = "tensor",
    ) -> SparseEntries:
        entries = own(x, grid, out=out, old=old, key=key, name=name)
        if name != "loss" or noted:
            return entries
        noted.append(len(entries))
        if entry == "far":
            out.fill_(float.fromhex(NEIGHBOURS[0]))
            return SparseEntries.ascending(1, 1, np.array([0]), np.array([0]))
        return entries if entry == "kept" else SparseEntries.none(entries.n, 1)

    def beside(job: Job) -> None:
        last = [each for each in job.model.parameters() if each.requires_grad][-1]
        with torch.no_grad():
            last.view(-1)[0] = BESIDE + (entry == "far") * FARTHER

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "recording_context", with_band)
        patch.setattr(recording, "round_recorded", noting)
        record(tampered(order, beside), run)
    assert noted == [0 if entry == "far" else 1]
    return str(run.load_transcript().record(0).loss)


@pytest.mark.parametrize(
    ("entry", "is_near", "ruling"),
    [
        ("lost", True, ("none", "cannot_reproduce")),
        ("far", True, ("none", "cannot_reproduce")),
        ("kept", True, ("auditor", "fault")),
        pytest.param("kept", False, ("auditor", "fault"), marks=pytest.mark.slow),
    ],
)
def test_an_auditors_loss_may_lie_on_either_side_of_a_boundary_of_which_the_log_says_nothing(
    tmp_path: Path, entry: str, is_near: bool, ruling: tuple[str, str]
) -> None:
    """As an auditor's machine may have it whose last places are others, or which hardly obeys what the log says.

    Controls: a log that says it.
    """
    source, order = ordered(2, 2)
    run = RunDirectory(tmp_path / "run")
    own = with_loss_beside(run, order, entry)
    assert own in NEIGHBOURS
    claim = claimed(source, run)
    stated = next(each for each in NEIGHBOURS if each != own) if is_near else AFAR
    forge(claim, lambda each: replace(each, loss=stated) if each.step == 0 else each)
    found = ruled(source, run, claim)
    assert (found.loser, found.outcome, found.step) == (*ruling, 0), found.reason


def test_a_false_loss_beside_a_state_that_honest_arithmetic_can_give_convicts(tmp_path: Path) -> None:
    source, run = turned(tmp_path, 2, [1])
    forge(run, lambda each: replace(each, loss=hex_float(2.0**-6)) if each.step == 1 else each)
    found = ruled(source, run, claimed(source, run))
    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", 1), found.reason
    assert "loss is" in found.reason


def test_a_fingerprint_within_a_segment_is_that_of_the_state_claimed_there(tmp_path: Path) -> None:
    source, order = ordered(3, 3)
    run = RunDirectory(tmp_path / "run")
    record(order, run)
    transcript = run.load_transcript()
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(0))
    states = [hold(copied_state(replay.session).values())]
    frames = run.load_frames(transcript, 0, 2)
    for step in range(2):
        replay.follow(transcript.record(step), frames[step])
        states.append(hold(copied_state(replay.session).values()))
    roots = [state.root for state in states]
    for stated, loser in ((transcript.record(1).fingerprint, "none"), ("0" * 16, "trainer")):
        forge(run, lambda each, stated=stated: replace(each, fingerprint=stated) if each.step == 1 else each)
        ours = run.load_transcript()
        seat = HandedSeat(run, ours, 1, dict(enumerate(states)), None, frames[1], None)
        judge = StepJudge(ours, transcript, replay, {"trainer": seat})
        ruling = judge.rule(DisputedPosition("steps", 1, 2, roots[1], {"trainer": roots[2]}))
        assert ruling.loser == loser, ruling.reason
        assert ("state fingerprint" in ruling.reason) == (loser == "trainer")
    replay.session.close()


def test_what_is_not_found_out_of_earlier_records_clears_nobody_behind_a_later_step(tmp_path: Path) -> None:
    """Digests of data that noise may explain; one element of a later step goes the other way, of which the log says nothing."""
    source, run = turned(tmp_path, 4, [3])
    forge(run, lambda each: replace(each, batch=f"{each.step + 7:064x}") if each.step == 1 else each)
    found = ruled(source, run, claimed(source, run))
    assert (found.loser, found.outcome, found.step) == ("none", "cannot_reproduce", 3), found.reason
    assert "of the steps before it: step 1: " in found.reason
    assert not found.clears


RECORDED, BAND = Session.recording_context, RecordingContext.band


def with_wide_decisions(session: Session, before: GridTable) -> RecordingContext:
    """What a session records in, with the widest bands of decisions that its policy allows."""
    made, most = RECORDED(session, before), session.policy.decision_band[1]
    sites = {
        at: replace(grid, band=most) if at[0] == Kind.DECISION else grid
        for at, grid in made.table.sites.items()
    }
    made.table, made._grids = GridTable(sites), sites  # pyright: ignore[reportPrivateUsage]
    return made


def reaching_too_far(made: RecordingContext, rms: float, widest: float = math.inf) -> float:
    """One band and three quarters."""
    return min(1.75 * BAND(made, rms), widest)


@pytest.mark.parametrize(
    ("lists", "ruling"), [(False, ("none", "cannot_reproduce")), (True, ("auditor", "fault"))]
)
@pytest.mark.parametrize("objects", [False, True])
def test_an_auditor_may_take_either_branch_of_a_near_tie_that_the_log_does_not_list(
    tmp_path: Path, lists: bool, ruling: tuple[str, str], objects: bool
) -> None:
    """Its state follows from that, and so may what it sees in the log. Control: a log that lists them all."""
    source, order = ordered(1, 1)
    run, finish = RunDirectory(tmp_path / "run"), RecordingContext.finish
    dropped: list[SiteAddress] = []

    def forgetting(made: RecordingContext) -> bytes:
        for address in [each for each in made.payloads if each.kind == Kind.DECISION and not lists]:
            del made.payloads[address]
            dropped.append(address)
        return finish(made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "recording_context", with_wide_decisions)
        patch.setattr(RecordingContext, "finish", forgetting)
        record(order, run)
    assert lists or dropped
    claim = claimed(source, run)
    if objects:
        root = run.load_transcript().root().hex()
        objection = LogObjection(root, 0, "gradient of conv1.weight", 0, "lies too far away")
        claim.write_document(claim.objection_path, objection.encode())
    else:
        state = dict(claim.load_checkpoint(1))
        weight = state["model/conv1.weight"]
        values = np.frombuffer(bytes(weight.data), dtype="<f4") + np.float32(2.0**-6)
        forge_state(claim, 1, state | {weight.name: replace(weight, data=values.tobytes())})
    found = ruled(source, run, claim)
    assert (found.loser, found.outcome, found.step) == (*ruling, 0), found.reason
    assert lists or "leaves open on which side of a boundary" in found.reason


def listing_too_far(x: Tensor, grid: SiteGrid, *, name: str = "tensor", **more: Any) -> SparseEntries:
    """The entries, and further ones that have elements between 1.6 and 1.75 bands from a boundary go to its other side."""
    own, key = x.double().clone(), more.get("key", NO_KEY)
    entries = round_recorded(x, grid, name=name, **more)  # in place, of some
    if "gradient of" not in name:
        return entries
    scales = torch.from_numpy(np.repeat(grid.scales.astype(np.int64), x.numel() // grid.scales.size))
    band = torch.ldexp(torch.ones(x.numel(), dtype=torch.float64), scales + grid.band).reshape(x.shape)

    def within(share: float) -> dict[int, int]:
        ends = [find_candidates(own + sign * share * band, grid, key=key) for sign in (1, -1)]
        below = [
            {int(i): 1 for i in each.index} for each in ends
        ]  # shifted up it lies there: it is below, and goes up
        return {**dict.fromkeys(below[1], 0), **below[0]}

    far = {i: side for i, side in within(0.75).items() if i not in within(0.6)}
    listed = dict(zip(entries.indexes.tolist(), entries.symbols.tolist(), strict=True)) | far
    at = sorted(listed)
    return SparseEntries.ascending(
        x.numel(), 1, np.array(at, dtype=np.int64), np.array([listed[i] for i in at])
    )


def turned_round(x: Tensor, grid: SiteGrid, **more: Any) -> Residues:
    """The residues, each half of all of them farther."""
    residues = round_recorded_residues(x, grid, **more)
    turned = np.unpackbits(residues.planes[-1], count=residues.n, bitorder="little") ^ 1
    residues.planes[-1] = np.packbits(turned, bitorder="little")
    return residues


def listing_no(kind: Kind) -> Callable[[RecordingContext], bytes]:
    """Finish a log without the entries of all sites of a kind."""
    finish = RecordingContext.finish

    def forgetting(made: RecordingContext) -> bytes:
        for address in [each for each in made.payloads if each.kind == kind]:
            del made.payloads[address]
        return finish(made)

    return forgetting


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        pytest.param("fp32", [], id="honest"),
        pytest.param("leaf", [], id="honest-leaf"),
        pytest.param("bf16", [], id="honest-bf16"),
        pytest.param("fp32", [(Session, "recording_context", with_wide_decisions)], id="honest-wide"),
        pytest.param(
            "leaf", [(RecordingContext, "finish", listing_no(Kind.ACTIVATION))], id="no-activations"
        ),
        pytest.param("fp32", [(RecordingContext, "finish", listing_no(Kind.GRADIENT))], id="no-gradients"),
        pytest.param("fp32", [(recording, "round_recorded", listing_too_far)], id="too-far"),
        pytest.param("bf16", [(recording, "round_recorded_residues", turned_round)], id="turned-round"),
        pytest.param(
            "fp32",
            [
                (Session, "recording_context", with_wide_decisions),
                (RecordingContext, "band", reaching_too_far),
            ],
            id="decisions-too-far",
        ),
    ],
)
def test_what_a_log_leaves_open_is_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    policy: str,
    changes: Sequence[tuple[object, str, object]],
) -> None:
    """An honest auditor lost where its machine had some of it otherwise. An honest log leaves nothing open."""
    source, order = ordered(1, 1)
    run = RunDirectory(tmp_path / "run")
    with monkeypatch.context() as patch:
        for where, name, other in changes:
            patch.setattr(where, name, other)
        record(replace(order, policy=find_policy(policy)), run)
    transcript = run.load_transcript()
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(0))
    repeated = AcceptableStates(replay, run.load_frames(transcript, 0, 1)[0])
    assert repeated.leaves_open is not ("honest" in request.node.name)
    replay.session.close()


@pytest.mark.parametrize(("job", "settings"), [("digits", {"width": "12", "batch": "32"}), ("text", TEXT)])
def test_an_honest_log_leaves_nothing_open_however_long_it_is(
    tmp_path: Path, job: str, settings: Mapping[str, str]
) -> None:
    """Scales that are kept come to lie as far above their values as they may: held an octave off, that is beyond the rule."""
    source, run = find_source(job), RunDirectory(tmp_path / "run")
    record(Order(source, settings, find_policy("fp32"), steps=30, checkpoint_every=30), run)
    transcript = run.load_transcript()
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    session, is_open, kept = replay.session, list[int](), 0
    load_state(session, run.load_checkpoint(0))
    for step, frame in sorted(run.load_frames(transcript, 0, 30).items()):
        context = session.following_context(frame, form=DoubtingContext)
        with under_log(), adopting(session, transcript.record(step)):
            run_step(session, replay.job, context)
        context.finish()
        session.settle(context)
        is_open += [step] if context.leaves_open else []
        kept += bool(context.doubts)
    session.close()
    assert not is_open
    assert kept  # the control: an octave off, some header breaks a rule


@pytest.mark.parametrize(
    ("policy", "kind", "header"),
    [
        ("fp32", Kind.BUFFER, {"scales": []}),
        ("fp32", Kind.GRADIENT, {"floor": 1000}),
        ("leaf", Kind.ACTIVATION, {"scales": []}),
    ],
)
def test_a_header_that_nobody_can_compute_with_hides_no_false_labels(
    tmp_path: Path, policy: str, kind: Kind, header: dict[str, Any]
) -> None:
    """The judge, or the auditor, ended in an error of its own."""
    source, order = ordered(2, 2)
    order, run = replace(order, policy=find_policy(policy)), RunDirectory(tmp_path / "run")

    def rolled(job: Job) -> None:
        own = job.batch
        job.batch = lambda step: (own(step)[0], own(step)[1].roll(1)) if step == 0 else own(step)

    record(tampered(order, rolled), run)
    transcript = run.load_transcript()
    frames = run.load_frames(transcript, 0, 2)
    replay = open_replay(transcript.specification, source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(0))
    table, batch = replay.session.following_context(frames[0]).table, batch_digest(replay.job.batch(0))
    at = next(each for each, grid in table.sites.items() if each[0] == kind and not grid.residue_bits)
    grid = table.sites[at]
    other = SiteGrid(
        grid.precision,
        grid.band,
        header.get("floor", grid.floor),
        grid.dithered,
        header.get("scales", grid.scales),
    )
    sites = dict(decode_frame(frames[0]).sites)
    stated = GridTable({**table.sites, at: other})
    sites[SiteAddress(0, 0, Kind.GRID, 0)] = replay.session.table.diff(stated)
    frames[0] = encode_frame(Frame(tuple(sorted(sites.items(), key=lambda each: each[0].fields))))
    replay.session.close()
    run.log_path(0).write_bytes(frames[0] + frames[1])
    forge(
        run,
        lambda each: replace(
            each,
            log=frame_digest(frames[each.step]),
            log_bytes=len(frames[each.step]),
            batch=batch if each.step == 0 else each.batch,
        ),
    )
    assert audit(run, source).verdict in ("mismatch", "log_violation")
    found = ruled(source, run, claimed(source, run))
    assert (found.loser, found.step) == ("trainer", 0), found.reason


@pytest.mark.parametrize(("moves", "at"), [(True, [1]), (False, [])])
def test_a_false_loss_is_farther_away_than_a_loud_decision_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool, at: list[int]
) -> None:
    """Beside a state that either value explains, and beside one on which both agree; where noise is unknown it says nothing."""
    loud = Deviation(1, "cannot_reproduce", "decision 2", None, "noise", "less", "noise")
    source, run = turned(tmp_path, 2, at)
    for factor, known, ruling in (
        (2.0**-9, True, "trainer"),
        (1.0 + 2.0**-12, True, "none"),
        (2.0**-9, False, "none"),
    ):
        site = loud if known else replace(loud, subject=EVERYTHING)
        monkeypatch.setattr(step_judge, "find_noisy_sites", lambda *_, site=site: [site])
        copy = RunDirectory(tmp_path / f"{factor} {known}" / "run")
        shutil.copytree(run.path, copy.path)
        own = float.fromhex(str(run.load_transcript().record(1).loss))
        forge(
            copy,
            lambda each, loss=own * factor: replace(each, loss=hex_float(loss)) if each.step == 1 else each,
        )
        claim = claimed(source, copy)
        found = dispute(copy, claim, source, level="steps")
        assert (found.loser, found.step) == (ruling, 1), found.reason
        assert found.outcome == ("fault" if ruling == "trainer" else "cannot_reproduce")
        assert moves == (found.ends is not None)
