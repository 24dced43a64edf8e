"""One record of a chip's log: what it states, its bytes, and its signature (spec/chip-log.md 1 to 3).

A record states its place (counter, digest of the one before), the chip's firmware, boot count and clocks, the
snapshot rate in force, and one event:

    logged = sign_record(Record(0, NO_RECORD, ueid, firmware, clocks, 100, Genesis(...)), signer)
    parse_record(logged.signed, signer.public_key) == logged

What a chain of records must keep to is in ``chip_log``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import cast

from tallystick.errors import InvalidInput
from tallystick.signing.cose import (
    CHIP_RECORD,
    covered_bytes,
    encode_cbor,
    open_sign1,
    parse_cbor,
    peek_sign1,
    sign1,
)
from tallystick.signing.keys import PublicKey, Signer

RECORD_TAG = b"tallystick/chip-record/1\0"
RECORD_LIMIT = 4096  # bytes of one signed record; a snapshot has about 500
DIGEST_BYTES = 48  # SHA-384, as in device attestation (SPDM, CoEv)
ROOT_BYTES = 32
NO_RECORD = bytes(DIGEST_BYTES)  # what a genesis record names as its predecessor
DAY_MS = 86_400_000
PAGE_ALGORITHM = "sha256-salted-pages/1"

GENESIS, SNAPSHOT, BOOT, PRECOMMIT, FIRMWARE_UPDATE, OWNER_CHANGE, ACKNOWLEDGEMENT, SELF_TEST = range(8)
KINDS = (
    "genesis", "snapshot", "boot", "pre-commitment", "firmware update", "owner change", "acknowledgement", "self-test",
)  # fmt: skip
TORN, QUIESCE_TIMEOUT, STORAGE_FULL, CLOCK_UNCERTAIN, UNREADABLE, UNACKNOWLEDGED = (1 << i for i in range(6))
FLAGS = {
    TORN: "torn", QUIESCE_TIMEOUT: "quiesce timeout", STORAGE_FULL: "storage full",
    CLOCK_UNCERTAIN: "clock uncertain", UNREADABLE: "unreadable pages", UNACKNOWLEDGED: "unacknowledged",
}  # fmt: skip
AGENTS = ("simulated", "software", "firmware")
MODES = ("local", "remote")


@dataclass(frozen=True)
class Firmware:
    """What runs on the chip: SHA-256 of its code, security version number, and whether debugging is open."""

    digest: bytes
    svn: int
    debug: bool = False


@dataclass(frozen=True)
class Clocks:
    """Boots so far, and milliseconds: since the boot, in use over the chip's life, and since 1970 (None: no clock)."""

    boots: int
    uptime: int
    active: int
    wall: int | None = None


@dataclass(frozen=True)
class Genesis:
    """The first record: who made the chip, what runs the agent, the owner's key id, and where records go."""

    maker: str
    model: str
    agent: str
    owner: bytes
    mode: str
    collector: bytes = b""


@dataclass(frozen=True)
class Boot:
    """The agent started: sixteen random bytes, how many bytes of a half-written record it cut, how many records it lost."""

    seed: bytes
    cut: int = 0
    lost: int = 0


@dataclass(frozen=True)
class LoggedPrecommit:
    """The digest of a transcript's pre-commitment, logged before the run's first step."""

    digest: bytes


@dataclass(frozen=True)
class Snapshot:
    """Memory at a random time.

    Attributes:
        page_size, pages, size: bytes of a page, number of pages and bytes in all.
        root: Merkle root over the salted pages of all observed memory.
        layout: salted digest of the list of regions.
        run: the pre-commitment in force, or empty.
        flags: bits of ``FLAGS``.
    """

    page_size: int
    pages: int
    size: int
    root: bytes
    layout: bytes
    run: bytes = b""
    flags: int = 0


@dataclass(frozen=True)
class FirmwareUpdate:
    """The firmware that the next boot will run."""

    digest: bytes
    svn: int


@dataclass(frozen=True)
class OwnerChange:
    """Key ids of the owners before and after."""

    before: bytes
    after: bytes


@dataclass(frozen=True)
class Acknowledgement:
    """A collector's receipt for a record: its counter and the SHA-256 of the receipt."""

    seq: int
    receipt: bytes


@dataclass(frozen=True)
class SelfTest:
    """Whether hashing and signing gave their known answers."""

    passed: bool
    digest: bytes


Event = (
    Genesis | Boot | LoggedPrecommit | Snapshot | FirmwareUpdate | OwnerChange | Acknowledgement | SelfTest
)


