"""Evidence of accelerators: what a pinned root vouches for, and that it is this chip's, now."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from tallystick.cli.main import main
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.certificates import (
    encode_chain,
    parse_chain,
    parse_root,
    verify_endorsement,
)
from tallystick.fleet.attestation.spdm import (
    DeviceQuestion,
    MeasurementReference,
    device_nonce,
    device_ueid,
    parse_device_file,
    parse_exchange,
    verify_device,
)
from tallystick.signing.keys import generate_key
from tallystick.testing.devices import FIRMWARE, NOW, FakeMaker, encode_device_file, issue, key_of

MAKER, NONCE = FakeMaker("maker"), b"\7" * 32
DEVICE = MAKER.device("0001")


def test_a_device_answers_for_itself_under_the_root_that_the_reader_pins() -> None:
    evidence = DEVICE.answer(NONCE)
    found = verify_device(evidence, DeviceQuestion(MAKER.root, NONCE, NOW))
    assert (found.name, found.serial) == ("maker device 0001", "0001")
    assert found.ueid == device_ueid(DEVICE.chain[1].key) != device_ueid(MAKER.device("0002").chain[1].key)
    assert parse_device_file(encode_device_file((evidence,))) == (evidence,)
    assert parse_exchange(evidence.exchange.encode()) == evidence.exchange
    for question in (
        DeviceQuestion(FakeMaker("other").root, NONCE, NOW),
        DeviceQuestion(MAKER.root, bytes(32), NOW),
        DeviceQuestion(MAKER.root, NONCE, 0),
    ):
        with pytest.raises(Mismatch):
            verify_device(evidence, question)


def test_the_identity_is_the_devices_and_outlives_its_firmware() -> None:
    """The leaf's key is that of the firmware; an update changes it, and the chip keeps its UEID."""
    updated = replace(DEVICE, firmware=bytes(range(48)))
    assert updated.chain[0].der != DEVICE.chain[0].der
    one, two = (
        verify_device(device.answer(NONCE), DeviceQuestion(MAKER.root, NONCE, NOW))
        for device in (DEVICE, updated)
    )
    assert one.ueid == two.ueid


@pytest.mark.parametrize("at", range(0, 37 + 8 + 2 * 55 + 32, 7))
def test_no_signed_byte_can_be_changed(at: int) -> None:
    evidence = DEVICE.answer(NONCE)
    data = bytearray(evidence.exchange.encode())
    data[at] ^= 1
    with pytest.raises((InvalidInput, Mismatch)):
        exchange = parse_exchange(bytes(data))
        verify_device(replace(evidence, exchange=exchange), DeviceQuestion(MAKER.root, NONCE, NOW))


def test_measurements_are_compared_with_what_the_reader_accepts() -> None:
    evidence, question = DEVICE.answer(NONCE), DeviceQuestion(MAKER.root, NONCE, NOW)
    good = MeasurementReference(((2, (bytes(48), FIRMWARE)),))
    assert verify_device(evidence, question, good).compared == (2,)
    with pytest.raises(Mismatch, match="measurement 2 is"):
        verify_device(evidence, question, MeasurementReference(((2, (bytes(48),)),)))


def test_the_nonce_to_ask_with_names_chip_key_head_and_reader() -> None:
    key, head = generate_key("ecdsa-p384").public_key, ChipHead(3, bytes(48))
    asked = device_nonce(b"\1" * 17, key, head, NONCE)
    others = {
        device_nonce(b"\2" * 17, key, head, NONCE),
        device_nonce(b"\1" * 17, generate_key("ecdsa-p384").public_key, head, NONCE),
        device_nonce(b"\1" * 17, key, ChipHead(4, bytes(48)), NONCE),
        device_nonce(b"\1" * 17, key, ChipHead(3, b"\1" * 48), NONCE),
        device_nonce(b"\1" * 17, key, head, bytes(32)),
    }
    assert len(others) == 5 and asked not in others


