"""Every case of vectors/tpm-evidence, vectors/tpm-enrolment, vectors/revocation and vectors/device-evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.certificates import parse_chain, parse_root
from tallystick.fleet.attestation.credential import make_credential
from tallystick.fleet.attestation.enrolment import Enrolment, EnrolmentRequest, KeptChallenge, enrol
from tallystick.fleet.attestation.revocation import Revocation, check_revocation, parse_revocation_list
from tallystick.fleet.attestation.spdm import (
    DeviceFacts,
    DeviceQuestion,
    MeasurementReference,
    parse_device_file,
    verify_device,
)
from tallystick.fleet.attestation.tpm import PcrReference, TpmEvidence
from tallystick.fleet.attestation.tpm_verification import TpmFacts, TpmQuestion, verify_tpm
from tallystick.signing.keys import parse_public_key

VECTORS = Path(__file__).parents[2] / "vectors"


def names(room: str, *, refused: bool) -> list[str]:
    return [p.name for p in sorted((VECTORS / room).iterdir()) if p.name.endswith("_fail") == refused]


def load(room: str, name: str) -> dict[str, Any]:
    return json.loads((VECTORS / room / name / "input.json").read_text())


def tpm(case: dict[str, Any]) -> TpmFacts:
    evidence = TpmEvidence.parse(case["evidence"].encode())
    assert evidence.encode() == case["evidence"].encode()
    question = TpmQuestion(
        parse_public_key(bytes.fromhex(case["attestation_key"])),
        parse_public_key(bytes.fromhex(case["device_key"])),
        bytes.fromhex(case["ueid"]),
        ChipHead(case["head"][0], bytes.fromhex(case["head"][1])),
        bytes.fromhex(case["nonce"]),
    )
    return verify_tpm(evidence, question, PcrReference.parse(case["reference"].encode()))


def device(case: dict[str, Any]) -> DeviceFacts:
    (evidence,) = parse_device_file(case["file"].encode())
    question = DeviceQuestion(parse_root(case["root"].encode()), bytes.fromhex(case["nonce"]), case["at"])
    return verify_device(evidence, question, MeasurementReference.parse(case["reference"].encode()))


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


def enrolled(case: dict[str, Any]) -> Enrolment:
    request = EnrolmentRequest.parse(case["request"].encode())
    assert request.encode() == case["request"].encode()
    kept = KeptChallenge(request.digest(), bytes.fromhex(case["secret"]))
    roots = [parse_root(case["root"].encode())]
    answer = bytes.fromhex(case["answer"])
    return enrol(request, answer, kept, roots, at=case["at"], revocation="not checked", enroller="11" * 32)


@pytest.mark.parametrize("name", names("tpm-enrolment", refused=False))
def test_an_attestation_key_is_enrolled_and_has_this_credential(name: str) -> None:
    case = load("tpm-enrolment", name)
    facts, found = case["facts"], enrolled(case)
    tpm_names = [found.tpm.manufacturer, found.tpm.model, found.tpm.version]
    assert (found.certificate, tpm_names) == (facts["certificate"], facts["tpm"])
    assert found.attestation_key.name().hex() == facts["name"]
    endorsed = EnrolmentRequest.parse(case["request"].encode()).certificates[0].key
    made = make_credential(
        endorsed, bytes.fromhex(facts["name"]), bytes.fromhex(case["secret"]),
        ephemeral=ec.derive_private_key(int(case["ephemeral"], 16), ec.SECP256R1()),
    )  # fmt: skip
    assert (made.blob.hex(), made.seed.hex()) == (facts["credential"], facts["seed"])


@pytest.mark.parametrize("name", names("tpm-enrolment", refused=True))
def test_an_enrolment_is_refused_for_the_reason_stated(name: str) -> None:
    case = load("tpm-enrolment", name)
    with pytest.raises((InvalidInput, Mismatch)) as caught:
        enrolled(case)
    assert case["reason"] in str(caught.value)


def known(case: dict[str, Any]) -> Revocation:
    chain, root = parse_chain(case["chain"].encode()), parse_root(case["root"].encode())
    lists = [parse_revocation_list(bytes.fromhex(each)) for each in case["lists"]]
    return check_revocation(chain, root, lists, at=case["at"], required=case["required"])


@pytest.mark.parametrize("name", names("revocation", refused=False))
def test_what_is_known_of_a_chains_revocation(name: str) -> None:
    case = load("revocation", name)
    found = known(case)
    assert {"status": found.status, "not_checked": list(found.unknown)} == case["facts"]


@pytest.mark.parametrize("name", names("revocation", refused=True))
def test_a_revoked_chain_or_a_list_that_does_not_count_is_refused(name: str) -> None:
    case = load("revocation", name)
    with pytest.raises((InvalidInput, Mismatch)) as caught:
        known(case)
    assert case["reason"] in str(caught.value)
