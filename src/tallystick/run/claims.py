"""Signed statements read back: what each party claims, held to its form (spec/attestation.md 3 to 5)."""

from __future__ import annotations

from collections.abc import Mapping

from tallystick.commit.encoding import (
    HASH_BYTES,
    INTEGER_LIMIT,
    Fields,
    parse_hex,
    parse_hex_float,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import parse_run_statement
from tallystick.run.sample import parse_draw
from tallystick.run.statements import (
    AUDIT_TYPE,
    BUILD_TYPE,
    LOSERS,
    MOST_NAMES,
    OUTCOMES,
    PROVENANCE_TYPE,
    REAL,
    RESULTS,
    RUN_DIGEST,
    VERDICT_TYPE,
    AuditClaim,
    Claim,
    FirstState,
    MeasuredFreedom,
    RunIdentity,
    TrainerClaim,
    Uncompared,
    VerdictClaim,
    check_weights,
    parse_time,
)
from tallystick.signing.dsse import Statement, known_fields
from tallystick.signing.note import decode_base64


def read_claim(statement: Statement, *, what: str = "statement") -> Claim:
    """Return what a statement claims; that a key signed it is for the caller to know.

    Raises:
        InvalidInput: another predicate type, or a field missing or malformed.
        Mismatch: its parts contradict each other.
    """
    readers = {PROVENANCE_TYPE: _trainer_claim, AUDIT_TYPE: _audit_claim, VERDICT_TYPE: _verdict_claim}
    if statement.predicate_type not in readers:
        raise InvalidInput(
            f"{what}: predicateType {statement.predicate_type[:80]!r} is not one that is known"
        )
    claim = readers[statement.predicate_type](statement, what)
    root = statement.digest_of("run", RUN_DIGEST)
    if root != claim.identity.run.root:
        raise Mismatch(
            f"{what}: its subject is run {root}, its predicate is about {claim.identity.run.root}",
            where=what,
            own=claim.identity.run.root,
            stated=root,
        )
    return claim


def _trainer_claim(statement: Statement, what: str) -> TrainerClaim:
    top = known_fields(
        statement.predicate,
        ("buildDefinition", "runDetails", "tallystick_signedAt"),
        what=f"{what}: predicate",
    )
    names = ("buildType", "externalParameters", "internalParameters", "resolvedDependencies")
    build = known_fields(top.value("buildDefinition"), names, what=f"{what}: buildDefinition")
    build.constant("buildType", BUILD_TYPE)
    parameters = known_fields(
        build.value("externalParameters"), ("policy",), what=f"{what}: externalParameters"
    )
    policy = known_fields(parameters.value("policy"), ("name",), what=f"{what}: policy")
    details = known_fields(top.value("runDetails"), ("builder", "byproducts"), what=f"{what}: runDetails")
    products: dict[str, object] = {}
    for item in details.items("byproducts"):
        fields = known_fields(item, ("name",), what=f"{what}: byproduct")
        if (name := fields.text("name")) in products:
            raise InvalidInput(f"{what}: byproduct {name[:80]!r} stands there twice")
        products[name] = item
    for name in ("run.json", "specification.json"):
        if name not in products:
            raise InvalidInput(f"{what}: byproduct {name} is missing")
    run = known_fields(products["run.json"], ("content",), what=f"{what}: run.json")
    specification = known_fields(
        products["specification.json"], ("digest",), what=f"{what}: specification.json"
    )
    identity = _identity(statement, run.text("content"), specification.text_mapping("digest"), what)
    at = parse_time(top.text("tallystick_signedAt"), what=f"{what}: tallystick_signedAt")
    return TrainerClaim(identity, at, policy.text("name"), {name: build.value(name) for name in names[1:]})


def _audit_claim(statement: Statement, what: str) -> AuditClaim:
    names = ("beginning", "freedom", "policy", "profile", "replayedAt", "result", "run", "sample", "segments")
    top = known_fields(statement.predicate, names, what=f"{what}: predicate")
    identity = _run_identity(statement, top.value("run"), what)
    result = _one_of(top.text("result"), RESULTS, f"{what}: result")
    segments = tuple(_segment(item, what) for item in top.items("segments"))
    borders = [step for segment in segments for step in segment]
    if borders != sorted(borders) or (borders and borders[-1] > identity.run.steps):
        raise InvalidInput(f"{what}: segments must ascend, not overlap and end by step {identity.run.steps}")
    sample = top.optional_text("sample")
    draw = None if sample is None else parse_draw(decode_base64(sample, what=f"{what}: sample"))
    claim = AuditClaim(
        identity=identity,
        at=parse_time(top.text("replayedAt"), what=f"{what}: replayedAt"),
        result=result,
        segments=segments,
        draw=draw,
        policy=top.text("policy"),
        profile=top.text("profile"),
        freedom=_freedom(top.value("freedom"), f"{what}: freedom"),
        beginning=None
        if top.value("beginning") is None
        else _first_state(top.value("beginning"), f"{what}: beginning"),
    )
    check_weights(claim, what)
    if draw is not None and (draw.announcement.run_root.hex(), draw.segments) != (
        identity.run.root,
        segments,
    ):
        raise Mismatch(f"{what}: the draw is of other segments or of run {draw.announcement.run_root.hex()}")
    return claim


def _verdict_claim(statement: Statement, what: str) -> VerdictClaim:
    names = (
        "accusation",
        "auditorRun",
        "dispute",
        "loser",
        "outcome",
        "reason",
        "record",
        "ruledAt",
        "run",
        "step",
    )
    top = known_fields(statement.predicate, names, what=f"{what}: predicate")
    claim = VerdictClaim(
        identity=_run_identity(statement, top.value("run"), what),
        at=parse_time(top.text("ruledAt"), what=f"{what}: ruledAt"),
        auditor_run=_hash(top.text("auditorRun"), f"{what}: auditorRun"),
        outcome=_one_of(top.text("outcome"), OUTCOMES, f"{what}: outcome"),
        loser=_one_of(top.text("loser"), LOSERS, f"{what}: loser"),
        step=None if top.value("step") is None else top.integer("step"),
        reason=top.text("reason"),
        record=_named(top.value("record"), f"{what}: record"),
        dispute=_named_or_none(top.value("dispute"), f"{what}: dispute"),
        accusation=_named_or_none(top.value("accusation"), f"{what}: accusation"),
    )
    if claim.outcome != "forfeit" and (claim.outcome == "fault") == (claim.loser == "none"):
        raise Mismatch(f"{what}: outcome {claim.outcome} and loser {claim.loser} contradict each other")
    if claim.outcome == "forfeit" and claim.step is not None:
        raise Mismatch(f"{what}: outcome forfeit and step {claim.step} contradict each other")
    return claim


def _run_identity(statement: Statement, value: object, what: str) -> RunIdentity:
    run = known_fields(value, ("specification", "statement"), what=f"{what}: run")
    return _identity(statement, run.text("statement"), run.text_mapping("specification"), what)


def _identity(statement: Statement, run: str, specification: Mapping[str, str], what: str) -> RunIdentity:
    stated = parse_run_statement(decode_base64(run, what=f"{what}: run statement"))
    digest = _hash(specification.get("tallystickSpecification", ""), f"{what}: specification")
    weights = statement.digest_of("weights", "sha256")
    return RunIdentity(stated, digest, None if weights is None else _hash(weights, f"{what}: weights"))


def _segment(value: object, what: str) -> tuple[int, int]:
    match value:
        case [int(start), int(end)] if type(start) is int and type(end) is int and 0 <= start < end:
            return start, end
        case _:
            raise InvalidInput(f"{what}: a segment must be two ascending numbers of steps")


def _one_of(text: str, known: tuple[str, ...], what: str) -> str:
    if text not in known:
        raise InvalidInput(f"{what} must be one of {', '.join(known)}, is {text[:40]!r}")
    return text


def _freedom(value: object, what: str) -> MeasuredFreedom:
    fields = known_fields(value, (*REAL, "moves", "silenced"), what=what)
    real = {attribute: _size(fields.text(name), f"{what}: {name}") for name, attribute in REAL.items()}
    return MeasuredFreedom(
        **real, moves=_count(fields, "moves", what), silenced=_count(fields, "silenced", what)
    )


def _first_state(value: object, what: str) -> FirstState:
    fields = known_fields(value, ("other", "rounded", "trained"), what=what)
    other, rounded = (_uncompared(fields.value(name), f"{what}: {name}") for name in ("other", "rounded"))
    return FirstState(_count(fields, "trained", what), other, rounded)


def _uncompared(value: object, what: str) -> Uncompared:
    fields = known_fields(value, ("names", "parameters", "tensors"), what=what)
    names, tensors = fields.texts("names"), _count(fields, "tensors", what)
    if len(names) != min(tensors, MOST_NAMES):
        raise InvalidInput(
            f"{what}: must name {min(tensors, MOST_NAMES)} of {tensors} tensors, names {len(names)}"
        )
    if not tensors and fields.integer("parameters"):
        raise InvalidInput(f"{what}: {fields.integer('parameters')} parameters stand in no tensor")
    return Uncompared(_count(fields, "parameters", what), tensors, names)


def _count(fields: Fields, name: str, what: str) -> int:
    if not 0 <= (number := fields.integer(name)) < INTEGER_LIMIT:
        raise InvalidInput(f"{what}: {name} must be 0 to 2**63 - 1, is {number}")
    return number


def _size(text: str, what: str) -> float:
    number = parse_hex_float(text, what=what)
    if not number >= 0.0:
        raise InvalidInput(f"{what}: must be a number and not negative, is {text}")
    return number


def _named(value: object, what: str) -> str:
    """The SHA-256 of a document that a statement names."""
    return _hash(known_fields(value, ("sha256",), what=what).text("sha256"), what)


def _named_or_none(value: object, what: str) -> str | None:
    return None if value is None else _named(value, what)


def _hash(text: str, what: str) -> str:
    parse_hex(text, n_bytes=HASH_BYTES, what=what)
    return text
