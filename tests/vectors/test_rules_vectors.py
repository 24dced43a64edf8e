"""Rules, neutral orders and outputs: the vectors are accepted or refused for the reason they give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick import errors
from tallystick.fleet.compliance.rules import parse_rules
from tallystick.fleet.enclave.neutral import NeutralOrder
from tallystick.fleet.enclave.neutral_result import read_values
from tallystick.fleet.provenance.batch_opening import open_batch, parse_batch_opening
from tallystick.fleet.provenance.transcripts import Lineage, Precommit, RunReport, Totals

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rules", "neutral-order", "neutral-output", "batch-opening")


def cases(folder: str) -> list[Path]:
    return sorted((ROOT / "vectors" / folder).iterdir())


@pytest.mark.parametrize("folder", cases("rules"), ids=lambda folder: folder.name)
def test_a_file_of_rules_has_its_digest_or_is_refused(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()
    if "reason" in case:
        with pytest.raises(getattr(errors, case["error"]), match=case["reason"]):
            parse_rules(data)
        return
    found = parse_rules(data)
    assert found.digest == case["digest"]
    assert [[rule.id, rule.kind] for rule in found.rules] == case["rules"]


@pytest.mark.parametrize("folder", cases("neutral-order"), ids=lambda folder: folder.name)
def test_an_order_tells_so_many_bits_or_is_refused(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    data = case["order"].encode()
    if "reason" in case:
        with pytest.raises(getattr(errors, case["error"]), match=case["reason"]):
            NeutralOrder.parse(data)
        return
    order = NeutralOrder.parse(data)
    assert (order.encode(), order.digest(), order.bits) == (data, case["digest"], case["bits"])


@pytest.mark.parametrize("folder", cases("neutral-output"), ids=lambda folder: folder.name)
def test_an_output_has_its_values_or_none(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    order = NeutralOrder.parse(case["order"].encode())
    if "reason" in case:
        with pytest.raises(getattr(errors, case["error"]), match=case["reason"]):
            read_values(order, case["printed"].encode())
        return
    assert read_values(order, case["printed"].encode()) == case["values"]


@pytest.mark.parametrize("folder", cases("batch-opening"), ids=lambda folder: folder.name)
def test_an_opened_batch_has_its_records_or_is_refused(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text())
    data = bytes.fromhex(case["opening"])
    precommit = Precommit("0" * 64, case["data"], (), "0" * 64, Lineage("initialised"))
    report = RunReport(case["run"], case["steps"], precommit, case["data"], (), Totals(1, 1, 1))
    if "reason" in case:
        with pytest.raises(getattr(errors, case["error"]), match=case["reason"]):
            open_batch(parse_batch_opening(data), report)
        return
    opening = parse_batch_opening(data)
    found = open_batch(opening, report)
    assert opening.encode() == data
    assert (found.digest, found.form, list(found.records)) == (case["batch"], case["form"], case["records"])


def test_the_vectors_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "vectors_rules.py", tmp_path], check=True)
    for folder in FOLDERS:
        written, kept = (
            {p.relative_to(root): p.read_text() for p in (root / folder).rglob("*") if p.is_file()}
            for root in (tmp_path, ROOT / "vectors")
        )
        assert written == kept