@dataclass(frozen=True)
class Record:
    """One record as the chip states it; ``rate`` is in thousandths of a snapshot per day in use."""

    seq: int
    previous: bytes
    ueid: bytes
    firmware: Firmware
    clocks: Clocks
    rate: int
    event: Event

    @property
    def kind(self) -> int:
        """The number of the event's kind."""
        return _KIND_OF[type(self.event)]

    def encode(self) -> bytes:
        """Return the payload: deterministic CBOR (spec/chip-log.md 2).

        Raises:
            InvalidInput: a field breaks its rule.
        """
        check_record(self)
        clocks: list[object] = [self.clocks.boots, self.clocks.uptime, self.clocks.active]
        if self.clocks.wall is not None:
            clocks.append(self.clocks.wall)
        return encode_cbor(
            {
                1: self.seq,
                2: self.previous,
                3: self.ueid,
                4: [self.firmware.digest, self.firmware.svn, self.firmware.debug],
                5: clocks,
                6: self.kind,
                7: self.rate,
                8: _event_fields(self.event),
            }
        )


@dataclass(frozen=True)
class LoggedRecord:
    """A record, its digest (what the next one names) and the signed bytes it came in."""

    record: Record
    digest: bytes
    signed: bytes = field(repr=False)


def sign_record(record: Record, signer: Signer) -> LoggedRecord:
    """Return the record signed for the log.

    Raises:
        InvalidInput: a field breaks its rule, or a key that signs no chip logs.
    """
    data = sign1(record.encode(), CHIP_RECORD, signer)
    return LoggedRecord(record, _digest_of(data), data)


def parse_record(data: bytes, key: PublicKey, *, what: str = "chip record") -> LoggedRecord:
    """Return the record that ``key`` signed.

    Raises:
        InvalidInput: malformed, or a field breaks its rule.
        Mismatch: another key, or a signature that does not fit.
    """
    signed = open_sign1(data, CHIP_RECORD, key, what=what, limit=RECORD_LIMIT)
    record = parse_payload(signed.payload, what=what)
    return LoggedRecord(record, _hash(signed.covered), data)


def parse_payload(data: bytes, *, what: str = "chip record") -> Record:
    """Return the record whose payload is exactly ``data``; whoever signed it.

    Raises:
        InvalidInput: malformed, or a field breaks its rule.
    """
    value = parse_cbor(data, what=what, limit=RECORD_LIMIT)
    if not isinstance(value, dict) or set(cast("dict[object, object]", value)) != set(range(1, 9)):
        raise InvalidInput(f"{what}: must be a map with the keys 1 to 8")
    items = cast("dict[int, object]", value)
    match items[4], items[5]:
        case [bytes(digest), int(svn), bool(debug)], [int(boots), int(uptime), int(active), *wall] if len(
            wall
        ) < 2 and all(type(item) is int for item in (svn, boots, uptime, active, *wall)):
            firmware = Firmware(digest, svn, debug)
            clocks = Clocks(boots, uptime, active, cast("int", wall[0]) if wall else None)
        case _:
            raise InvalidInput(f"{what}: firmware must be [bytes, int, bool], clocks three or four integers")
    seq, previous, ueid, kind, rate, body = (items[key] for key in (1, 2, 3, 6, 7, 8))
    if not (type(seq) is int and type(kind) is int and type(rate) is int):
        raise InvalidInput(f"{what}: counter, kind and rate must be integers")
    if not (isinstance(previous, bytes) and isinstance(ueid, bytes)):
        raise InvalidInput(f"{what}: the digest before and the chip's identity must be bytes")
    record = Record(seq, previous, ueid, firmware, clocks, rate, _parse_event(kind, body, what))
    check_record(record, what=what)
    return record


def check_record(record: Record, *, what: str = "chip record") -> None:
    """Return if every field keeps its rule (spec/chip-log.md 2).

    Raises:
        InvalidInput: one does not.
    """
    what = f"{what} {record.seq}" if what == "chip record" else what
    clocks = record.clocks
    numbers = {
        "counter": record.seq, "boot count": clocks.boots, "uptime": clocks.uptime, "active time": clocks.active,
        "wall clock": clocks.wall or 0, "security version": record.firmware.svn, "rate": record.rate,
    }  # fmt: skip
    for name, number in numbers.items():
        if not 0 <= number < 2**63:
            raise InvalidInput(f"{what}: {name} must lie in [0, 2**63), is {number}")
    _must_have(record.previous, DIGEST_BYTES, f"{what}: the digest before")
    if not 7 <= len(record.ueid) <= 33:
        raise InvalidInput(f"{what}: a UEID has 7 to 33 bytes, not {len(record.ueid)}")
    _must_have(record.firmware.digest, ROOT_BYTES, f"{what}: the firmware's digest")
    if (record.seq == 0) != isinstance(record.event, Genesis):
        raise InvalidInput(f"{what}: counter 0 and the genesis record go together")
    if record.seq == 0 and record.previous != NO_RECORD:
        raise InvalidInput(f"{what}: a genesis record names zeros as the digest before")
    _check_event(record.event, record.seq, what)


def _digest_of(data: bytes) -> bytes:
    return _hash(covered_bytes(*peek_sign1(data, what="chip record", limit=RECORD_LIMIT)))


def _hash(covered: bytes) -> bytes:
    return hashlib.sha384(RECORD_TAG + covered).digest()


def _must_have(value: bytes, n_bytes: int, what: str, *, empty: bool = False) -> None:
    if len(value) != n_bytes and not (empty and not value):
        raise InvalidInput(f"{what} must have {n_bytes} bytes, has {len(value)}")


