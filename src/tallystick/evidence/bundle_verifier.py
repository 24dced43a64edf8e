"""Whoever holds a bundle and a policy checks it alone: offline, without torch, as the list of spec/evidence-bundle.md 4.

Each check says what it saw or why it failed; the first that fails ends the list. Without a policy the checks that need
one are not judged, and then nothing is accepted, however consistent it is. What is missing is never a pass.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import cast

from tallystick.commit.encoding import is_same_json
from tallystick.dispute.record import (
    SIGNATURES_CHECK,
    DisputeCheck,
    DisputeRecord,
    parse_dispute,
    signed_claims,
    verify_dispute,
)
from tallystick.dispute.signed_moves import MOVE_TYPE, MoveClaim, is_move_signed, read_move
from tallystick.dispute.terms import Party
from tallystick.dispute.verdict import FORFEIT, parse_verdict, verify_verdict
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.evidence.bundle import Bundle, Member, parse_bundle
from tallystick.evidence.policy import EvidencePolicy
from tallystick.evidence.verification import (
    Audited,
    Check,
    FileAnswer,
    Stated,
    Verification,
    quoted,
    stated_by,
)
from tallystick.run.claims import read_claim
from tallystick.run.documents import (
    RunStatement,
    Specification,
    parse_run_statement,
    parse_specification,
)
from tallystick.run.proofs import parse_specification_proof, verify_specification_proof
from tallystick.run.sample import parse_announcement
from tallystick.run.statements import (
    AuditClaim,
    Claim,
    TrainerClaim,
    VerdictClaim,
    build_definition,
    time_text,
)
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import PublicKey, parse_public_key
from tallystick.signing.model_signature import Manifest, parse_model_signature
from tallystick.store.models import check_result, compare_model
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import (
    Checkpoint,
    LogEntry,
    LogProof,
    is_split_view,
    parse_checkpoint,
    parse_log_proof,
)

MOST_TRIED = 1 << 14  # pairs of a signature and a key: a second's worth and more
SHOWS_NOT = (
    "that the data is good, that an auditor's machine was honest beyond the quorum asked for, or what the auditors "
    "measured; with [torch], tally audit repeats the run"
)
CHECKS = (
    "the bundle is whole and its documents parse",
    "every statement is signed with a key in the bundle",
    "every signer has the role that its statement needs",
    "nobody says two different things",
    "all statements are about one run of one specification",
    "the trainer signed the weights' files",
    "the run was published before it was challenged",
    "drawn samples are the beacon's",
    "every verdict follows from what it rests on",
    "whoever loses at an operator loses by what it signed, not by the judge's word",
    "no accusation stands",
    "enough auditors found a match, recently, within the freedom accepted",
    "what the run states is what is asked for",
)


@dataclass(frozen=True)
class Signed:
    """A statement whose signature verified: the member's name, who signed, and what it claims."""

    name: str
    document: bytes
    key_id: str
    claim: Claim


@dataclass(frozen=True)
class _Move:
    """A move of a dispute: the member it stands in, whose key signed it, what it claims; of a record, the signature."""

    name: str
    key: PublicKey
    claim: MoveClaim
    signature: bytes | None = None

    def is_signed(self) -> bool:
        """Whether the key made the signature; that of a statement has been verified."""
        return self.signature is None or is_move_signed(self.claim, self.signature, self.key)


@dataclass(frozen=True)
class _Dispute:
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
class _Facts:
    """What the checks so far have established."""

    bundle: Bundle = field(default_factory=lambda: Bundle(()))
    keys: dict[str, PublicKey] = field(default_factory=dict[str, PublicKey])
    signed: list[Signed] = field(default_factory=list[Signed])
    runs: dict[str, RunStatement] = field(default_factory=dict[str, RunStatement])
    proofs: dict[str, LogProof] = field(default_factory=dict[str, LogProof])
    entries: dict[str, LogEntry] = field(default_factory=dict[str, LogEntry])
    records: dict[str, DisputeRecord] = field(default_factory=dict[str, DisputeRecord])
    moves: list[_Move] = field(default_factory=list[_Move])
    disputes: list[_Dispute] = field(default_factory=list[_Dispute])
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
            (s, s.claim) for s in self.signed if isinstance(s.claim, AuditClaim) and _root(s.claim) == root
        ]

    def audited(self) -> list[Audited]:
        """The same, with the number of parameters that the specification speaks of."""
        sites = () if self.specification is None else self.specification.sites
        parameters = sum(math.prod(site.shape) for site in sites if site.kind == "gradient")
        return [Audited(signed.key_id, claim, parameters) for signed, claim in self.audits()]

    def verdicts(self) -> list[tuple[Signed, VerdictClaim]]:
        """The judges' statements."""
        return [(s, s.claim) for s in self.signed if isinstance(s.claim, VerdictClaim)]


