"""What trainer, auditor and judge sign about a run, and what a reader takes from it (spec/attestation.md).

    provenance          SLSA provenance v1, build type https://tallystick/training/v1
    replay audit        https://tallystick/replay-audit/v0.2
    dispute verdict     https://tallystick/dispute-verdict/v0.1

All have one subject ``run`` (the root of the run tree) and, where the weights are known, one ``weights`` (their
OpenSSF Model Signing root digest). Readers take the fields they know and refuse a statement that lacks one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tallystick.commit.encoding import (
    hex_float,
)
from tallystick.errors import InvalidInput
from tallystick.run.documents import RunStatement, Specification
from tallystick.run.sample import SegmentDraw
from tallystick.signing.dsse import Statement, Subject

PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://tallystick/training/v1"
AUDIT_TYPE = "https://tallystick/replay-audit/v0.2"
VERDICT_TYPE = "https://tallystick/dispute-verdict/v0.1"
RUN_DIGEST = "tallystickRun"  # name of the digest of a subject that is a run: the root of its tree
RESULTS = ("match", "mismatch", "log_violation", "cannot_reproduce", "not_accepted")
OUTCOMES = ("fault", "agreement", "both_acceptable", "not_proven", "cannot_reproduce", "forfeit")
LOSERS = ("trainer", "auditor", "both", "none")
MOST_NAMES = 1000  # of tensors that an audit's statement lists

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", re.ASCII)


@dataclass(frozen=True)
class RunIdentity:
    """Which run a statement is about: its statement, its specification's digest and its weights, in hexadecimal."""

    run: RunStatement
    specification: str
    weights: str | None

    def subjects(self) -> tuple[Subject, ...]:
        """Return the subjects of every statement about the run."""
        run = Subject("run", {RUN_DIGEST: self.run.root})
        return (run,) if self.weights is None else (run, Subject("weights", {"sha256": self.weights}))


@dataclass(frozen=True)
class TrainerClaim:
    """The trainer says: this specification led to this run and these weights."""

    identity: RunIdentity
    at: int
    policy: str
    definition: Mapping[str, object]  # what it says of job, data and settings; the specification decides


@dataclass(frozen=True)
class MeasuredFreedom:
    """What an auditor measured of what a log could have chosen, and did; infinity is what has no bound.

    Attributes:
        fraction: share of roundings that the log could choose.
        largest_steer, largest_move: the largest steer of one step's gradient that the budget allows, and the log's own.
        fullest_step: the largest share of its budget of size that one step used.
        path_steer: how far all moves together carry the weights, over the distance trained.
        moves: roundings and decisions that the log took from the auditor's own.
        silenced: parameters whose gradient was declared to be noise only, in the step where they are most.
    """

    fraction: float
    largest_steer: float
    largest_move: float
    fullest_step: float
    path_steer: float
    moves: int
    silenced: int

    @property
    def steer(self) -> float:
        """The larger of what the budget allows in one step and of what the log did."""
        return max(self.largest_steer, self.largest_move)

    def fields(self) -> dict[str, object]:
        """Return the numbers as an audit's statement holds them."""
        real = {name: hex_float(getattr(self, attribute)) for name, attribute in REAL.items()}
        return {**real, "moves": self.moves, "silenced": self.silenced}


REAL = {
    "fraction": "fraction", "fullestStep": "fullest_step", "largestMove": "largest_move", "largestSteer": "largest_steer",
    "pathSteer": "path_steer",
}  # fmt: skip


@dataclass(frozen=True)
class Uncompared:
    """Tensors of a run's first state that are not, bit for bit, what the job builds on the auditor's machine.

    Attributes:
        parameters, tensors: how many, of both.
        names: of the first ``MOST_NAMES`` of them.
    """

    parameters: int
    tensors: int
    names: tuple[str, ...]

    def fields(self) -> dict[str, object]:
        """Return the numbers and names as an audit's statement holds them."""
        return {"names": list(self.names), "parameters": self.parameters, "tensors": self.tensors}


@dataclass(frozen=True)
class FirstState:
    """How a run's first state compares with what the job builds on the auditor's machine.

    Attributes:
        trained: parameters that the job trains.
        other: of those, what begins otherwise; no two machines need draw the same ones.
        rounded: what the job does not train and what is the job's to within the last bits only.
    """

    trained: int
    other: Uncompared
    rounded: Uncompared

    @property
    def uncompared(self) -> int:
        """Parameters that are not, bit for bit, the job's own."""
        return self.other.parameters + self.rounded.parameters

    def fields(self) -> dict[str, object]:
        """Return the comparison as an audit's statement holds it."""
        return {"other": self.other.fields(), "rounded": self.rounded.fields(), "trained": self.trained}


@dataclass(frozen=True)
class AuditClaim:
    """An auditor says what repeating a run, or a part of it, showed.

    Attributes:
        identity: of the run.
        at: seconds since 1970.
        result: one of ``RESULTS``.
        segments: what was repeated: (first step, end), ascending, without overlap.
        draw: from which public randomness they were drawn; None if they were chosen otherwise.
        policy: name of the rounding policy.
        profile: the auditor's arithmetic, in words.
        freedom: what was measured of the log's freedom over these steps.
        beginning: how the first state compares with the job's; None if the steps repeated do not begin there.
    """

    identity: RunIdentity
    at: int
    result: str
    segments: tuple[tuple[int, int], ...]
    draw: SegmentDraw | None
    policy: str
    profile: str
    freedom: MeasuredFreedom
    beginning: FirstState | None

    @property
    def steps(self) -> int:
        """How many steps were repeated."""
        return sum(end - start for start, end in self.segments)

    @property
    def is_whole(self) -> bool:
        """Whether every step was."""
        return self.steps == self.identity.run.steps

    @property
    def needs_weights(self) -> bool:
        """Whether it says that the run's final state followed: of which weights, it must say too."""
        followed = self.result in ("match", "not_accepted")
        return followed and any(end == self.identity.run.steps for _, end in self.segments)


