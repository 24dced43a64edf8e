"""Whatever is given to tally verify is told by its content, and hostile files are no more than looked at."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tallystick.errors import InvalidInput, StoreError
from tallystick.evidence.policy import policy_template
from tallystick.evidence.recognition import recognise
from tallystick.signing.dsse import Statement, Subject, sign_statement
from tallystick.signing.keys import ed25519_key, generate_key
from tallystick.signing.model_signature import Manifest, sign_model
from tallystick.signing.note import NOTE, Note, NoteKey, NoteSigner
from tallystick.tlog.tree import checkpoint_text

KEY = ed25519_key(bytes(32))
LOG = NoteSigner(NoteKey("log.example/a", NOTE, KEY.public_key), KEY)


def tensors(metadata: object, text: bytes | None = None) -> bytes:
    header = {"__metadata__": metadata, "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + b"\0"


def statement(kind: str) -> bytes:
    return sign_statement(Statement((Subject("run", {"tallystickRun": "11" * 32}),), kind, {}), KEY)


AS_BUNDLE = "-o B`"


@pytest.mark.parametrize(
    ("data", "what", "answer"),
    [
        (b'{"format":"tallystick/bundle/1","members":[]}\n', "a bundle of evidence", "--policy FILE"),
        (sign_model(Manifest({"a": "11" * 32}), "m", generate_key("ecdsa-p256")), "a model signature", "--model DIR"),
        (statement("https://slsa.dev/provenance/v1"), "a trainer's signed provenance", AS_BUNDLE),
        (statement("https://tallystick/replay-audit/v0.2"), "an auditor's signed statement", AS_BUNDLE),
        (statement("https://tallystick/dispute-verdict/v0.1"), "a judge's signed verdict", AS_BUNDLE),
        (statement("https://tallystick/dispute-move/v0.1"), "a signed move of a dispute", AS_BUNDLE),
        (statement("https://x\x1b[2J"), "a signed in-toto statement of type 'https://x\\x1b[2J'", AS_BUNDLE),
        (b'{"payloadType":"a","payload":"e30=","signatures":[]}', "a signed envelope that is malformed", "signatures"),
        (tensors({"format": "pt"}), "a weights' file of 1 tensors", "--bundle B"),
        (tensors({"format": "tallystick/state/1"}), "a run's checkpoint", "--bundle B"),
        (tensors([]), "a weights' file", "--bundle B"),
        (tensors(None, b"{" + b"[" * 100_000), "a broken safetensors file", "nothing"),
        (b'{"format":"tallystick/step-proof/1"}', "the proof of a step's record", "--root HEX"),
        (b'{"format":"tallystick/chunk-proof/1"}', "the proof of a chunk", "--root HEX"),
        (b'{"format":"tallystick/dispute/1"}', "the record of a dispute", "--trainer-signs PUB"),
        (b'{"format":"tallystick/dispute-verdict/1"}', "a judge's verdict", AS_BUNDLE),
        (b'{"format":"tallystick/run/2"}', "a run's specification", "tally verify DIR"),
        (b'{"format":"tallystick/run-statement/1"}', "a run's statement", "tally verify DIR"),
        (b'{"batch":"","fingerprint":"","state_root":null}\n{}', "the step records", "tally verify DIR"),
        (policy_template({}).encode(), "an evidence policy", "tally verify B --policy"),
        (b'{"verdict":"match","freedom":{},"segments":[]}', "an audit's report, unsigned", "tally report DIR --audit"),
        (b'{"format":"\\u001b[31m"}', "a document of format '\\x1b[31m'", "knows none"),
        (b"{}", "JSON of no format", "takes a bundle"),
        (b"{", "broken JSON", "not JSON"),
        (KEY.public_key.pem(), "a public key", "tally key show"),
        (LOG.sign(Note(checkpoint_text("log.example/a", 1, bytes(32)))).encode(), "a transparency log's checkpoint", AS_BUNDLE),
        (b"PK\x03\x04....", "a zip archive", "not opened"),
        (b"\x80\x04.", "a pickle", "not opened"),
        (b"", "none of the documents", "takes a bundle"),
        (b"[]", "none of the documents", "takes a bundle"),
        (bytes(range(255, 0, -1)), "none of the documents", "takes a bundle"),
    ],
)  # fmt: skip
def test_a_file_is_told_by_its_content(tmp_path: Path, data: bytes, what: str, answer: str) -> None:
    path = tmp_path / "given"
    path.write_bytes(data)
    found = recognise(path)
    assert found.what.startswith(what)
    assert answer in found.answer
    assert found.is_bundle == (what == "a bundle of evidence")
    assert found.is_proof == (data[:20] == b'{"format":"tallystic' and "--root HEX" in answer + found.answer)


def test_a_directory_is_told_by_what_lies_in_it(tmp_path: Path) -> None:
    assert recognise(tmp_path).what.startswith("a directory without")
    (tmp_path / "model.sig").write_bytes(b"")
    assert recognise(tmp_path).what == "a model's directory, with model.sig"
    (tmp_path / "log.vkey").write_bytes(b"")
    assert recognise(tmp_path).what == "a transparency log"
    (tmp_path / "steps.jsonl").symlink_to("/dev/zero")
    assert recognise(tmp_path).what == "a run directory"


def test_pipes_devices_and_what_is_not_there_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(InvalidInput, match="is not a regular file"):
            recognise(tmp_path / name)
    with pytest.raises(StoreError, match="there is no such file"):
        recognise(tmp_path / "missing")


def test_a_header_that_claims_more_than_the_file_has_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert recognise(path).what.startswith("none of the documents")
    path.write_bytes(((1 << 26) + 1).to_bytes(8, "little") + b"{}")
    os.truncate(path, (1 << 26) + 100)  # sparse: a header over the limit is not parsed
    assert recognise(path).what == "a safetensors file"