def verify_bundle(
    data: bytes,
    policy: EvidencePolicy | None,
    *,
    now: int,
    model: Manifest | None = None,
    file: Path | None = None,
    unread: Sequence[str] = (),
    name: str = "bundle",
) -> Verification:
    """Return the numbered checks of a bundle; ``now`` in seconds since 1970, ``model`` the files that are at hand.

    ``unread`` are files beside those that were not looked at. With ``file`` it is also answered whether that is
    the very result that the bundle speaks of.

    ``verdict`` is ``match`` only if a policy was given and every check passed; ``unjudged`` if no policy was given and
    none failed. ``finding`` says in words what the evidence shows.
    """
    found = Verification(name, SHOWS_NOT)
    run = _BundleChecks(data, policy, now, model, file, unread)
    checks: tuple[Callable[[], str | None], ...] = (
        run.check_documents, run.check_signatures, run.check_roles, run.check_equivocation, run.check_one_run,
        run.check_model, run.check_published, run.check_draws, run.check_verdicts, run.check_signed_moves, run.check_accusations,
        run.check_quorum, run.check_stated,
    )  # fmt: skip
    for number, (claim, check) in enumerate(zip(CHECKS, checks, strict=True), start=1):
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
    facts = run.facts
    if facts.trainer is not None:
        found.root, found.steps = facts.trainer.identity.run.root, facts.trainer.identity.run.steps
    found.stated, found.file = facts.stated, facts.file
    found.audits = facts.audited() if facts.stated is not None else []
    if file is not None and found.file is None:
        found.file = FileAnswer(str(file), None, "the bundle's own checks failed before it was compared")
    accepted = "trained as stated" if found.verdict == "match" else "nothing is accepted"
    found.finding = facts.finding or accepted
    return found


