"""Every case of vectors/{transparency-log,attestation,audit-draw,evidence-bundle,dispute-verdict,dispute-exchange}."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tallystick.commit.encoding import canonical_json, digest
from tallystick.dispute.exchange import encode_answer, read_answer, read_question
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import parse_bundle
from tallystick.run.documents import parse_run_statement, parse_specification
from tallystick.run.sample import parse_draw
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import ed25519_key, parse_public_key
from tallystick.signing.model_signature import Manifest, parse_model_signature
from tallystick.signing.note import parse_note, parse_vkey
from tallystick.tlog.policy import parse_log_policy
from tallystick.tlog.tree import LogEntry, parse_log_proof

REPOSITORY = Path(__file__).parents[2]
ROOMS = (
    "transparency-log",
    "attestation",
    "audit-draw",
    "evidence-bundle",
    "dispute-verdict",
    "dispute-exchange",
)
CASES = sorted(folder for room in ROOMS for folder in (REPOSITORY / "vectors" / room).iterdir())
ERRORS = {"InvalidInput": InvalidInput, "Mismatch": Mismatch}


def note(note: str, vkeys: list[str], signed: dict[str, int | None]) -> None:
    parsed = parse_note(note.encode())
    assert parsed.encode() == note.encode()
    assert {str(key): when for key, when in parsed.verify(map(parse_vkey, vkeys)).items()} == signed


def log_proof(proof: str, kind: str, digest: str, policy: str, seen_at: int | None = None) -> None:
    parsed = parse_log_proof(proof.encode())
    assert parsed.encode() == proof.encode()
    seen = parsed.verify(LogEntry(kind, digest), parse_log_policy(policy.encode()))
    assert seen.seen_at == seen_at


def log_policy(policy: str) -> None:
    parse_log_policy(policy.encode())


def envelope(envelope: str, key: str, predicate: dict[str, Any]) -> None:
    opened = parse_envelope(envelope.encode()).open([parse_public_key(bytes.fromhex(key))])
    assert opened.predicate == predicate


def model_signature(signature: str, key: str, files: dict[str, str], root_digest: str = "") -> None:
    manifest = Manifest(files)
    parse_model_signature(signature.encode()).verify(manifest, [parse_public_key(key.encode())])
    assert manifest.root_digest() == root_digest


def audit_draw(draw: str, power: list[int] | None = None) -> None:
    found = parse_draw(draw.encode())
    assert found.encode() == draw.encode()
    assert power is not None
    assert found.announcement.power() == Fraction(*power)


def bundle(bundle: str, members: list[list[str]] | None = None) -> None:
    parsed = parse_bundle(bytes.fromhex(bundle))
    assert parsed.encode().hex() == bundle
    assert [[m.kind, m.name, m.data.hex()] for m in parsed.members] == members


def verdict(verdict: str, run: str, auditor_run: str, specification: str) -> None:
    parsed = parse_verdict(verdict.encode())
    assert parsed.encode() == verdict.encode()
    trainer, auditor = parse_run_statement(run.encode()), parse_run_statement(auditor_run.encode())
    assert verify_verdict(parsed, trainer, auditor, parse_specification(specification.encode()))


def exchange(
    question: str, answer: str, key: str, referee: str, dispute: dict[str, Any] | None = None
) -> None:
    asked, said = bytes.fromhex(question), bytes.fromhex(answer)
    posting = read_question(BytesIO(asked), len(asked), parse_public_key(bytes.fromhex(referee)))
    statement = parse_envelope(asked.partition(b"\n")[0]).statement()
    assert posting.statement().encode() == statement.encode()
    signer = parse_public_key(bytes.fromhex(key))
    found, _ = read_answer(BytesIO(said), len(said), posting, signer)
    assert (
        dispute is None or digest("tallystick/dispute-exchange/1", canonical_json(dispute)) == posting.dispute
    )
    again = b"".join(encode_answer(posting, found, ed25519_key(bytes([2]) * 32)))
    assert read_answer(BytesIO(again), len(again), posting, signer)[0] == found


OPERATIONS: dict[str, Callable[..., None]] = {
    "note": note,
    "log-proof": log_proof,
    "log-policy": log_policy,
    "envelope": envelope,
    "model-signature": model_signature,
    "audit-draw": audit_draw,
    "bundle": bundle,
    "verdict": verdict,
    "exchange": exchange,
}


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_vector(folder: Path) -> None:
    assert (folder / "README.md").read_text(encoding="utf-8").endswith(".\n")
    case = json.loads((folder / "input.json").read_text())
    operation = OPERATIONS[case.pop("operation")]
    if not folder.name.endswith("_fail"):
        operation(**case)
        return
    error, reason = ERRORS[case.pop("error")], case.pop("reason")
    with pytest.raises(error, match=re.escape(reason)):
        operation(**case)


def test_the_vectors_are_what_their_generator_writes(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "vectors_evidence.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)

    def files(root: Path) -> dict[str, bytes]:
        found = (path for room in ROOMS for path in sorted((root / room).rglob("*")) if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in found}

    assert files(tmp_path) == files(REPOSITORY / "vectors")
