"""An inspection from the drawn sample to its verdict: work order, what was found, and what that comes to; pure.

Formats and rules: spec/inspection.md. The order names chips, what the registry says of them and a secret nonce; chips
are named to their owner only on the spot. The inspector needs no network: the package holds all that is asked for,
the sealed result all that was found. Whatever is missing, late or unclear counts as a failure, never as a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, digest, parse_hex
from tallystick.commit.field_rules import At, Embedded, Hash, Hex, Row, Size, Via, Whole
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.inspection.custody import MOST_LINKS, Link
from tallystick.fleet.registry.facts import Chip
from tallystick.signing.dsse import parse_envelope, sign_payload
from tallystick.signing.keys import PublicKey, Signer

ORDER_FORMAT, RESULT_FORMAT = "tallystick/work-order/1", "tallystick/inspection-result/1"
ORDER_TAG, RESULT_TAG, NONCE_TAG = (
    "tallystick/work-order/1",
    "tallystick/inspection-result/1",
    "tallystick/chip-nonce/1",
)
EXTRACTION_FORMAT = "tallystick/log-extraction/1"
ORDER_TYPE = "application/vnd.tallystick.work-order+json"
RESULT_TYPE = "application/vnd.tallystick.inspection-result+json"
EXTRACTION_TYPE = "application/vnd.tallystick.log-extraction+json"
LARGEST_DOCUMENT = 1 << 26
LARGEST_LOG = 1 << 26
NONCE_BYTES = 32
Seal = Literal["intact", "broken", "missing", "not fitted"]
Seen = Literal["seen", "refused", "absent", "unreached"]
SEEN, REFUSED, ABSENT, UNREACHED = "seen", "refused", "absent", "unreached"


@dataclass(frozen=True)
class OrderedChip(Document, what="work order: chip"):
    """One chip of an order, as the registry has it."""

    chip: Annotated[str, Hex(), Size(14, 66)]
    stratum: str
    serial: str
    key: str
    board: str
    owner: str


@dataclass(frozen=True)
class WorkOrder(Document, form=ORDER_FORMAT, what="work order", limit=LARGEST_DOCUMENT):
    """Which chips to inspect where, and what to check on each of them.

    ``nonce`` is fresh and secret until the inspection; each chip gets its own from it. ``seals`` names those every chip
    must have intact, ``photos`` how many pictures of each are asked for.

    Raises:
        InvalidInput: no chip, one twice, a nonce of another length, or an order due before it is issued.
    """

    registry: str
    entries: int
    draw: Hash
    period: int
    inspector: str
    custodian: str
    issued: Whole
    due: int
    nonce: Annotated[bytes, Hex(NONCE_BYTES)]
    seals: tuple[str, ...]
    photos: int
    targets: Annotated[tuple[Annotated[OrderedChip, Row()], ...], At("chips")]

    def __post_init__(self) -> None:
        super().__post_init__()
        chips = [target.chip for target in self.targets]
        if not chips or chips != sorted(set(chips)):
            raise InvalidInput("work order: must name chips, in ascending order, none twice")
        if self.issued >= self.due or not 0 <= self.photos <= 100:
            raise InvalidInput(
                f"work order: issued at {self.issued}, due at {self.due}, {self.photos} photos; it must be due later, "
                "photos 0 to 100"
            )

    def digest(self) -> bytes:
        """Return the 32 bytes that name the order."""
        return digest(ORDER_TAG, self.encode())

    def chip_nonce(self, chip: str) -> bytes:
        """Return the nonce that this chip must sign: nobody can have signed it before the order was opened."""
        return digest(NONCE_TAG, self.nonce, bytes.fromhex(chip))


def _optional_digest(value: object, what: str) -> bytes:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be a string")
    return parse_hex(value, n_bytes=HASH_BYTES, what=what) if value else b""


OptionalDigest = Annotated[bytes, Via(bytes.hex, _optional_digest)]


@dataclass(frozen=True)
class InspectionFinding(Document, what="finding", limit=LARGEST_DOCUMENT):
    """What was found of one chip; digests are SHA-256 of files in the package, empty where there is none."""

    chip: Annotated[str, Hex(), Size(0, 66)]
    outcome: Seen
    time: int
    serial: str = ""
    log: OptionalDigest = b""
    evidence: OptionalDigest = b""
    key: Annotated[bytes, Hex()] = b""
    seals: tuple[tuple[str, Seal], ...] = ()
    photos: tuple[Hash, ...] = ()
    note: str = ""

    def items(self) -> list[bytes]:
        """Return the digests of all files that the finding names."""
        return [item for item in (self.log, self.evidence, *self.photos) if item]


@dataclass(frozen=True)
class InspectionResult(Document, form=RESULT_FORMAT, what="inspection result", limit=LARGEST_DOCUMENT):
    """All findings of one order and the chain of custody of their files."""

    order: Hash
    inspector: str
    closed: int
    findings: tuple[InspectionFinding, ...]
    custody: Annotated[tuple[Annotated[Link, Embedded()], ...], Size(0, MOST_LINKS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        chips = [finding.chip for finding in self.findings]
        if chips != sorted(set(chips)):
            raise InvalidInput("inspection result: findings must be in ascending order of chips, none twice")

    def digest(self) -> bytes:
        """Return the 32 bytes that name the result, as the registry's event does."""
        return digest(RESULT_TAG, self.encode())


