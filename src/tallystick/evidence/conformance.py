"""Conformance: whether another implementation of the verifier accepts and refuses what the vectors say.

The implementation is a program that reads one JSON question a line and answers each with one JSON line::

    {"id": "case 17", "operation": "verify-inclusion", "leaf": "..", "index": 3, ..}
    {"id": "case 17", "accepted": false}

A question holds what a verifier is given and nothing of what is expected. Its bytes are ``{"hex": ..}`` or
``{"text": ..}`` (ASCII) or ``{"painted": n}`` (n bytes 0, 1, .., 250, 0, ..). ``OPERATIONS`` lists what is asked;
``answer`` is this package's own implementation, which ``tally conformance serve`` offers.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from tallystick.commit import merkle
from tallystick.commit.state import Entry, parse_chunk_proof, parse_state_summary, state_root, verify_chunk
from tallystick.dispute.exchange import read_answer, read_question
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import parse_bundle
from tallystick.run import documents, proofs, transcript
from tallystick.run.sample import parse_draw
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import parse_public_key
from tallystick.signing.model_signature import Manifest, parse_model_signature
from tallystick.signing.note import parse_note, parse_vkey
from tallystick.tlog.policy import parse_log_policy
from tallystick.tlog.tree import LogEntry, parse_log_proof

Json = dict[str, Any]
LONGEST_ANSWER = 1 << 16  # bytes of a line
# Cases that also say what a prover writes ask the verifier's question about it.
ASKED_AS = {
    "inclusion": "verify-inclusion",
    "consistency": "verify-consistency",
    "state": "verify-state",
    "open-chunk": "verify-chunk",
    "transcript": "verify-transcript",
}


@dataclass(frozen=True)
class Operation:
    """What a verifier can be asked: the fields of the question, and this package's own way to check it."""

    fields: tuple[str, ...]
    ask: Callable[..., None]


@dataclass(frozen=True)
class Question:
    """One case as the implementation sees it, and whether it must be accepted."""

    number: int
    name: str
    operation: str
    fields: Mapping[str, object]
    accepted: bool

    @property
    def asked_as(self) -> str:
        """The identity that the implementation sees; the case's own name would give the answer away."""
        return f"case {self.number}"

    def line(self) -> bytes:
        """Return the JSON line that asks it."""
        asked = {"id": self.asked_as, "operation": self.operation, **self.fields}
        return json.dumps(asked, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True)
class Answered:
    """What became of one question: ``agreed``, or the implementation's word in ``said``."""

    question: Question
    said: str

    @property
    def agreed(self) -> bool:
        """Whether the implementation says what the vectors say."""
        return self.said == ("accepted" if self.question.accepted else "refused")


def answer(question: Mapping[str, Any], operations: Mapping[str, Operation]) -> bool:
    """Return whether this package accepts what ``question`` asks about.

    Raises:
        InvalidInput: an operation that is not in ``operations``, or a question without its fields.
    """
    fields = dict(question)
    fields.pop("id", None)
    operation = fields.pop("operation", None)
    if operation not in operations:
        raise InvalidInput(f"operation {operation!r}: must be one of {', '.join(operations)}")
    asked = operations[operation]
    if fields.keys() != set(asked.fields):
        raise InvalidInput(
            f"{operation}: must have the fields {', '.join(asked.fields)}, has {', '.join(fields)}"
        )
    try:
        asked.ask(*(fields[name] for name in asked.fields))
    except (InvalidInput, Mismatch):
        return False
    return True


