"""What a file or directory is, by its content, and which command answers for it: for whoever gave it to another one.

Nothing is believed because of it: what is recognised is still to be checked by the command that is named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tallystick.commit.encoding import parse_json
from tallystick.commit.state import PROOF_FORMAT
from tallystick.dispute.record import DISPUTE_FORMAT
from tallystick.dispute.signed_moves import MOVE_TYPE
from tallystick.dispute.verdict import OBJECTION_FORMAT, VERDICT_FORMAT
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.evidence.policy import FORMAT as POLICY_FORMAT
from tallystick.run.calibration import FORMAT as CALIBRATION_FORMAT
from tallystick.run.documents import SPECIFICATION_FORMAT, STATEMENT_FORMAT
from tallystick.run.proofs import SPECIFICATION_PROOF_FORMAT, STEP_PROOF_FORMAT
from tallystick.run.sample import ANNOUNCEMENT_FORMAT, DRAW_FORMAT
from tallystick.run.statements import AUDIT_TYPE, PROVENANCE_TYPE, VERDICT_TYPE
from tallystick.signing.dsse import ENVELOPE_LIMIT, PAYLOAD_TYPE, parse_envelope
from tallystick.signing.model_signature import PREDICATE_TYPE
from tallystick.signing.note import NOTE_LIMIT
from tallystick.store.regular import open_regular
from tallystick.store.tensor_files import STATE_METADATA
from tallystick.tlog.tree import PROOF_HEADER, parse_checkpoint

HEAD_BYTES = 1 << 12
HEADER_LIMIT = 1 << 26  # bytes of a safetensors header
RUN = "a run directory"
PROOFS = (STEP_PROOF_FORMAT, PROOF_FORMAT, DISPUTE_FORMAT)

IN_BUNDLE = (
    "put it in one with `tally bundle {path} .. -o B`, and check that with `tally verify B --policy FILE`"
)
_UNOPENED = "it can hold code and is not opened; `tally export RUN --out DIR` writes weights as safetensors"
_KNOWN = "tally verify takes a bundle, a run directory, a proof or a dispute's record"
_AS_ROOT = "it is verified against a root known from elsewhere: `tally verify {path} --root HEX`"

_DOCUMENTS: Mapping[str, tuple[str, str]] = {
    STEP_PROOF_FORMAT: ("the proof of a step's record", _AS_ROOT),
    PROOF_FORMAT: ("the proof of a chunk of a state", f"{_AS_ROOT}, with the chunk beside it or in --chunk"),
    DISPUTE_FORMAT: (
        "the record of a dispute over one operator",
        f"{_AS_ROOT} --trainer-signs PUB --auditor-signs PUB",
    ),
    VERDICT_FORMAT: ("a judge's verdict with the moves that led to it", f"it counts in a bundle, signed: {IN_BUNDLE}"),
    STATEMENT_FORMAT: ("a run's statement", "`tally verify DIR` checks the run directory that it lies in"),
    SPECIFICATION_FORMAT: ("a run's specification", "`tally verify DIR` checks the run directory that it lies in"),
    SPECIFICATION_PROOF_FORMAT: ("the proof of a run's specification", f"it counts in a bundle: {IN_BUNDLE}"),
    ANNOUNCEMENT_FORMAT: ("the announcement of a sampled audit", f"it counts in a bundle: {IN_BUNDLE}"),
    DRAW_FORMAT: ("the draw of a sampled audit", "the auditor's signed statement holds it, and counts in a bundle"),
    OBJECTION_FORMAT: ("an auditor's objection to a log", "`tally dispute RUN CLAIM` rules on the claim that it lies in"),
    CALIBRATION_FORMAT: ("measured noise", "`tally record --bands {path}` and `tally report DIR --bands {path}` take it"),
    POLICY_FORMAT: ("an evidence policy", "it says what a bundle must show: `tally verify B --policy {path}`"),
}  # fmt: skip

_STATEMENTS: Mapping[str, str] = {
    PROVENANCE_TYPE: "a trainer's signed provenance of a run",
    AUDIT_TYPE: "an auditor's signed statement of what repeating a run showed",
    VERDICT_TYPE: "a judge's signed verdict",
    MOVE_TYPE: "a signed move of a dispute",
    PREDICATE_TYPE: "the signed statement of a model signature, out of its bundle",
}


@dataclass(frozen=True)
class Recognised:
    """What something is, in words, and which command answers for it.

    Attributes:
        what: with an article.
        answer: a sentence.
        is_proof: whether it is checked against a root.
        is_bundle: whether it says that it is a bundle of evidence.
    """

    what: str
    answer: str
    is_proof: bool = False
    is_bundle: bool = False

    def __str__(self) -> str:
        return f"is {self.what}; {self.answer}"


def recognise(path: Path) -> Recognised:
    """Return what lies at ``path``; of a file no more is read than tells.

    Raises:
        InvalidInput: it is a device, a pipe or something else that is no regular file.
        StoreError: it is not there or cannot be read.
    """
    if path.is_dir():
        return _directory(path)
    if not os.path.lexists(path):
        raise StoreError(f"{path}: there is no such file or directory")
    with open_regular(
        path, "a bundle, a run directory, a proof or a dispute's record is needed", follow=True
    ) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            if (found := _tensors(path, head, size)) is not None:
                return found
            rest = file.read(ENVELOPE_LIMIT) if head.lstrip().startswith((b"{", b"//")) else b""
        except OSError as problem:
            raise StoreError(f"{path}: cannot be read ({problem.strerror})") from problem
    return _document(path, head, rest)


def _directory(path: Path) -> Recognised:
    names = {"specification.json", "steps.jsonl", "run.json"}
    if any(os.path.lexists(path / name) for name in names):
        return Recognised(RUN, f"`tally verify {path}` checks its documents, `tally audit {path}` repeats it")
    if os.path.lexists(path / "log.vkey"):
        return Recognised("a transparency log", f"`tally log verify {path} --policy FILE` checks it")
    inner = [name for name in ("model.sig", "model.safetensors") if os.path.lexists(path / name)]
    if inner:
        return Recognised(
            f"a model's directory, with {' and '.join(inner)}",
            f"`tally verify {path} --bundle B` says whether its files are the result that a bundle speaks of",
        )
    return Recognised("a directory without specification.json, steps.jsonl or run.json", "so it is no run")


def _tensors(path: Path, head: bytes, size: int) -> Recognised | None:
    """Return what a safetensors file is, by its header; None if it is none."""
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or not 2 <= length <= size - 8:
        return None
    question = f"`tally verify {path} --bundle B` says whether it is the result that a bundle speaks of"
    what = "a safetensors file"
    if length <= HEADER_LIMIT:
        with open_regular(path, what, follow=True) as file:
            text = file.read(8 + length)[8:]
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            return Recognised(
                "a broken safetensors file: its header is not JSON", "nothing can be said of it"
            )
        names = cast("dict[str, object]", header if isinstance(header, dict) else {})
        metadata = names.pop("__metadata__", None)
        if isinstance(metadata, dict) and cast("dict[str, object]", metadata).get("format") == STATE_METADATA:
            what = f"a run's checkpoint, a committed state of {len(names)} entries"
            question = f"`tally verify DIR` checks those of a run; {question}"
        else:
            what = f"a weights' file of {len(names)} tensors"
    return Recognised(what, question)


def _document(path: Path, head: bytes, rest: bytes) -> Recognised:
    for start, what, answer in _HEADS:
        if head.startswith(start):
            return Recognised(what, answer.format(path=path))
    if head.startswith(b'{"format":"tallystick/bundle/'):
        return Recognised(
            "a bundle of evidence", f"`tally verify {path} --policy FILE` checks it", is_bundle=True
        )
    if head.lstrip().startswith((b"{", b"//")):
        return _json(path, head + rest)
    try:
        checkpoint = parse_checkpoint(head) if len(head) <= NOTE_LIMIT else None
    except (InvalidInput, Mismatch):
        checkpoint = None
    if checkpoint is not None:
        return Recognised(
            "a transparency log's checkpoint", f"it counts in a bundle: {IN_BUNDLE.format(path=path)}"
        )
    return Recognised("none of the documents that tally knows", _KNOWN)


_HEADS: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes", _UNOPENED),
    (b"\x80", "a pickle, as torch.save wrote", _UNOPENED),
    (
        b"-----BEGIN PUBLIC KEY",
        "a public key",
        "`tally key show {path}` says whose; policies name its key id",
    ),
    (
        b"-----BEGIN",
        "a key or certificate in PEM",
        "`tally key show PUB` shows a public key; a private one is its owner's",
    ),
    (
        PROOF_HEADER.encode(),
        "a log proof",
        "`tally log verify {path} DOCUMENT --policy FILE` checks it; a bundle takes it as DOCUMENT@{path}",
    ),
    (b"TALLYLOG", "a chip's log", "`tally chip verify {path} --key FILE` checks it"),
    (b"<!doctype html", "a page for people", "`tally report DIR` writes it from a run; pages prove nothing"),
)


def _json(path: Path, data: bytes) -> Recognised:
    lines = (b"" if line.lstrip().startswith(b"//") else line for line in data.split(b"\n"))
    try:
        value = parse_json(b"\n".join(lines), what=str(path), limit=len(data))
    except InvalidInput as problem:
        first = data.partition(b"\n")[0]
        if b'"fingerprint":' in first and b'"state_root":' in first:
            return Recognised(
                "the step records of a run", "`tally verify DIR` checks the run directory that they lie in"
            )
        if len(data) > ENVELOPE_LIMIT:  # of all that is JSON, only a dispute's record is as long
            return Recognised("a long JSON document", _AS_ROOT.format(path=path), is_proof=True)
        return Recognised("broken JSON", str(problem))
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    stated = fields.get("format")
    if "dsseEnvelope" in fields:
        answer = f"it counts in a bundle: {IN_BUNDLE.format(path=path)} --model DIR"
        return Recognised("a model signature (OpenSSF Model Signing)", answer)
    if "payloadType" in fields:
        return _statement(path, data)
    if isinstance(stated, str) and stated in _DOCUMENTS:
        what, answer = _DOCUMENTS[stated]
        return Recognised(what, answer.format(path=path), is_proof=stated in PROOFS)
    if isinstance(stated, str):
        return Recognised(f"a document of format {stated[:80]!a}", "`tally verify` knows none such")
    if {"verdict", "freedom", "segments"} <= fields.keys():
        answer = f"`tally report DIR --audit {path}` shows it; `tally audit --key KEY --statement FILE` writes a signed one"
        return Recognised("an audit's report, unsigned", answer)
    if {"verdict", "checks", "shows_not"} <= fields.keys():
        return Recognised(
            "what tally verify --json printed", "it is nobody's signature; verify the bundle itself"
        )
    return Recognised("JSON of no format that tally knows", _KNOWN)


def _statement(path: Path, data: bytes) -> Recognised:
    try:
        envelope = parse_envelope(data, what=str(path))
        if envelope.payload_type != PAYLOAD_TYPE:
            return Recognised(
                f"a signed envelope around {envelope.payload_type[:80]!a}", "tally knows none such"
            )
        kind = envelope.statement(what=str(path)).predicate_type
    except InvalidInput as problem:
        return Recognised("a signed envelope that is malformed", str(problem))
    what = _STATEMENTS.get(
        kind, f"a signed in-toto statement of type {kind[:80]!a}, which tally does not know"
    )
    return Recognised(
        what, f"its signature and what it says are checked in a bundle: {IN_BUNDLE.format(path=path)}"
    )
