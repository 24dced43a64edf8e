"""Whether a TPM's evidence answers a question: key, certificate, quote and registers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import cast

from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from tallystick.commit.encoding import digest
from tallystick.errors import Mismatch
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.tpm import (
    BOUND,
    CERTIFY_TAG,
    CURVES,
    DECRYPT,
    HASHES,
    HIERARCHIES,
    QUOTE_TAG,
    RESTRICTED,
    SIGN,
    Certified,
    PcrReference,
    Quoted,
    TpmEvidence,
    TpmPublic,
)
from tallystick.signing.keys import PublicKey

WHAT = "TPM evidence"


@dataclass(frozen=True)
class TpmQuestion:
    """What a reader knows beforehand and asks: the attestation key, the chip, its device key, the head and a nonce."""

    attestation_key: PublicKey
    device_key: PublicKey
    ueid: bytes
    head: ChipHead
    nonce: bytes


@dataclass(frozen=True)
class TpmFacts:
    """What a TPM was found to state, all of it verified.

    Attributes:
        head: the log's head that was quoted.
        registers: what had booted, equal to the reader's reference values where those name a register.
        compared: registers that the reference names.
        clock, resets, restarts, safe: the TPM's own time.
        firmware: version of the TPM's own.
    """

    head: ChipHead
    registers: tuple[tuple[int, bytes], ...]
    compared: tuple[int, ...]
    clock: int
    resets: int
    restarts: int
    safe: bool
    firmware: int


def certify_data(ueid: bytes) -> bytes:
    """Return the qualifying data of the device key's certification: 32 bytes that name the chip."""
    return digest(CERTIFY_TAG, ueid)


def quote_data(ueid: bytes, device_key: PublicKey, head: ChipHead, nonce: bytes) -> bytes:
    """Return the qualifying data of a quote: 32 bytes over the chip, its key, its log's head and the reader's nonce."""
    place = head.seq.to_bytes(8, "little")
    return digest(QUOTE_TAG, ueid, bytes.fromhex(device_key.key_id), place, head.digest, nonce)


def verify_tpm(evidence: TpmEvidence, question: TpmQuestion, reference: PcrReference) -> TpmFacts:
    """Return what the TPM states about the chip (the steps are those of spec/chip-log.md 7).

    Not shown: that the program which used the device key is the one that was measured, unless the registers compared
    cover it; that the TPM is a maker's (that is what knowing its attestation key beforehand is for).

    Raises:
        Mismatch: another key, chip, head, nonce or boot, or a signature that does not fit.
    """
    _verify_keys(evidence, question)
    _verify_signatures(evidence, question)
    _verify_certified(evidence)
    _verify_answers(evidence, question)
    statement, _ = evidence.quote
    quoted = cast("Quoted", statement.content)
    _verify_quoted_digest(evidence, quoted)
    _compare_registers(evidence, quoted, reference)
    return TpmFacts(
        question.head, evidence.registers, tuple(register for register, _ in reference.registers),
        statement.clock, statement.resets, statement.restarts, statement.safe, statement.firmware,
    )  # fmt: skip


def _verify_keys(evidence: TpmEvidence, question: TpmQuestion) -> None:
    """Steps 1 and 2: both keys are the known ones, and they can do what such keys do and nothing else."""
    signer, device = evidence.attestation_key, evidence.device_key
    for name, stated, known in (  # 1
        ("attestation key", signer.key(), question.attestation_key),
        ("device key", device.key(), question.device_key),
    ):
        if stated != known:
            raise Mismatch(f"{WHAT}: {name} is {stated.key_id[:16]}.., known is {known.key_id[:16]}..")
    must_attest(signer, what=f"{WHAT}: attestation key")  # 2
    _must_have(device, BOUND | SIGN, DECRYPT | RESTRICTED, f"{WHAT}: device key")


def _verify_signatures(evidence: TpmEvidence, question: TpmQuestion) -> None:
    """Step 3: the attestation key signed the certification and the quote."""
    signer = evidence.attestation_key
    for name, (statement, signature) in (
        ("certification", evidence.certification),
        ("quote", evidence.quote),
    ):
        half = len(signature) // 2
        der = encode_dss_signature(
            int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")
        )
        question.attestation_key.verify(der, statement.encode(), what=f"{WHAT}: {name}")
        if statement.signer != signer.qualified_name("endorsement"):
            raise Mismatch(
                f"{WHAT}: {name}: signed by {statement.signer.hex()[:16]}.., not by that key in its hierarchy"
            )


def _verify_certified(evidence: TpmEvidence) -> None:
    """Step 4: the certification is about the device key, in a hierarchy of this TPM."""
    device = evidence.device_key
    certified = cast("Certified", evidence.certification[0].content)
    places = {device.qualified_name(hierarchy) for hierarchy in HIERARCHIES}
    if certified.name != device.name() or certified.qualified_name not in places:
        raise Mismatch(
            f"{WHAT}: certifies key {certified.name.hex()[:16]}.., not device key {device.name().hex()[:16]}.."
        )


def _verify_answers(evidence: TpmEvidence, question: TpmQuestion) -> None:
    """Step 5: both statements carry the data that was asked for: the chip, the log's head and the reader's nonce."""
    pairs = (
        ("certification", evidence.certification[0].data, certify_data(question.ueid)),
        ("quote", evidence.quote[0].data, quote_data(question.ueid, question.device_key, question.head, question.nonce)),
    )  # fmt: skip
    for name, stated, asked in pairs:
        if stated != asked:
            raise Mismatch(
                f"{WHAT}: {name} answers {stated.hex()[:16]}.., asked was {asked.hex()[:16]}.. "
                f"(chip {question.ueid.hex()}, record {question.head.seq}, your nonce)"
            )


def _verify_quoted_digest(evidence: TpmEvidence, quoted: Quoted) -> None:
    """Step 6: the registers shown hash to what was quoted."""
    hashed = hashlib.new(HASHES[CURVES[evidence.attestation_key.curve][2]])
    for _, value in evidence.registers:
        hashed.update(value)
    if hashed.digest() != quoted.digest:
        raise Mismatch(
            f"{WHAT}: the registers hash to {hashed.hexdigest()[:16]}.., quoted is {quoted.digest.hex()[:16]}.."
        )


def _compare_registers(evidence: TpmEvidence, quoted: Quoted, reference: PcrReference) -> None:
    """Step 7: the registers hold the reader's reference values."""
    held = dict(evidence.registers)
    if reference.bank != HASHES[quoted.bank]:
        raise Mismatch(f"{WHAT}: bank {HASHES[quoted.bank]} was quoted, the reference is of {reference.bank}")
    for register, value in reference.registers:
        found = held.get(register)
        if found != value:
            shown = "was not quoted" if found is None else f"is {found.hex()[:16]}.."
            raise Mismatch(f"{WHAT}: register {register} {shown}, the reference has {value.hex()[:16]}..")


def must_attest(key: TpmPublic, *, what: str) -> None:
    """Return if ``key`` was made in its TPM, cannot leave it, and signs nothing but what the TPM itself states.

    Raises:
        Mismatch: its attributes say otherwise.
    """
    _must_have(key, BOUND | SIGN | RESTRICTED, DECRYPT, what)


def _must_have(key: TpmPublic, needed: int, forbidden: int, what: str) -> None:
    if key.attributes & needed != needed or key.attributes & forbidden:
        raise Mismatch(
            f"{what}: attributes are {key.attributes:#x}, must include {needed:#x} and exclude {forbidden:#x}: "
            "it could leave the TPM, or sign for another"
        )