class _BundleChecks:
    """The checks of one bundle; each returns what it saw, None where a policy is needed, and raises what is wrong."""

    def __init__(
        self,
        data: bytes,
        policy: EvidencePolicy | None,
        now: int,
        model: Manifest | None,
        file: Path | None,
        unread: Sequence[str],
    ) -> None:
        self.data, self.policy, self.now, self.model, self.file = data, policy, now, model, file
        self.unread = unread
        self.facts = _Facts()

    def check_documents(self) -> str:
        """1. Container, keys, run statements, specification, log proofs and checkpoints are well formed."""
        facts = self.facts
        facts.bundle = parse_bundle(self.data)
        for member in facts.bundle.of("key"):
            key = parse_public_key(member.data, what=f"key {member.name}")
            if key.key_id != member.name:
                raise Mismatch(f"key {member.name[:16]}..: its key id is {key.key_id}")
            facts.keys[key.key_id] = key
        for member in facts.bundle.of("run"):
            statement = parse_run_statement(member.data)
            if statement.root != member.name:
                raise Mismatch(f"run {member.name}: its root is {statement.root}")
            facts.runs[statement.root] = statement
        if (member := self._only("specification")) is not None:
            facts.specification = parse_specification(member.data)
        for member in facts.bundle.of("log-proof"):
            proof = parse_log_proof(member.data, what=f"log-proof {member.name}")
            facts.proofs[member.name] = proof
            facts.checkpoints.append(proof.checkpoint)
        for member in facts.bundle.of("checkpoint"):
            facts.checkpoints.append(parse_checkpoint(member.data, what=f"checkpoint {member.name}"))
        for member in facts.bundle.of("announcement"):
            parse_announcement(member.data)
        for member in facts.bundle.of("dispute"):
            facts.records[member.name] = parse_dispute(member.data)
        return f"{len(facts.bundle.members)} members, {len(self.data):,} bytes"

    def check_signatures(self) -> str:
        """2. Each statement was signed with a key of the bundle, and says something that is known."""
        facts, tried = self.facts, 0
        for member in facts.bundle.of("statement"):
            what = f"statement {member.name}"
            envelope = parse_envelope(member.data, what=what)
            tried += len(envelope.signatures) * len(facts.keys)
            if tried > MOST_TRIED:
                raise InvalidInput(
                    f"{what}: to try every signature so far with each of {len(facts.keys)} keys takes {tried}, at most "
                    f"{MOST_TRIED} are tried"
                )
            signers = envelope.signers(list(facts.keys.values()))
            if len(signers) != 1:
                raise Mismatch(f"{what}: is signed by {len(signers)} keys of the bundle, must be by one")
            statement, key_id = envelope.statement(what=what), signers[0].key_id
            if statement.predicate_type == MOVE_TYPE:
                facts.moves.append(_Move(member.name, signers[0], read_move(statement, what=what)))
                continue
            claim = read_claim(statement, what=what)
            facts.signed.append(Signed(member.name, member.data, key_id, claim))
        if not facts.signed and not facts.moves:
            raise Mismatch("the bundle holds no statement")
        documents = [statement.encode() for statement in facts.runs.values()] + [
            s.document for s in facts.signed
        ]
        documents += [member.data for member in facts.bundle.of("announcement")]
        documents += [
            s.claim.draw.announcement.encode()
            for s in facts.signed
            if isinstance(s.claim, AuditClaim) and s.claim.draw is not None
        ]
        facts.entries = {entry.digest: entry for entry in map(entry_of, documents)}
        if strange := sorted(set(facts.proofs) - set(facts.entries)):
            raise Mismatch(f"log proof {strange[0]}: is about no document of the bundle")
        signers = {*(s.key_id for s in facts.signed), *(move.key.key_id for move in facts.moves)}
        return f"{len(facts.bundle.of('statement'))} statements, {len(signers)} signers"

    def check_roles(self) -> str | None:
        """3. The policy knows each signer in the role of its statement."""
        if self.policy is None:
            return None
        needed = [(s.name, s.key_id, _ROLE_OF[type(s.claim)]) for s in self.facts.signed]
        needed += [(move.name, move.key.key_id, move.claim.party) for move in self.facts.moves]
        for name, key_id, wanted in needed:
            role = self.policy.roles.get(key_id)
            if role != wanted:
                raise Mismatch(
                    f"statement {name}: is a {wanted}'s, its signer {key_id} is {role or 'nobody'} in the policy"
                )
        return ", ".join(f"{role} {key_id[:16]}.." for _, key_id, role in needed)

    def check_equivocation(self) -> str:
        """4. No key signed two claims that cannot both be meant, no log two trees of one size."""
        for one, other in itertools.combinations(self.facts.signed, 2):
            if one.key_id == other.key_id and (what := _contradiction(one.claim, other.claim)) is not None:
                who = _ROLE_OF[type(one.claim)]
                self.facts.finding = f"equivocation: {who} {one.key_id} signed two answers"
                raise Mismatch(
                    f"{who} {one.key_id[:16]}.. contradicts itself: {what} ({one.name}, {other.name})"
                )
        self._check_moves()
        logs = () if self.policy is None or self.policy.log is None else self.policy.log.logs
        for one, other in itertools.combinations(self.facts.checkpoints, 2):
            if is_split_view(one, other, logs):
                self.facts.finding = f"equivocation: log {one.origin} signed two trees of {one.size} entries"
                raise Mismatch(
                    f"log {one.origin}: signed two trees of {one.size} entries, {one.root.hex()} and {other.root.hex()}"
                )
        return f"{len(self.facts.signed)} statements, {len(self.facts.checkpoints)} checkpoints"

    def _check_moves(self) -> None:
        """No key made two moves in one place of one dispute, in statements or records."""
        places: dict[tuple[str, bytes], dict[bytes, list[_Move]]] = {}
        for move in self._moves():
            for place in move.claim.places():
                at = places.setdefault((move.key.key_id, place), {})
                at.setdefault(move.claim.move, []).append(move)
        for (key_id, _), found in places.items():
            # A signature in a record counts from check 9 on: where two moves meet, both are verified here.
            signed = (
                [next((m for m in same if m.is_signed()), None) for same in found.values()]
                if len(found) > 1
                else []
            )
            meant = [move for move in signed if move is not None]
            if len(meant) > 1:
                one, other = meant[:2]
                who, step = one.claim.party, one.claim.terms.step
                self.facts.finding = f"equivocation: {who} {key_id} signed two answers"
                raise Mismatch(
                    f"{who} {key_id[:16]}.. contradicts itself: two different moves ({one.claim.kind}) in one place "
                    f"of the dispute over step {step} ({one.name}, {other.name})"
                )

    def _moves(self) -> Iterator[_Move]:
        """All moves that the bundle says somebody signed, in statements and in records."""
        yield from self.facts.moves
        for name, record in self.facts.records.items():
            try:
                found = signed_claims(record)
            except ProtocolViolation:
                continue  # check 9 says what is wrong with it
            yield from (_Move(name, key, claim, signature) for claim, signature, key in found)

    def check_one_run(self) -> str:
        """5. One provenance; everything else is about its run, and the specification lies under its root."""
        facts = self.facts
        claims = [s.claim for s in facts.signed if isinstance(s.claim, TrainerClaim)]
        if len(claims) != 1:
            raise Mismatch(f"the bundle must hold one trainer's provenance, holds {len(claims)}")
        facts.trainer = claims[0]
        own = facts.trainer.identity
        for signed in facts.signed:
            theirs = signed.claim.identity
            if (theirs.run, theirs.specification) != (own.run, own.specification):
                raise Mismatch(
                    f"statement {signed.name}: is about run {theirs.run.root}, the provenance about {own.run.root}"
                )
            if theirs.weights is not None and theirs.weights != own.weights:
                raise Mismatch(
                    f"statement {signed.name}: weights are {theirs.weights}, the provenance says {own.weights}"
                )
        for move in facts.moves:
            if move.claim.terms.run.hex() != own.run.root:
                raise Mismatch(
                    f"statement {move.name}: is about run {move.claim.terms.run.hex()}, the provenance about {own.run.root}"
                )
        proof = self._only("specification-proof")
        if facts.specification is None or proof is None or own.run.root not in facts.runs:
            raise Mismatch(
                "the run's statement, its specification or the proof that it lies under the root is missing"
            )
        if facts.runs[own.run.root] != own.run or facts.specification.digest().hex() != own.specification:
            raise Mismatch(f"run {own.run.root}: statement or specification is not the one that was signed")
        parsed = parse_specification_proof(proof.data)
        if parsed.tree_size != own.run.tree_size:
            raise Mismatch(
                f"specification proof: tree of {parsed.tree_size} leaves, the run has {own.run.tree_size}"
            )
        verify_specification_proof(parsed, facts.specification, bytes.fromhex(own.run.root))
        stated = (facts.specification.steps, facts.specification.policy.name)
        if stated != (own.run.steps, facts.trainer.policy):
            raise Mismatch(
                f"provenance: {own.run.steps} steps under {facts.trainer.policy}, ordered were {stated}"
            )
        for name, value in build_definition(facts.specification).items():
            if not is_same_json(facts.trainer.definition[name], value):
                raise Mismatch(
                    f"provenance: its {name} are not those of the specification under the run's root"
                )
        signer = next(signed.key_id for signed in facts.signed if signed.claim is facts.trainer)
        facts.stated = stated_by(facts.specification, trainer=signer, weights=own.weights)
        return f"run {own.run.root}, {own.run.steps} steps"

    def check_model(self) -> str | None:
        """6. model.sig is the trainer's, its root digest is the one all statements name, and the files at hand have it."""
        member = self._only("model-signature")
        weights = self.facts.claimed.identity.weights
        if self.model is not None:
            check_result(self.model, str(weights), "model")
        if self.file is not None:
            if weights is None:
                raise Mismatch(f"{self.file}: the statements name no weights to compare it with")
            final_state = self.facts.claimed.identity.run.final_state
            self.facts.file = FileAnswer(str(self.file), *compare_model(self.file, weights, final_state))
            if not self.facts.file.is_result:
                raise Mismatch(
                    f"{self.file}: is not the result that the bundle speaks of: {self.facts.file.why}"
                )
        given = self.model is not None or self.file is not None
        at_hand = "the files at hand are these" if given else "no files were given to compare"
        if self.unread:
            at_hand += f"; not looked at: {', '.join(self.unread)}"
        if member is None:
            if self.policy is None:
                return None
            if self.policy.model_signature:
                raise Mismatch("model.sig is missing, and the policy asks for it")
            return f"not asked for; {at_hand}"
        if self.policy is None:
            return None
        keys = [key for key_id, key in self.facts.keys.items() if self.policy.roles.get(key_id) == "trainer"]
        manifest = parse_model_signature(member.data).manifest(keys)
        check_result(manifest, str(weights), "model.sig")
        return f"{len(manifest.files)} files, root digest {weights}; {at_hand}"

    def check_published(self) -> str | None:
        """7. The run lies in a log that the policy knows, seen by its quorum before any statement about it."""
        if self.policy is None:
            return None
        run = self.facts.claimed.identity.run.encode()
        if self.policy.log is None:
            return "not asked for"
        entry = entry_of(run)
        proof = self.facts.proofs.get(entry.digest)
        if proof is None:
            raise Mismatch("the run's log proof is missing, and the policy asks for publication")
        for digest, other in self.facts.proofs.items():
            other.verify(self.facts.entries[digest], self.policy.log)
        seen = proof.verify(entry, self.policy.log)
        if seen.seen_at is not None:
            early = [
                s
                for s in self.facts.signed
                if not isinstance(s.claim, TrainerClaim) and s.claim.at < seen.seen_at
            ]
            if early:
                raise Mismatch(
                    f"statement {early[0].name}: is of {time_text(early[0].claim.at)}, the run was published at "
                    f"{time_text(seen.seen_at)}"
                )
        when = (
            "no witness asked for"
            if seen.seen_at is None
            else f"seen by a quorum at {time_text(seen.seen_at)}"
        )
        return f"{seen.origin}, entry {proof.index} of {seen.size}, {when}"

    def check_draws(self) -> str | None:
        """8. Each sample is what announcement and beacon lead to, announced for this log before the beacon spoke."""
        drawn = [(signed, claim.draw) for signed, claim in self.facts.audits() if claim.draw is not None]
        if not drawn:
            return "no audit was by sample"
        if self.policy is None:
            return None
        for signed, draw in drawn:
            announcement = draw.announcement
            what = f"statement {signed.name}"
            own = self.facts.claimed.identity.run
            assert self.facts.specification is not None
            every = self.facts.specification.checkpoint_every
            if (announcement.tree_size, announcement.steps, announcement.checkpoint_every) != (
                own.tree_size,
                own.steps,
                every,
            ):
                raise Mismatch(
                    f"{what}: the draw is about a run of {announcement.steps} steps in other segments"
                )
            if signed.claim.at < announcement.beacon_time:
                raise Mismatch(f"{what}: is older than its beacon, {time_text(announcement.beacon_time)}")
            if self.policy.log is None:
                continue
            entry = entry_of(announcement.encode())
            proof = self.facts.proofs.get(entry.digest)
            if announcement.log is None or proof is None:
                raise Mismatch(
                    f"{what}: nothing shows that run and draw were published before the beacon spoke"
                )
            seen = proof.verify(entry, self.policy.log)
            if seen.seen_at is not None and seen.seen_at >= announcement.beacon_time:
                raise Mismatch(
                    f"{what}: was announced at {time_text(seen.seen_at)}, its beacon spoke at "
                    f"{time_text(announcement.beacon_time)}"
                )
        return f"{len(drawn)} drawn again; the beacons' own signatures are for the reader to check"

    def check_verdicts(self) -> str:
        """9. What each verdict rests on leads to its step, and an operator's record to its loser."""
        checked: list[str] = []
        records = {
            member.digest: member for kind in ("verdict", "dispute") for member in self.facts.bundle.of(kind)
        }
        for signed, claim in self.facts.verdicts():
            if claim.outcome in ("fault", FORFEIT) and claim.record not in records:
                raise Mismatch(f"statement {signed.name}: the record it names is not in the bundle")
            if (record := records.pop(claim.record, None)) is not None:
                why = self._check_grounds(signed.name, claim, record)
                checked.append(f"{claim.outcome}: {why}")
            if claim.dispute is not None:
                if (member := records.pop(claim.dispute, None)) is None or member.kind != "dispute":
                    raise Mismatch(
                        f"statement {signed.name}: the dispute record it names is not in the bundle"
                    )
                checked.append(self._check_dispute(member.name, signed, claim))
        if records:
            left = next(iter(records.values()))
            raise Mismatch(f"{left.kind} {left.name}: no verdict in the bundle names it")
        return "; ".join(checked) or "no verdict"

    def _check_dispute(self, name: str, signed: Signed, claim: VerdictClaim) -> str:
        """Return what the record of a dispute down to one operator shows, in words."""
        record = self.facts.records[name]
        root = bytes.fromhex(claim.identity.run.root)
        checks = verify_dispute(record, run_root=root, known=self._known_keys(claim, record))
        for check in checks:
            if check.outcome in ("failed", "not reached"):
                raise Mismatch(f"dispute {name}: check {check.number} ({check.claim}): {check.detail}")
        if record.loser != claim.loser:
            raise Mismatch(f"dispute {name}: the {record.loser} loses, the verdict says {claim.loser}")
        if record.auditor_run.hex() != claim.auditor_run:
            raise Mismatch(
                f"dispute {name}: is with claim {record.auditor_run.hex()}, the verdict about {claim.auditor_run}"
            )
        if record.step_proof.record.step != claim.step:
            raise Mismatch(
                f"dispute {name}: is about step {record.step_proof.record.step}, the verdict about {claim.step}"
            )
        needed = tuple(check for check in checks if check.outcome == "needs the job")
        self.facts.disputes.append(_Dispute(name, signed, record, checks[SIGNATURES_CHECK - 1], needed))
        return f"one operator: {record.loser} loses" + (
            f", {len(needed)} checks need the job" if needed else ""
        )

    def _known_keys(self, claim: VerdictClaim, record: DisputeRecord) -> dict[Party, list[str]]:
        """Return whose keys may have signed the moves of a dispute.

        The trainer's is the key that signed the run's provenance; the auditor's the one that signed the accusation which
        the verdict answers, so that nobody loses in its place; where it answers none, any auditor's of the policy.
        """
        trainers = [signed.key_id for signed in self.facts.signed if signed.claim is self.facts.trainer]
        accusers = [
            signed.key_id
            for signed, _ in self.facts.audits()
            if hashlib.sha256(signed.document).hexdigest() == claim.accusation
        ]
        if self.policy is not None:
            auditors = [key_id for key_id, role in self.policy.roles.items() if role == "auditor"]
        else:
            auditors = [record.keys["auditor"].key_id] if "auditor" in record.keys else []
        return {"trainer": trainers, "auditor": accusers or auditors}

    def check_signed_moves(self) -> str | None:
        """10. Whoever loses a dispute over operators signed the moves that convict it, and the record shows that they do."""
        said: list[str] = []
        for dispute in self.facts.disputes:
            step = dispute.record.step_proof.record.step
            if not (missing := "; ".join(dispute.not_proven())):
                said.append(f"step {step}: {dispute.signatures.detail}")
            elif self.policy is not None and self.policy.judges_word:
                said.append(f"step {step}: {missing}, which the policy accepts")
            elif self.policy is not None:
                self.facts.finding = (
                    f"not proven: that the {dispute.record.loser} is to blame for step {step}"
                )
                raise Mismatch(f"dispute {dispute.name}: not proven: {missing}")
        if self.policy is None and self.facts.disputes:
            return None
        return "; ".join(said) or "no dispute ended at an operator"

    def _check_grounds(self, name: str, claim: VerdictClaim, record: Member) -> str:
        what = f"verdict {record.name}"
        verdict = parse_verdict(record.data)
        stated = (verdict.loser, verdict.outcome, verdict.reason, verdict.step)
        if stated != (claim.loser, claim.outcome, claim.reason, claim.step):
            raise Mismatch(f"{what}: says other things than statement {name}")
        own, theirs = self.facts.claimed.identity.run, self.facts.runs.get(claim.auditor_run)
        specification = self.facts.specification
        if theirs is None or specification is None:
            raise Mismatch(f"{what}: the auditor's run statement {claim.auditor_run} is missing")
        try:
            return verify_verdict(verdict, own, theirs, specification)
        except Mismatch as problem:
            raise Mismatch(f"{what}: {problem}") from None

    def check_accusations(self) -> str:
        """11. No accepted judge found the trainer at fault, and no auditor's finding is left unanswered."""
        answered: set[str] = set()
        seen_alike: set[str] = set()
        for signed, claim in self.facts.verdicts():
            if claim.loser in ("trainer", "both"):
                basis = self._basis_of(signed, claim)
                words = quoted(claim.reason)
                fault = (
                    "trainer forfeited"
                    if claim.outcome == FORFEIT
                    else f"trainer at fault at step {claim.step}"
                )
                self.facts.finding = f"{fault} ({basis}); unchecked, the judge's own words: {words}"
                raise Mismatch(f"judge {signed.key_id[:16]}.. ruled against the trainer: {words}")
            if claim.finds_out and claim.accusation is not None:
                (seen_alike if claim.outcome == "agreement" else answered).add(claim.accusation)
        accusing = [(s, c) for s, c in self.facts.audits() if c.result in ("mismatch", "log_violation")]
        for signed, claim in accusing:
            # Runs whose states agree say nothing of a log: that judge was shown no objection.
            ruled = answered if claim.result == "log_violation" else answered | seen_alike
            if hashlib.sha256(signed.document).hexdigest() not in ruled:
                self.facts.finding = f"accused by auditor {signed.key_id}: {claim.result}"
                raise Mismatch(
                    f"auditor {signed.key_id[:16]}.. found a {claim.result}, and no judge has ruled on it"
                )
        return f"{len(accusing)} accusations, each answered by a judge" if accusing else "none was made"

    def _basis_of(self, verdict: Signed, claim: VerdictClaim) -> str:
        """Return in words what a verdict against a party rests on beside the judge's signature."""
        if claim.outcome == FORFEIT:
            return "the judge's word about who was silent or contradicted itself"
        dispute = next((each for each in self.facts.disputes if each.verdict is verdict), None)
        if dispute is None:
            return "the judge's word, which repeating the step tests"
        if dispute.signatures.outcome != "passed":
            return "the judge's word about who made the list"
        if dispute.needed:
            return "the judge's word about what the job asks for, which the job tests"
        return f"by moves that the {dispute.record.loser} signed"

    def check_quorum(self) -> str | None:
        """12. As many different auditors as the policy asks for have found a match that meets its conditions."""
        if self.policy is None:
            return None
        counted: dict[str, AuditClaim] = {}
        reasons: list[str] = []
        for audited in self.facts.audited():
            reason = _shortfall(audited, self.policy, self.now)
            if reason is None:
                counted[audited.key_id] = audited.claim
            else:
                reasons.append(f"{audited.key_id[:16]}..: {reason}")
        why = f"; not counted: {'; '.join(reasons)}" if reasons else ""
        if len(counted) < self.policy.auditor_quorum:
            raise Mismatch(
                f"{len(counted)} auditors count, the policy asks for {self.policy.auditor_quorum}{why}"
            )
        said = ", ".join(
            f"{key_id[:16]}.. ({claim.steps} of {claim.identity.run.steps} steps)"
            for key_id, claim in counted.items()
        )
        return f"{len(counted)} of {self.policy.auditor_quorum} asked for: {said}{why}"

    def check_stated(self) -> str | None:
        """13. Job, program, data, settings, seed, steps and weights are those that the policy names, if it names any."""
        if self.policy is None:
            return None
        assert self.facts.stated is not None
        stated = self.facts.stated.fields()
        for name, wanted in self.policy.pins.items():
            if (found := stated[name]) != wanted:
                raise Mismatch(
                    f"{name}: the run states {_shown(found)}, the policy asks for {_shown(wanted)}"
                )
        if self.facts.stated.policy not in self.policy.rounding_policies:
            asked = ", ".join(quoted(each) for each in self.policy.rounding_policies) or "none"
            raise Mismatch(
                f"rounding_policies: the run states {quoted(self.facts.stated.policy)}, the policy asks for one of {asked}"
            )
        return f"{', '.join(self.policy.pins) or 'nothing'} asked for beside the rounding policy"

    def _only(self, kind: str) -> Member | None:
        found = self.facts.bundle.of(kind)
        if len(found) > 1:
            raise InvalidInput(f"bundle: must hold one {kind}, holds {len(found)}")
        return found[0] if found else None


