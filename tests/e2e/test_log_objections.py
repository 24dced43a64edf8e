"""A log that lies and moves no state convicts its trainer; an objection to an honest log convicts the auditor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallystick.dispute.verdict import LogObjection, parse_verdict, verify_verdict
from tallystick.errors import Mismatch
from tallystick.execution.job import find_source
from tallystick.numerics.log import (
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    decode_frame,
    encode,
    encode_frame,
)
from tallystick.numerics.policy import find_policy
from tallystick.roles import claim as claiming
from tallystick.roles import log_judge
from tallystick.roles.audit_report import Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.replay import open_replay
from tallystick.roles.statements import sign_audit
from tallystick.roles.trainer import Order, record
from tallystick.signing.keys import ed25519_key
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.testing.cheats import forge

SETTINGS = {"width": "8", "batch": "16"}
STEPS, EVERY, AT = 9, 3, 4
SOURCE = find_source("digits")
PARAMETERS = dict(SOURCE.build(SETTINGS).model.named_parameters())
ORDINAL = list(PARAMETERS).index("conv2.weight")
SITE = SiteAddress(0, 0, Kind.GRADIENT, ORDINAL)


@pytest.fixture(scope="module", params=["fp32", "fp64"])
def honest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("honest") / request.param)
    record(Order(SOURCE, SETTINGS, find_policy(request.param), steps=STEPS, checkpoint_every=EVERY), run)
    return run


def with_frame(run: RunDirectory, path: Path, edit: Callable[[Frame], Frame]) -> RunDirectory:
    """A copy of a run whose log of step ``AT`` is another, with every digest made to fit; states are as they were."""
    shutil.copytree(run.path, path)
    copy = RunDirectory(path)
    first = AT - AT % EVERY
    frames = copy.load_frames(copy.load_transcript(), first, first + EVERY)
    frames[AT] = encode_frame(edit(decode_frame(frames[AT])))
    copy.log_path(first).write_bytes(b"".join(frames[step] for step in sorted(frames)))
    size, named = len(frames[AT]), frame_digest(frames[AT])
    forge(copy, lambda r: replace(r, log_bytes=size, log=named) if r.step == AT else r)
    return copy


def added(*elements: int, side: int = 1) -> Callable[[Frame], Frame]:
    """Entries of elements that are far from every boundary: a follower does not obey them."""

    def edit(frame: Frame) -> Frame:
        numel = PARAMETERS["conv2.weight"].numel()
        at = np.asarray(elements, dtype=np.int64)
        entries = SparseEntries(numel, 1, at, np.full(at.size, side))
        return Frame.of({**dict(frame.sites), SITE: encode(entries)})

    return edit


def claimed(run: RunDirectory, path: Path, *, jitter: bool = False) -> tuple[RunDirectory, AuditorClaim]:
    claim = RunDirectory(path)
    written = write_claim(run, SOURCE, claim, jitter=jitter)
    assert isinstance(written, AuditorClaim)
    return claim, written


def test_a_log_that_lies_and_moves_nothing_convicts_its_trainer(honest: RunDirectory, tmp_path: Path) -> None:
    run = with_frame(honest, tmp_path / "run", added(3, 5))
    report = audit(run, SOURCE)
    claim, written = claimed(run, tmp_path / "claim")

    result = dispute(run, claim, SOURCE)

    assert (report.verdict, report.first and report.first.step) == ("log_violation", AT)
    assert written.objection is not None
    assert (written.first_deviation, written.objection.step, written.objection.element) == (AT, AT, 3)
    # Every committed state is the same on both sides: nothing but the log is in dispute.
    assert claim.load_transcript().checkpoints() == run.load_transcript().checkpoints()
    assert (result.loser, result.step, result.outcome, result.rounds) == ("trainer", AT, "fault", 0)
    assert "farther than twice the band" in result.reason
    assert result.objection == written.objection
    own, theirs = run.load_transcript(), claim.load_transcript()
    told = verify_verdict(
        parse_verdict(result.encode()), own.statement(), theirs.statement(), own.specification
    )
    assert told == f"the auditor objects to the log of step {AT}"


def test_the_same_run_with_its_own_log_is_nobodys_fault(honest: RunDirectory, tmp_path: Path) -> None:
    """The control: one frame is the only difference."""
    run = with_frame(honest, tmp_path / "run", lambda frame: frame)
    claim, written = claimed(run, tmp_path / "claim")

    result = dispute(run, claim, SOURCE)

    assert (written.first_deviation, written.objection) == (None, None)
    assert (result.loser, result.outcome, result.step) == ("none", "agreement", None)
    assert claim.load_objection() is None


def test_a_log_that_moves_nothing_is_ruled_on_before_a_later_state(
    honest: RunDirectory, tmp_path: Path
) -> None:
    """The auditor's claim differs in its last state too: there it is the auditor that lies, and yet the trainer lied first."""
    run = with_frame(honest, tmp_path / "run", added(3))
    claim, _ = claimed(run, tmp_path / "claim")
    forge(claim, lambda r: r if r.step != STEPS - 1 else replace(r, state_root="ab" * 32))

    result = dispute(run, claim, SOURCE)

    assert (result.loser, result.step) == ("trainer", AT)
    own, theirs = run.load_transcript(), claim.load_transcript()
    verdict = parse_verdict(result.encode())
    assert verdict.ends is not None  # the game was played, and the verdict holds what it began with
    assert "log of step" in verify_verdict(verdict, own.statement(), theirs.statement(), own.specification)


