"""What an implementation can be asked about trees, states, runs, statements and disputes (spec/vectors.md 2).

Each operation is one that the cases of ``vectors`` have, or that asks a verifier about a prover's case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from io import BytesIO

from tallystick.commit import merkle
from tallystick.commit.state import (
    Entry,
    open_chunk,
    parse_chunk_proof,
    parse_state_summary,
    state_root,
    summarise,
    verify_chunk,
)
from tallystick.dispute.exchange import read_answer, read_question
from tallystick.dispute.record import parse_dispute, verify_dispute
from tallystick.dispute.terms import Party
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import parse_bundle
from tallystick.evidence.conformance import Json, Query, Refused
from tallystick.evidence.numeric_questions import NUMERICS
from tallystick.evidence.question_forms import (
    CONTENT,
    HASH,
    HASHES,
    HEX,
    HEXES,
    INTEGER,
    INTEGERS,
    OBJECT,
    TEXT,
    content,
    listed,
    optional,
)
from tallystick.run import documents, proofs, transcript
from tallystick.run.sample import parse_draw
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import parse_public_key
from tallystick.signing.model_signature import Manifest, parse_model_signature
from tallystick.signing.note import parse_note, parse_vkey
from tallystick.tlog.policy import parse_log_policy
from tallystick.tlog.tree import LogEntry, parse_log_proof

Values = Mapping[str, object]


def _hashes(values: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(value) for value in values]


def _hexes(values: Sequence[bytes]) -> list[str]:
    return [value.hex() for value in values]


# ------------------------------------------------------------------------------------------ trees and states


def _leaf_hashes(leaves: Sequence[str]) -> list[bytes]:
    return [merkle.leaf_hash(bytes.fromhex(leaf)) for leaf in leaves]


def _roots(leaves: list[str]) -> Values:
    hashed = _leaf_hashes(leaves)
    return {"roots": [merkle.root(hashed[:n]).hex() for n in range(len(hashed) + 1)]}


def _prove_inclusion(leaves: list[str], index: int) -> Values:
    hashed = _leaf_hashes(leaves)
    return {"proof": _hexes(merkle.inclusion_proof(hashed, index)), "root": merkle.root(hashed).hex()}


def _prove_consistency(leaves: list[str], old_size: int) -> Values:
    hashed = _leaf_hashes(leaves)
    return {
        "proof": _hexes(merkle.consistency_proof(hashed, old_size)),
        "old_root": merkle.root(hashed[:old_size]).hex(),
        "root": merkle.root(hashed).hex(),
    }


def _inclusion(leaf: str, index: int, size: int, proof: list[str], root: str) -> None:
    hashed = merkle.leaf_hash(bytes.fromhex(leaf))
    merkle.verify_inclusion(hashed, index=index, size=size, proof=_hashes(proof), root=bytes.fromhex(root))


def _with_leaf(case: Json) -> Json:
    return case if "leaf" in case else {**case, "leaf": case["leaves"][case["index"]]}


def _consistency(old_size: int, size: int, old_root: str, root: str, proof: list[str]) -> None:
    old, new = bytes.fromhex(old_root), bytes.fromhex(root)
    merkle.verify_consistency(old_size=old_size, size=size, old_root=old, root=new, proof=_hashes(proof))


def _entries(entries: list[Json]) -> list[Entry]:
    return [Entry(e["name"], e["dtype"], tuple(e["shape"]), content(e["data"])) for e in entries]


def _state(entries: list[Json]) -> Values:
    found = summarise(_entries(entries))
    return {
        "tensor_roots": [entry.tensor_root.hex() for entry in found.entries],
        "entry_leaves": [entry.leaf().hex() for entry in found.entries],
        "summary": {"text": found.encode().decode("ascii")},
        "root": found.root().hex(),
    }


def _verify_state(entries: list[Json], root: str) -> None:
    if (found := state_root(_entries(entries)).hex()) != root:
        raise Mismatch(f"root is {found}, stated is {root}")


def _summary(document: Json, root: str) -> None:
    if (found := parse_state_summary(content(document)).root().hex()) != root:
        raise Mismatch(f"root is {found}, stated is {root}")


def _open_chunk(entries: list[Json], name: str, chunk_index: int) -> Values:
    return {"proof": {"text": open_chunk(_entries(entries), name, chunk_index).encode().decode("ascii")}}


def _chunk(proof: Json, chunk: Json, root: str) -> None:
    verify_chunk(parse_chunk_proof(content(proof)), content(chunk), bytes.fromhex(root))


ENTRIES = listed(
    {
        "type": "object",
        "properties": {"name": TEXT, "dtype": TEXT, "shape": INTEGERS, "data": CONTENT},
        "required": ["name", "dtype", "shape", "data"],
        "additionalProperties": False,
    }
)
TREES: Mapping[str, Query] = {
    "roots": Query(
        "Roots of the trees of the first 0, 1, .. leaves.", {"leaves": HEXES}, _roots, {"roots": HASHES}
    ),
    "inclusion": Query(
        "The inclusion proof of a leaf.", {"leaves": HEXES, "index": INTEGER}, _prove_inclusion,
        {"proof": HASHES, "root": HASH},
    ),
    "verify-inclusion": Query(
        "Whether a proof leads from a leaf to a root.",
        {"leaf": HEX, "index": INTEGER, "size": INTEGER, "proof": HEXES, "root": HEX}, _inclusion, prepare=_with_leaf,
    ),
    "consistency": Query(
        "The proof that a tree begins with an older one.", {"leaves": HEXES, "old_size": INTEGER}, _prove_consistency,
        {"proof": HASHES, "old_root": HASH, "root": HASH},
    ),
    "verify-consistency": Query(
        "Whether a proof shows that a tree begins with an older one.",
        {"old_size": INTEGER, "size": INTEGER, "old_root": HEX, "root": HEX, "proof": HEXES}, _consistency,
    ),
    "state": Query(
        "The roots of a state.", {"entries": ENTRIES}, _state,
        {"tensor_roots": HASHES, "entry_leaves": HEXES, "summary": CONTENT, "root": HASH},
    ),
    "verify-state": Query("Whether a state has a root.", {"entries": ENTRIES, "root": TEXT}, _verify_state),
    "summary": Query("Whether a state summary has a root.", {"document": CONTENT, "root": TEXT}, _summary),
    "open-chunk": Query(
        "The proof of a chunk.", {"entries": ENTRIES, "name": TEXT, "chunk_index": INTEGER}, _open_chunk,
        {"proof": CONTENT},
    ),
    "verify-chunk": Query(
        "Whether a chunk lies under a state's root.", {"proof": CONTENT, "chunk": CONTENT, "root": HEX}, _chunk
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ runs and evidence


def _transcript(specification: Json, records: Json, statement: Json) -> Values:
    found = transcript.verify_transcript(content(specification), content(records), content(statement))
    return {
        "specification_digest": found.specification.digest().hex(),
        "leaf_hashes": _hexes(found.leaf_hashes),
        "root": found.root().hex(),
    }


def _step(proof: Json, root: str) -> None:
    proofs.verify_step_proof(proofs.parse_step_proof(content(proof)), bytes.fromhex(root))


def _specification(proof: Json, specification: Json, root: str) -> None:
    found = proofs.parse_specification_proof(content(proof))
    stated = documents.parse_specification(content(specification))
    proofs.verify_specification_proof(found, stated, bytes.fromhex(root))


def _extension(proof: Json, old_root: str, root: str) -> None:
    found = proofs.parse_extension_proof(content(proof))
    proofs.verify_extension(found, old_root=bytes.fromhex(old_root), root=bytes.fromhex(root))


def _note(note: str, vkeys: list[str]) -> Values:
    found = parse_note(note.encode()).verify([parse_vkey(vkey) for vkey in vkeys])
    return {"signed": {str(key): when for key, when in found.items()}}


def _log_proof(proof: str, kind: str, digest: str, policy: str) -> Values:
    seen = parse_log_proof(proof.encode()).verify(LogEntry(kind, digest), parse_log_policy(policy.encode()))
    return {"seen_at": seen.seen_at}


def _log_policy(policy: str) -> None:
    parse_log_policy(policy.encode())


def _envelope(envelope: str, key: str) -> Values:
    opened = parse_envelope(envelope.encode()).open([parse_public_key(bytes.fromhex(key))])
    return {"predicate": dict(opened.predicate)}


def _model_signature(signature: str, key: str, files: dict[str, str]) -> Values:
    manifest = Manifest(files)
    parse_model_signature(signature.encode()).verify(manifest, [parse_public_key(key.encode())])
    return {"root_digest": manifest.root_digest()}


def _audit_draw(draw: str) -> Values:
    power: Fraction = parse_draw(draw.encode()).announcement.power()
    return {"power": [power.numerator, power.denominator]}


def _with_lowest_terms(case: Json) -> Json:
    if "power" not in case:
        return case
    power = Fraction(*case["power"])
    return {**case, "power": [power.numerator, power.denominator]}


def _bundle(bundle: str) -> Values:
    parsed = parse_bundle(bytes.fromhex(bundle))
    return {"members": [[m.kind, m.name, m.data.hex()] for m in parsed.members]}


def _verdict(verdict: str, run: str, auditor_run: str, specification: str) -> None:
    trainer, auditor = (documents.parse_run_statement(each.encode()) for each in (run, auditor_run))
    stated = documents.parse_specification(specification.encode())
    verify_verdict(parse_verdict(verdict.encode()), trainer, auditor, stated)


def _exchange(question: str, answer: str, key: str, referee: str) -> None:
    asked, said = bytes.fromhex(question), bytes.fromhex(answer)
    posting = read_question(BytesIO(asked), len(asked), parse_public_key(bytes.fromhex(referee)))
    read_answer(BytesIO(said), len(said), posting, parse_public_key(bytes.fromhex(key)))


def _dispute(record: str, run_root: str, keys: Mapping[Party, Sequence[str]]) -> Values | Refused:
    try:
        parsed = parse_dispute(record.encode())
    except InvalidInput:
        return Refused({"check": 0, "outcome": "malformed"})
    for check in verify_dispute(parsed, run_root=bytes.fromhex(run_root), known=keys):
        if check.outcome != "passed":
            return Refused({"check": check.number, "outcome": check.outcome})
    return {}


def _with_keys(case: Json) -> Json:
    return {"keys": {}, **case}


EVIDENCE: Mapping[str, Query] = {
    "verify-transcript": Query(
        "Whether specification, records and statement fit together.",
        {"specification": CONTENT, "records": CONTENT, "statement": CONTENT}, _transcript,
        {"specification_digest": HASH, "leaf_hashes": HASHES, "root": HASH},
    ),
    "step-proof": Query("Whether a record lies under a run's root.", {"proof": CONTENT, "root": HEX}, _step),
    "specification-proof": Query(
        "Whether a specification does.", {"proof": CONTENT, "specification": CONTENT, "root": HEX}, _specification
    ),
    "extension-proof": Query(
        "Whether a run begins with an older one.", {"proof": CONTENT, "old_root": HEX, "root": HEX}, _extension
    ),
    "note": Query(
        "Which of the keys signed a note, and when.", {"note": TEXT, "vkeys": listed(TEXT)}, _note, {"signed": OBJECT}
    ),
    "log-proof": Query(
        "When the policy's witnesses had seen an entry.",
        {"proof": TEXT, "kind": TEXT, "digest": TEXT, "policy": TEXT}, _log_proof, {"seen_at": optional(INTEGER)},
    ),
    "log-policy": Query("Whether a log policy is well formed.", {"policy": TEXT}, _log_policy),
    "envelope": Query(
        "What the key's owner signed.", {"envelope": TEXT, "key": HEX}, _envelope, {"predicate": OBJECT}
    ),
    "model-signature": Query(
        "Whether the key's owner signed these files, SHA-256 by name.",
        {"signature": TEXT, "key": TEXT, "files": {"type": "object", "additionalProperties": TEXT}}, _model_signature,
        {"root_digest": HASH},
    ),
    "audit-draw": Query(
        "The probability, a fraction in lowest terms, with which a drawn audit finds what it promises to.", {"draw": TEXT},
        _audit_draw, {"power": listed(INTEGER, 2)}, prepare=_with_lowest_terms,
    ),
    "bundle": Query(
        "The members of a bundle: kind, name, bytes.", {"bundle": HEX}, _bundle, {"members": listed(listed(TEXT, 3))}
    ),
    "verdict": Query(
        "Whether a verdict follows from what it rests on.",
        {"verdict": TEXT, "run": TEXT, "auditor_run": TEXT, "specification": TEXT}, _verdict,
    ),
    "exchange": Query(
        "Whether the referee asked a question, and an answer to it counts, of the key's owner.",
        {"question": HEX, "answer": HEX, "key": HEX, "referee": HEX},
        _exchange,
    ),
    "dispute": Query(
        "Whether a dispute's record passes every check, the parties known by these key ids; else which is the first that "
        "it does not, 0 for its form, and how that ends.",
        {"record": TEXT, "run_root": HEX, "keys": OBJECT}, _dispute, prepare=_with_keys,
        refused={"check": INTEGER, "outcome": {"enum": ["malformed", "failed", "needs the job", "not proven"]}},
    ),
}  # fmt: skip


OPERATIONS: Mapping[str, Query] = {**TREES, **EVIDENCE, **NUMERICS}
ASKED_AS: Mapping[str, Sequence[str]] = {
    "inclusion": ("inclusion", "verify-inclusion"),
    "consistency": ("consistency", "verify-consistency"),
    "state": ("state", "verify-state"),
    "open-chunk": ("open-chunk", "verify-chunk"),
    "transcript": ("verify-transcript",),
    "record": ("record-and-follow",),
    "follow": ("record-and-follow",),
}
"""Which operations ask about a case: a prover's is also a question to a verifier."""
