"""A judge's panel: the same question asked under other arithmetics, before anybody is convicted (spec/dispute.md 14).

What the judge computes depends on its processor. So whoever it would convict is judged again by child processes of the same
machine, under AVX2 and under SSE4.2, from the same states and documents; a conviction stands if all answer alike. A member
that does not answer convicts nobody. Members start with the first question and live as long as the process.

A referee that is started again for every answer that arrives asks every question again. What the members said is kept
beside the dispute, by the digest of the question, so they compute it once.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import canonical_json
from tallystick.commit.state import HeldState
from tallystick.dispute.terms import PARTIES, DisputedPosition, Party
from tallystick.dispute.verdict import LogObjection
from tallystick.errors import InvalidInput
from tallystick.execution.determinism import X86_ONLY, Profile
from tallystick.execution.job import JobSource
from tallystick.roles.costs import Ledger
from tallystick.roles.elsewhen import calendar_of
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.version import __version__

KEPT_FORMAT = "tallystick/panel-opinions/1"
KEPT_LIMIT = 1 << 20  # bytes of what a panel said to one question
X86 = ("x86_64", "amd64")
OWN = "the judge's own"
PATIENCE_S = 3600.0  # for one answer: a job that hangs in a member convicts nobody
ELSEWHEN = (
    3  # an order of two strings is the same under three hash seeds once in four, of five once in 14,400
)


def panel_profiles() -> tuple[Profile, ...]:
    """Return the arithmetics of a panel besides the judge's own; where there are no instruction sets to choose, noise is one."""
    if platform.machine().lower() in X86:
        return tuple(Profile(name, threads=1) for name in X86_ONLY)
    return Profile(threads=1), Profile(threads=1, jitter=True)


@dataclass(frozen=True)
class PanelQuestion:
    """What a member is asked, and everything that it needs for an answer.

    Attributes:
        kind: ``state``, ``records``, ``log``, ``beginning`` or ``structure``: which ruling; ``same``: what the job is there.
        trainer, auditor: directories with the documents of the runs.
        source: the job's.
        step: the one that is ruled on.
        agreed: the state before it.
        states: after it, of the parties that can open their claims.
        unopened: why a party cannot open its last checkpoint before, where it can not.
        frame: the trainer's log of the step, or None.
        no_frame: why the trainer has none, if it said so.
        position: where the game ended; for ``state``.
        objection: for ``log``.
        at: for ``structure``: the leaf.
        parties: who is judged.
    """

    kind: str
    trainer: Path
    auditor: Path
    source: JobSource
    step: int
    agreed: HeldState | None = None
    states: Mapping[Party, HeldState] = field(default_factory=dict[Party, HeldState])
    unopened: Mapping[Party, str] = field(default_factory=dict[Party, str])
    frame: bytes | None = None
    no_frame: str | None = None
    position: DisputedPosition | None = None
    objection: LogObjection | None = None
    at: int = 0
    parties: Sequence[Party] = PARTIES

    def body(self) -> dict[str, object]:
        """Return what is asked as JSON, without the states and where anything lies."""
        position = self.position
        return {
            "agreed": self.agreed is not None,
            "at": self.at,
            "frame": self.frame is not None,
            "job": self.source.path,
            "kind": self.kind,
            "no_frame": self.no_frame,
            "objection": None if self.objection is None else self.objection.encode().decode(),
            "parties": list(self.parties),
            "position": None
            if position is None
            else {
                "agreed": position.agreed,
                "agreed_commitment": position.agreed_commitment.hex(),
                "claims": {party: claim.hex() for party, claim in position.claims.items()},
                "disputed": position.disputed,
                "level": position.level,
            },
            "source": base64.b64encode(self.source.source).decode(),
            "states": sorted(self.states),
            "step": self.step,
            "unopened": dict(self.unopened),
        }

    def digest(self, members: Sequence[str]) -> str:
        """Return the SHA-256, in hexadecimal, of everything that the opinions of ``members`` follow from."""
        documents = [
            RunDirectory(place).load_transcript().root().hex() for place in (self.trainer, self.auditor)
        ]
        held = {"agreed": self.agreed, **self.states}
        states = {name: [s.root.hex(), sorted(s.entries)] for name, s in held.items() if s is not None}
        frame = None if self.frame is None else hashlib.sha256(self.frame).hexdigest()
        asked = {
            "body": self.body(), "documents": documents, "frame": frame, "members": list(members), "states": states,
            "version": __version__,
        }  # fmt: skip
        return hashlib.sha256(canonical_json(asked)).hexdigest()

    def write(self, place: Path) -> bytes:
        """Write the states below ``place`` and return the rest as one line of JSON."""
        for name, state in {"agreed": self.agreed, **self.states}.items():
            if state is not None:
                folder = place / name
                folder.mkdir()
                RunDirectory(folder).write_checkpoint(0, list(state.entries.values()))
        if self.frame is not None:
            write_whole(place / "frame", self.frame)
        places = {"auditor": self.auditor.resolve(), "place": place, "trainer": self.trainer.resolve()}
        asked = {**self.body(), **{name: str(path) for name, path in places.items()}}
        return json.dumps(asked).encode() + b"\n"


@dataclass(frozen=True)
class Opinion(Document, what="opinion"):
    """A member's answer (whom it would convict, or what its list has) and why."""

    answer: str
    reason: str


@dataclass(frozen=True)
class KeptOpinions(Document, form=KEPT_FORMAT, what="panel", limit=KEPT_LIMIT):
    """What a panel said to one question, by its members' names."""

    said: Mapping[str, Opinion]