def objecting(run: RunDirectory, path: Path, **changes: Any) -> RunDirectory:
    claim, _ = claimed(run, path)
    said = LogObjection(run.load_transcript().root().hex(), AT, "gradient of conv2.weight", 3, "too far away")
    claim.write_document(claim.objection_path, replace(said, **changes).encode())
    return claim


@pytest.mark.parametrize("site", ["gradient of conv2.weight", "decision 0 of micro-batch 0", "no such site"])
def test_an_objection_to_an_honest_log_convicts_the_auditor(
    honest: RunDirectory, site: str, tmp_path: Path
) -> None:
    result = dispute(honest, objecting(honest, tmp_path / "claim", site=site), SOURCE)

    assert (result.loser, result.step, result.outcome) == ("auditor", AT, "fault")
    assert "nothing there comes near to breaking a rule" in result.reason


@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("spoilt", ["changed", "absent"])
def test_a_copy_that_was_spoilt_on_its_way_convicts_nobody(
    honest: RunDirectory, spoilt: str, jitter: bool, tmp_path: Path
) -> None:
    """Before, the auditor lost, and a trainer whose records lie went free with it; an audit accused the trainer."""
    copy = RunDirectory(tmp_path / "copy")
    shutil.copytree(honest.path, copy.path)
    path = copy.log_path(AT - AT % EVERY)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.unlink() if spoilt == "absent" else path.write_bytes(data)
    claim, written = claimed(copy, tmp_path / "claim", jitter=jitter)
    assert written.objection is not None and written.objection.site == "log"

    result = dispute(honest, claim, SOURCE)

    assert (result.loser, result.outcome, result.clears) == ("none", "cannot_reproduce", False), result.reason
    assert "audit again with that" in result.reason
    if spoilt == "changed" and not jitter:
        report = audit(copy, SOURCE)
        assert report.verdict == "mismatch" and report.first is not None and report.first.is_of_copy
        with pytest.raises(Mismatch, match="nothing is signed against it; take another copy"):
            sign_audit(copy, report, ed25519_key(bytes(32)), 0, "cpu")


def test_a_false_objection_does_not_save_a_trainer_whose_state_is_false(
    honest: RunDirectory, tmp_path: Path
) -> None:
    from tallystick.testing.cheats import CHEATS

    run = RunDirectory(tmp_path / "run")
    policy = find_policy(honest.load_specification().policy.name)
    CHEATS["edited_weights"](0).run(Order(SOURCE, SETTINGS, policy, steps=STEPS, checkpoint_every=EVERY), run)

    result = dispute(run, objecting(run, tmp_path / "claim"), SOURCE)

    assert (result.loser, result.step) == ("trainer", STEPS - 1)


def test_what_lies_between_half_of_a_limit_and_the_limit_blames_nobody(
    honest: RunDirectory, tmp_path: Path
) -> None:
    """An entry between one and two bands from its boundary: another honest machine could have seen it beyond."""
    specification = honest.load_specification()
    if specification.policy.name == "fp64":
        return  # its bands are so narrow that no element of so small a tensor lies in between
    replay = open_replay(specification, SOURCE)
    assert not isinstance(replay, Deviation)
    state = honest.load_checkpoint(AT - AT % EVERY)
    near = find_near_element(replay, honest, state)
    replay.session.close()
    assert near is not None
    run = with_frame(honest, tmp_path / "run", added(near[0], side=near[1]))
    result = dispute(run, objecting(run, tmp_path / "claim", element=near[0]), SOURCE)

    assert (result.loser, result.outcome, result.step) == ("none", "cannot_reproduce", AT)
    assert "too near a rule's limit" in result.reason


