"""Every case of vectors/tpm-evidence and vectors/device-evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tallystick.errors import InvalidInput, Mismatch
from tallystick.monitor.certificates import parse_root
from tallystick.monitor.chiplog import Head
from tallystick.monitor.spdm import (
    DeviceFacts,
    DeviceQuestion,
    parse_device_file,
    parse_measurement_reference,
    verify_device,
)
from tallystick.monitor.tpm import TpmFacts, TpmQuestion, parse_pcr_reference, parse_tpm_evidence, verify_tpm
from tallystick.protocol.signing import parse_public_key

VECTORS = Path(__file__).parents[2] / "vectors"


def names(room: str, *, refused: bool) -> list[str]:
    return [p.name for p in sorted((VECTORS / room).iterdir()) if p.name.endswith("_fail") == refused]


def load(room: str, name: str) -> dict[str, Any]:
    return json.loads((VECTORS / room / name / "input.json").read_text())


def tpm(case: dict[str, Any]) -> TpmFacts:
    evidence = parse_tpm_evidence(case["evidence"].encode())
    assert evidence.encode() == case["evidence"].encode()
    question = TpmQuestion(
        parse_public_key(bytes.fromhex(case["attestation_key"])),
        parse_public_key(bytes.fromhex(case["device_key"])),
        bytes.fromhex(case["ueid"]),
        Head(case["head"][0], bytes.fromhex(case["head"][1])),
        bytes.fromhex(case["nonce"]),
    )
    return verify_tpm(evidence, question, parse_pcr_reference(case["reference"].encode()))


def device(case: dict[str, Any]) -> DeviceFacts:
    (evidence,) = parse_device_file(case["file"].encode())
    question = DeviceQuestion(parse_root(case["root"].encode()), bytes.fromhex(case["nonce"]), case["at"])
    return verify_device(evidence, question, parse_measurement_reference(case["reference"].encode()))


@pytest.mark.parametrize("name", names("tpm-evidence", refused=False))
def test_a_tpm_is_found_to_state_the_facts(name: str) -> None:
    case = load("tpm-evidence", name)
    found = tpm(case)
    assert {name: getattr(found, name) for name in case["facts"]} == {
        **case["facts"],
        "compared": tuple(case["facts"]["compared"]),
    }


@pytest.mark.parametrize("name", names("device-evidence", refused=False))
def test_a_device_is_found_to_state_the_facts(name: str) -> None:
    case, found = load("device-evidence", name), device(load("device-evidence", name))
    stated = {
        "name": found.name,
        "serial": found.serial,
        "ueid": found.ueid.hex(),
        "measurements": {str(m.index): m.value.hex() for m in found.measurements},
        "compared": list(found.compared),
        "versions": dict(found.versions),
    }
    assert stated == case["facts"]


@pytest.mark.parametrize("name", names("tpm-evidence", refused=True))
def test_a_tpms_evidence_is_refused_for_the_reason_stated(name: str) -> None:
    case = load("tpm-evidence", name)
    with pytest.raises((InvalidInput, Mismatch)) as caught:
        tpm(case)
    assert case["reason"] in str(caught.value)


@pytest.mark.parametrize("name", names("device-evidence", refused=True))
def test_a_devices_evidence_is_refused_for_the_reason_stated(name: str) -> None:
    case = load("device-evidence", name)
    with pytest.raises((InvalidInput, Mismatch)) as caught:
        device(case)
    assert case["reason"] in str(caught.value)
