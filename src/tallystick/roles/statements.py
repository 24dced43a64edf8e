"""What each party signs about a run, and what a bundle takes from its directory; needs no torch.

The subject's digest is that of ``model.safetensors`` as the committed final state makes it, so whoever repeated the
run can tell it without the trainer's file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tallystick.commit.encoding import parse_json
from tallystick.dispute.record import DISPUTE_FORMAT
from tallystick.dispute.verdict import VERDICT_FORMAT
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.evidence.bundle import BUNDLE_LIMIT, Member, named
from tallystick.run.claims import read_claim
from tallystick.run.documents import SPECIFICATION_FORMAT, STATEMENT_FORMAT, parse_run_statement
from tallystick.run.proofs import SPECIFICATION_PROOF_FORMAT
from tallystick.run.sample import ANNOUNCEMENT_FORMAT
from tallystick.run.statements import (
    MOST_NAMES,
    AuditClaim,
    FirstState,
    MeasuredFreedom,
    RunIdentity,
    Uncompared,
    VerdictClaim,
    audit_statement,
    provenance_statement,
    verdict_statement,
)
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import parse_envelope, sign_statement
from tallystick.signing.keys import Signer, parse_public_key
from tallystick.store.files import RunDirectory, check_ranks, read_whole
from tallystick.store.models import weights_manifest
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import PROOF_HEADER, parse_checkpoint, parse_log_proof
from tallystick.version import __version__

if TYPE_CHECKING:
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.initial_state import Beginning
    from tallystick.roles.referee import DisputeResult


def identity_of(directory: RunDirectory, transcript: Transcript | None = None) -> RunIdentity:
    """Return which run ``directory`` holds, with the root digest of the weights in its committed final state.

    Raises:
        InvalidInput: a document or the final state is missing or malformed.
        Mismatch: the documents disagree, or the state has another root.
    """
    held = directory.load_transcript() if transcript is None else transcript
    final = held.statement()
    state = directory.load_committed(final.steps, final.final_state)
    return _identity(held, weights_manifest(state.values()).root_digest())


def identity_of_claimed(directory: RunDirectory, transcript: Transcript | None = None) -> RunIdentity:
    """Return the same, without weights where the trainer cannot open its final state: such a run is accused too."""
    held = directory.load_transcript() if transcript is None else transcript
    try:
        return identity_of(directory, held)
    except (InvalidInput, Mismatch):
        return _identity(held, None)


def sign_run(directory: RunDirectory, signer: Signer, at: int) -> bytes:
    """Return the trainer's signed provenance of a finished run; ``at`` is now, in seconds since 1970.

    Raises:
        InvalidInput, Mismatch: as for ``identity_of``.
        InvalidInput: several ranks recorded it.
    """
    transcript = directory.load_transcript()
    check_ranks(transcript)
    identity = identity_of(directory, transcript)
    statement = provenance_statement(transcript.specification, identity, at=at, version=__version__)
    return sign_statement(statement, signer)


def sign_audit(directory: RunDirectory, report: AuditReport, signer: Signer, at: int, device: str) -> bytes:
    """Return the auditor's signed statement of what ``report`` found, accusation or not.

    Raises:
        ProtocolViolation: the directory no longer holds the run that was audited.
        InvalidInput: the final state followed, and no longer opens its root.
        Mismatch: a file of this copy is not what the run commits to, so what was found is not about the run.
    """
    if report.first is not None and report.first.is_of_copy:
        raise Mismatch(
            f"{directory.path}: {report.first.own}: so this copy is not the run that was committed to, and nothing is signed "
            "against it; take another copy"
        )
    held = _same(directory, report.root, f"audit: {report.verdict} was found")
    freedom = report.freedom
    claim = AuditClaim(
        identity=identity_of_claimed(directory, held),
        at=at,
        result=report.verdict,
        segments=report.sample.segments if report.sample is not None else _joined(report),
        draw=report.sample,
        policy=held.specification.policy.name,
        profile=report.profile,
        freedom=MeasuredFreedom(
            fraction=freedom.fraction,
            largest_steer=_or_infinity(freedom.largest_steer),
            largest_move=_or_infinity(freedom.largest_move),
            fullest_step=_or_infinity(freedom.fullest_step),
            path_steer=_or_infinity(freedom.path_steer),
            moves=freedom.moved + freedom.decisions_moved,
            silenced=freedom.silenced_parameters,
        ),
        beginning=None if report.beginning is None else _first_state(report.beginning),
    )
    first = report.first
    details: dict[str, object] = {
        "device": device,
        "differingElements": report.differing_elements,
        "environment": {
            name: {"own": own, "trainer": other} for name, (own, other) in report.environment.items()
        },
        "first": None
        if first is None
        else {
            "element": first.element,
            "own": first.own,
            "stated": first.stated,
            "step": first.step,
            "subject": first.subject,
        },
        "near": freedom.near,
        "roundings": freedom.elements,
    }
    return sign_statement(audit_statement(claim, details=details, version=__version__), signer)


def sign_verdict(
    trainer: RunDirectory,
    auditor: RunDirectory,
    result: DisputeResult,
    signer: Signer,
    at: int,
    *,
    dispute: bytes | None = None,
    accusation: bytes | None = None,
) -> bytes:
    """Return the judge's signed statement of how a dispute ended; it names the verdict's document by its SHA-256.

    ``dispute`` is the record of a dispute that went down to one operator, ``accusation`` the auditor's signed statement
    that the verdict answers; the statement names both.

    Raises:
        InvalidInput: the accusation is no audit's statement.
        Mismatch: it is about another run.
        ProtocolViolation: a directory no longer holds the run that was judged.
    """
    ours, theirs = (
        _same(directory, root, f"verdict: loser {result.loser} was found")
        for directory, root in zip((trainer, auditor), result.runs, strict=True)
    )
    identity = identity_of_claimed(trainer, ours)
    if accusation is not None:
        accused = read_claim(
            parse_envelope(accusation, what="accusation").statement(what="accusation"), what="accusation"
        )
        if not isinstance(accused, AuditClaim):
            raise InvalidInput("accusation: must be an auditor's statement")
        if accused.identity.run.root != identity.run.root:
            raise Mismatch(
                f"accusation: is about run {accused.identity.run.root}, the dispute about {identity.run.root}",
                where="accusation: run",
                own=identity.run.root,
                stated=accused.identity.run.root,
            )
    claim = VerdictClaim(
        identity=identity,
        at=at,
        auditor_run=theirs.root().hex(),
        outcome=result.outcome,
        loser=result.loser,
        step=result.step,
        reason=result.reason,
        record=hashlib.sha256(result.encode()).hexdigest(),
        dispute=None if dispute is None else hashlib.sha256(dispute).hexdigest(),
        accusation=None if accusation is None else hashlib.sha256(accusation).hexdigest(),
    )
    return sign_statement(verdict_statement(claim, version=__version__), signer)


def gather(path: Path, *, follow: bool = True) -> list[Member]:
    """Return the bundle members that lie at ``path``: a run's directory, or one document, known by its content.

    A trainer's run gives its statement, specification, the proof between them and a provenance; an auditor's claim its
    statement and a verdict. Of a directory no link is followed: it may be a stranger's.

    Raises:
        StoreError: nothing is there, or it cannot be read.
        InvalidInput: a document that belongs in no bundle.
    """
    if not follow or not path.is_dir():
        data = read_whole(path, limit=BUNDLE_LIMIT, what="a document for a bundle", follow=follow)
        return [member_of(data, path.name)]
    directory = RunDirectory(path)
    statement = directory.load_statement()
    found = [Member("run", parse_run_statement(statement).root, statement)]
    extra = [
        path / name
        for name in (
            "verdict.json",
            "dispute.json",
            "provenance.intoto.json",
            "verdict.intoto.json",
            "model.sig",
        )
    ]
    found += [member for file in extra if os.path.lexists(file) for member in gather(file, follow=False)]
    if os.path.lexists(path / "provenance.intoto.json"):
        transcript = directory.load_transcript()
        found.append(named("specification", transcript.specification.encode()))
        found.append(named("specification-proof", transcript.prove_specification().encode()))
    return found


def member_of(data: bytes, name: str) -> Member:
    """Return ``data`` as the member that its content makes it; ``name`` is for messages.

    Raises:
        InvalidInput: it belongs in no bundle.
    """
    if data.startswith(
        (b"-----BEGIN PUBLIC KEY", b"-----BEGIN PRIVATE", b"-----BEGIN ENCRYPTED", b"-----BEGIN EC")
    ):
        key = parse_public_key(data, what=name)
        return Member("key", key.key_id, key.spki)
    if data.startswith(PROOF_HEADER.encode()):
        raise InvalidInput(f"{name}: a log proof is named after its document; give it as DOCUMENT@PROOF")
    if not data.startswith(b"{"):
        try:
            parse_checkpoint(data)
        except InvalidInput:
            raise InvalidInput(f"{name}: is no document that belongs in a bundle") from None
        return named("checkpoint", data)
    value = parse_json(data, what=name, limit=BUNDLE_LIMIT)
    stated = cast("dict[str, object]", value).get("format") if isinstance(value, dict) else None
    kinds: dict[object, str] = {
        STATEMENT_FORMAT: "run",
        SPECIFICATION_FORMAT: "specification",
        SPECIFICATION_PROOF_FORMAT: "specification-proof",
        ANNOUNCEMENT_FORMAT: "announcement",
        VERDICT_FORMAT: "verdict",
        DISPUTE_FORMAT: "dispute",
    }
    if isinstance(value, dict) and "payloadType" in value:
        return named("statement", data)
    if isinstance(value, dict) and "dsseEnvelope" in value:
        return named("model-signature", data)
    if not isinstance(stated, str) or stated not in kinds:
        raise InvalidInput(f"{name}: is no document that belongs in a bundle")
    if stated == STATEMENT_FORMAT:
        return Member("run", parse_run_statement(data).root, data)
    return named(kinds[stated], data)


def log_proof_of(document: bytes, proof: bytes) -> Member:
    """Return a log proof as the member named after the document that it is about."""
    return Member("log-proof", entry_of(document).digest, _checked(proof, parse_log_proof))


def _checked(data: bytes, parse: Callable[[bytes], object]) -> bytes:
    parse(data)
    return data


def _same(directory: RunDirectory, root: str, what: str) -> Transcript:
    """Return the transcript of a run that was read before, which somebody may have changed since."""
    held = directory.load_transcript()
    if (now := held.root().hex()) != root:
        raise ProtocolViolation(
            f"{what} of run {root}, {directory.path} now holds run {now}; nothing was signed"
        )
    return held


def _identity(transcript: Transcript, weights: str | None) -> RunIdentity:
    return RunIdentity(transcript.statement(), transcript.specification.digest().hex(), weights)


def _or_infinity(number: float) -> float:
    """What is no number has no bound."""
    return math.inf if math.isnan(number) else number


def _first_state(found: Beginning) -> FirstState:
    def named_ones(parameters: int, names: tuple[str, ...]) -> Uncompared:
        return Uncompared(parameters, len(names), names[:MOST_NAMES])

    rounded = named_ones(found.rounded_parameters, found.rounded)
    return FirstState(found.trained, named_ones(found.other, found.others), rounded)


def _joined(report: AuditReport) -> tuple[tuple[int, int], ...]:
    """The segments that were repeated, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for segment in sorted((segment.start, segment.end) for segment in report.segments):
        if joined and joined[-1][1] == segment[0]:
            joined[-1] = (joined[-1][0], segment[1])
        else:
            joined.append(segment)
    return tuple(joined)
