"""Every case of vectors/dispute: accepted records verify, refused neighbours fail where and why they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.dispute.bisection import Claim
from tallystick.dispute.operator_game import Opened, Revealed
from tallystick.dispute.operator_list import base_of, hash_of, parse_operator
from tallystick.dispute.record import CHECKS, DisputeRecord, parse_dispute, signed_claims, verify_dispute
from tallystick.errors import InvalidInput

FOLDER = Path(__file__).parents[2] / "vectors" / "dispute"
CASES = sorted(FOLDER.iterdir())
EXAMPLE = json.loads((FOLDER / "worked-example" / "input.json").read_text())["record"].encode()


@pytest.mark.parametrize("folder", CASES, ids=[folder.name for folder in CASES])
def test_a_case_is_accepted_or_refused_for_its_reason(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    data, root = case["record"].encode(), bytes.fromhex(case["run_root"])
    if case.get("check") == 0:
        with pytest.raises(InvalidInput, match=case["reason"]):
            parse_dispute(data)
        return
    record = parse_dispute(data)
    assert record.encode() == data

    checks = verify_dispute(record, run_root=root, known=case["keys"])

    assert [check.claim for check in checks] == list(CHECKS)
    if "reason" not in case:
        assert [check.outcome for check in checks] == ["passed"] * len(CHECKS)
        assert operator_of(record) in (
            "aten::mm of layer (forward)",
            "tallystick::end of state (store)",
            "none",
        )
        return
    at = case["check"] - 1
    assert [check.outcome for check in checks[:at]] == ["passed"] * at, checks
    assert checks[at].outcome == case["outcome"], checks
    assert case["reason"] in checks[at].detail
    assert all(check.outcome == "not reached" for check in checks[at + 1 :])


def operator_of(record: DisputeRecord) -> str:
    opened = (move.leaf.leaf for move in record.moves if isinstance(move, Opened))
    return next((str(parse_operator(leaf)) for leaf in opened if leaf is not None), "none")


def test_the_page_draws_the_bytes_of_its_example() -> None:
    page = (Path(__file__).parents[2] / "spec" / "dispute.md").read_text()
    drawn = set(re.findall(r"^[0-9a-f]{64}$", page, re.MULTILINE))
    record = parse_dispute(EXAMPLE)
    base = base_of(
        agreed=record.steps.claims[0].commitment,
        specification=record.specification.leaf(),
        record=record.step_proof.record.leaf(),
        chunk=record.chunk,
    )
    found = {base} | {move.commitment for move in record.moves if isinstance(move, Claim)}
    for move in record.moves:
        if isinstance(move, Opened):
            assert move.leaf.leaf is not None
            found.add(hash_of(move.leaf.leaf))
            assert re.sub(r"\s", "", page).count(move.leaf.leaf.decode())
        if isinstance(move, Revealed):
            assert move.opened.leaf is not None
            found.add(hash_of(move.opened.leaf))

    first, signature, _ = signed_claims(record)[0]
    found |= {first.history, first.move}

    assert drawn == {each.hex() for each in found}
    assert re.findall(r"^[0-9a-f]{128}$", page, re.MULTILINE) == [signature.hex()]


@given(st.integers(0, len(EXAMPLE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_fails_and_never_escapes(at: int, byte: int) -> None:
    changed = EXAMPLE[:at] + bytes([byte]) + EXAMPLE[at + 1 :]
    try:
        record = parse_dispute(changed)
    except InvalidInput:
        return
    assert record.encode() == changed
    root = parse_dispute(EXAMPLE).run_root
    passed = all(check.outcome == "passed" for check in verify_dispute(record, run_root=root))
    # the words of the ruling and the auditor's own claim after the step are nobody's commitment
    assert (
        not passed
        or changed == EXAMPLE
        or record.reason != parse_dispute(EXAMPLE).reason
        or (record.steps.ends["auditor"] != parse_dispute(EXAMPLE).steps.ends["auditor"])
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_dispute(data)
