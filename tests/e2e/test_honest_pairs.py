"""Honest runs of jobs as people write them, audited on other arithmetic: whoever judges a difference, nobody loses.

The jobs of ``honest_jobs`` draw, augment, transform and whiten their data, have helper modules beside them and label by a
teacher. Each is recorded in one process and audited in others. What does not match goes on as its auditor would go on: a
claim, then a dispute before three judges. The whole matrix, with its table:

    pytest -s -m slow tests/e2e/test_honest_pairs.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tallystick.execution.determinism import INSTRUCTION_SETS, Profile
from tallystick.roles.panel import panel_profiles

JOBS = Path(__file__).parent / "honest_jobs"
NATIVE = Profile(threads=1)
JUDGES = (NATIVE, *panel_profiles())
JITTER = Profile(threads=1, jitter=True)
AUDITORS = (*JUDGES, JITTER)
ACCUSATIONS = ("mismatch", "log_violation")
CASES = (
    "seeded_data", "noisy_inputs", "turned_images", "turned_pixels", "crops_and_flips", "mixed_up", "blurred", "spectra",
    "standardised", "whitened", "whitened by=svd", "whitened by=numpy", "taught", "taught labels=choice",
    "taught labels=bucket", "rings", "drawn_choices", "masked_text",
)  # fmt: skip
PAIRS = (
    *((case, "fp32", profile) for profile in (NATIVE, JITTER) for case in CASES),
    *((case, policy, NATIVE) for case in ("turned_images", "rings") for policy in ("fp64", "bf16")),
    *((case, "fp32", JUDGES[-1]) for case in ("noisy_inputs", "turned_pixels")),
)  # fmt: skip
QUICK = (("turned_pixels", "fp32"), ("turned_images", "fp64"))  # a judge under SSE4.2 convicted both before
SEAT = """
import contextlib, io, json, sys
from tallystick.cli.main import main
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(json.loads(line))
    print(json.dumps([code, said.getvalue()]), flush=True)
"""
FOREIGN = """
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.job import JobSource
own = JobSource.build

def build(source, settings, seed=0):
    with JitterMode(Jitter(99)):
        job = own(source, settings, seed)
    batch = job.batch

    def elsewhere(step):
        with JitterMode(Jitter(100 + step)):
            return batch(step)

    job.batch = elsewhere
    return job

JobSource.build = build
"""


class Seat:
    """A process under one arithmetic in which commands run one after another.

    With jitter it has a processor like no judge's: each of torch's operators is off by a last place, in the job's ``build`` and
    ``batch`` (``FOREIGN``) as in its steps (the profile).
    """

    def __init__(self, profile: Profile) -> None:
        chosen = {name for names in INSTRUCTION_SETS.values() for name in names}
        environment = {name: value for name, value in os.environ.items() if name not in chosen}
        self._process = subprocess.Popen(
            [sys.executable, "-c", FOREIGN * profile.jitter + SEAT], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**environment, **profile.environment()},
        )  # fmt: skip

    def tally(self, *arguments: str) -> dict[str, Any]:
        """Return what a command answers with --json; ``code`` is its exit code."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([*arguments, "--json"]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        code, said = json.loads(line)
        return {"code": code, **json.loads(said)}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Found:
    """What came of one audit: its verdict, and the judges' rulings if it was no match."""

    verdict: str
    first: Any = None
    rulings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def convicted(self) -> list[str]:
        return [
            f"{judge}: {r['loser']}: {r['reason']}"
            for judge, r in self.rulings.items()
            if r["loser"] != "none"
        ]

    def __str__(self) -> str:
        outcomes = [ruling["outcome"] for ruling in self.rulings.values()]
        return self.verdict + (f" ({', '.join(dict.fromkeys(outcomes))})" if outcomes else "")


class Room:
    """The parties' processes: a recorder's and an auditor's for each arithmetic, who judges too."""

    def __init__(self) -> None:
        self._seats: dict[tuple[str, str], Seat] = {}
        self.table: dict[tuple[str, str, str], dict[str, Found]] = {}

    def seat(self, role: str, profile: Profile) -> Seat:
        key = role, str(profile)
        if key not in self._seats:
            self._seats[key] = Seat(profile)
        return self._seats[key]

    def record(self, run: Path, case: str, policy: str, profile: Profile) -> list[str]:
        """Record a run and return the arguments that name its job."""
        name, *settings = case.split()
        job = str(JOBS / f"{name}.py")
        options = [
            "--profile",
            str(profile),
            "--policy",
            policy,
            "--checkpoint-every",
            "4",
            "--run",
            str(run),
        ]
        options += [part for setting in settings for part in ("--set", setting)]
        assert self.seat("recorder", profile).tally("record", job, *options)["code"] == 0
        return ["--job", job]

    def audit(self, run: Path, job: Sequence[str], profile: Profile, judges: Sequence[Profile]) -> Found:
        """Audit a run; if that is no match, claim otherwise, and hear the judges."""
        seat, claim = self.seat("auditor", profile), run.with_name(f"{run.name}-{profile}")
        repeat = ["audit", str(run), *job, "--profile", str(profile)]
        said = seat.tally(*repeat, "--effort", "0")
        found = Found(said["verdict"], said["first"])
        if found.verdict != "match":
            seat.tally(*repeat, "--claim", str(claim))
            for judge in judges:
                ruling = self.seat("auditor", judge).tally("dispute", str(run), str(claim), *job)
                found.rulings[str(judge)] = ruling
        return found

    def close(self) -> None:
        for seat in self._seats.values():
            seat.close()
        if len(self.table) > len(QUICK):
            print("\n\n| job | policy | recorded under |", *(f" {profile} |" for profile in AUDITORS), sep="")
            print("|---|---|---|", *("---|" for _ in AUDITORS), sep="")
            for names, row in self.table.items():
                print("|", " | ".join([*names, *(str(row.get(str(p), "")) for p in AUDITORS)]), "|")


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    made = Room()
    yield made
    made.close()


def judged(
    room: Room,
    place: Path,
    pair: tuple[str, str, Profile],
    auditors: Sequence[Profile],
    judges: Sequence[Profile] = JUDGES,
) -> None:
    case, policy, profile = pair
    job = room.record(place / "run", case, policy, profile)
    row = {str(auditor): room.audit(place / "run", job, auditor, judges) for auditor in auditors}
    room.table[case, policy, str(profile)] = row
    assert {name: found.convicted for name, found in row.items() if found.convicted} == {}
    assert {name: found.first for name, found in row.items() if found.verdict in ACCUSATIONS} == {}


@pytest.mark.parametrize(("case", "policy"), QUICK)
def test_nobody_honest_is_convicted(room: Room, tmp_path: Path, case: str, policy: str) -> None:
    judged(room, tmp_path, (case, policy, NATIVE), JUDGES[-1:], JUDGES[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)).replace(" ", "-"))
def test_nobody_honest_is_convicted_whoever_audits_and_judges(
    room: Room, tmp_path: Path, pair: tuple[str, str, Profile]
) -> None:
    judged(room, tmp_path, pair, AUDITORS)
