"""What a dispute by files takes: a referee and two parties, each a process with its own key and run, on one machine.

A trainer swaps the data of one step in the middle of a segment and defends itself with the program that did it; an auditor
disputes the run down to the operator. Nothing passes but the files of the two mailboxes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import TallyError
from tallystick.signing.keys import generate_key
from tallystick.store.keys import write_key
from tallystick_bench.dispute import make_false_run

IDLE_SECONDS = 3600  # that a party waits for the next question
SWAPPING = """

_honest = build


def build(settings):
    job = _honest(settings)
    own = job.batch
    job.batch = lambda step: own(step + 1_000_003 if step == {at} else step)
    return job
"""
Say = Callable[[str], None]


@dataclass(frozen=True)
class PartyCost:
    """What one side did: questions, bytes of files both ways, and seconds of work, elapsed and of its processor."""

    questions: int
    received_bytes: int
    sent_bytes: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class ExchangeCost:
    """What the dispute took.

    Attributes:
        job, policy, segment: what was disputed; steps between two checkpoints.
        rounds, rounds_per_level: of questions and answers; of bisection, by level.
        parties: the two, and the referee, whose bytes are those of both together.
        seconds: from the first question to the ruling.
        state_bytes: size of the state after the last step.
        loser, operator: how it ended, and at what.
    """

    job: str
    policy: str
    segment: int
    rounds: int
    rounds_per_level: Mapping[str, int]
    parties: Mapping[str, PartyCost]
    seconds: float
    state_bytes: int
    loser: str
    operator: str

    def fields(self) -> dict[str, object]:
        """Return everything as a JSON object."""
        return {**vars(self), "parties": {who: vars(each) for who, each in self.parties.items()}}


def measure_exchange(
    place: Path, job: str, policy: str, segment: int, say: Say, settings: Mapping[str, str] | None = None
) -> ExchangeCost:
    """Record a false run of ``segment`` steps in ``place``, dispute it by files, and return what that took.

    Raises:
        TallyError: a process failed, was killed for the memory that two parties on one machine need, or the trainer did not
            lose at an operator.
    """
    at = segment // 2
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # the parties need the memory that this takes
        made = apart.submit(make_false_run, place, job, policy, segment, say, settings)
    source, _, run, claim = made.result()
    (place / "program.py").write_bytes(source.source + SWAPPING.format(at=at).encode())
    last = run.load_transcript().checkpoints()[-1]
    state_bytes = run.load_held(last.steps_done, last.state_root).nbytes
    runs: dict[Party, Path] = {"trainer": run.path, "auditor": claim.path}
    for who in (*PARTIES, "referee"):
        write_key(place / f"{who}.key", generate_key("ed25519"))
    docket, referee = place / "docket", place / "referee.key"
    signs = [word for party in PARTIES for word in (f"--{party}-signs", place / f"{party}.key.pub")]
    opened = _start("open", run.path, claim.path, "--out", docket, "--key", referee, *signs)
    dispute = _answer_of(opened, "open", (0,))["dispute"]
    say(f"disputing step {at} of {segment} by files")
    programs = {"trainer": place / "program.py", "auditor": source.path}
    began = time.perf_counter()
    answering: dict[Party, subprocess.Popen[bytes]] = {
        party: _start(
            "answer", docket / party, runs[party], "--key", place / f"{party}.key", "--job", programs[party],
            "--referee-signs", place / "referee.key.pub", "--dispute", dispute, "--follow", IDLE_SECONDS,
        )
        for party in PARTIES
    }  # fmt: skip
    try:
        ruling = _start("rule", docket, "--key", referee, "--job", source.path, "--follow")
        _watch(ruling, answering)
        ruled = _answer_of(ruling, "rule", (0, 1))
        seconds = time.perf_counter() - began
        worked = {party: _answer_of(answering[party], party, (0,)) for party in PARTIES}
    finally:
        for process in (each for each in answering.values() if each.poll() is None):
            process.kill()
            process.communicate()
    found, exchange = ruled["operator"], ruled["exchange"]
    if ruled["loser"] != "trainer" or found is None or found["operator"] is None:
        raise TallyError(f"bench: the trainer did not lose at an operator: {ruled['reason']}")
    parties: dict[str, PartyCost] = {
        party: _cost(exchange["parties"][party], worked[party]) for party in PARTIES
    }
    both = [exchange["parties"][party] for party in PARTIES]
    totals = {
        name: sum(each[name] for each in both) for name in ("questions", "sent_bytes", "received_bytes")
    }
    # What the parties are sent the referee sends.
    turned = {**totals, "sent_bytes": totals["received_bytes"], "received_bytes": totals["sent_bytes"]}
    parties["referee"] = _cost(turned, exchange["referee"])
    return ExchangeCost(
        job, policy, segment, exchange["rounds"], ruled["rounds_per_level"], parties, seconds, state_bytes,
        ruled["loser"], str(found["operator"]["name"]),
    )  # fmt: skip


def _cost(passed: Mapping[str, Any], worked: Mapping[str, Any]) -> PartyCost:
    return PartyCost(
        passed["questions"], passed["received_bytes"], passed["sent_bytes"], worked["seconds"], worked["cpu_seconds"]
    )  # fmt: skip


def _watch(ruling: subprocess.Popen[bytes], answering: Mapping[Party, subprocess.Popen[bytes]]) -> None:
    """Wait for the ruling; return early, the referee killed, if a party ends as it should not: nobody would answer any more."""
    while ruling.poll() is None:
        for party, process in answering.items():
            if process.poll() not in (None, 0):
                ruling.kill()
                ruling.communicate()
                _answer_of(process, party, (0,))
        time.sleep(0.05)


def _start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "tallystick", "dispute", *map(str, arguments), "--json"]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _answer_of(process: subprocess.Popen[bytes], name: str, codes: tuple[int, ...]) -> dict[str, Any]:
    """Return what a process printed at its end: with ``--json`` its errors too.

    Raises:
        TallyError: it ended otherwise than with one of ``codes``.
    """
    out = process.communicate()[0]
    if process.returncode not in codes:
        raise TallyError(
            f"bench: {name} ended with {process.returncode}: {out.decode(errors='replace')[-500:]}"
        )
    return json.loads(out)
