"""Policy leaf from the command line's point of view: other arithmetic, other threads, lies in the activation log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tallystick.errors import InvalidInput
from tallystick.evidence.run_verifier import verify_run
from tallystick.execution.determinism import parse_profile
from tallystick.execution.job import find_source
from tallystick.numerics.log import Kind, decode_frame
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import claim_path
from tallystick.testing.forged_entry import ForgedEntry

SETTINGS = {"width": "8", "batch": "16"}
AT = 7


def order(**more: object) -> Order:
    policy = find_policy("leaf", **more)  # type: ignore[arg-type]
    return Order(find_source("digits"), SETTINGS, policy, steps=14, checkpoint_every=5)


def tally(*arguments: str, profile: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **parse_profile(profile).environment()}
    return subprocess.run(
        [sys.executable, "-m", "tallystick", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def weights(run: Path, steps: int) -> np.ndarray:
    entries = RunDirectory(run).load_checkpoint(steps)
    model = [np.frombuffer(bytes(entries[n].data), "<u4") for n in sorted(entries) if n.startswith("model/")]
    return np.concatenate([part for part in model if part.size > 1])


@pytest.mark.parametrize(
    "more", [{}, {"tau": "kind", "b_r": 29}, {"tau": "0.25"}], ids=["layer", "kind", "fixed"]
)
def test_a_run_is_followed_under_jitter_and_its_documents_verify(
    more: dict[str, object], tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    record(order(**more), run)
    report = audit(run, find_source("digits"), jitter=True)
    assert (report.verdict, report.differing_elements) == ("match", 0), str(report.first)
    assert report.freedom.fraction < (0.52 if more.get("tau") == "0.25" else 0.2)
    assert all(check.outcome == "passed" for check in verify_run(run).checks)


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "auditor"), [("native", "sse4,threads=1"), ("sse4,threads=1", "native")])
def test_instruction_sets_reach_the_same_bytes_over_100_steps_and_differ_without_the_log(
    trainer: str, auditor: str, tmp_path: Path
) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    arguments = ["--policy", "leaf", "--steps", "100", "--checkpoint-every", "50", "--set", "width=8"]
    done = tally("record", "digits", "--run", str(run), *arguments, profile=trainer)
    assert done.returncode == 0, done.stderr
    followed = tally("audit", str(run), "--json", profile=auditor)
    answer = json.loads(followed.stdout)
    assert (answer["verdict"], answer["differing_elements"]) == ("match", 0), answer["first"]
    done = tally("record", "digits", "--run", str(alone), *arguments, profile=auditor)
    assert done.returncode == 0, done.stderr
    assert np.count_nonzero(weights(run, 100) != weights(alone, 100)) > 0


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT])
def test_a_forged_entry_of_an_activation_is_caught_at_its_step_and_its_trainer_blamed(
    kind: Kind, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    ForgedEntry(AT, kind).run(order(), run)
    transcript = run.load_transcript()
    kinds = {address.kind for address, _ in decode_frame(run.load_frames(transcript, AT, AT + 1)[AT])}
    assert kind in kinds, "the control: the lie stands in the log"

    report = audit(run, find_source("digits"))
    write_claim(run, find_source("digits"), claim_path(run))
    result = dispute(run, claim_path(run), find_source("digits"))

    assert report.verdict in ("log_violation", "mismatch")
    assert report.first is not None
    assert report.first.step == AT
    at_step = [str(d) for segment in report.segments for d in segment.deviations if d.step == AT]
    assert any("twice the band or farther" in text for text in at_step)
    assert (result.loser, result.step) == ("trainer", AT)


def test_an_honest_run_of_activations_leaves_nobody_to_blame(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    record(order(), run)
    write_claim(run, find_source("digits"), claim_path(run))
    result = dispute(run, claim_path(run), find_source("digits"))
    assert (result.loser, result.rounds) == ("none", 0)


def test_choices_of_the_policy_belong_to_leaf_alone(tmp_path: Path) -> None:
    refused = tally(
        "record", "digits", "--run", str(tmp_path / "x"), "--policy", "fp32", "--b-r", "30", profile="native"
    )
    assert refused.returncode == 2
    assert "policy fp32: has no b_r and no tau" in refused.stderr
    with pytest.raises(InvalidInput, match="tau must be"):
        order(tau="0.3")
