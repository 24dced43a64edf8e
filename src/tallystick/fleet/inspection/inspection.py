"""An inspection from the drawn sample to its verdict: work order, what was found, and what that comes to; pure.

Formats and rules: spec/inspection.md. The order names chips, what the registry says of them and a secret nonce; chips
are named to their owner only on the spot. The inspector needs no network: the package holds all that is asked for,
the sealed result all that was found. Whatever is missing, late or unclear counts as a failure, never as a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    canonical_json,
    digest,
    frame,
    parse_canonical_json,
    parse_document,
    parse_hex,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.inspection.custody import Link, parse_chain
from tallystick.fleet.registry.facts import Chip
from tallystick.signing.keys import PublicKey, Signer

ORDER_FORMAT, RESULT_FORMAT = "tallystick/work-order/1", "tallystick/inspection-result/1"
ORDER_TAG, RESULT_TAG, NONCE_TAG = (
    "tallystick/work-order/1",
    "tallystick/inspection-result/1",
    "tallystick/chip-nonce/1",
)
EXTRACTION_TAG = "tallystick/log-extraction/1"
LARGEST_DOCUMENT = 1 << 26
LARGEST_LOG = 1 << 26
NONCE_BYTES = 32
SEALS = ("intact", "broken", "missing", "not fitted")
SEEN, REFUSED, ABSENT, UNREACHED = "seen", "refused", "absent", "unreached"


@dataclass(frozen=True)
class Target:
    """One chip of an order, as the registry has it."""

    chip: str
    stratum: str
    serial: str
    key: str
    board: str
    owner: str


@dataclass(frozen=True)
class WorkOrder:
    """Which chips to inspect where, and what to check on each of them.

    ``nonce`` is fresh and secret until the visit; each chip gets its own from it. ``seals`` names those every chip
    must have intact, ``photos`` how many pictures of each are asked for.
    """

    registry: str
    entries: int
    draw: bytes
    period: int
    inspector: str
    custodian: str
    issued: int
    due: int
    nonce: bytes
    seals: tuple[str, ...]
    photos: int
    targets: tuple[Target, ...]

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(
            {
                "format": ORDER_FORMAT,
                "registry": self.registry,
                "entries": self.entries,
                "draw": self.draw.hex(),
                "period": self.period,
                "inspector": self.inspector,
                "custodian": self.custodian,
                "issued": self.issued,
                "due": self.due,
                "nonce": self.nonce.hex(),
                "seals": list(self.seals),
                "photos": self.photos,
                "chips": [[t.chip, t.stratum, t.serial, t.key, t.board, t.owner] for t in self.targets],
            }
        )

    def digest(self) -> bytes:
        """Return the 32 bytes that name the order."""
        return digest(ORDER_TAG, self.encode())

    def chip_nonce(self, chip: str) -> bytes:
        """Return the nonce that this chip must sign: nobody can have signed it before the order was opened."""
        return digest(NONCE_TAG, self.nonce, bytes.fromhex(chip))


@dataclass(frozen=True)
class Finding:
    """What was found of one chip; digests are SHA-256 of files in the package, empty where there is none."""

    chip: str
    outcome: str
    time: int
    serial: str = ""
    log: bytes = b""
    evidence: bytes = b""
    key: bytes = b""
    seals: tuple[tuple[str, str], ...] = ()
    photos: tuple[bytes, ...] = ()
    note: str = ""

    def value(self) -> dict[str, object]:
        """Return the finding as it stands in documents."""
        return {
            "chip": self.chip,
            "outcome": self.outcome,
            "time": self.time,
            "serial": self.serial,
            "log": self.log.hex(),
            "evidence": self.evidence.hex(),
            "key": self.key.hex(),
            "seals": [list(seal) for seal in self.seals],
            "photos": [photo.hex() for photo in self.photos],
            "note": self.note,
        }

    def items(self) -> list[bytes]:
        """Return the digests of all files that the finding names."""
        return [item for item in (self.log, self.evidence, *self.photos) if item]


@dataclass(frozen=True)
class Result:
    """All findings of one order and the chain of custody of their files."""

    order: bytes
    inspector: str
    closed: int
    findings: tuple[Finding, ...]
    custody: tuple[Link, ...]

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(
            {
                "format": RESULT_FORMAT,
                "order": self.order.hex(),
                "inspector": self.inspector,
                "closed": self.closed,
                "findings": [finding.value() for finding in self.findings],
                "custody": [link.encode().decode("ascii") for link in self.custody],
            }
        )

    def digest(self) -> bytes:
        """Return the 32 bytes that name the result, as the registry's deed does."""
        return digest(RESULT_TAG, self.encode())


