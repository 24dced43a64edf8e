from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick import errors
from tallystick.commit.directory import (
    BUCKET_TAG,
    KEY_TAG,
    MAP_TAG,
    bucket_leaf,
    parse_map_proof,
    prefix_of,
    verify_lookup,
)
from tallystick.commit.encoding import frame
from tallystick.fleet.registry.events import parse_entry
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.signing.keys import ed25519_key

ROOT = Path(__file__).resolve().parents[3]
REGISTRIES = sorted((ROOT / "vectors" / "registry").iterdir())
MAPS = sorted((ROOT / "vectors" / "registry-map").iterdir())


@pytest.mark.parametrize("folder", REGISTRIES, ids=lambda folder: folder.name)
def test_a_log_leads_to_its_roots_or_is_refused(folder: Path, tmp_path: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    lines, key = [line.encode() for line in case["lines"]], ed25519_key(hashlib.sha256(b"registry").digest())
    with RegistryLedger(tmp_path / "registry") as ledger:
        if "reason" not in case:
            head = ledger.append(map(parse_entry, lines), key, now=100).head
            assert (head.registry, head.entries) == (case["registry"], len(lines))
            assert (head.log_root.hex(), head.state_root.hex()) == (case["log"], case["state"])
            return
        ledger.append(map(parse_entry, lines[:-1]), key, now=100)
        with pytest.raises(getattr(errors, case["error"]), match=case["reason"]):
            ledger.append([parse_entry(lines[-1])], key, now=101)


@pytest.mark.parametrize("folder", MAPS, ids=lambda folder: folder.name)
def test_a_map_proof_shows_a_value_or_is_refused(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    key, root = bytes.fromhex(case["key"]), bytes.fromhex(case["root"])
    if "reason" not in case:
        value = verify_lookup(parse_map_proof(case["proof"], what="proof"), key, root)
        assert (None if value is None else value.hex()) == case["value"]
        return
    with pytest.raises(getattr(errors, case["error"]), match=case["reason"]):
        verify_lookup(parse_map_proof(case["proof"], what="proof"), key, root)


def test_the_page_draws_the_bytes_of_its_worked_example() -> None:
    page = (ROOT / "spec" / "registry.md").read_text().partition("## 12. Worked example")[2]
    blocks = [
        bytes.fromhex("".join(line.partition("#")[0] for line in block.partition("```")[0].splitlines()))
        for block in page.split("```hex\n")[1:]
    ]
    case = json.loads((ROOT / "vectors" / "registry-map" / "one-bucket" / "input.json").read_text())
    items = [(bytes.fromhex(key), bytes.fromhex(value)) for key, value in case["proof"]["items"]]
    assert blocks[0] == frame(KEY_TAG, b"key-1")
    assert blocks[1] == hashlib.sha256(blocks[0]).digest()
    assert int.from_bytes(blocks[1][:4], "big") == prefix_of(b"key-1")
    assert blocks[2] == frame(BUCKET_TAG, *(part for item in items for part in item))
    assert blocks[3] == bucket_leaf(items) == bytes.fromhex(case["proof"]["root"])
    assert blocks[4] == frame(MAP_TAG, b"\0", (3).to_bytes(8, "little"), blocks[3])
    assert blocks[5] == bytes.fromhex(case["root"])


def test_the_vectors_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "vectors_registry.py", tmp_path], check=True)
    for folder in ("registry", "registry-map"):
        written = {
            p.relative_to(tmp_path): p.read_text() for p in (tmp_path / folder).rglob("*") if p.is_file()
        }
        kept = {
            p.relative_to(ROOT / "vectors"): p.read_text()
            for p in (ROOT / "vectors" / folder).rglob("*")
            if p.is_file()
        }
        assert written == kept
