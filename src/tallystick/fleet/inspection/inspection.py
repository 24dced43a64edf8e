"""An inspection from the drawn sample to its verdict: work order, what was found, and what that comes to; pure.

Formats and rules: spec/inspection.md. The order names chips, what the registry says of them and a secret nonce; chips
are named to their owner only on the spot. The inspector needs no network: the package holds all that is asked for,
the sealed result all that was found. Whatever is missing, late or unclear counts as a failure, never as a pass.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from tallystick.fleet.inspection.custody import Link, parse_chain, verify_chain
from tallystick.fleet.registry.events import Chip
from tallystick.fleet.sampling.workload import Round
from tallystick.signing.keys import PublicKey, Signer, parse_public_key

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
PASSED, FAILED = "passed", "failed"


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


class LogReader(Protocol):
    """Reads what a chip handed over. Returns what is wrong with it, in words; nothing wrong is an empty list."""

    def __call__(self, *, log: bytes, evidence: bytes, key: PublicKey, chip: str, nonce: bytes) -> list[str]:
        """Check that ``evidence`` is the chip's own, fresh for ``nonce``, and vouches for ``log``."""
        ...


@dataclass(frozen=True)
class ChipVerdict:
    """What one chip's inspection comes to, with every reason against it."""

    target: Target
    outcome: str
    reasons: tuple[str, ...]
    passed: bool


@dataclass(frozen=True)
class Verdict:
    """What an order comes to: a verdict for each of its chips."""

    order: WorkOrder
    result: Result
    chips: tuple[ChipVerdict, ...]

    @property
    def failures(self) -> list[ChipVerdict]:
        """The chips that did not pass, those that nobody reached left out."""
        return [chip for chip in self.chips if not chip.passed and chip.outcome != UNREACHED]

    def rounds(self, frame: Mapping[str, int], lost: Mapping[str, int] | None = None) -> list[Round]:
        """Return the rounds for re-planning (spec/plan.md 6); ``frame`` are the chips of each stratum drawn from."""
        found: list[Round] = []
        for stratum in sorted({chip.target.stratum for chip in self.chips}):
            here = [chip.outcome for chip in self.chips if chip.target.stratum == stratum]
            unreached, seen = here.count(UNREACHED), here.count(SEEN)
            found.append(
                Round(
                    stratum, frame[stratum], len(here), seen, len(here) - seen - unreached, unreached,
                    (lost or {}).get(stratum, 0),
                )
            )  # fmt: skip
        return found

    def deed_rows(self) -> list[list[str]]:
        """Return the chips and outcomes for the registry's deed ``inspected``."""
        rows: list[list[str]] = []
        for chip in self.chips:
            if chip.outcome == UNREACHED:
                continue
            word = {SEEN: PASSED if chip.passed else FAILED, REFUSED: REFUSED}.get(chip.outcome, ABSENT)
            rows.append([chip.target.chip, word])
        return rows


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


def judge(
    order: WorkOrder,
    result: Result,
    keys: Mapping[str, PublicKey],
    files: Mapping[bytes, bytes],
    reader: LogReader,
) -> Verdict:
    """Return what ``result`` comes to: every chip of the order passes every check, or fails with its reasons.

    ``files`` are the package's files by their SHA-256. A chip without a finding has failed.

    Raises:
        Mismatch: the result is another order's or inspector's, its chain of custody is broken or leaves out a file.
    """
    if result.order != order.digest():
        raise Mismatch(
            f"inspection: the result is of order {result.order.hex()[:16]}.., this is {order.digest().hex()[:16]}.."
        )
    if result.inspector != order.inspector:
        raise Mismatch(f"inspection: {result.inspector} inspected, the order is for {order.inspector}")
    holder = verify_chain(result.custody, keys)
    if result.custody[-1].action != "seal" or holder != order.inspector:
        raise Mismatch(
            f"inspection: the chain of custody ends with {holder}, it must end with a seal of {order.inspector}"
        )
    kept = {item for link in result.custody for item in link.items}
    for finding in result.findings:
        if missing := [item for item in finding.items() if item not in kept]:
            raise Mismatch(
                f"chip {finding.chip}: file {missing[0].hex()[:16]}.. is not in the chain of custody"
            )
    found = {finding.chip: finding for finding in result.findings}
    shared = {
        photo
        for photo, count in Counter(p for f in result.findings for p in set(f.photos)).items()
        if count > 1
    }
    if stray := sorted(set(found) - {target.chip for target in order.targets}):
        raise Mismatch(f"chip {stray[0]}: was not in the order")
    return Verdict(
        order,
        result,
        tuple(
            _judge_chip(order, target, found.get(target.chip), files, shared, reader)
            for target in order.targets
        ),
    )


def _judge_chip(
    order: WorkOrder,
    target: Target,
    finding: Finding | None,
    files: Mapping[bytes, bytes],
    shared: set[bytes],
    reader: LogReader,
) -> ChipVerdict:
    if finding is None:
        return ChipVerdict(target, ABSENT, ("nothing was reported: counted as a failure",), False)
    if finding.outcome == UNREACHED:
        if finding.items() or finding.serial or finding.seals:
            return ChipVerdict(
                target, REFUSED, ("unreached, and yet something was found: counted as a failure",), False
            )
        return ChipVerdict(target, UNREACHED, ("not reached for the inspectors' own reasons",), False)
    if finding.outcome != SEEN:
        return ChipVerdict(target, finding.outcome, (f"{finding.outcome}: counted as a failure",), False)
    reasons: list[str] = []
    if not order.issued <= finding.time <= order.due:
        reasons.append(f"seen at {finding.time}, the order runs from {order.issued} to {order.due}")
    if finding.serial != target.serial:
        reasons.append(
            f"serial number on the part is {finding.serial or 'not read'}, registered is {target.serial}"
        )
    seals = dict(finding.seals)
    reasons += [
        f"seal {name} is {seals.get(name, 'not reported')}"
        for name in order.seals
        if seals.get(name) != "intact"
    ]
    if len(set(finding.photos)) < order.photos:
        reasons.append(f"{len(set(finding.photos))} photos, {order.photos} are asked for")
    reasons += [f"photo {p.hex()[:16]}.. is not in the package" for p in finding.photos if p not in files]
    reasons += [
        f"photo {p.hex()[:16]}.. is shown for another chip too" for p in finding.photos if p in shared
    ]
    reasons += _log_reasons(order, target, finding, files, reader)
    return ChipVerdict(target, SEEN, tuple(reasons), not reasons)


def _log_reasons(
    order: WorkOrder, target: Target, finding: Finding, files: Mapping[bytes, bytes], reader: LogReader
) -> list[str]:
    if not finding.log or not finding.evidence:
        return ["no log was extracted with a fresh nonce"]
    for name, item in (("log", finding.log), ("evidence", finding.evidence)):
        if item not in files:
            return [f"the {name} {item.hex()[:16]}.. is not in the package"]
    if hashlib.sha256(finding.key).hexdigest() != target.key:
        return [f"the device key is not the registered one, {target.key[:16] or 'none'}.."]
    try:
        key = parse_public_key(finding.key, what="device key")
    except InvalidInput as problem:
        return [str(problem)]
    log, evidence = files[finding.log], files[finding.evidence]
    return reader(log=log, evidence=evidence, key=key, chip=target.chip, nonce=order.chip_nonce(target.chip))


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
