"""How much a chip's log is worth, derived from the evidence that was checked; nobody declares it.

    L0  a simulated chip, or a log whose key nobody vouches for
    L1  a software agent on the owner's machine, its key known beforehand, its head attested for a fresh nonce
    L2  L1, the key in a TPM whose attestation key is known, and its quote over that head: what booted is what should have
    L3  firmware, its key endorsed by a chain to a maker's root that the reader trusts, debugging closed
    L4  L3, and the chip was inspected and the registry's streams agree

Each level needs everything below it but L0's. A software agent never reaches L3, whatever it presents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import At
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead, NumberedFinding
from tallystick.fleet.agent.chip_record import Genesis, LoggedRecord
from tallystick.fleet.attestation.tpm_verification import TpmFacts
from tallystick.signing.cose import EAT, encode_cbor, open_sign1, parse_cbor, sign1
from tallystick.signing.keys import PublicKey, Signer

MEANINGS = (
    "simulated, or nobody vouches for its key",
    "a software agent on the owner's machine",
    "a software agent under measured boot",
    "firmware with an endorsed key",
    "endorsed firmware, inspected, in a reconciled registry",
)
TOKEN_LIMIT = 4096
PROFILE = "1.3.6.1.4.1.42623.1.3"  # OCP's EAT profile
NONCE_BYTES = (8, 64)  # RFC 9711 section 4.1


@dataclass(frozen=True)
class Attestation:
    """What a chip stated of itself for a nonce: its head, boot count, uptime in seconds, and whether debugging is open."""

    ueid: bytes
    nonce: bytes
    head: ChipHead
    boots: int
    uptime: int
    debug: bool
    agent: str


@dataclass(frozen=True)
class CheckedEvidence:
    """What a reader has verified itself; every field is the result of a check, none a statement of the owner.

    Attributes:
        known_key: the device key was known before the log was handed over (registry, inspection, pinned file).
        attestation: of the head, for a nonce that the reader chose.
        quote: what a TPM stated about the device key and over a head, verified (``fleet.attestation.tpm``).
        endorsed: the device key's certificate chain ends in a maker's root that the reader trusts.
        inspected: the chip was inspected: serial, seals, log read on the spot.
        reconciled: the registry's streams agree about it.
    """

    known_key: bool = False
    attestation: Attestation | None = None
    quote: TpmFacts | None = None
    endorsed: bool = False
    inspected: bool = False
    reconciled: bool = False


@dataclass(frozen=True)
class Assurance(Document, what="assurance", implied=("meaning",)):
    """A level from 0 to 4, and what the next one lacks."""

    level: int
    lacks: Annotated[tuple[str, ...], At("next_level_lacks")]

    @property
    def meaning(self) -> str:
        """The level in words."""
        return MEANINGS[self.level]

    def __str__(self) -> str:
        return f"L{self.level}: {self.meaning}"


def attest_head(
    head: LoggedRecord,
    nonce: bytes,
    boot_seed: bytes,
    agent: str,
    signer: Signer,
    *,
    uptime: int | None = None,
) -> bytes:
    """Return an EAT-shaped statement of a log's head, signed for ``nonce``.

    ``uptime`` is the live agent's, in milliseconds; that of the last record where no agent runs.

    Raises:
        InvalidInput: the nonce has not 8 to 64 bytes.
    """
    least, most = NONCE_BYTES
    if not least <= len(nonce) <= most:
        raise InvalidInput(f"attestation: a nonce has {least} to {most} bytes, not {len(nonce)}")
    record = head.record
    claims = {
        10: nonce,
        256: record.ueid,
        261: (record.clocks.uptime if uptime is None else uptime) // 1000,
        263: 0 if record.firmware.debug else 2,
        265: PROFILE,
        267: record.clocks.boots,
        268: boot_seed,
        -70002: record.seq.to_bytes(8, "big") + head.digest,
        -70003: agent,
    }
    return sign1(encode_cbor(claims), EAT, signer)


def parse_attestation(data: bytes, key: PublicKey, nonce: bytes) -> Attestation:
    """Return what the chip stated for ``nonce``.

    Raises:
        InvalidInput: malformed, or claims missing.
        Mismatch: another key or nonce.
    """
    what = "attestation"
    claims = parse_cbor(
        open_sign1(data, EAT, key, what=what, limit=TOKEN_LIMIT).payload, what=what, limit=TOKEN_LIMIT
    )
    match claims:
        case {
            10: bytes(stated), 256: bytes(ueid), 261: int(uptime), 263: int(status), 265: str(),
            267: int(boots), 268: bytes(), -70002: bytes(place), -70003: str(agent),
        } if len(place) == 56 and all(type(number) is int for number in (uptime, status, boots)):  # fmt: skip
            pass
        case _:
            raise InvalidInput(f"{what}: a claim of spec/chip-log.md section 6 is missing or of another type")
    if stated != nonce:
        raise Mismatch(f"{what}: answers nonce {stated.hex()[:32]}, asked was {nonce.hex()[:32]}")
    head = ChipHead(int.from_bytes(place[:8], "big"), place[8:], "an attestation")
    return Attestation(ueid, stated, head, boots, uptime, status == 0, agent)


def derive_assurance(
    log: Sequence[LoggedRecord], findings: Sequence[NumberedFinding], evidence: CheckedEvidence
) -> Assurance:
    """Return the level that the evidence supports for ``log``, whose findings are ``findings``.

    A log with a finding that no honest chip has is worth no more than L0.
    """
    genesis = log[0].record.event if log else None
    agent = genesis.agent if isinstance(genesis, Genesis) else "unknown"
    attested = evidence.attestation
    fresh = attested is not None and bool(log) and (attested.head.seq, attested.head.digest) == (
        log[-1].record.seq, log[-1].digest
    )  # fmt: skip
    quote = evidence.quote
    quoted = fresh and quote is not None and (quote.head.seq, quote.head.digest) == (
        log[-1].record.seq, log[-1].digest
    )  # fmt: skip
    wanted: tuple[tuple[tuple[str, bool], ...], ...] = (
        (
            ("a log without violations", bool(log) and all(f.severity != "violation" for f in findings)),
            ("an agent that is not simulated", agent in ("software", "firmware")),
            ("a device key known beforehand", evidence.known_key),
            ("an attestation of the log's last record for a fresh nonce", fresh),
        ),
        (
            (
                "a TPM's quote over the attested head",
                quoted or (agent == "firmware" and evidence.endorsed),
            ),
        ),
        (
            ("firmware, not software on the owner's machine", agent == "firmware"),
            ("a chain of certificates to a maker's root", evidence.endorsed),
            ("closed debugging", attested is not None and not attested.debug),
        ),
        (("an inspection", evidence.inspected), ("a reconciled registry", evidence.reconciled)),
    )
    level = 0
    for needed in wanted:
        lacks = tuple(name for name, there in needed if not there)
        if lacks:
            return Assurance(level, lacks)
        level += 1
    return Assurance(level, ())
