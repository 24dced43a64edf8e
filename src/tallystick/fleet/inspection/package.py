"""An inspection package on disk: all that an inspector needs without a network, and all that was found.

    order.json         the signed work order
    checklist.txt      the same for people, with each chip's nonce
    findings/CHIP.json what was found of one chip; written once
    files/SHA256       logs, evidence and photos, named by their digests
    custody.jsonl      the chain of custody, one signed link a line
    result.json        the sealed result; nothing is recorded after it

Files appear whole or not at all; a package that was interrupted goes on where it was. Format: spec/inspection.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tallystick.errors import InvalidInput, ProtocolViolation, StoreError
from tallystick.fleet.inspection.custody import Action, Link, add_link, encode_chain, parse_chain
from tallystick.fleet.inspection.inspection import (
    LARGEST_DOCUMENT,
    LARGEST_LOG,
    ORDER_TYPE,
    RESULT_TYPE,
    InspectionFinding,
    InspectionResult,
    WorkOrder,
)
from tallystick.signing.dsse import parse_envelope, sign_payload
from tallystick.signing.keys import Signer
from tallystick.store.files import read_whole, storing, write_whole


@dataclass(frozen=True)
class InspectionPackage:
    """Reads and writes one package."""

    path: Path

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, signed_order: bytes, order: WorkOrder, signer: Signer, *, now: int) -> None:
        """Make the directory for ``order``; its inspector begins the chain of custody.

        Raises:
            StoreError: it is there already, or cannot be written.
        """
        if self.path.exists() and any(self.path.iterdir()):
            raise StoreError(f"{self.path}: exists and is not empty")
        with storing(str(self.path)):
            for folder in ("findings", "files"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        self._write("checklist.txt", "".join(f"{line}\n" for line in checklist_lines(order)).encode())
        self._add("begin", {order.inspector: signer}, [order.digest()], now)
        self._write("order.json", signed_order)

    def record(
        self,
        finding: InspectionFinding,
        signer: Signer,
        *,
        log: bytes = b"",
        evidence: bytes = b"",
        photos: Sequence[bytes] = (),
        now: int,
    ) -> InspectionFinding:
        """Return the finding as recorded, its files kept under their digests and entered in the chain of custody.

        Raises:
            ProtocolViolation: the package is sealed, the chip is not in the order or was recorded already.
        """
        order = self.load_order()
        self._must_be_open()
        if finding.chip not in {target.chip for target in order.targets}:
            raise ProtocolViolation(f"chip {finding.chip}: is not in the order")
        place = self._finding_path(finding.chip)
        if place.exists():
            raise ProtocolViolation(f"chip {finding.chip}: was recorded already; findings are not changed")
        kept = [self._keep(data) if data else b"" for data in (log, evidence)]
        made = replace(
            finding, log=kept[0], evidence=kept[1], photos=tuple(self._keep(photo) for photo in photos)
        )
        data = made.encode()
        self._add("take", {order.inspector: signer}, [hashlib.sha256(data).digest(), *made.items()], now)
        self._write(f"findings/{place.name}", data)
        return made

    def hand_over(self, giver: str, taker: str, signers: Mapping[str, Signer], *, now: int) -> Link:
        """Return the link by which custody goes from ``giver`` to ``taker``, signed by both."""
        self._must_be_open()
        ordered = {giver: signers[giver], taker: signers[taker]}
        return self._add("hand over", ordered, [], now, to=taker)

    def seal(self, signer: Signer, *, now: int) -> InspectionResult:
        """Return the result over all findings so far, signed; nothing can be recorded after it."""
        self._must_be_open()
        order = self.load_order()
        findings = self.load_findings()
        items = [hashlib.sha256(finding.encode()).digest() for finding in findings]
        self._add("seal", {order.inspector: signer}, items, now)
        result = InspectionResult(order.digest(), order.inspector, now, findings, self.load_chain())
        self._write("result.json", sign_payload(RESULT_TYPE, result.encode(), [signer]).encode())
        return result

    # -- reading -----------------------------------------------------------------------------------

    def load_order(self) -> WorkOrder:
        """Return the work order; its signature is for whoever has the key to check."""
        envelope = parse_envelope(self.load("order.json"), what="order.json", limit=LARGEST_DOCUMENT)
        return WorkOrder.parse(envelope.payload_of(ORDER_TYPE, what="order.json"))

    def load_findings(self) -> tuple[InspectionFinding, ...]:
        """Return all findings recorded so far, by chip."""
        found = [
            InspectionFinding.parse(self.load(f"findings/{path.name}"), what=path.name)
            for path in (self.path / "findings").glob("*.json")
        ]
        return tuple(sorted(found, key=lambda finding: finding.chip))

    def load_chain(self) -> tuple[Link, ...]:
        """Return the chain of custody so far."""
        path = self.path / "custody.jsonl"
        return parse_chain(self.load("custody.jsonl")) if path.exists() else ()

    def load_files(self) -> dict[bytes, bytes]:
        """Return all files whose content has the digest that they are named after, by digest."""
        found: dict[bytes, bytes] = {}
        for path in sorted((self.path / "files").iterdir()):
            data = self.load(f"files/{path.name}")
            digest = hashlib.sha256(data).digest()
            if digest.hex() == path.name:
                found[digest] = data
        return found

    def load(self, name: str) -> bytes:
        """Return one file of the package.

        Raises:
            StoreError: it is missing or cannot be read.
            InvalidInput: it is too large.
        """
        return read_whole(
            self.path / name, limit=2 * LARGEST_DOCUMENT, what="a file of an inspection package"
        )

    # -- inside ------------------------------------------------------------------------------------

    def _add(
        self, action: Action, signers: Mapping[str, Signer], items: Sequence[bytes], now: int, *, to: str = ""
    ) -> Link:
        chain = self.load_chain()
        acting = next(iter(signers))
        if chain and acting != (holder := chain[-1].to or chain[-1].party):
            raise ProtocolViolation(f"inspection: {acting} acts, {holder} has custody of the package")
        link = add_link(chain, action, signers, items=items, time=now, to=to)
        self._write("custody.jsonl", encode_chain([*chain, link]))
        return link

    def _must_be_open(self) -> None:
        if (self.path / "result.json").exists():
            raise ProtocolViolation(f"{self.path}: is sealed")

    def _finding_path(self, chip: str) -> Path:
        if not chip.isalnum():
            raise InvalidInput(f"chip {chip[:80]!r}: must be hexadecimal")
        return self.path / "findings" / f"{chip}.json"

    def _keep(self, data: bytes) -> bytes:
        if len(data) > LARGEST_LOG:
            raise InvalidInput(f"inspection: a file of {len(data)} bytes exceeds the limit of {LARGEST_LOG}")
        digest = hashlib.sha256(data).digest()
        self._write(f"files/{digest.hex()}", data)
        return digest

    def _write(self, name: str, data: bytes) -> None:
        write_whole(self.path / name, data)


def checklist_lines(order: WorkOrder) -> list[str]:
    """Return the order as an inspector reads it on paper."""
    lines = [
        f"Work order {order.digest().hex()[:16]} for {order.inspector} at {order.custodian}, period {order.period}",
        f"From second {order.issued} to {order.due} (UTC, since 1970); {len(order.targets)} chips",
        "",
        "For each chip: read the serial number on the part; look at each seal; take the photos; have the chip",
        "sign its log with the nonce below; record it. A chip that is refused or absent is recorded as such.",
        f"Seals: {', '.join(order.seals) or 'none'}. Photos: {order.photos}.",
    ]
    for target in order.targets:
        lines += [
            "",
            f"[ ] chip {target.chip}",
            f"    serial {target.serial}, board {target.board or 'none'}, owner {target.owner}, model {target.stratum}",
            f"    device key {target.key or 'none registered'}",
            f"    nonce {order.chip_nonce(target.chip).hex()}",
        ]
    return lines