def test_a_maker_vouches_for_the_key_of_a_log() -> None:
    chain = parse_chain(
        b"".join(
            certificate.public_bytes(Encoding.PEM)
            for certificate in (issue("log key", "line", is_ca=False), issue("line", "maker root"))
        )
    )
    verify_endorsement(chain, MAKER.root, chain[0].key, at=NOW)
    with pytest.raises(Mismatch, match="the log's is"):
        verify_endorsement(chain, MAKER.root, generate_key("ecdsa-p384").public_key, at=NOW)
    forged = parse_chain(
        issue("log key", "line", is_ca=False, signer="me").public_bytes(Encoding.PEM) + chain[1].pem()
    )
    assert forged[0].key == chain[0].key
    with pytest.raises(Mismatch, match="is not signed by"):
        verify_endorsement(forged, MAKER.root, chain[0].key, at=NOW)
    for change in ({"is_ca": False}, {"signs_certificates": False}):
        with pytest.raises(Mismatch, match="must not sign certificates, and signs one"):
            verify_endorsement((chain[0], replace(chain[1], **change)), MAKER.root, chain[0].key, at=NOW)
    assert encode_chain(chain) == chain[0].pem() + chain[1].pem()
    with pytest.raises(InvalidInput, match="one is pinned"):
        parse_root(encode_chain(chain))
    with pytest.raises(InvalidInput, match="65537 bytes exceed the limit of 65536"):
        parse_chain(chain[0].pem().ljust((1 << 16) + 1, b"\n"))


@pytest.fixture
def chip(tmp_path: Path) -> Path:
    """A chip that carries the identity of ``DEVICE``."""
    (tmp_path / "root.pem").write_bytes(MAKER.root.pem())
    (tmp_path / "first.json").write_bytes(encode_device_file((DEVICE.answer(os.urandom(32)),)))
    assert main(["key", "generate", str(tmp_path / "owner")]) == 0
    place, root = str(tmp_path / "chip"), str(tmp_path / "root.pem")
    made = [
        "--owner",
        str(tmp_path / "owner.pub"),
        "--device",
        str(tmp_path / "first.json"),
        "--device-root",
        root,
    ]
    assert main(["chip", "init", place, *made, "--algorithm", "ecdsa-p256"]) == 0
    assert main(["chip", "agent", place, "--for", "0"]) == 0
    return tmp_path


def test_a_log_goes_with_its_own_accelerator(chip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nonce, token = "ab" * 16, str(chip / "token")
    assert main(["chip", "attest", str(chip / "chip"), "--nonce", nonce, "--out", token]) == 0
    asked = bytes.fromhex(capsys.readouterr().err.split("with nonce ")[1].split()[0])
    shown = ["chip", "verify", str(chip / "chip/log.journal"), "--key", str(chip / "chip/chip.key.pub")]
    shown += [
        "--attestation",
        token,
        "--nonce",
        nonce,
        "--device-root",
        str(chip / "root.pem"),
        "--at",
        str(NOW),
    ]
    reasons: dict[str, str] = {}
    for name, evidence in {
        "right": DEVICE.answer(asked),
        "stale": DEVICE.answer(bytes(32)),
        "another": MAKER.device("0002").answer(asked),
        "other maker": FakeMaker("other").device("0001").answer(asked),
    }.items():
        (chip / "now.json").write_bytes(encode_device_file((evidence,)))
        code = main([*shown, "--device", str(chip / "now.json"), "--json"])
        said = capsys.readouterr()
        assert code == (0 if name == "right" else 1)
        reasons[name] = said.err
        if name == "right":
            document = json.loads(said.out)
            assert document["evidence"]["device"]["serial"] == "0001"
            assert document["assurance"]["level"] == 1  # genuine hardware is no firmware that logs
    assert "answers nonce" in reasons["stale"]
    assert "is of device" in reasons["another"]
    assert "is not signed by" in reasons["other maker"]


def test_a_device_is_shown_alone(chip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chip / "now.json").write_bytes(encode_device_file((DEVICE.answer(NONCE),)))
    shown = [
        "chip",
        "device",
        str(chip / "now.json"),
        "--device-root",
        str(chip / "root.pem"),
        "--at",
        str(NOW),
    ]
    capsys.readouterr()
    assert main([*shown, "--nonce", NONCE.hex(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fresh"] is True
    assert main(shown) == 3
    assert "not shown: no nonce was given" in capsys.readouterr().out
    assert main([*shown, "--nonce", "00" * 32]) == 1
    assert main(["chip", "device", str(chip / "owner"), "--device-root", str(chip / "root.pem")]) == 2
    two = encode_device_file((DEVICE.answer(NONCE), DEVICE.answer(NONCE)))
    (chip / "now.json").write_bytes(two)
    assert main(shown) == 2
    assert "holds 2 devices" in capsys.readouterr().err


def test_keys_of_the_test_kit_follow_from_names() -> None:
    assert key_of("a").private_numbers() == key_of("a").private_numbers() != key_of("b").private_numbers()