_KIND_OF: dict[type, int] = {
    Genesis: GENESIS, Snapshot: SNAPSHOT, Boot: BOOT, LoggedPrecommit: PRECOMMIT, FirmwareUpdate: FIRMWARE_UPDATE,
    OwnerChange: OWNER_CHANGE, Acknowledgement: ACKNOWLEDGEMENT, SelfTest: SELF_TEST,
}  # fmt: skip


def _event_fields(event: Event) -> list[object]:
    values = [getattr(event, each.name) for each in fields(event)]
    return [PAGE_ALGORITHM, *values] if isinstance(event, Snapshot) else values


_FORMS: tuple[tuple[Callable[..., Event], tuple[type, ...]], ...] = (
    (Genesis, (str, str, str, bytes, str, bytes)),
    (Snapshot, (str, int, int, int, bytes, bytes, bytes, int)),
    (Boot, (bytes, int, int)),
    (LoggedPrecommit, (bytes,)),
    (FirmwareUpdate, (bytes, int)),
    (OwnerChange, (bytes, bytes)),
    (Acknowledgement, (int, bytes)),
    (SelfTest, (bool, bytes)),
)


def _parse_event(kind: int, body: object, what: str) -> Event:
    if not 0 <= kind < len(_FORMS):
        raise InvalidInput(f"{what}: kind {kind} is unknown; known are 0 to {len(_FORMS) - 1}")
    made, types = _FORMS[kind]
    values = cast("list[object]", body) if isinstance(body, list) else []
    if tuple(map(type, values)) != types:
        expected = ", ".join(t.__name__ for t in types)
        raise InvalidInput(f"{what}: the body of a {KINDS[kind]} record must be [{expected}]")
    if made is Snapshot:
        if values[0] != PAGE_ALGORITHM:
            raise InvalidInput(
                f"{what}: page algorithm {str(values[0])[:40]!r} is unknown, must be {PAGE_ALGORITHM!r}"
            )
        values = values[1:]
    return made(*values)


def _check_event(event: Event, seq: int, what: str) -> None:
    match event:
        case Genesis():
            _check_genesis(event, what)
        case Boot():
            _must_have(event.seed, 16, f"{what}: the boot's seed")
            _check_numbers(what, cut=event.cut, lost=event.lost)
        case LoggedPrecommit():
            _must_have(event.digest, ROOT_BYTES, f"{what}: the pre-commitment")
        case Snapshot():
            _check_snapshot(event, what)
        case FirmwareUpdate():
            _must_have(event.digest, ROOT_BYTES, f"{what}: the firmware's digest")
            _check_numbers(what, version=event.svn)
        case OwnerChange():
            _must_have(event.before, ROOT_BYTES, f"{what}: the owner before")
            _must_have(event.after, ROOT_BYTES, f"{what}: the owner after")
        case Acknowledgement():
            _must_have(event.receipt, ROOT_BYTES, f"{what}: the receipt's digest")
            _check_numbers(what, counter=event.seq)
        case SelfTest():
            _must_have(event.digest, ROOT_BYTES, f"{what}: the self-test's digest")


def _check_genesis(event: Genesis, what: str) -> None:
    for name, text in (("maker", event.maker), ("model", event.model)):
        if not 1 <= len(text) <= 100 or not text.isprintable():
            raise InvalidInput(f"{what}: {name} must be 1 to 100 printable characters")
    if event.agent not in AGENTS:
        raise InvalidInput(f"{what}: agent must be one of {', '.join(AGENTS)}, is {event.agent[:40]!r}")
    if event.mode not in MODES:
        raise InvalidInput(f"{what}: mode must be one of {', '.join(MODES)}, is {event.mode[:40]!r}")
    _must_have(event.owner, ROOT_BYTES, f"{what}: the owner")
    _must_have(event.collector, ROOT_BYTES, f"{what}: the collector", empty=event.mode == "local")
    if event.mode == "local" and event.collector:
        raise InvalidInput(f"{what}: a chip in local mode names no collector")


def _check_snapshot(event: Snapshot, what: str) -> None:
    _check_numbers(what, page_size=event.page_size, pages=event.pages, size=event.size, flags=event.flags)
    if event.page_size == 0 or event.flags >= 2 * max(FLAGS):
        raise InvalidInput(f"{what}: page size {event.page_size} or flags {event.flags} are out of range")
    if not -(-event.size // event.page_size) <= event.pages <= event.size:
        raise InvalidInput(
            f"{what}: {event.size} bytes in pages of {event.page_size} make no {event.pages} pages"
        )
    _must_have(event.root, ROOT_BYTES, f"{what}: the root")
    _must_have(event.layout, ROOT_BYTES, f"{what}: the layout")
    _must_have(event.run, ROOT_BYTES, f"{what}: the run", empty=True)


def _check_numbers(what: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if not 0 <= number < 2**63:
            raise InvalidInput(f"{what}: {name.replace('_', ' ')} must lie in [0, 2**63), is {number}")