# ------------------------------------------------------------------------------------------- documents


def make_order(
    chips: Sequence[Chip], *, registry: str, entries: int, draw: bytes, period: int, inspector: str, custodian: str,
    issued: int, due: int, nonce: bytes, seals: Sequence[str] = ("case",), photos: int = 1,
) -> WorkOrder:  # fmt: skip
    """Return the order for ``chips``; they are named in ascending order, so that it does not show the draw's.

    Raises:
        InvalidInput: no chip, one twice, a nonce of another length, or an order due before it is issued.
    """
    targets = tuple(
        Target(chip.chip, chip.model, chip.serial, chip.key, chip.board, chip.owner)
        for chip in sorted(chips, key=lambda chip: chip.chip)
    )
    order = WorkOrder(
        registry,
        entries,
        draw,
        period,
        inspector,
        custodian,
        issued,
        due,
        nonce,
        tuple(seals),
        photos,
        targets,
    )
    return parse_order(order.encode())


def parse_order(data: bytes) -> WorkOrder:
    """Return the work order whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes, or an order that contradicts itself.
    """
    names = (
        "format", "registry", "entries", "draw", "period", "inspector", "custodian", "issued", "due", "nonce",
        "seals", "photos", "chips",
    )  # fmt: skip
    fields = parse_document(data, ORDER_FORMAT, what="work order", limit=LARGEST_DOCUMENT, names=names)
    order = WorkOrder(
        fields.text("registry"),
        fields.integer("entries"),
        parse_hex(fields.text("draw"), n_bytes=HASH_BYTES, what="work order: draw"),
        fields.integer("period"),
        fields.text("inspector"),
        fields.text("custodian"),
        fields.integer("issued"),
        fields.integer("due"),
        parse_hex(fields.text("nonce"), n_bytes=NONCE_BYTES, what="work order: nonce"),
        fields.texts("seals"),
        fields.integer("photos"),
        tuple(_target(item) for item in fields.items("chips")),
    )
    chips = [target.chip for target in order.targets]
    if not chips or chips != sorted(set(chips)):
        raise InvalidInput("work order: must name chips, in ascending order, none twice")
    if not 0 <= order.issued < order.due or not 0 <= order.photos <= 100:
        raise InvalidInput(
            f"work order: issued at {order.issued}, due at {order.due}, {order.photos} photos; it must be due later, "
            "photos 0 to 100"
        )
    return order


def parse_result(data: bytes) -> Result:
    """Return the result whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes.
    """
    names = ("format", "order", "inspector", "closed", "findings", "custody")
    fields = parse_document(
        data, RESULT_FORMAT, what="inspection result", limit=LARGEST_DOCUMENT, names=names
    )
    findings = tuple(parse_finding(item) for item in fields.items("findings"))
    chips = [finding.chip for finding in findings]
    if chips != sorted(set(chips)):
        raise InvalidInput("inspection result: findings must be in ascending order of chips, none twice")
    links = fields.texts("custody")
    return Result(
        parse_hex(fields.text("order"), n_bytes=HASH_BYTES, what="inspection result: order"),
        fields.text("inspector"),
        fields.integer("closed"),
        findings,
        parse_chain("".join(f"{link}\n" for link in links).encode()),
    )