def load_questions(vectors: Path, operations: Mapping[str, Operation]) -> list[Question]:
    """Return the verifier's questions in the folder ``vectors``, in order of their names.

    Raises:
        InvalidInput: there are none.
    """
    found: list[Question] = []
    for path in sorted(vectors.glob("*/*/input.json")):
        room, name = path.parent.parent.name, path.parent.name
        case = cast(Json, json.loads(path.read_text(encoding="utf-8")))
        stated = "draw" if room == "draw" else case.get("operation")
        operation = ASKED_AS.get(str(stated), str(stated))
        if operation not in operations:
            continue
        if "leaves" in case and "leaf" not in case and "index" in case:
            case["leaf"] = case["leaves"][case["index"]]
        fields = {field: case[field] for field in operations[operation].fields}
        found.append(Question(len(found), f"{room}/{name}", operation, fields, not name.endswith("_fail")))
    if not found:
        raise InvalidInput(f"vectors {vectors}: no case of an operation that a verifier is asked about")
    return found


def drive(
    program: Sequence[str], questions: Sequence[Question], *, timeout_s: float = 30.0
) -> Iterator[Answered]:
    """Ask ``program`` every question, one process for all, and yield its answers as they come.

    A program that ends, is silent for ``timeout_s`` or answers nonsense is not asked further: what was
    still to be asked counts as not answered.

    Raises:
        InvalidInput: the program cannot be started.
    """
    try:
        child = subprocess.Popen(list(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    except OSError as problem:
        raise InvalidInput(f"program {program[0]}: cannot be started ({problem.strerror})") from problem
    assert child.stdin is not None
    assert child.stdout is not None
    lines: queue.Queue[bytes] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
    reader.start()
    gone = ""
    try:
        for question in questions:
            said = gone
            if not said:
                try:
                    child.stdin.write(question.line())
                    said = _said(question, lines.get(timeout=timeout_s))
                except (OSError, queue.Empty) as problem:
                    said = "silent" if isinstance(problem, queue.Empty) else "ended"
                if said not in ("accepted", "refused"):
                    gone = f"not asked, it was {said} before"
            yield Answered(question, said)
    finally:
        child.kill()
        child.wait()
        reader.join(timeout=timeout_s)
        child.stdin.close()
        child.stdout.close()


def _read(stream: Any, lines: queue.Queue[bytes]) -> None:
    """Hand over whole lines; an empty one says that no more will come."""
    held = b""
    while data := stream.read(LONGEST_ANSWER):
        *whole, held = (held + data).split(b"\n")
        for line in whole:
            lines.put(line)
        if len(held) > LONGEST_ANSWER:
            break
    lines.put(b"")


def _said(question: Question, line: bytes) -> str:
    if not line:
        return "ended"
    try:
        value = json.loads(line)
    except ValueError:
        return f"malformed ({line[:60]!r})"
    if (
        not isinstance(value, dict)
        or cast(Json, value).get("id") != question.asked_as
        or not isinstance(cast(Json, value).get("accepted"), bool)
    ):
        return f"malformed ({line[:60]!r})"
    return "accepted" if cast(Json, value)["accepted"] else "refused"


def content(data: Json) -> bytes:
    """Return the bytes that a question writes as hexadecimal, as ASCII text or as a painted length."""
    ((form, value),) = data.items()
    if form == "painted":
        return (bytes(range(251)) * (value // 251 + 1))[:value]
    return bytes.fromhex(value) if form == "hex" else value.encode("ascii")


def _hashes(values: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(value) for value in values]


def _inclusion(leaf: str, index: int, size: int, proof: list[str], root: str) -> None:
    hashed = merkle.leaf_hash(bytes.fromhex(leaf))
    merkle.verify_inclusion(hashed, index=index, size=size, proof=_hashes(proof), root=bytes.fromhex(root))


def _consistency(old_size: int, size: int, old_root: str, root: str, proof: list[str]) -> None:
    old, new = bytes.fromhex(old_root), bytes.fromhex(root)
    merkle.verify_consistency(old_size=old_size, size=size, old_root=old, root=new, proof=_hashes(proof))


def _state(entries: list[Json], root: str) -> None:
    built = [Entry(e["name"], e["dtype"], tuple(e["shape"]), content(e["data"])) for e in entries]
    _same(state_root(built), root)


def _summary(document: Json, root: str) -> None:
    _same(parse_state_summary(content(document)).root(), root)


def _chunk(proof: Json, chunk: Json, root: str) -> None:
    verify_chunk(parse_chunk_proof(content(proof)), content(chunk), bytes.fromhex(root))


def _transcript(specification: Json, records: Json, statement: Json) -> None:
    transcript.verify_transcript(content(specification), content(records), content(statement))


def _step(proof: Json, root: str) -> None:
    proofs.verify_step_proof(proofs.parse_step_proof(content(proof)), bytes.fromhex(root))


def _specification(proof: Json, specification: Json, root: str) -> None:
    found = proofs.parse_specification_proof(content(proof))
    stated = documents.parse_specification(content(specification))
    proofs.verify_specification_proof(found, stated, bytes.fromhex(root))


def _extension(proof: Json, old_root: str, root: str) -> None:
    found = proofs.parse_extension_proof(content(proof))
    proofs.verify_extension(found, old_root=bytes.fromhex(old_root), root=bytes.fromhex(root))


def _note(note: str, vkeys: list[str]) -> None:
    parse_note(note.encode()).verify([parse_vkey(vkey) for vkey in vkeys])


def _log_proof(proof: str, kind: str, digest: str, policy: str) -> None:
    parse_log_proof(proof.encode()).verify(LogEntry(kind, digest), parse_log_policy(policy.encode()))


def _log_policy(policy: str) -> None:
    parse_log_policy(policy.encode())


def _envelope(envelope: str, key: str) -> None:
    parse_envelope(envelope.encode()).open([parse_public_key(bytes.fromhex(key))])


def _model_signature(signature: str, key: str, files: dict[str, str]) -> None:
    parse_model_signature(signature.encode()).verify(Manifest(files), [parse_public_key(key.encode())])


def _audit_draw(draw: str) -> None:
    parse_draw(draw.encode())


def _bundle(bundle: str) -> None:
    parse_bundle(bytes.fromhex(bundle))


def _verdict(verdict: str, run: str, auditor_run: str, specification: str) -> None:
    trainer, auditor = (documents.parse_run_statement(each.encode()) for each in (run, auditor_run))
    stated = documents.parse_specification(specification.encode())
    verify_verdict(parse_verdict(verdict.encode()), trainer, auditor, stated)


def _exchange(question: str, answer: str, key: str) -> None:
    asked, said = bytes.fromhex(question), bytes.fromhex(answer)
    posting = read_question(BytesIO(asked), len(asked))
    read_answer(BytesIO(said), len(said), posting, parse_public_key(bytes.fromhex(key)))


def _same(found: bytes, stated: str) -> None:
    if found.hex() != stated:
        raise Mismatch(f"root is {found.hex()}, stated is {stated}")


OPERATIONS: Mapping[str, Operation] = {
    "verify-inclusion": Operation(("leaf", "index", "size", "proof", "root"), _inclusion),
    "verify-consistency": Operation(("old_size", "size", "old_root", "root", "proof"), _consistency),
    "verify-state": Operation(("entries", "root"), _state),
    "summary": Operation(("document", "root"), _summary),
    "verify-chunk": Operation(("proof", "chunk", "root"), _chunk),
    "verify-transcript": Operation(("specification", "records", "statement"), _transcript),
    "step-proof": Operation(("proof", "root"), _step),
    "specification-proof": Operation(("proof", "specification", "root"), _specification),
    "extension-proof": Operation(("proof", "old_root", "root"), _extension),
    "note": Operation(("note", "vkeys"), _note),
    "log-proof": Operation(("proof", "kind", "digest", "policy"), _log_proof),
    "log-policy": Operation(("policy",), _log_policy),
    "envelope": Operation(("envelope", "key"), _envelope),
    "model-signature": Operation(("signature", "key", "files"), _model_signature),
    "audit-draw": Operation(("draw",), _audit_draw),
    "bundle": Operation(("bundle",), _bundle),
    "verdict": Operation(("verdict", "run", "auditor_run", "specification"), _verdict),
    "exchange": Operation(("question", "answer", "key"), _exchange),
}
