"""What each party signs about a run, made from what lies in its directory; needs no torch.

The subject's digest is that of ``model.safetensors`` as the committed final state makes it, so whoever repeated the
run can tell it without the trainer's file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tallystick.commit.encoding import hex_float
from tallystick.errors import InvalidInput, Mismatch
from tallystick.protocol.attest import (
    AuditClaim,
    RunIdentity,
    VerdictClaim,
    audit_statement,
    provenance_statement,
    verdict_statement,
)
from tallystick.protocol.envelope import sign_statement
from tallystick.protocol.signing import Signer
from tallystick.protocol.transcript import Transcript
from tallystick.store.files import RunDirectory
from tallystick.store.models import weights_manifest
from tallystick.version import __version__

if TYPE_CHECKING:
    from tallystick.roles.auditor import AuditReport
    from tallystick.roles.judge import DisputeResult


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


def identity_of_claimed(directory: RunDirectory) -> RunIdentity:
    """Return the same, without weights where the trainer cannot open its final state: such a run is accused too."""
    held = directory.load_transcript()
    try:
        return identity_of(directory, held)
    except (InvalidInput, Mismatch):
        return _identity(held, None)


def sign_run(directory: RunDirectory, signer: Signer, at: int) -> bytes:
    """Return the trainer's signed provenance of a finished run; ``at`` is now, in seconds since 1970.

    Raises:
        InvalidInput, Mismatch: as for ``identity_of``.
    """
    transcript = directory.load_transcript()
    identity = identity_of(directory, transcript)
    statement = provenance_statement(transcript.specification, identity, at=at, version=__version__)
    return sign_statement(statement, signer)


def sign_audit(directory: RunDirectory, report: AuditReport, signer: Signer, at: int, device: str) -> bytes:
    """Return the auditor's signed statement of what ``report`` found, accusation or not."""
    specification = directory.load_specification()
    freedom = report.freedom
    claim = AuditClaim(
        identity=identity_of_claimed(directory),
        at=at,
        result=report.verdict,
        segments=report.sample.segments if report.sample is not None else _joined(report),
        draw=report.sample,
        policy=specification.policy.name,
        profile=report.profile,
        freedom=freedom.fraction,
        steer=freedom.largest_steer,
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
        "largestMove": hex_float(freedom.largest_move),
        "moved": freedom.moved,
        "near": freedom.near,
        "roundings": freedom.elements,
    }
    return sign_statement(audit_statement(claim, details=details, version=__version__), signer)


def sign_verdict(
    trainer: RunDirectory, auditor: RunDirectory, result: DisputeResult, signer: Signer, at: int
) -> bytes:
    """Return the judge's signed statement of how a dispute ended; it names the verdict's document by its SHA-256."""
    claim = VerdictClaim(
        identity=identity_of_claimed(trainer),
        at=at,
        auditor_run=auditor.load_transcript().root().hex(),
        outcome=result.outcome,
        loser=result.loser,
        step=result.step,
        reason=result.reason,
        record=hashlib.sha256(result.encode()).hexdigest(),
    )
    return sign_statement(verdict_statement(claim, version=__version__), signer)


def _identity(transcript: Transcript, weights: str | None) -> RunIdentity:
    return RunIdentity(transcript.statement(), transcript.specification.digest().hex(), weights)


def _joined(report: AuditReport) -> tuple[tuple[int, int], ...]:
    """The segments that were repeated, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for segment in sorted((segment.start, segment.end) for segment in report.segments):
        if joined and joined[-1][1] == segment[0]:
            joined[-1] = (joined[-1][0], segment[1])
        else:
            joined.append(segment)
    return tuple(joined)
