"""A device key in a software TPM: what it signs, what it states, and what no statement can be bent to say."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.cli.main import main
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.agent.chip_log import ChipHead, read_log, verify_log
from tallystick.fleet.attestation.assurance import CheckedEvidence, derive_assurance, parse_attestation
from tallystick.fleet.attestation.tpm import BOUND, PcrReference, TpmEvidence
from tallystick.fleet.attestation.tpm_verification import TpmQuestion, verify_tpm
from tallystick.integrations.tpm import (
    TpmSigner,
    attestation_key,
    gather_evidence,
    make_tpm_key,
    parse_tpm_key,
)
from tallystick.signing.keys import P256, P384, generate_key
from tallystick.store.chips import ChipDirectory
from tallystick.store.keys import load_public_key
from tallystick.testing.software_tpm import software_tpm

UEID, HEAD, NONCE = b"\1" * 17, ChipHead(3, b"\2" * 48), b"\3" * 32


@pytest.mark.parametrize("algorithm", [P256, P384])
def test_a_key_in_the_tpm_signs_and_is_vouched_for(tcti: str, algorithm: str) -> None:
    key = make_tpm_key(tcti, algorithm)
    assert parse_tpm_key(key.encode()) == key
    signer = TpmSigner(key)
    for message in (b"", b"record", os.urandom(5000)):
        signer.public_key.verify(signer.sign(message), message, what="message")
    evidence = gather_evidence(key, ueid=UEID, head=HEAD, nonce=NONCE)
    assert TpmEvidence.parse(evidence.encode()) == evidence
    assert evidence.device_key.attributes & BOUND == BOUND
    question = TpmQuestion(attestation_key(tcti, algorithm).key(), signer.public_key, UEID, HEAD, NONCE)
    found = verify_tpm(evidence, question, PcrReference("sha256", evidence.registers))
    assert (found.head, found.compared, found.resets) == (HEAD, tuple(range(8)), 1)
    for other in (
        replace(question, nonce=b"\4" * 32),
        replace(question, head=ChipHead(4, HEAD.digest)),
        replace(question, ueid=b"\5" * 17),
        replace(question, attestation_key=generate_key(algorithm).public_key),
        replace(question, device_key=make_tpm_key(tcti, algorithm).public.key()),
    ):
        with pytest.raises(Mismatch):
            verify_tpm(evidence, other, PcrReference("sha256", evidence.registers))


def test_another_boot_shows(tcti: str) -> None:
    """Control: the same TPM and key, one register extended, as other software would have been measured."""
    from tpm2_pytss import ESAPI, ESYS_TR, TPM2_ALG, TPML_DIGEST_VALUES, TPMT_HA, TPMU_HA

    key = make_tpm_key(tcti)
    question = TpmQuestion(attestation_key(tcti).key(), key.public.key(), UEID, HEAD, NONCE)
    before = gather_evidence(key, ueid=UEID, head=HEAD, nonce=NONCE)
    reference = PcrReference("sha256", before.registers)
    verify_tpm(before, question, reference)
    with ESAPI(tcti) as esys:
        measured = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=TPMU_HA(sha256=b"\7" * 32))
        esys.pcr_extend(ESYS_TR.PCR4, TPML_DIGEST_VALUES([measured]))
    after = gather_evidence(key, ueid=UEID, head=HEAD, nonce=NONCE)
    with pytest.raises(Mismatch, match="register 4 is"):
        verify_tpm(after, question, reference)
    lied = replace(after, registers=before.registers)  # the old values, told with the new quote
    with pytest.raises(Mismatch, match="registers hash to"):
        verify_tpm(lied, question, reference)


def test_a_key_is_of_one_tpm_and_comes_back_after_a_restart(tcti: str, tmp_path: Path) -> None:
    del tcti  # for its check that there is a TPM
    with software_tpm(tmp_path / "a") as first:
        key = make_tpm_key(first)
        vouching = attestation_key(first)
    with pytest.raises(StoreError, match="cannot be reached"):
        TpmSigner(key).sign(b"x")
    with software_tpm(tmp_path / "a") as again:
        assert attestation_key(again) == vouching
        TpmSigner(replace(key, tcti=again)).sign(b"x")
        evidence = gather_evidence(replace(key, tcti=again), ueid=UEID, head=HEAD, nonce=NONCE)
        assert evidence.quote[0].resets == 2  # a reset shows
    with (
        software_tpm(tmp_path / "b") as other,
        pytest.raises(StoreError, match="another TPM, or it was cleared"),
    ):
        TpmSigner(replace(key, tcti=other)).sign(b"x")


def test_a_chip_with_its_key_in_a_tpm_is_worth_level_two_and_no_more(
    tcti: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "chip"
    nonce = "5a" * 32
    files = {name: str(tmp_path / name) for name in ("token", "tpm.json", "pcrs.json")}

    def run(*arguments: str) -> None:
        assert main(list(arguments)) == 0

    run("key", "generate", str(tmp_path / "owner"))
    run("chip", "init", str(place), "--owner", str(tmp_path / "owner.pub"), "--tpm", tcti)
    assert not (place / "chip.key").exists()
    run("chip", "agent", str(place), "--for", "0")
    run("chip", "attest", str(place), "--nonce", nonce, "--out", files["token"], "--tpm", files["tpm.json"])
    evidence = TpmEvidence.parse(Path(files["tpm.json"]).read_bytes())
    Path(files["pcrs.json"]).write_bytes(PcrReference("sha256", evidence.registers).encode())
    shown = ["chip", "verify", str(place / "log.journal"), "--key", str(place / "chip.key.pub")]
    shown += ["--attestation", files["token"], "--nonce", nonce, "--json"]
    quoted = ["--tpm", files["tpm.json"], "--tpm-key", str(place / "tpm.pub"), "--pcrs", files["pcrs.json"]]
    capsys.readouterr()
    levels: list[int] = []
    for more in ([], quoted):
        run(*shown, *more)
        levels.append(json.loads(capsys.readouterr().out)["assurance"]["level"])
    assert levels == [1, 2]
    # A stale quote is of another head: the agent starts once more, and only the attestation is renewed.
    run("chip", "agent", str(place), "--for", "0")
    run("chip", "attest", str(place), "--nonce", nonce, "--out", files["token"])
    assert main([*shown, *quoted]) == 1
    assert "quote answers" in capsys.readouterr().err
    assert main([*shown, *quoted[:2]]) == 2
    assert "go together" in capsys.readouterr().err


def test_the_level_needs_the_quote_of_the_last_record(tcti: str, tmp_path: Path) -> None:
    assert main(["key", "generate", str(tmp_path / "owner")]) == 0
    place = tmp_path / "chip"
    made = ["chip", "init", str(place), "--owner", str(tmp_path / "owner.pub"), "--tpm", tcti]
    assert main(made) == 0
    assert main(["chip", "agent", str(place), "--for", "0"]) == 0
    chip = ChipDirectory(place)
    public = load_public_key(place / "chip.key.pub")
    log, findings = read_log(chip.frames(), public)
    assert findings == verify_log(log) == []
    token = tmp_path / "token"
    assert main(["chip", "attest", str(place), "--nonce", "ab" * 8, "--out", str(token)]) == 0
    attested = parse_attestation(token.read_bytes(), public, b"\xab" * 8)
    key = parse_tpm_key(chip.tpm_path.read_bytes())
    quotes = {}
    for record in log:
        head = ChipHead(record.record.seq, record.digest)
        evidence = gather_evidence(key, ueid=record.record.ueid, head=head, nonce=b"\xab" * 8)
        question = TpmQuestion(attestation_key(tcti).key(), public, record.record.ueid, head, b"\xab" * 8)
        quotes[record.record.seq] = verify_tpm(evidence, question, PcrReference("sha256", evidence.registers))
    levels = [
        derive_assurance(log, [], CheckedEvidence(True, attested, quotes[seq])).level
        for seq in sorted(quotes)
    ]
    assert levels == [1, 1, 2]  # the beginning, a boot, and the self-test with which the agent ended


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--tpm", "swtpm:path=/nowhere/tpm"], "cannot be reached"),
        (["--tpm", "swtpm:path=/nowhere/tpm", "--algorithm", "ed25519"], "a key in a TPM is ecdsa-p256"),
    ],
)
def test_a_tpm_that_is_not_there_is_named_and_leaves_no_chip(
    tcti: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], reason: str
) -> None:
    del tcti
    assert main(["key", "generate", str(tmp_path / "owner")]) == 0
    owner = str(tmp_path / "owner.pub")
    assert main(["chip", "init", str(tmp_path / "chip"), "--owner", owner, *more]) == 2
    assert reason in capsys.readouterr().err
    assert not any((tmp_path / "chip").glob("*"))


def test_an_algorithm_without_a_curve_is_refused(tcti: str) -> None:
    with pytest.raises(InvalidInput, match="algorithm must be"):
        make_tpm_key(tcti, "ed25519")
