"""What the attacks on evidence share: an honest run that is published, witnessed, audited and bundled, and a reader.

The reader's policy asks for everything: a log with two of two witnesses, one auditor of the whole run, no evidence older
than thirty days. ``Court.reads`` gives the reader's verification of whatever bundle is put before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stage import Stage

from tallystick.commit.encoding import canonical_json
from tallystick.evidence.bundle import Member, make_bundle, named
from tallystick.evidence.bundle_verifier import verify_bundle
from tallystick.evidence.policy import FORMAT, LIMITS, PINS, parse_evidence_policy
from tallystick.evidence.verification import Verification
from tallystick.roles.audit_report import AuditReport
from tallystick.roles.auditor import audit
from tallystick.roles.referee import DisputeResult
from tallystick.roles.statements import log_proof_of, sign_audit, sign_run, sign_verdict
from tallystick.signing.keys import SigningKey, ed25519_key
from tallystick.signing.note import COSIGNATURE, NOTE, NoteKey, NoteSigner
from tallystick.store.files import RunDirectory
from tallystick.store.tlog import LogDirectory, Witness
from tallystick.testing.attacks import must
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import Checkpoint

DAY = 86400
PUBLISHED = 1_800_000_000
AUDITED, NOW = PUBLISHED + DAY, PUBLISHED + 2 * DAY
ORIGIN = "log.example/runs"
TRAINER, AUDITOR, SECOND, JUDGE, LOG_KEY, *WITNESS_KEYS = (ed25519_key(bytes([n]) * 32) for n in range(1, 8))
LOG = NoteSigner(NoteKey(ORIGIN, NOTE, LOG_KEY.public_key), LOG_KEY)
WITNESSES = [
    NoteSigner(NoteKey(f"w{n}.example", COSIGNATURE, key.public_key), key)
    for n, key in enumerate(WITNESS_KEYS)
]


def log_policy() -> list[str]:
    names = [f"W{n}" for n in range(len(WITNESSES))]
    lines = [f"log {LOG.key}"]
    lines += [f"witness {name} {witness.key}" for name, witness in zip(names, WITNESSES, strict=True)]
    return [*lines, f"group all-of-them all {' '.join(names)}", "quorum all-of-them"]


def convicted(
    run: RunDirectory, claim: RunDirectory, ruling: DisputeResult, record: bytes | None
) -> list[Member]:
    """Return the members of a bundle in which the judge signs that ruling, with that record of level three."""
    transcript, theirs = run.load_transcript(), claim.load_transcript().statement()
    statement = transcript.statement()
    signed = sign_verdict(run, claim, ruling, JUDGE, AUDITED, dispute=record)
    held = [
        *(key_member(key) for key in (TRAINER, AUDITOR, SECOND, JUDGE)),
        *(Member("run", each.root, each.encode()) for each in (statement, theirs)),
        named("specification", transcript.specification.encode()),
        named("specification-proof", transcript.prove_specification().encode()),
        named("statement", sign_run(run, TRAINER, PUBLISHED)),
        named("statement", signed),
        named("verdict", ruling.encode()),
    ]
    return held if record is None else [*held, named("dispute", record)]


def reads(
    members: Iterable[Member], *, now: int = NOW, published: bool = True, **changes: object
) -> Verification:
    """Return what a stranger with the policy says to a bundle of these members; ``changes`` are to the policy."""
    policy = {
        "format": FORMAT,
        "trainers": [TRAINER.public_key.key_id],
        "auditors": [AUDITOR.public_key.key_id, SECOND.public_key.key_id],
        "judges": [JUDGE.public_key.key_id],
        "auditor_quorum": 1,
        "coverage": "whole",
        "rounding_policies": ["fp64", "fp32", "bf16"],
        **dict.fromkeys((*PINS, *(f"most_{limit}" for limit in LIMITS))),
        "most_freedom": "1",
        "most_steer": "1",
        "judges_word": False,
        "most_age_days": 30,
        "log_policy": log_policy() if published else None,
        "model_signature": False,
        **changes,
    }
    data = make_bundle(members).encode()
    return verify_bundle(data, parse_evidence_policy(canonical_json(policy)), now=now)


def must_fail(
    members: Iterable[Member], *, check: int, naming: str, now: int = NOW, published: bool = True
) -> str:
    """Return what the reader says, who must stop at that check and name that."""
    found = reads(members, now=now, published=published)
    failed = next((each for each in found.checks if each.outcome == "failed"), None)
    must(failed is not None, f"the reader says {found.verdict}, {naming!r} had to be refused")
    assert failed is not None
    must(
        failed.number == check,
        f"the reader stops at check {failed.number}, {failed.detail}; expected {check}",
    )
    must(naming in failed.detail, f"the reader says {failed.detail!r}, expected {naming!r}")
    must(found.finding != "trained as stated", "the reader accepts the run all the same")
    return f"check {failed.number}: {failed.detail}"


def key_member(key: SigningKey) -> Member:
    return Member("key", key.public_key.key_id, key.public_key.spki)


def publish(
    log: LogDirectory, documents: Sequence[bytes], seen: int = PUBLISHED, memory: Path | None = None
) -> Checkpoint:
    """Add documents to a log, sign it and let the witnesses cosign it."""
    if not log.path.exists():
        log.create(ORIGIN, LOG)
    log.add([entry_of(document).encode() for document in documents])
    signed = log.sign(LOG)
    for number, signer in enumerate(WITNESSES):
        folder = (memory or log.path.with_name(f"{log.path.name}-witness")) / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        log.attach(Witness(folder).cosign(log, LOG.key, signer, seen))
    return log.checkpoint() if WITNESSES else signed


@dataclass(frozen=True)
class Court:
    """A run, honest unless a cheat has made it before, with the evidence about it."""

    stage: Stage
    name: str = "run"
    changes: tuple[tuple[str, str], ...] = ()

    @cached_property
    def run(self) -> RunDirectory:
        from tallystick.roles.trainer import record

        directory = self.stage.run(self.name)
        if not directory.statement_path.exists():  # a cheat may have made it
            record(self.stage.order(**dict(self.changes)), directory)
        return directory

    @cached_property
    def report(self) -> AuditReport:
        return audit(self.run, self.stage.source)

    @cached_property
    def log(self) -> LogDirectory:
        log = LogDirectory(self.stage.folder / f"{self.name}-log")
        publish(log, [self.run.load_statement()])
        return log

    def provenance(self, key: SigningKey = TRAINER) -> Member:
        return named("statement", sign_run(self.run, key, PUBLISHED))

    def audited(
        self, key: SigningKey = AUDITOR, at: int = AUDITED, report: AuditReport | None = None
    ) -> Member:
        signed = sign_audit(self.run, self.report if report is None else report, key, at, "cpu")
        return named("statement", signed)

    def proof(self) -> Member:
        statement = self.run.load_statement()
        return log_proof_of(statement, self.log.prove(entry_of(statement)).encode())

    def about(self) -> list[Member]:
        transcript = self.run.load_transcript()
        statement = transcript.statement()
        return [
            Member("run", statement.root, statement.encode()),
            named("specification", transcript.specification.encode()),
            named("specification-proof", transcript.prove_specification().encode()),
        ]

    def members(self) -> list[Member]:
        """Return the members of the honest bundle, which the reader accepts."""
        keys = [key_member(key) for key in (TRAINER, AUDITOR, SECOND, JUDGE)]
        held = [*keys, *self.about(), self.provenance(), self.audited(), self.proof()]
        found = reads(held)
        must((found.verdict, found.finding) == ("match", "trained as stated"), f"the control: {found.checks}")
        return held