_ROLE_OF: dict[type[Claim], str] = {TrainerClaim: "trainer", AuditClaim: "auditor", VerdictClaim: "judge"}


def _root(claim: Claim) -> str:
    return claim.identity.run.root


def _contradiction(one: Claim, other: Claim) -> str | None:
    """Return in words why one party cannot mean both claims, or None."""
    a, b = one.identity, other.identity
    match one, other:
        case TrainerClaim(), TrainerClaim() if a.specification == b.specification:
            if a.run != b.run:
                return f"runs {a.run.root} and {b.run.root} of one specification"
            return None if a.weights == b.weights else f"weights {a.weights} and {b.weights} of one run"
        case AuditClaim(), AuditClaim() if a.run == b.run:
            # What is not accepted followed from the log in every byte, as a match did; the limits may have been others.
            held = ("match", "not_accepted")
            if one.result in held and other.result in held:
                return None
            results = {one.result, other.result} - {"cannot_reproduce"}
            if len(results) < 2 or not _overlap(one, other):
                return None
            return f"results {' and '.join(sorted(results))} for the same steps"
        case VerdictClaim(), VerdictClaim() if (a.run, one.auditor_run) == (b.run, other.auditor_run):
            if not (one.finds_out and other.finds_out):
                return None
            same = (one.outcome, one.loser, one.step) == (other.outcome, other.loser, other.step)
            return None if same else f"verdicts {one.loser} and {other.loser} on one dispute"
        case _:
            return None


