"""Every case of vectors/chip-log, and the page that draws its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead, read_log, verify_log
from tallystick.fleet.agent.chip_record import parse_record
from tallystick.signing.keys import parse_public_key

REPOSITORY = Path(__file__).parents[2]
CASES = {folder.name: folder for folder in sorted((REPOSITORY / "vectors/chip-log").iterdir())}


def load(name: str) -> dict[str, Any]:
    return json.loads((CASES[name] / "input.json").read_text())


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("_fail")])
def test_a_log_has_the_findings_stated(name: str) -> None:
    case = load(name)
    key = parse_public_key(bytes.fromhex(case["key"]))
    frames = [bytes.fromhex(frame) for frame in case["frames"]]
    records, malformed = read_log(frames, key)
    assert malformed == []
    known = [ChipHead(seq, bytes.fromhex(digest), "the inspector") for seq, digest in case["known"]]
    found = [[f.rule, f.seq, f.severity] for f in verify_log(records, known=known)]
    assert found == case["findings"]
    for logged, frame in zip(records, frames, strict=True):
        assert logged.signed == frame


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("_fail")])
def test_a_frame_is_refused_for_the_reason_stated(name: str) -> None:
    case = load(name)
    key = parse_public_key(bytes.fromhex(case["key"]))
    with pytest.raises((InvalidInput, Mismatch)) as caught:
        parse_record(bytes.fromhex(case["frame"]), key)
    assert case["reason"] in str(caught.value)