@dataclass(frozen=True)
class VerdictClaim:
    """A judge says how a dispute between two runs of one specification ended."""

    identity: RunIdentity
    at: int
    auditor_run: str
    outcome: str
    loser: str
    step: int | None
    reason: str
    record: str  # SHA-256 of the verdict's document, hexadecimal
    dispute: str | None = None  # SHA-256 of the record of a dispute down to one operator
    accusation: str | None = None  # SHA-256 of the auditor's signed statement that it answers

    @property
    def finds_out(self) -> bool:
        """Whether it says anything about the parties; not where the judge could not tell, or both were silent."""
        idle = self.outcome == "forfeit" and self.loser == "none"
        return not idle and self.outcome not in ("cannot_reproduce", "not_proven")


Claim = TrainerClaim | AuditClaim | VerdictClaim


def provenance_statement(
    specification: Specification, identity: RunIdentity, *, at: int, version: str
) -> Statement:
    """Return the trainer's statement: what was ordered, from what, and what came out; ``at`` is the signing's second."""
    run = identity.run.encode()
    predicate = {
        "buildDefinition": {"buildType": BUILD_TYPE, **build_definition(specification)},
        "runDetails": {
            "builder": {"id": BUILD_TYPE, "version": {"tallystick": version}},
            "byproducts": [
                {
                    "content": base64.b64encode(run).decode(),
                    "digest": {"sha256": hashlib.sha256(run).hexdigest()},
                    "name": "run.json",
                },
                {"digest": {"tallystickSpecification": identity.specification}, "name": "specification.json"},
            ],
        },
        "tallystick_signedAt": time_text(at),
    }
    return Statement(identity.subjects(), PROVENANCE_TYPE, predicate)


def build_definition(specification: Specification) -> dict[str, object]:
    """Return what a provenance says of job, data and settings."""
    job = specification.job
    dependencies = [{"digest": {"sha256": job.source_digest}, "name": "job source"}]
    if job.dataset_digest is not None:
        dependencies.append({"digest": {"sha256": job.dataset_digest}, "name": "dataset"})
    policy = {"name": specification.policy.name, "parameters": dict(specification.policy.parameters)}
    return {
        "externalParameters": {
            "accumulation": specification.accumulation,
            "checkpointEvery": specification.checkpoint_every,
            "job": {"path": job.path, "settings": dict(job.settings)},
            "policy": policy,
            "seed": specification.seed,
            "steps": specification.steps,
            "worldSize": specification.world_size,
        },
        "internalParameters": {"versions": dict(specification.versions)},
        "resolvedDependencies": dependencies,
    }


def audit_statement(claim: AuditClaim, *, details: Mapping[str, object], version: str) -> Statement:
    """Return the auditor's statement; ``details`` are for people and must be canonical JSON's values.

    Raises:
        InvalidInput: the claim needs weights and has none.
    """
    check_weights(claim, "audit")
    predicate = {
        "auditor": {"version": {"tallystick": version}},
        "beginning": None if claim.beginning is None else claim.beginning.fields(),
        "details": dict(details),
        "freedom": claim.freedom.fields(),
        "policy": claim.policy,
        "profile": claim.profile,
        "replayedAt": time_text(claim.at),
        "result": claim.result,
        "run": _run_fields(claim.identity),
        "sample": None if claim.draw is None else base64.b64encode(claim.draw.encode()).decode(),
        "segments": [list(segment) for segment in claim.segments],
    }
    return Statement(claim.identity.subjects(), AUDIT_TYPE, predicate)


def verdict_statement(claim: VerdictClaim, *, version: str) -> Statement:
    """Return the judge's statement."""
    predicate = {
        "accusation": None if claim.accusation is None else {"sha256": claim.accusation},
        "auditorRun": claim.auditor_run,
        "dispute": None if claim.dispute is None else {"sha256": claim.dispute},
        "judge": {"version": {"tallystick": version}},
        "loser": claim.loser,
        "outcome": claim.outcome,
        "reason": claim.reason,
        "record": {"sha256": claim.record},
        "ruledAt": time_text(claim.at),
        "run": _run_fields(claim.identity),
        "step": claim.step,
    }
    return Statement(claim.identity.subjects(), VERDICT_TYPE, predicate)


def time_text(seconds: int) -> str:
    """Return the second since 1970 as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str, *, what: str) -> int:
    """Return the second since 1970 that ``text`` writes.

    Raises:
        InvalidInput: another form than 2026-01-31T12:00:00Z, or no such day.
    """
    if not _TIME.fullmatch(text):
        raise InvalidInput(f"{what}: must be a time such as 2026-01-31T12:00:00Z, is {text[:40]!r}")
    try:
        return int(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise InvalidInput(f"{what}: there is no time {text}") from None


def _run_fields(identity: RunIdentity) -> dict[str, object]:
    return {
        "specification": {"tallystickSpecification": identity.specification},
        "statement": base64.b64encode(identity.run.encode()).decode(),
    }


def check_weights(claim: AuditClaim, what: str) -> None:
    """Return if the claim names the weights wherever it must.

    Raises:
        InvalidInput: it does not.
    """
    if claim.needs_weights and claim.identity.weights is None:
        raise InvalidInput(
            f"{what}: result {claim.result} up to the run's end, step {claim.identity.run.steps}, must name the weights, "
            "names none"
        )
