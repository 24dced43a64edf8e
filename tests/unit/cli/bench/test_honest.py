"""The matrix of honest audits: what counts as a false accusation, and that nothing that failed passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tallystick.errors import TallyError
from tallystick.execution.determinism import Profile
from tallystick_bench.honest import JOBS, POLICIES, PROFILES, HonestMatrix, measure_honest

FREEDOM = {"moved": 7, "move_budget": 40, "largest_steer": 0.01}
FIRST = {"step": 3, "subject": "loss", "own": "0x1.0p+0", "stated": "0x1.8p+0"}


def answers(
    verdict: str, loser: str = "none", outcome: str = "both_acceptable"
) -> tuple[Any, list[list[str]]]:
    """A tally command that gives these answers, and what it was asked."""
    asked: list[list[str]] = []

    def child(arguments: Sequence[str], profile: Profile) -> dict[str, Any]:
        asked.append([arguments[0], str(profile), *(["claim"] if "--claim" in arguments else [])])
        if arguments[0] == "dispute":
            return {"loser": loser, "outcome": outcome}
        first = None if verdict == "match" else FIRST
        return {"verdict": verdict, "freedom": FREEDOM, "seconds": {"total": 1.0}, "first": first}

    return child, asked


def matrix(child: Any, place: Path) -> HonestMatrix:
    return measure_honest(place, jobs=["digits"], policies=["fp32"], profiles=PROFILES[:1], child=child)


def test_every_job_is_recorded_once_and_audited_under_every_profile(tmp_path: Path) -> None:
    child, asked = answers("match")

    found = measure_honest(tmp_path, child=child)

    assert len(found.audits) == len(JOBS) * len(POLICIES) * len(PROFILES) == 27
    assert {(audit.moved, audit.budget, audit.steer) for audit in found.audits} == {(7, 40, 0.01)}
    assert (found.false_accusations, found.is_met) == (0, True)
    assert [a for a in asked if a[0] == "record"] == [["record", "native"]] * 9
    assert [a for a in asked if a[0] == "audit"] == [["audit", profile] for profile in PROFILES] * 9


def test_settings_go_to_every_job_beside_its_own(tmp_path: Path) -> None:
    given: list[list[str]] = []

    def child(arguments: Any, profile: Any) -> dict[str, Any]:
        given.append(list(arguments))
        return {"verdict": "match", "freedom": FREEDOM, "seconds": {"total": 1.0}, "first": None}

    measure_honest(
        tmp_path, jobs=["resnet50"], policies=["fp32"], profiles=[], settings={"batch": "4"}, child=child
    )

    assert [text for text in given[0] if "=" in text] == ["width=8", "blocks=1,1,1,1", "batch=4"]


@pytest.mark.parametrize(
    ("verdict", "loser", "outcome", "false", "met"),
    [
        ("match", "none", "agreement", 0, True),
        ("cannot_reproduce", "none", "cannot_reproduce", 0, True),
        ("cannot_reproduce", "trainer", "fault", 1, False),
        ("cannot_reproduce", "auditor", "fault", 1, False),
        ("mismatch", "none", "both_acceptable", 1, False),
        ("log_violation", "trainer", "fault", 1, False),
        ("not_accepted", "trainer", "fault", 0, False),
    ],
)
def test_an_audit_or_a_dispute_that_accuses_anybody_is_false(
    verdict: str, loser: str, outcome: str, false: int, met: bool, tmp_path: Path
) -> None:
    child, asked = answers(verdict, loser, outcome)

    found = matrix(child, tmp_path)

    assert (found.false_accusations, found.is_met) == (false, met)
    went_on = [["audit", PROFILES[0], "claim"], ["dispute", "native"]]
    assert asked[2:] == ([] if verdict in ("match", "not_accepted") else went_on)
    assert found.not_accepted == found.fields()["not_accepted"] == (verdict == "not_accepted")
    assert found.audits[0].first == (
        None if verdict == "match" else "step 3: loss is 0x1.0p+0, stated 0x1.8p+0"
    )
    assert found.fields()["audits"][0]["false_accusation"] == bool(false)


@pytest.mark.parametrize("broken", ["record", "audit", "dispute"])
def test_a_command_that_fails_is_no_pass(broken: str, tmp_path: Path) -> None:
    good, _ = answers("cannot_reproduce")

    def child(arguments: Sequence[str], profile: Profile) -> dict[str, Any]:
        if arguments[0] == broken:
            raise TallyError(f"{broken}: no")
        return good(arguments, profile)

    found = matrix(child, tmp_path)

    assert (found.is_met, found.audits[0].error) == (False, f"{broken}: no")


@pytest.mark.slow
def test_honest_runs_of_digits_are_never_accused(tmp_path: Path) -> None:
    found = measure_honest(tmp_path, jobs=["digits"])

    assert found.is_met, found.fields()
    assert any(audit.moved for audit in found.audits)  # the control: the machines do differ