def parse_finding(value: object) -> Finding:
    """Return the finding that ``Finding.value`` writes.

    Raises:
        InvalidInput: another form.
    """
    names = ("chip", "outcome", "time", "serial", "log", "evidence", "key", "seals", "photos", "note")
    fields = Fields(value, what="finding", names=names)
    seals: list[tuple[str, str]] = []
    for item in fields.items("seals"):
        match item:
            case [str(name), str(state)] if state in SEALS:
                seals.append((name, state))
            case _:
                raise InvalidInput(f"finding: a seal must be [name, one of {', '.join(SEALS)}]")
    if fields.text("outcome") not in (SEEN, REFUSED, ABSENT, UNREACHED):
        raise InvalidInput(f"finding: outcome must be one of {SEEN}, {REFUSED}, {ABSENT}, {UNREACHED}")
    chip = fields.text("chip")
    if len(chip) > 66:
        raise InvalidInput("finding: a chip has at most 33 bytes")
    parse_hex(chip, n_bytes=len(chip) // 2, what="finding: chip")
    key = fields.text("key")
    return Finding(
        chip,
        fields.text("outcome"),
        fields.integer("time"),
        fields.text("serial"),
        _optional_digest(fields.text("log")),
        _optional_digest(fields.text("evidence")),
        parse_hex(key, n_bytes=len(key) // 2, what="finding: key"),
        tuple(seals),
        fields.hashes("photos"),
        fields.text("note"),
    )


def sign_document(tag: str, encoded: bytes, party: str, signer: Signer) -> bytes:
    """Return a signed document: canonical JSON of the document's text, the signer's name and signature."""
    signature = signer.sign(frame(tag, party.encode(), encoded))
    return canonical_json({"document": encoded.decode("ascii"), "party": party, "signature": signature.hex()})


def open_document(tag: str, data: bytes, keys: Mapping[str, PublicKey]) -> tuple[bytes, str]:
    """Return the document's bytes and who signed it, with one of ``keys``.

    Raises:
        InvalidInput: not such a document.
        Mismatch: an unknown party, or another key's signature.
    """
    value = parse_canonical_json(data, what="signed document", limit=2 * LARGEST_DOCUMENT)
    fields = Fields(value, what="signed document", names=("document", "party", "signature"))
    party, text, signature = fields.text("party"), fields.text("document"), fields.text("signature")
    if len(signature) > 512 or not text.isascii():
        raise InvalidInput("signed document: is ASCII, its signature at most 256 bytes")
    encoded = text.encode("ascii")
    if party not in keys:
        raise Mismatch(f"signed document: is signed by {party[:64]}, whose key is not known here")
    made = parse_hex(signature, n_bytes=len(signature) // 2, what="signed document")
    keys[party].verify(made, frame(tag, party.encode(), encoded), what=f"document of {party}")
    return encoded, party


# ---------------------------------------------------------------------------------------------- judging


# --------------------------------------------------------------------------------------- log extraction


def extract_log(log: bytes, *, chip: str, nonce: bytes, signer: Signer) -> bytes:
    """Return the plainest evidence that a chip can give: its signature over its name, the nonce and its log's digest."""
    return signer.sign(_extraction(log, chip, nonce))


def read_extraction(*, log: bytes, evidence: bytes, key: PublicKey, chip: str, nonce: bytes) -> list[str]:
    """Return what is wrong with a plain extraction; a LogReader. What the log says is for the matcher."""
    if not log:
        return ["the log is empty"]
    if not key.is_signed(evidence, _extraction(log, chip, nonce)):
        return ["the chip did not sign this log with this nonce: old, another chip's, or changed"]
    return []


def _extraction(log: bytes, chip: str, nonce: bytes) -> bytes:
    return frame(EXTRACTION_TAG, bytes.fromhex(chip), nonce, hashlib.sha256(log).digest())


def _target(item: object) -> Target:
    match item:
        case [str(chip), str(stratum), str(serial), str(key), str(board), str(owner)] if (
            14 <= len(chip) <= 66
        ):
            parse_hex(chip, n_bytes=len(chip) // 2, what="work order: chip")
            return Target(chip, stratum, serial, key, board, owner)
        case _:
            raise InvalidInput("work order: a chip must be [chip, stratum, serial, key, board, owner]")


def _optional_digest(text: str) -> bytes:
    return parse_hex(text, n_bytes=HASH_BYTES, what="finding: digest") if text else b""