class PanelMember:
    """One arithmetic: a child process that answers questions one after another.

    Where ``elsewhen`` is a number, sets of strings have another order there, of that hash seed, and clocks show another time;
    above 0 in another time zone.
    """

    def __init__(self, profile: Profile, elsewhen: int | None = None) -> None:
        self.profile = profile
        self.elsewhen = elsewhen
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> Opinion | None:
        """Return the answer, None if the process died of the question, or has not answered in ``PATIENCE_S``."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        impatience = threading.Timer(PATIENCE_S, _end, (process,))
        impatience.start()
        try:
            process.stdin.write(json.dumps(self._environment()).encode() + b"\n" + question)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            impatience.cancel()
        if not line:
            self.close()
            return None
        said: Any = json.loads(line)
        return Opinion(str(said["answer"]), str(said["reason"]))

    def start(self) -> subprocess.Popen[bytes]:
        """Return the process, started if it is not there yet: loading takes seconds, in which others can load too."""
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "tallystick.roles.panel_member", str(self.profile), str(self.elsewhen or 0),
                ],
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what the job starts ends with the member
            )  # fmt: skip
            atexit.register(self.close)
        return self._process

    def _environment(self) -> dict[str, str]:
        """Return the variables of this process as they are now, but for what makes the member another one."""
        other = {} if self.elsewhen is None else {"PYTHONHASHSEED": str(self.elsewhen)}
        if self.elsewhen:
            other["TZ"] = f"TAL{5 * self.elsewhen}"  # so many hours behind Greenwich
            other |= calendar_of(self.elsewhen)
        paths = os.pathsep.join(path for path in sys.path if path)
        return {**os.environ, **self.profile.environment(), **other, "PYTHONPATH": paths}

    def close(self) -> None:
        """Let the process end."""
        process, self._process = self._process, None
        if process is not None:
            atexit.unregister(self.close)
            _end(process)
            for pipe in (process.stdin, process.stdout):  # a job's own processes may hold the other ends
                with suppress(OSError):
                    pipe.close() if pipe is not None else None
            process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


_MEMBERS: dict[str, PanelMember] = {}


def sitting_panel() -> Sequence[PanelMember]:
    """Return this process's panel; members that have started stay."""
    return [_MEMBERS.setdefault(str(profile), PanelMember(profile)) for profile in panel_profiles()]


def same_arithmetic() -> Sequence[PanelMember]:
    """Return members that compute as this process does, each with an order of sets and a clock of its own."""
    return [_MEMBERS.setdefault(f"elsewhen {n}", PanelMember(Profile(), n)) for n in range(ELSEWHEN)]


def opinions_on(question: PanelQuestion, members: Sequence[PanelMember]) -> list[Opinion | None]:
    """Return what each member says; None of one that does not answer."""
    with tempfile.TemporaryDirectory(prefix="tally-panel-") as place:
        written = question.write(Path(place))
        for member in members:
            member.start()
        return [member.ask(written) for member in members]


def find_dissent(question: PanelQuestion, own: str, kept: Path | None = None) -> str | None:
    """Return which arithmetics do not answer ``question`` as the judge's ``own`` does, and what they say; None if all agree.

    ``kept`` is a folder of the judge's own with what they said before.
    """
    if type(question.source) is not JobSource:
        return f"the job {question.source.path} cannot be given to another process"
    said = _opinions(question) if kept is None else _said_or_kept(question, kept)
    others = [
        f"{name} {'does not answer' if opinion is None else f'says {opinion.answer}: {opinion.reason}'}"
        for name, opinion in said.items()
        if opinion is None or opinion.answer != own
    ]
    if not others:
        return None
    alike = [OWN, *(name for name, opinion in said.items() if opinion is not None and opinion.answer == own)]
    return f"arithmetics disagree: {', '.join(alike)}: {own}; {'; '.join(others)}"


def _opinions(question: PanelQuestion) -> dict[str, Opinion | None]:
    members = sitting_panel()
    return dict(zip((str(member.profile) for member in members), opinions_on(question, members), strict=True))


def _said_or_kept(question: PanelQuestion, kept: Path) -> Mapping[str, Opinion | None]:
    """Return what the members said before, else what they say now; that is kept if all of them answer."""
    names = [str(member.profile) for member in sitting_panel()]
    path = kept / f"{question.digest(names)}.json"
    if path.exists():
        held = KeptOpinions.parse(read_whole(path, limit=KEPT_LIMIT, what="what a panel said")).said
        if sorted(held) != sorted(names):
            raise InvalidInput(f"panel: must be {', '.join(names)}, is {', '.join(held)[:200]}")
        return {name: held[name] for name in names}
    said = _opinions(question)
    given = {name: opinion for name, opinion in said.items() if opinion is not None}
    if given.keys() == said.keys():
        write_whole(path, KeptOpinions(given).encode())
    return said


@dataclass(frozen=True)
class Panel:
    """Whom the judge of one dispute asks, and about which runs; ``ledger`` is charged.

    ``trainer`` and ``auditor`` are directories with the documents of both runs, ``source`` is the job's, ``kept`` is where
    what the members say outlives the process, or None.
    """

    trainer: Path
    auditor: Path
    source: JobSource
    ledger: Ledger
    kept: Path | None = None

    def find_dissent(self, kind: str, own: str, step: int, **more: Any) -> str | None:
        """Return which arithmetics do not answer a ``PanelQuestion`` as the judge's ``own`` does; None if all agree."""
        with self.ledger.charging("judge", "panel"):
            question = PanelQuestion(kind, self.trainer, self.auditor, self.source, step, **more)
            return find_dissent(question, own, self.kept)


def asked_of(line: bytes) -> Mapping[str, Any]:
    """Return what ``PanelQuestion.write`` wrote."""
    return cast("Mapping[str, Any]", json.loads(line))
