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
from typing import Annotated, ClassVar

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, parse_hex, short
from tallystick.commit.field_rules import At, Hex, Least, NotNegative, Via, Whole
from tallystick.errors import InvalidInput
from tallystick.run.documents import RunStatement, Specification, parse_run_statement
from tallystick.run.sample import SegmentDraw, parse_draw
from tallystick.signing.dsse import Statement, Subject, known_fields
from tallystick.signing.note import decode_base64

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


class _Said(Document):
    """What a statement says: a reader ignores fields that it does not know."""

    LOOSE: ClassVar[bool] = True


@dataclass(frozen=True)
class MeasuredFreedom(_Said, what="freedom"):
    """What an auditor measured of what a log could have chosen, and did; infinity is what has no bound.

    Attributes:
        fraction: share of roundings that the log could choose.
        largest_steer, largest_move: the largest steer of one step's gradient that the budget allows, and the log's own.
        fullest_step: the largest share of its budget of size that one step used.
        path_steer: how far the log's choices led the weights, over the distance trained.
        moves: roundings and decisions that the log took from the auditor's own.
        silenced: parameters whose gradient was declared to be noise only, in the step where they are most.
    """

    fraction: NotNegative
    largest_steer: Annotated[float, At("largestSteer"), Least(0)]
    largest_move: Annotated[float, At("largestMove"), Least(0)]
    fullest_step: Annotated[float, At("fullestStep"), Least(0)]
    path_steer: Annotated[float, At("pathSteer"), Least(0)]
    moves: Whole
    silenced: Whole

    @property
    def steer(self) -> float:
        """The larger of what the budget allows in one step and of what the log did."""
        return max(self.largest_steer, self.largest_move)


@dataclass(frozen=True)
class Uncompared(_Said, what="uncompared"):
    """Tensors of a run's first state that are not, bit for bit, what the job builds on the auditor's machine.

    Attributes:
        parameters, tensors: how many, of both.
        names: of the first ``MOST_NAMES`` of them.

    Raises:
        InvalidInput: another number of names, or parameters without a tensor.
    """

    parameters: Whole
    tensors: Whole
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        named = min(self.tensors, MOST_NAMES)
        if len(self.names) != named:
            raise InvalidInput(
                f"uncompared: must name {named} of {self.tensors} tensors, names {len(self.names)}"
            )
        if not self.tensors and self.parameters:
            raise InvalidInput(f"uncompared: {self.parameters} parameters stand in no tensor")


@dataclass(frozen=True)
class FirstState(_Said, what="beginning"):
    """How a run's first state compares with what the job builds on the auditor's machine.

    Attributes:
        trained: parameters that the job trains.
        other: of those, what begins otherwise; no two machines need draw the same ones.
        rounded: what the job does not train and what is the job's to within the last bits only.
    """

    trained: Whole
    other: Uncompared
    rounded: Uncompared

    @property
    def uncompared(self) -> int:
        """Parameters that are not, bit for bit, the job's own."""
        return self.other.parameters + self.rounded.parameters


def _run_fields(identity: RunIdentity) -> dict[str, object]:
    return {
        "specification": {"tallystickSpecification": identity.specification},
        "statement": base64.b64encode(identity.run.encode()).decode(),
    }


def _read_run(value: object, what: str) -> RunIdentity:
    run = known_fields(value, ("specification", "statement"), what=what)
    return identity_of(run.text("statement"), run.text_mapping("specification"), what)


def identity_of(run: str, specification: Mapping[str, str], what: str) -> RunIdentity:
    """Return which run a statement's fields name, without the weights, which are a subject of it.

    Raises:
        InvalidInput: no run statement in base64, or no digest of a specification.
    """
    stated = parse_run_statement(decode_base64(run, what=f"{what}: run statement"))
    digest = specification.get("tallystickSpecification", "")
    parse_hex(digest, n_bytes=HASH_BYTES, what=f"{what}: specification")
    return RunIdentity(stated, digest, None)


def time_text(seconds: int) -> str:
    """Return the second since 1970 as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: object, what: str) -> int:
    """Return the second since 1970 that ``text`` writes.

    Raises:
        InvalidInput: another form than 2026-01-31T12:00:00Z, or no such day.
    """
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise InvalidInput(f"{what}: must be a time such as 2026-01-31T12:00:00Z, is {short(str(text))}")
    try:
        return int(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise InvalidInput(f"{what}: there is no time {text}") from None


def _draw_text(draw: SegmentDraw | None) -> str | None:
    return None if draw is None else base64.b64encode(draw.encode()).decode()


def _read_draw(value: object, what: str) -> SegmentDraw | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be a string or null")
    return parse_draw(decode_base64(value, what=what))


def _named(digest: str | None) -> dict[str, str] | None:
    return None if digest is None else {"sha256": digest}


def _read_named(value: object, what: str) -> str | None:
    if value is None:
        return None
    text = known_fields(value, ("sha256",), what=what).text("sha256")
    parse_hex(text, n_bytes=HASH_BYTES, what=what)
    return text


RunField = Annotated[RunIdentity, At("run"), Via(_run_fields, _read_run)]
NamedDocument = Annotated[str | None, Via(_named, _read_named)]


@dataclass(frozen=True)
class AuditClaim(_Said, what="predicate"):
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

    identity: RunField
    at: Annotated[int, At("replayedAt"), Via(time_text, parse_time)]
    result: str
    segments: tuple[tuple[int, int], ...]
    draw: Annotated[SegmentDraw | None, At("sample"), Via(_draw_text, _read_draw)]
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
class VerdictClaim(_Said, what="predicate"):
    """A judge says how a dispute between two runs of one specification ended.

    Attributes:
        identity: of the trainer's run.
        at: seconds since 1970.
        auditor_run: root of the auditor's.
        outcome, loser: of ``OUTCOMES`` and ``LOSERS``.
        step, reason: which step it rules on, if any, and why.
        record: SHA-256 of the verdict's document, hexadecimal.
        dispute: SHA-256 of the record of a dispute down to one operator.
        accusation: SHA-256 of the auditor's signed statement that it answers.
    """

    identity: RunField
    at: Annotated[int, At("ruledAt"), Via(time_text, parse_time)]
    auditor_run: Annotated[str, At("auditorRun"), Hex(HASH_BYTES)]
    outcome: str
    loser: str
    step: int | None
    reason: str
    record: Annotated[str, At("record", "sha256"), Hex(HASH_BYTES)]
    dispute: NamedDocument = None
    accusation: NamedDocument = None

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
    predicate = {**claim.fields(), "auditor": {"version": {"tallystick": version}}, "details": dict(details)}
    return Statement(claim.identity.subjects(), AUDIT_TYPE, predicate)


def verdict_statement(claim: VerdictClaim, *, version: str) -> Statement:
    """Return the judge's statement."""
    predicate = {**claim.fields(), "judge": {"version": {"tallystick": version}}}
    return Statement(claim.identity.subjects(), VERDICT_TYPE, predicate)


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
