"""The names of ``import tallystick``: what they take, what comes back, what they refuse, and that they start without torch."""

from __future__ import annotations

import operator
import subprocess
import sys
from pathlib import Path

import pytest

import tallystick
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.roles.run_writer import Progress
from tallystick.store.files import RunDirectory


def test_a_job_is_recorded_audited_and_verified_by_paths(job: Path, tmp_path: Path) -> None:
    path, seen = tmp_path / "run", list[Progress]()

    statement = tallystick.record(str(job), str(path), checkpoint_every=2, progress=seen.append)
    checked = tallystick.verify(str(path), root=statement.root.upper())
    report = tallystick.audit(path, job)
    part = tallystick.audit(path, job, steps=(2, 4))

    assert [one.step for one in seen] == list(range(6))
    assert statement == RunDirectory(path).load_transcript().statement()
    assert (checked.accepted, checked.findings, checked.root) == (True, (), statement.root)
    assert (report.verdict, report.steps, report.root) == ("match", 6, statement.root)
    assert (part.verdict, part.steps) == ("match", 2)


def test_settings_steps_and_seed_are_the_orders(job: Path, tmp_path: Path) -> None:
    tallystick.record(job, tmp_path / "run", settings={"width": "8"}, steps=2, seed=7, policy="fp64")

    stated = RunDirectory(tmp_path / "run").load_specification()

    assert (stated.job.settings, stated.steps, stated.seed, stated.policy.name) == (
        {"width": "8"},
        2,
        7,
        "fp64",
    )


def test_a_run_that_is_there_is_not_written_over_and_a_finished_one_not_resumed_otherwise(
    job: Path, copied: Path
) -> None:
    with pytest.raises(StoreError, match="is not empty"):
        tallystick.record(job, copied)
    with pytest.raises(InvalidInput):
        tallystick.record(job, copied, seed=1, resume=True)


def test_edited_weights_are_found(edited: Path, job: Path) -> None:
    report = tallystick.audit(edited, job)

    assert report.verdict == "mismatch"
    assert report.first is not None
    assert report.first.own != report.first.stated


def test_no_code_is_run_because_a_run_names_it(recorded: Path) -> None:
    with pytest.raises(InvalidInput, match="no code is run because a specification names it"):
        tallystick.audit(recorded)


def test_another_root_is_a_finding(recorded: Path) -> None:
    checked = tallystick.verify(recorded, root="00" * 32)

    assert not checked.accepted
    assert checked.findings[0].outcome == "failed"
    assert {check.outcome for check in checked.findings[1:]} == {"not reached"}


def test_a_proof_is_verified_against_its_root_and_no_other(
    recorded: Path, tally: object, tmp_path: Path
) -> None:
    proof = tmp_path / "proof.json"
    assert callable(tally)
    assert tally("prove", recorded, "--step", "3", "--out", proof).code == 0
    root = RunDirectory(recorded).load_transcript().root().hex()

    assert tallystick.verify(proof, root=root).accepted
    assert not tallystick.verify(proof, root="11" * 32).accepted
    with pytest.raises(InvalidInput, match="root: a proof is checked against a root"):
        tallystick.verify(proof)


def test_a_bundle_is_not_accepted_without_a_policy(recorded: Path, tally: object, tmp_path: Path) -> None:
    bundle = tmp_path / "b.json"
    assert callable(tally)
    assert tally("bundle", recorded, "--out", bundle).code == 0

    checked = tallystick.verify(bundle)

    assert not checked.accepted
    with pytest.raises(InvalidInput, match="root: for runs and proofs"):
        tallystick.verify(bundle, root="11" * 32)
    with pytest.raises(InvalidInput, match="no such file"):
        tallystick.verify(bundle, policy=tmp_path / "nothing")


def test_what_cannot_be_read_is_invalid_input(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))

    for path in (tmp_path / "nothing", tmp_path / "noise", tmp_path):
        with pytest.raises(InvalidInput):
            tallystick.verify(path)
    with pytest.raises(InvalidInput, match="policy, model: for bundles"):
        tallystick.verify(recorded, policy="p.toml")
    with pytest.raises(InvalidInput, match="root"):
        tallystick.verify(recorded, root="zz")
    with pytest.raises(InvalidInput):
        tallystick.audit(tmp_path / "nothing")


@pytest.mark.parametrize("device", ["tpu", "cuda:9"])
def test_a_device_that_is_not_known_is_refused_before_anything_is_written(
    device: str, job: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="unknown; known are cpu, cuda"):
        tallystick.record(job, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


def test_a_mismatch_has_its_place_and_both_values(copied: Path) -> None:
    log = next((copied / "logs").iterdir())
    log.write_bytes(bytes([log.read_bytes()[0] ^ 1]) + log.read_bytes()[1:])
    directory = RunDirectory(copied)
    transcript = directory.load_transcript()

    with pytest.raises(Mismatch) as caught:
        directory.load_frames(transcript, int(log.stem), int(log.stem) + 1)

    assert caught.value.where == f"step {int(log.stem)}: log"
    assert caught.value.stated == transcript.record(int(log.stem)).log
    assert caught.value.own is not None
    assert caught.value.own != caught.value.stated
    assert Mismatch("only words").where == ""


def test_every_name_is_there_and_verifying_loads_no_torch() -> None:
    child = (
        "import sys, tallystick; tallystick.verify, tallystick.record, tallystick.audit, tallystick.Verification; "
        "tallystick.RunStatement; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", child], check=False).returncode == 0
    assert all(getattr(tallystick, name) is not None for name in tallystick.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'whim'"):
        operator.attrgetter("whim")(tallystick)