def _overlap(one: AuditClaim, other: AuditClaim) -> bool:
    """Whether a match of one claim and a finding of the other speak of the same steps: one covers all of the other's."""
    return _covers(one, other) or _covers(other, one)


def _covers(one: AuditClaim, other: AuditClaim) -> bool:
    # Ascending and without overlap, so the last that begins before a segment is the one that may cover it.
    starts = [start for start, _ in one.segments]
    last = ((bisect_right(starts, start) - 1, end) for start, end in other.segments)
    return all(at >= 0 and end <= one.segments[at][1] for at, end in last)


def _shown(value: object) -> str:
    """Return what is stated, or asked for, as text: quoted where it is somebody's."""
    if isinstance(value, Mapping):
        pairs = sorted(cast("Mapping[str, str]", value).items())
        return ", ".join(f"{quoted(name)}: {quoted(text)}" for name, text in pairs) or "no settings"
    return "none" if value is None else quoted(value) if isinstance(value, str) else str(value)


def _shortfall(audited: Audited, policy: EvidencePolicy, now: int) -> str | None:
    """Return why an audit does not count, or None."""
    claim = audited.claim
    age = now - claim.at
    if claim.result != "match":
        return f"its result is {claim.result}"
    if claim.identity.weights is None:
        return "it names no weights"
    if claim.at > now + 300:
        return f"it is dated {time_text(claim.at)}, which is to come"
    if age > policy.most_age_days * 86400:
        return f"it is {age // 86400} days old, accepted are {policy.most_age_days}"
    if claim.policy not in policy.rounding_policies:
        return f"rounding policy {quoted(claim.policy)} is not accepted"
    for name, value in audited.measured().items():
        limit = policy.limits.get(name)
        if limit is None:
            continue
        if value is None:
            return f"it did not repeat the beginning, and the policy has most_{name} {limit}"
        if value == math.inf or Fraction(value) > limit:
            return f"{name} {float(value):.9g} exceeds most_{name} {float(limit):.9g}"
    return None if claim.is_whole else _weak_sample(claim, policy)


def _weak_sample(claim: AuditClaim, policy: EvidencePolicy) -> str | None:
    """Return why a partial audit does not count, or None."""
    if policy.coverage is None:
        return f"it covers {claim.steps} of {claim.identity.run.steps} steps, asked for is all"
    if claim.draw is None:
        return "its steps were chosen, not drawn"
    fraction, detect = policy.coverage
    power = claim.draw.announcement.power_for(fraction)
    if power < detect:
        return f"its sample finds a share {float(fraction):.3g} with probability {float(power):.4f}, asked is {float(detect):.4f}"
    return None