def find_near_element(replay: Any, run: RunDirectory, state: Any) -> tuple[int, int] | None:
    """Return an element of the site between one and two bands of a boundary, and the side on which it lies."""
    import torch

    from tallystick.execution.snapshot import load_state
    from tallystick.numerics.grid_table import SiteGrid
    from tallystick.numerics.rounding import find_candidates

    transcript, found = run.load_transcript(), list[tuple[int, int]]()
    load_state(replay.session, state)
    for step in range(AT - AT % EVERY, AT):
        replay.follow(transcript.record(step), run.load_frames(transcript, step, step + 1)[step])
    context = replay.session.following_context(run.load_frames(transcript, AT, AT + 1)[AT])
    honest_round = context.round

    def looking(kind: Kind, ordinal: int, x: torch.Tensor, **more: Any) -> None:
        if (kind, ordinal) == (Kind.GRADIENT, ORDINAL):
            grid = context.table.sites[(kind, ordinal)]
            form = (grid.floor, grid.dithered, grid.scales)
            wide = SiteGrid(grid.precision, grid.band + 1, *form)
            narrow = SiteGrid(grid.precision, grid.band, *form)
            key = more.get("key", (0, 0))
            reach = {b: find_candidates(x, g, key=key) for b, g in (("wide", wide), ("narrow", narrow))}
            beyond = sorted(set(reach["wide"].index.tolist()) - set(reach["narrow"].index.tolist()))
            own = x.reshape(-1)
            for at in beyond:
                place = reach["wide"].index.tolist().index(at)
                upper, lower = float(reach["wide"].upper[place]), float(reach["wide"].lower[place])
                side = int(abs(float(own[at]) - upper) < abs(float(own[at]) - lower))
                found.append((at, side))  # the entry states its own side: nothing moves
        honest_round(kind, ordinal, x, **more)

    context.round = looking
    from tallystick.execution.step import run_step

    run_step(replay.session, replay.job, context)
    return found[0] if found else None


def test_noise_of_the_judges_own_that_could_explain_a_violation_blames_nobody(
    honest: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_frame(honest, tmp_path / "run", added(3))
    claim, written = claimed(run, tmp_path / "claim")
    noisy = [
        Deviation(AT, "cannot_reproduce", "gradient of conv2.weight", None, "noise 1", "band 0.1", "noise")
    ]
    monkeypatch.setattr(log_judge, "find_noisy_sites", lambda *given: noisy)

    result = dispute(run, claim, SOURCE)

    assert written.objection is not None
    assert (result.loser, result.outcome) == ("none", "cannot_reproduce")
    assert "the judge's own noise can explain" in result.reason
    # An auditor on such a machine does not object in the first place.
    monkeypatch.setattr(claiming, "find_noisy_sites", lambda *given: noisy)
    _, silent = claimed(run, tmp_path / "silent")
    assert (silent.objection, silent.first_deviation) == (None, None)


def test_the_command_shows_the_objection_and_signs_what_it_rests_on(
    honest: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tallystick.cli.main import main

    run = with_frame(honest, tmp_path / "run", added(3))
    assert main(["audit", str(run.path), "--claim", str(tmp_path / "claim"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["first_step"], said["differing_elements"], said["objection"]["step"]) == (AT, 0, AT)

    assert main(["dispute", str(run.path), str(tmp_path / "claim"), "--json"]) == 1
    ruled = json.loads(capsys.readouterr().out)
    assert (ruled["loser"], ruled["step"], ruled["objection"]) == ("trainer", AT, said["objection"])
    assert main(["dispute", str(run.path), str(tmp_path / "claim")]) == 1
    assert "the trainer loses at step 4" in capsys.readouterr().out


OTHER_PROGRAM = """
from tallystick.jobs import digits

def build(settings):
    job = digits.build(settings)
    own = job.batch
    job.batch = lambda step: own(1_000_007) if step == 4 else own(step)
    return job
"""


def test_a_trainer_may_answer_with_its_own_program(
    honest: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its list then shows where it lied; the job's own list can only end in another state than the one claimed."""
    from tallystick.cli.main import main
    from tallystick.testing.cheats import CHEATS

    run, claim = RunDirectory(tmp_path / "run"), tmp_path / "claim"
    policy = find_policy(honest.load_specification().policy.name)
    CHEATS["other_data"](AT).run(Order(SOURCE, SETTINGS, policy, steps=STEPS, checkpoint_every=EVERY), run)
    write_claim(run, SOURCE, RunDirectory(claim))
    program = tmp_path / "program.py"
    program.write_text(OTHER_PROGRAM)

    def ruled(*more: str) -> tuple[int, Any]:
        code = main(["dispute", str(run.path), str(claim), "--json", *more])
        return code, json.loads(capsys.readouterr().out)

    code, found = ruled("--defence", str(program))
    assert (code, found["loser"], found["step"]) == (1, "trainer", AT)
    assert found["operator"]["operator"]["name"] == "tallystick::batch"
    code, alone = ruled()
    assert (code, alone["loser"], alone["operator"]["operator"]["name"]) == (1, "trainer", "tallystick::end")
    assert main(["dispute", str(run.path), str(claim), "--defence", str(tmp_path / "none.py")]) == 2
    assert main(["dispute", str(run.path), str(claim), "--defence", str(program), "--level", "steps"]) == 2
    program.write_text(OTHER_PROGRAM.replace("return job", "job.dataset_digest = '00' * 32\n    return job"))
    assert main(["dispute", str(run.path), str(claim), "--defence", str(program)]) == 2
    assert "the trainer's program" in capsys.readouterr().err
