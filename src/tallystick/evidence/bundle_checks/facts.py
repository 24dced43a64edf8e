"""What the checks of a bundle hand to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tallystick.dispute.record import DisputeCheck, DisputeRecord, signed_claims
from tallystick.dispute.signed_moves import MoveClaim, is_move_signed
from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.evidence.bundle import Bundle, Member
from tallystick.evidence.policy import EvidencePolicy
from tallystick.evidence.verification import Audited, FileAnswer, Stated
from tallystick.run.documents import RunStatement, Specification
from tallystick.run.statements import AuditClaim, Claim, TrainerClaim, VerdictClaim
from tallystick.signing.keys import PublicKey
from tallystick.signing.model_signature import Manifest
from tallystick.tlog.tree import Checkpoint, LogEntry, LogProof

ROLE_OF: dict[type[Claim], str] = {TrainerClaim: "trainer", AuditClaim: "auditor", VerdictClaim: "judge"}


@dataclass(frozen=True)
class Signed:
    """A statement whose signature verified: the member's name, who signed, and what it claims."""

    name: str
    document: bytes
    key_id: str
    claim: Claim


@dataclass(frozen=True)
class SignedMove:
    """A move of a dispute: the member it stands in, whose key signed it, what it claims; of a record, the signature."""

    name: str
    key: PublicKey
    claim: MoveClaim
    signature: bytes | None = None

    def is_signed(self) -> bool:
        """Whether the key made the signature; that of a statement has been verified."""
        return self.signature is None or is_move_signed(self.claim, self.signature, self.key)


@dataclass(frozen=True)
class JudgedDispute:
    """A verdict with the record of its dispute over operators, and what of the record's own checks is left to the judge."""

    name: str
    verdict: Signed
    record: DisputeRecord
    signatures: DisputeCheck
    needed: tuple[DisputeCheck, ...]

    def not_proven(self) -> list[str]:
        """Return in words what the record does not show of whom it blames."""
        found = [] if self.signatures.outcome == "passed" else [self.signatures.detail]
        return found + [
            f"{check.detail}: the ruling needs the job, and is the judge's word" for check in self.needed
        ]


@dataclass
class Facts:
    """What a reader gave, and what the checks so far have established.

    Attributes:
        data: the bundle's bytes.
        policy: what the reader asks for; None if it did not say.
        now: seconds since 1970.
        model: the files that are at hand.
        path: the file of which is asked whether it is the result.
        unread: files beside those at hand that were not looked at.
        finding: what the evidence shows, in words, where a check found more than that it failed.
    """

    data: bytes
    policy: EvidencePolicy | None
    now: int
    model: Manifest | None = None
    path: Path | None = None
    unread: Sequence[str] = ()
    bundle: Bundle = field(default_factory=lambda: Bundle(()))
    keys: dict[str, PublicKey] = field(default_factory=dict[str, PublicKey])
    signed: list[Signed] = field(default_factory=list[Signed])
    runs: dict[str, RunStatement] = field(default_factory=dict[str, RunStatement])
    proofs: dict[str, LogProof] = field(default_factory=dict[str, LogProof])
    entries: dict[str, LogEntry] = field(default_factory=dict[str, LogEntry])
    records: dict[str, DisputeRecord] = field(default_factory=dict[str, DisputeRecord])
    moves: list[SignedMove] = field(default_factory=list[SignedMove])
    disputes: list[JudgedDispute] = field(default_factory=list[JudgedDispute])
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])
    specification: Specification | None = None
    trainer: TrainerClaim | None = None
    stated: Stated | None = None
    file: FileAnswer | None = None
    finding: str | None = None

    @property
    def claimed(self) -> TrainerClaim:
        """The one provenance, once it was found."""
        assert self.trainer is not None
        return self.trainer

    def audits(self) -> list[tuple[Signed, AuditClaim]]:
        """The auditors' statements about the run."""
        root = self.claimed.identity.run.root
        return [
            (s, s.claim)
            for s in self.signed
            if isinstance(s.claim, AuditClaim) and s.claim.identity.run.root == root
        ]

    def audited(self) -> list[Audited]:
        """The same, with the number of parameters that the specification speaks of."""
        sites = () if self.specification is None else self.specification.sites
        parameters = sum(math.prod(site.shape) for site in sites if site.kind == "gradient")
        return [Audited(signed.key_id, claim, parameters) for signed, claim in self.audits()]

    def verdicts(self) -> list[tuple[Signed, VerdictClaim]]:
        """The judges' statements."""
        return [(s, s.claim) for s in self.signed if isinstance(s.claim, VerdictClaim)]

    def all_moves(self) -> Iterator[SignedMove]:
        """All moves that the bundle says somebody signed, in statements and in records."""
        yield from self.moves
        for name, record in self.records.items():
            try:
                found = signed_claims(record)
            except ProtocolViolation:
                continue  # check 9 says what is wrong with it
            yield from (SignedMove(name, key, claim, signature) for claim, signature, key in found)

    def only(self, kind: str) -> Member | None:
        """Return the member of a kind of which a bundle has at most one.

        Raises:
            InvalidInput: it holds more.
        """
        found = self.bundle.of(kind)
        if len(found) > 1:
            raise InvalidInput(f"bundle: must hold one {kind}, holds {len(found)}")
        return found[0] if found else None