@dataclass(frozen=True)
class LogExtraction(Document, form=EXTRACTION_FORMAT, what="log extraction", limit=1 << 12):
    """What a chip signs as the plainest evidence: its name, the visit's nonce for it, and its log's SHA-256."""

    chip: Annotated[str, Hex()]
    log: Hash
    nonce: Hash


def make_order(
    chips: Sequence[Chip], *, registry: str, entries: int, draw: bytes, period: int, inspector: str, custodian: str,
    issued: int, due: int, nonce: bytes, seals: Sequence[str] = ("case",), photos: int = 1,
) -> WorkOrder:  # fmt: skip
    """Return the order for ``chips``; they are named in ascending order, so that it does not show the draw's.

    Raises:
        InvalidInput: as for ``WorkOrder``.
    """
    targets = tuple(
        OrderedChip(chip.chip, chip.model, chip.serial, chip.key, chip.board, chip.owner)
        for chip in sorted(chips, key=lambda chip: chip.chip)
    )
    return WorkOrder(
        registry, entries, draw, period, inspector, custodian, issued, due, nonce, tuple(seals), photos, targets
    )  # fmt: skip


def open_document(payload_type: str, data: bytes, keys: Mapping[str, PublicKey]) -> tuple[bytes, str]:
    """Return the document in an envelope and the one party of ``keys`` that signed it.

    Raises:
        InvalidInput: no envelope of a document of that type.
        Mismatch: none of them signed it, or not one alone.
    """
    envelope = parse_envelope(data, what="signed document", limit=LARGEST_DOCUMENT)
    encoded = envelope.payload_of(payload_type, what="signed document")
    parties = [party for party, key in keys.items() if envelope.signers([key])]
    if len(envelope.signatures) != 1 or len(parties) != 1:
        raise Mismatch(
            f"signed document: must be signed by one party whose key is known here, is by {' and '.join(parties) or 'none'}"
            f" ({len(envelope.signatures)} signatures, {len(keys)} keys)"
        )
    return encoded, parties[0]


def extract_log(log: bytes, *, chip: str, nonce: bytes, signer: Signer) -> bytes:
    """Return the plainest evidence that a chip can give: its name, the nonce and its log's digest in a DSSE envelope."""
    return sign_payload(EXTRACTION_TYPE, _extraction(log, chip, nonce).encode(), [signer]).encode()


def read_extraction(*, log: bytes, evidence: bytes, key: PublicKey, chip: str, nonce: bytes) -> list[str]:
    """Return what is wrong with a plain extraction; a LogReader. What the log says is for the matcher."""
    if not log:
        return ["the log is empty"]
    try:
        envelope = parse_envelope(evidence, what="evidence", limit=1 << 12)
        said = envelope.payload_of(EXTRACTION_TYPE, what="evidence")
    except InvalidInput as problem:
        return [str(problem)]
    if said != _extraction(log, chip, nonce).encode() or not envelope.signers([key]):
        return ["the chip did not sign this log with this nonce: old, another chip's, or changed"]
    return []


def _extraction(log: bytes, chip: str, nonce: bytes) -> LogExtraction:
    return LogExtraction(chip, hashlib.sha256(log).digest(), nonce)
