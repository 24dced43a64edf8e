"""Whether a TPM's evidence answers a question: key, certificate, quote and registers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import cast

from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from tallystick.commit.encoding import digest
from tallystick.errors import Mismatch
from tallystick.fleet.agent.chip_log import Head
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
    head: Head
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

    head: Head
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


def quote_data(ueid: bytes, device_key: PublicKey, head: Head, nonce: bytes) -> bytes:
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
    _verify_signed(evidence, question.attestation_key)
    _verify_certified(evidence)
    _verify_answers(evidence, question)
    _verify_registers(evidence, reference)
    statement, _ = evidence.quote
    return TpmFacts(
        question.head, evidence.registers, tuple(register for register, _ in reference.registers),
        statement.clock, statement.resets, statement.restarts, statement.safe, statement.firmware,
    )  # fmt: skip


def _verify_keys(evidence: TpmEvidence, question: TpmQuestion) -> None:
    """Steps 1 and 2: both keys are the ones known, and their attributes keep them in their place."""
    for name, stated, known in (  # 1
        ("attestation key", evidence.attestation_key.key(), question.attestation_key),
        ("device key", evidence.device_key.key(), question.device_key),
    ):
        if stated != known:
            raise Mismatch(f"{WHAT}: {name} is {stated.key_id[:16]}.., known is {known.key_id[:16]}..")
    must_attest(evidence.attestation_key, what=f"{WHAT}: attestation key")  # 2
    _must_have(evidence.device_key, BOUND | SIGN, DECRYPT | RESTRICTED, f"{WHAT}: device key")


def _verify_signed(evidence: TpmEvidence, known: PublicKey) -> None:
    """Step 3: the attestation key signed both statements."""
    place = evidence.attestation_key.qualified_name("endorsement")
    for name, (statement, signature) in (
        ("certification", evidence.certification),
        ("quote", evidence.quote),
    ):
        half = len(signature) // 2
        der = encode_dss_signature(
            int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")
        )
        known.verify(der, statement.encode(), what=f"{WHAT}: {name}")
        if statement.signer != place:
            raise Mismatch(
                f"{WHAT}: {name}: signed by {statement.signer.hex()[:16]}.., not by that key in its hierarchy"
            )


def _verify_certified(evidence: TpmEvidence) -> None:
    """Step 4: what is certified is the device key."""
    device = evidence.device_key
    certified = cast("Certified", evidence.certification[0].content)
    places = {device.qualified_name(hierarchy) for hierarchy in HIERARCHIES}
    if certified.name != device.name() or certified.qualified_name not in places:
        raise Mismatch(
            f"{WHAT}: certifies key {certified.name.hex()[:16]}.., not device key {device.name().hex()[:16]}.."
        )


def _verify_answers(evidence: TpmEvidence, question: TpmQuestion) -> None:
    """Step 5: both statements answer this question."""
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


def _verify_registers(evidence: TpmEvidence, reference: PcrReference) -> None:
    """Steps 6 and 7: the registers are the ones quoted, and equal the reference where it names them."""
    quoted = cast("Quoted", evidence.quote[0].content)  # 6
    hashed = hashlib.new(HASHES[CURVES[evidence.attestation_key.curve][2]])
    for _, value in evidence.registers:
        hashed.update(value)
    if hashed.digest() != quoted.digest:
        raise Mismatch(
            f"{WHAT}: the registers hash to {hashed.hexdigest()[:16]}.., quoted is {quoted.digest.hex()[:16]}.."
        )
    held = dict(evidence.registers)  # 7
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
