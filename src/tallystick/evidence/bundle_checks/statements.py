"""Checks 1 to 5, but 4: documents parse, are signed by whoever may sign them, and speak of one run."""

from __future__ import annotations

from tallystick.commit.encoding import is_same_json
from tallystick.dispute.record import parse_dispute
from tallystick.dispute.signed_moves import MOVE_TYPE, read_move
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import parse_bundle
from tallystick.evidence.bundle_checks.facts import ROLE_OF, Facts, Signed, SignedMove
from tallystick.evidence.verification import stated_by
from tallystick.run.claims import read_claim
from tallystick.run.documents import parse_run_statement, parse_specification
from tallystick.run.proofs import parse_specification_proof, verify_specification_proof
from tallystick.run.sample import parse_announcement
from tallystick.run.statements import AuditClaim, TrainerClaim, build_definition
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import parse_public_key
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import parse_checkpoint, parse_log_proof

MOST_TRIED = 1 << 14  # pairs of a signature and a key: a second's worth and more


def check_documents(facts: Facts) -> str:
    """1. Container, keys, run statements, specification, log proofs and checkpoints are well formed."""
    facts.bundle = parse_bundle(facts.data)
    for member in facts.bundle.of("key"):
        key = parse_public_key(member.data, what=f"key {member.name}")
        if key.key_id != member.name:
            raise Mismatch(
                f"key {member.name[:16]}..: its key id is {key.key_id}",
                where=f"key {member.name}",
                own=key.key_id,
                stated=member.name,
            )
        facts.keys[key.key_id] = key
    for member in facts.bundle.of("run"):
        statement = parse_run_statement(member.data)
        if statement.root != member.name:
            raise Mismatch(
                f"run {member.name}: its root is {statement.root}",
                where=f"run {member.name}",
                own=statement.root,
                stated=member.name,
            )
        facts.runs[statement.root] = statement
    if (member := facts.only("specification")) is not None:
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
    return f"{len(facts.bundle.members)} members, {len(facts.data):,} bytes"


def check_signatures(facts: Facts) -> str:
    """2. Each statement was signed with a key of the bundle, and says something that is known."""
    tried = 0
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
            facts.moves.append(SignedMove(member.name, signers[0], read_move(statement, what=what)))
            continue
        claim = read_claim(statement, what=what)
        facts.signed.append(Signed(member.name, member.data, key_id, claim))
    if not facts.signed and not facts.moves:
        raise Mismatch("the bundle holds no statement")
    documents = [statement.encode() for statement in facts.runs.values()] + [s.document for s in facts.signed]
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


def check_roles(facts: Facts) -> str | None:
    """3. The policy knows each signer in the role of its statement."""
    if facts.policy is None:
        return None
    needed = [(s.name, s.key_id, ROLE_OF[type(s.claim)]) for s in facts.signed]
    needed += [(move.name, move.key.key_id, move.claim.party) for move in facts.moves]
    for name, key_id, wanted in needed:
        role = facts.policy.roles.get(key_id)
        if role != wanted:
            raise Mismatch(
                f"statement {name}: is a {wanted}'s, its signer {key_id} is {role or 'nobody'} in the policy"
            )
    return ", ".join(f"{role} {key_id[:16]}.." for _, key_id, role in needed)


def check_one_run(facts: Facts) -> str:
    """5. One provenance; everything else is about its run, and the specification lies under its root."""
    claims = [s.claim for s in facts.signed if isinstance(s.claim, TrainerClaim)]
    if len(claims) != 1:
        raise Mismatch(f"the bundle must hold one trainer's provenance, holds {len(claims)}")
    facts.trainer = claims[0]
    own = facts.trainer.identity
    for signed in facts.signed:
        theirs = signed.claim.identity
        if (theirs.run, theirs.specification) != (own.run, own.specification):
            raise Mismatch(
                f"statement {signed.name}: is about run {theirs.run.root}, the provenance about {own.run.root}",
                where=f"statement {signed.name}: run",
                own=own.run.root,
                stated=theirs.run.root,
            )
        if theirs.weights is not None and theirs.weights != own.weights:
            raise Mismatch(
                f"statement {signed.name}: weights are {theirs.weights}, the provenance says {own.weights}",
                where=f"statement {signed.name}: weights",
                own=own.weights,
                stated=theirs.weights,
            )
    for move in facts.moves:
        if move.claim.terms.run.hex() != own.run.root:
            raise Mismatch(
                f"statement {move.name}: is about run {move.claim.terms.run.hex()}, the provenance about {own.run.root}"
            )
    proof = facts.only("specification-proof")
    if facts.specification is None or proof is None or own.run.root not in facts.runs:
        raise Mismatch(
            "the run's statement, its specification or the proof that it lies under the root is missing"
        )
    if facts.runs[own.run.root] != own.run or facts.specification.digest().hex() != own.specification:
        raise Mismatch(f"run {own.run.root}: statement or specification is not the one that was signed")
    parsed = parse_specification_proof(proof.data)
    if parsed.tree_size != own.run.tree_size:
        raise Mismatch(
            f"specification proof: tree of {parsed.tree_size} leaves, the run has {own.run.tree_size}",
            where="specification proof: leaves",
            own=parsed.tree_size,
            stated=own.run.tree_size,
        )
    verify_specification_proof(parsed, facts.specification, bytes.fromhex(own.run.root))
    stated = (facts.specification.steps, facts.specification.policy.name)
    if stated != (own.run.steps, facts.trainer.policy):
        raise Mismatch(
            f"provenance: {own.run.steps} steps under {facts.trainer.policy}, ordered were {stated}"
        )
    for name, value in build_definition(facts.specification).items():
        if not is_same_json(facts.trainer.definition[name], value):
            raise Mismatch(f"provenance: its {name} are not those of the specification under the run's root")
    signer = next(signed.key_id for signed in facts.signed if signed.claim is facts.trainer)
    facts.stated = stated_by(facts.specification, trainer=signer, weights=own.weights)
    return f"run {own.run.root}, {own.run.steps} steps"
