"""Every case of vectors/{merkle,state-commitment,transcript}, and the pages that draw their bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tallystick.commit import merkle
from tallystick.commit.state import (
    Entry,
    open_chunk,
    parse_chunk_proof,
    parse_state_summary,
    state_root,
    summarise,
    verify_chunk,
    verify_state,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import parse_specification
from tallystick.run.proofs import (
    parse_extension_proof,
    parse_specification_proof,
    parse_step_proof,
    verify_extension,
    verify_specification_proof,
    verify_step_proof,
)
from tallystick.run.transcript import verify_transcript

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("merkle", "state-commitment", "transcript")
CASES = sorted(folder for room in ROOMS for folder in (REPOSITORY / "vectors" / room).iterdir())
ERRORS = {"InvalidInput": InvalidInput, "Mismatch": Mismatch}


def content(data: dict[str, Any]) -> bytes:
    """Return the bytes that a case writes as hexadecimal, as ASCII text, or as a painted length."""
    ((form, value),) = data.items()
    if form == "painted":
        return (bytes(range(251)) * (value // 251 + 1))[:value]
    return bytes.fromhex(value) if form == "hex" else value.encode("ascii")


def hashes(values: list[str]) -> list[bytes]:
    return [bytes.fromhex(value) for value in values]


def entries_of(values: list[dict[str, Any]]) -> list[Entry]:
    return [
        Entry(value["name"], value["dtype"], tuple(value["shape"]), content(value["data"]))
        for value in values
    ]


def roots(leaves: list[str], roots: list[str]) -> None:
    leaf_hashes = [merkle.leaf_hash(leaf) for leaf in hashes(leaves)]
    assert [merkle.root(leaf_hashes[:n]).hex() for n in range(len(leaves) + 1)] == roots
    assert [merkle.Accumulator(leaf_hashes[:n]).root().hex() for n in range(len(leaves) + 1)] == roots


def inclusion(leaves: list[str], index: int, size: int, proof: list[str], root: str) -> None:
    leaf_hashes = [merkle.leaf_hash(leaf) for leaf in hashes(leaves)]
    assert merkle.inclusion_proof(leaf_hashes, index) == hashes(proof)
    verify_inclusion(leaves[index], index, size, proof, root)


def verify_inclusion(leaf: str, index: int, size: int, proof: list[str], root: str) -> None:
    leaf_hash = merkle.leaf_hash(bytes.fromhex(leaf))
    merkle.verify_inclusion(leaf_hash, index=index, size=size, proof=hashes(proof), root=bytes.fromhex(root))


def consistency(
    leaves: list[str], old_size: int, size: int, old_root: str, root: str, proof: list[str]
) -> None:
    leaf_hashes = [merkle.leaf_hash(leaf) for leaf in hashes(leaves)]
    assert merkle.consistency_proof(leaf_hashes, old_size) == hashes(proof)
    verify_consistency(old_size, size, old_root, root, proof)


def verify_consistency(old_size: int, size: int, old_root: str, root: str, proof: list[str]) -> None:
    merkle.verify_consistency(
        old_size=old_size,
        size=size,
        old_root=bytes.fromhex(old_root),
        root=bytes.fromhex(root),
        proof=hashes(proof),
    )


def state(
    entries: list[dict[str, Any]],
    tensor_roots: list[str],
    entry_leaves: list[str],
    summary: dict[str, Any],
    root: str,
) -> None:
    found = summarise(entries_of(entries))
    assert [entry.tensor_root.hex() for entry in found.entries] == tensor_roots
    assert [entry.leaf().hex() for entry in found.entries] == entry_leaves
    assert found.encode() == content(summary)
    assert found.root().hex() == root
    assert state_root(entries_of(entries)).hex() == root


def check_state(entries: list[dict[str, Any]], root: str) -> None:
    verify_state(entries_of(entries), bytes.fromhex(root))


def check_summary(document: dict[str, Any], root: str) -> None:
    summary = parse_state_summary(content(document))
    assert summary.encode() == content(document)
    assert summary.root().hex() == root


def check_open(
    entries: list[dict[str, Any]],
    name: str,
    chunk_index: int,
    proof: dict[str, Any],
    chunk: dict[str, Any],
    root: str,
) -> None:
    assert open_chunk(entries_of(entries), name, chunk_index).encode() == content(proof)
    check_chunk(proof, chunk, root)


def check_chunk(proof: dict[str, Any], chunk: dict[str, Any], root: str) -> None:
    verify_chunk(parse_chunk_proof(content(proof)), content(chunk), bytes.fromhex(root))


def transcript(
    specification: dict[str, Any],
    records: dict[str, Any],
    statement: dict[str, Any],
    specification_digest: str,
    leaf_hashes: list[str],
    root: str,
) -> None:
    found = verify_transcript(content(specification), content(records), content(statement))
    assert found.specification.digest().hex() == specification_digest
    assert [leaf.hex() for leaf in found.leaf_hashes] == leaf_hashes
    assert found.root().hex() == root
    assert found.specification.encode() == content(specification)
    assert found.encode_records() == content(records)
    assert found.statement().encode() == content(statement)


def check_transcript(
    specification: dict[str, Any], records: dict[str, Any], statement: dict[str, Any]
) -> None:
    verify_transcript(content(specification), content(records), content(statement))


def step_proof(proof: dict[str, Any], root: str) -> None:
    found = parse_step_proof(content(proof))
    assert found.encode() == content(proof)
    verify_step_proof(found, bytes.fromhex(root))


def specification_proof(proof: dict[str, Any], specification: dict[str, Any], root: str) -> None:
    found = parse_specification_proof(content(proof))
    assert found.encode() == content(proof)
    verify_specification_proof(found, parse_specification(content(specification)), bytes.fromhex(root))


def extension_proof(proof: dict[str, Any], old_root: str, root: str) -> None:
    found = parse_extension_proof(content(proof))
    assert found.encode() == content(proof)
    verify_extension(found, old_root=bytes.fromhex(old_root), root=bytes.fromhex(root))


OPERATIONS: dict[str, Callable[..., None]] = {
    "roots": roots,
    "inclusion": inclusion,
    "verify-inclusion": verify_inclusion,
    "consistency": consistency,
    "verify-consistency": verify_consistency,
    "state": state,
    "verify-state": check_state,
    "summary": check_summary,
    "open-chunk": check_open,
    "verify-chunk": check_chunk,
    "transcript": transcript,
    "verify-transcript": check_transcript,
    "step-proof": step_proof,
    "specification-proof": specification_proof,
    "extension-proof": extension_proof,
}


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_vector(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    operation = OPERATIONS[case.pop("operation")]

    if not folder.name.endswith("_fail"):
        operation(**case)
        return
    error, reason = ERRORS[case.pop("error")], case.pop("reason")
    with pytest.raises(error, match=re.escape(reason)):
        operation(**case)


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_every_case_says_why_it_exists(folder: Path) -> None:
    why = (folder / "README.md").read_text(encoding="utf-8")

    assert len(why.splitlines()) == 1
    assert why.endswith(".\n")
    assert {path.name for path in folder.iterdir()} == {"README.md", "input.json"}


def test_the_vectors_are_what_their_generator_writes(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "vectors_commit.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)

    def files(root: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(root)): path.read_bytes()
            for room in ROOMS
            for path in sorted((root / room).rglob("*"))
            if path.is_file()
        }

    assert files(tmp_path) == files(REPOSITORY / "vectors")


@pytest.mark.parametrize(
    ("page", "room", "drawn"),
    [
        ("state-commitment.md", "state-commitment", ("tensor_roots", "entry_leaves", "root")),
        ("transcript.md", "transcript", ("specification_digest", "leaf_hashes", "root")),
    ],
)
def test_a_page_draws_the_bytes_of_its_worked_example(page: str, room: str, drawn: tuple[str, ...]) -> None:
    text = (REPOSITORY / "spec" / page).read_text(encoding="utf-8")
    # Hexadecimal in a drawing may be spaced and broken over lines; a note behind it begins with #.
    blocks = re.findall(r"^```hex\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    shown = {re.sub(r"#.*|\s", "", block) for block in blocks}
    case = json.loads((REPOSITORY / "vectors" / room / "worked-example" / "input.json").read_text())

    expected = {
        value for name in drawn for value in ([case[name]] if isinstance(case[name], str) else case[name])
    }

    assert shown == expected


def test_the_transcript_page_shows_the_documents_of_its_worked_example() -> None:
    text = (REPOSITORY / "spec" / "transcript.md").read_text(encoding="utf-8")
    case = json.loads((REPOSITORY / "vectors" / "transcript" / "worked-example" / "input.json").read_text())
    blocks = re.findall(r"^```json\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)

    shown = ["".join(line.strip() for line in block.splitlines()) for block in blocks]

    second_record = case["records"]["text"].splitlines()[1]
    assert shown == [case["specification"]["text"], second_record, case["statement"]["text"]]
