"""Signed statements read back: what each party claims, held to its form (spec/attestation.md 3 to 5)."""

from __future__ import annotations

from dataclasses import replace

from tallystick.commit.encoding import HASH_BYTES, parse_hex
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.statements import (
    AUDIT_TYPE,
    BUILD_TYPE,
    LOSERS,
    OUTCOMES,
    PROVENANCE_TYPE,
    RESULTS,
    RUN_DIGEST,
    VERDICT_TYPE,
    AuditClaim,
    Claim,
    RunIdentity,
    TrainerClaim,
    VerdictClaim,
    check_weights,
    identity_of,
    parse_time,
)
from tallystick.signing.dsse import Statement, known_fields


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
    named = identity_of(run.text("content"), specification.text_mapping("digest"), what)
    at = parse_time(top.value("tallystick_signedAt"), f"{what}: tallystick_signedAt")
    return TrainerClaim(
        _with_weights(named, statement, what),
        at,
        policy.text("name"),
        {name: build.value(name) for name in names[1:]},
    )


def _audit_claim(statement: Statement, what: str) -> AuditClaim:
    read = AuditClaim.read(statement.predicate, what=f"{what}: predicate")
    claim = replace(read, identity=_with_weights(read.identity, statement, what))
    _must_be_one_of(claim.result, RESULTS, f"{what}: result")
    steps = claim.identity.run.steps
    borders = [step for segment in claim.segments for step in segment]
    if borders != sorted(borders) or any(not 0 <= start < end <= steps for start, end in claim.segments):
        raise InvalidInput(
            f"{what}: segments must be ascending numbers of steps, not overlap and end by step {steps}"
        )
    check_weights(claim, what)
    draw, run = claim.draw, claim.identity.run.root
    if draw is not None and (draw.announcement.run_root.hex(), draw.segments) != (run, claim.segments):
        raise Mismatch(f"{what}: the draw is of other segments or of run {draw.announcement.run_root.hex()}")
    return claim


def _verdict_claim(statement: Statement, what: str) -> VerdictClaim:
    read = VerdictClaim.read(statement.predicate, what=f"{what}: predicate")
    claim = replace(read, identity=_with_weights(read.identity, statement, what))
    _must_be_one_of(claim.outcome, OUTCOMES, f"{what}: outcome")
    _must_be_one_of(claim.loser, LOSERS, f"{what}: loser")
    if claim.outcome != "forfeit" and (claim.outcome == "fault") == (claim.loser == "none"):
        raise Mismatch(f"{what}: outcome {claim.outcome} and loser {claim.loser} contradict each other")
    if claim.outcome == "forfeit" and claim.step is not None:
        raise Mismatch(f"{what}: outcome forfeit and step {claim.step} contradict each other")
    return claim


def _with_weights(identity: RunIdentity, statement: Statement, what: str) -> RunIdentity:
    weights = statement.digest_of("weights", "sha256")
    if weights is not None:
        parse_hex(weights, n_bytes=HASH_BYTES, what=f"{what}: weights")
    return replace(identity, weights=weights)


def _must_be_one_of(text: str, known: tuple[str, ...], what: str) -> None:
    if text not in known:
        raise InvalidInput(f"{what} must be one of {', '.join(known)}, is {text[:40]!r}")
