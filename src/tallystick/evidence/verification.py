"""What a verification says: checks, what was stated, what auditors measured, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import Specification
from tallystick.run.statements import AuditClaim

CheckOutcome = Literal["passed", "failed", "not judged", "not reached"]
VerificationVerdict = Literal["match", "mismatch", "malformed", "unjudged"]
MOST_WORDS = 200  # characters of free text that are repeated


@dataclass(frozen=True)
class Check:
    """One numbered check: what it claims, how it ended, and what it saw or why it failed."""

    number: int
    claim: str
    outcome: CheckOutcome = "not reached"
    detail: str = ""


@dataclass(frozen=True)
class Stated:
    """What a run states that it is: read from documents that lie under its root, repeated by nobody here.

    Attributes:
        job: the trainer's name for it; the digest decides what ran.
        program, data: SHA-256 of the job's source and of its data, hexadecimal; no data where the job makes its own.
        settings: the job's arguments.
        seed, steps: of the specification.
        policy: name of the rounding policy.
        trainer: id of the key that signed the provenance; None of a bare run.
        weights: root digest of the file that the final state makes, hexadecimal; None where it is not known.
    """

    job: str
    program: str
    data: str | None
    settings: Mapping[str, str]
    seed: int
    steps: int
    policy: str
    trainer: str | None
    weights: str | None

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints; what evidence policies pin goes by the same names."""
        return {**vars(self), "settings": dict(self.settings)}


def stated_by(specification: Specification, *, trainer: str | None, weights: str | None) -> Stated:
    """Return what a specification states, with who signed for it and what came out."""
    job = specification.job
    return Stated(
        job=job.path,
        program=job.source_digest,
        data=job.dataset_digest,
        settings=dict(job.settings),
        seed=specification.seed,
        steps=specification.steps,
        policy=specification.policy.name,
        trainer=trainer,
        weights=weights,
    )


@dataclass(frozen=True)
class Audited:
    """What one auditor signed about a run: its own word, held against the policy elsewhere."""

    key_id: str
    claim: AuditClaim
    parameters: int  # of the run, by its specification

    @property
    def silenced(self) -> Fraction | float:
        """The share of the run's parameters whose gradient was declared to be noise only."""
        silenced = self.claim.freedom.silenced
        return Fraction(silenced, self.parameters) if self.parameters else (math.inf if silenced else 0.0)

    def measured(self) -> dict[str, Fraction | float | None]:
        """Return the numbers that evidence policies limit, by the names they have there; None is not measured."""
        freedom, begin = self.claim.freedom, self.claim.beginning
        return {
            "freedom": freedom.fraction,
            "steer": freedom.steer,
            "fullest_step": freedom.fullest_step,
            "path_steer": freedom.path_steer,
            "silenced": self.silenced,
            "moves": freedom.moves,
            "uncompared": None if begin is None else begin.uncompared,
        }


@dataclass(frozen=True)
class FileAnswer:
    """Whether a file is the very result that a bundle speaks of; None where nothing can be told."""

    file: str
    is_result: bool | None
    why: str


@dataclass
class Verification:
    """All checks of one subject.

    Attributes:
        subject: what was verified, in words.
        root: hexadecimal root that everything hangs from; None if none was found.
        steps: how many steps the transcript has; None for proofs and unread transcripts.
        shows_not: what passing does not show, in words.
        checks: in order.
        verdict: ``match`` if every check passed; ``malformed`` or ``mismatch`` by the one that failed; ``unjudged`` if
            none failed and some need what was not given.
        finding: of a bundle or a dispute's record: what its evidence shows, in words.
        missing: what a verdict would need, in words, where some checks were not judged.
        stated: what the run states that it is, once its documents were found under its root.
        audits: of a bundle: what its auditors signed about the run, counted or not.
        file: of a bundle, where a file was given: whether it is the result.
    """

    subject: str
    shows_not: str
    checks: list[Check] = field(default_factory=list[Check])
    verdict: VerificationVerdict = "match"
    root: str | None = None
    steps: int | None = None
    finding: str | None = None
    missing: str = "no --policy"
    stated: Stated | None = None
    audits: list[Audited] = field(default_factory=list[Audited])
    file: FileAnswer | None = None

    @property
    def accepted(self) -> bool:
        """Whether every check passed: only the verdict ``match`` is; what was not judged is not."""
        return self.verdict == "match"

    @property
    def findings(self) -> tuple[Check, ...]:
        """The checks that did not pass, in order: failed, not judged, or not reached after one that failed."""
        return tuple(check for check in self.checks if check.outcome != "passed")


def work_through(found: Verification, checks: Iterable[tuple[str, Callable[[], str | None]]]) -> None:
    """Run ``checks`` into ``found``, in order, up to the first one that fails.

    A check returns what it saw, or None where a policy is needed that was not given; then nothing is accepted.
    """
    for number, (claim, check) in enumerate(checks, start=1):
        if found.verdict in ("mismatch", "malformed"):
            found.checks.append(Check(number, claim))
            continue
        try:
            detail = check()
        except (InvalidInput, Mismatch) as problem:
            found.verdict = "malformed" if isinstance(problem, InvalidInput) else "mismatch"
            found.checks.append(Check(number, claim, "failed", str(problem)))
            continue
        if detail is None:
            found.verdict = "unjudged"
            found.checks.append(Check(number, claim, "not judged", "no policy says what is asked for"))
        else:
            found.checks.append(Check(number, claim, "passed", detail))


def quoted(text: str, most: int = MOST_WORDS) -> str:
    """Return somebody's free text as what it is: in quotation marks, on one line, escaped and cut to ``most`` characters."""
    escaped = text.encode("unicode_escape").decode().replace('"', '\\"')
    return f'"{escaped if len(escaped) <= most else escaped[:most] + ".."}"'
