"""The collector of chips in remote mode: takes records in order, signs a receipt for each, and keeps what contradicts.

    collector = Collector(directory, signer, keys)
    receipts = collector.submit(frames)

A record is accepted once and in order; sent again it gets the same answer; another record with an accepted counter is
a fork, kept as evidence and refused. A receipt binds the collector as much as the chip: two receipts of one
collector for different records with one counter prove that it lies (``find_equivocation``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.fleet.agent.chip_log import ChipHead, NumberedFinding
from tallystick.fleet.agent.chip_record import (
    DIGEST_BYTES,
    RECORD_LIMIT,
    LoggedRecord,
    parse_payload,
    parse_record,
)
from tallystick.signing.cose import RECEIPT, encode_cbor, open_sign1, parse_cbor, peek_sign1, sign1
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.journal import Journal

RECEIPT_LIMIT = 1024


@dataclass(frozen=True)
class Receipt:
    """A collector's word that it holds a record: the chip, the counter, the record's digest, and when (ms since 1970)."""

    ueid: bytes
    seq: int
    digest: bytes
    time: int

    def encode(self) -> bytes:
        """Return the payload: deterministic CBOR."""
        return encode_cbor({1: self.ueid, 2: self.seq, 3: self.digest, 4: self.time})

    @property
    def head(self) -> ChipHead:
        """The place in the chip's log that the receipt vouches for."""
        return ChipHead(self.seq, self.digest, "a receipt")


def parse_receipt(data: bytes, key: PublicKey, *, what: str = "receipt") -> Receipt:
    """Return the receipt that the collector's ``key`` signed.

    Raises:
        InvalidInput: malformed.
        Mismatch: another key, or a signature that does not fit.
    """
    signed = open_sign1(data, RECEIPT, key, what=what, limit=RECEIPT_LIMIT)
    match parse_cbor(signed.payload, what=what, limit=RECEIPT_LIMIT):
        case {1: bytes(ueid), 2: int(seq), 3: bytes(digest), 4: int(moment), **rest} if (
            not rest and type(seq) is int and type(moment) is int and len(digest) == DIGEST_BYTES
        ):
            return Receipt(ueid, seq, digest, moment)
        case _:
            raise InvalidInput(f"{what}: must be {{1: ueid, 2: counter, 3: digest, 4: time}}")


def verify_receipt(data: bytes, logged: LoggedRecord, key: PublicKey) -> Receipt:
    """Return the receipt if it is the collector's and speaks of ``logged``.

    Raises:
        InvalidInput: malformed.
        Mismatch: another collector, chip, counter or record.
    """
    what = f"receipt for record {logged.record.seq}"
    receipt = parse_receipt(data, key, what=what)
    stated, own = (
        (receipt.ueid, receipt.seq, receipt.digest),
        (logged.record.ueid, logged.record.seq, logged.digest),
    )
    if stated != own:
        raise Mismatch(
            f"{what}: speaks of record {receipt.seq} {receipt.digest.hex()[:16]}.. of chip {receipt.ueid.hex()}, "
            f"must be {logged.digest.hex()[:16]}.. of chip {logged.record.ueid.hex()}"
        )
    return receipt


def find_equivocation(receipts: Iterable[Receipt]) -> list[NumberedFinding]:
    """Return a finding for each counter of a chip for which one collector signed receipts for different records."""
    seen: dict[tuple[bytes, int], bytes] = {}
    found: list[NumberedFinding] = []
    for receipt in receipts:
        before = seen.setdefault((receipt.ueid, receipt.seq), receipt.digest)
        if before != receipt.digest:
            text = f"signed for {before.hex()[:16]}.. and for {receipt.digest.hex()[:16]}.. as record {receipt.seq}"
            found.append(NumberedFinding(12, "lying collector", receipt.seq, text))
    return found


class Collector:
    """Receives the logs of many chips into a directory: ``UEID.journal`` and ``UEID.forks`` for each.

    Args:
        path: of the directory.
        signer: of receipts.
        keys: device keys by UEID; records of other chips are refused.
        clock: milliseconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        signer: Signer,
        keys: Mapping[bytes, PublicKey],
        *,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.path, self.keys = path, dict(keys)
        self._signer, self._clock = signer, clock
        self._logs: dict[bytes, tuple[Journal, list[LoggedRecord]]] = {}

    def submit(self, frames: Iterable[bytes]) -> list[bytes]:
        """Return a receipt for each record, having written it to the disk.

        Raises:
            InvalidInput: malformed, or a chip that is not registered here.
            Mismatch: not the chip's signature.
            ProtocolViolation: a fork or a gap; what came before it in ``frames`` is kept.
        """
        return [self._take(frame) for frame in frames]

    def log(self, ueid: bytes) -> list[LoggedRecord]:
        """Return the records held of a chip."""
        return list(self._open(ueid)[1])

    def forks(self, ueid: bytes) -> list[LoggedRecord]:
        """Return the records of a chip that contradicted accepted ones."""
        journal = Journal(self.path / f"{ueid.hex()}.forks")
        try:
            return [parse_record(frame, self.keys[ueid]) for frame in journal.records]
        finally:
            journal.close()

    def close(self) -> None:
        """Let others open the journals."""
        for journal, _ in self._logs.values():
            journal.close()
        self._logs.clear()

    def _take(self, frame: bytes) -> bytes:
        _, payload = peek_sign1(frame, what="chip record", limit=RECORD_LIMIT)
        ueid = parse_payload(payload).ueid
        if ueid not in self.keys:
            raise InvalidInput(f"collector: chip {ueid.hex()} is not registered here")
        logged = parse_record(frame, self.keys[ueid])
        journal, held = self._open(ueid)
        seq = logged.record.seq
        if seq < len(held):
            if held[seq].digest != logged.digest:
                self._keep_fork(ueid, frame)
                raise ProtocolViolation(
                    f"collector: chip {ueid.hex()} sent {logged.digest.hex()[:16]}.. as record {seq}, "
                    f"having sent {held[seq].digest.hex()[:16]}.. before: a fork"
                )
            return self._receipt(logged)  # sent again: the answer was lost on its way
        if seq > len(held):
            raise ProtocolViolation(
                f"collector: chip {ueid.hex()} sent record {seq}, record {len(held)} is missing"
            )
        if held and logged.record.previous != held[-1].digest:
            self._keep_fork(ueid, frame)
            raise ProtocolViolation(
                f"collector: record {seq} of chip {ueid.hex()} names {logged.record.previous.hex()[:16]}.. before it, "
                f"held is {held[-1].digest.hex()[:16]}..: a fork"
            )
        journal.append(frame)
        held.append(logged)
        return self._receipt(logged)

    def _receipt(self, logged: LoggedRecord) -> bytes:
        receipt = Receipt(logged.record.ueid, logged.record.seq, logged.digest, self._clock())
        return sign1(receipt.encode(), RECEIPT, self._signer)

    def _open(self, ueid: bytes) -> tuple[Journal, list[LoggedRecord]]:
        if ueid not in self._logs:
            if ueid not in self.keys:
                raise InvalidInput(f"collector: chip {ueid.hex()} is not registered here")
            journal = Journal(self.path / f"{ueid.hex()}.journal")
            held = [parse_record(frame, self.keys[ueid]) for frame in journal.records]
            self._logs[ueid] = (journal, held)
        return self._logs[ueid]

    def _keep_fork(self, ueid: bytes, frame: bytes) -> None:
        journal = Journal(self.path / f"{ueid.hex()}.forks")
        try:
            if frame not in journal.records:
                journal.append(frame)
        finally:
            journal.close()
