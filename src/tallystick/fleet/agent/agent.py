"""The chip agent: takes snapshots at random times and keeps the chip's log (spec/chip-log.md 3).

Ports are passed in: where records lie (``ChipDirectory``), who signs, what memory is seen (``Probe``), the clock, the
collector, and the draw of waiting times. The agent itself decides what is written, and in which order:

    agent = ChipAgent(directory, signer, probe, settings)
    agent.start()                  # genesis or boot record; what an interruption left is said there
    while True:
        agent.poll()               # a snapshot when its time has come
        sleep(agent.nap())

A software agent is no firmware: whoever owns the machine can stop it, or show it other memory. See ``assurance``.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from tallystick.errors import InvalidInput, ProtocolViolation, StoreError
from tallystick.fleet.agent.chip_record import (
    CLOCK_UNCERTAIN,
    DAY_MS,
    NO_RECORD,
    QUIESCE_TIMEOUT,
    STORAGE_FULL,
    TORN,
    UNACKNOWLEDGED,
    UNREADABLE,
    Acknowledgement,
    Boot,
    Clocks,
    Event,
    Firmware,
    FirmwareUpdate,
    Genesis,
    LoggedPrecommit,
    LoggedRecord,
    OwnerChange,
    Record,
    SelfTest,
    Snapshot,
    parse_record,
    sign_record,
)
from tallystick.fleet.agent.memory import (
    SALT_BYTES,
    Observation,
    Probe,
    SnapshotOpening,
    check_page_size,
    hash_memory,
)
from tallystick.fleet.attestation.assurance import attest_head
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.chips import ChipDirectory

LEAST_CAPACITY = 8
NAP = 0.25  # seconds between two looks at the clock: the same whether or not a snapshot is near
RETRY_SECONDS = 0.1
BATCH = 64  # records sent to a collector at a time


class Clock(Protocol):
    """Time as the agent sees it, in milliseconds."""

    def monotonic(self) -> int:
        """Return a time that never goes back while the agent runs."""
        ...

    def wall(self) -> int | None:
        """Return the time since 1970, None where there is no such clock."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> int:
        """Return the time since some start."""
        return time.monotonic_ns() // 1_000_000

    def wall(self) -> int | None:
        """Return the time since 1970."""
        return time.time_ns() // 1_000_000


class CollectorPort(Protocol):
    """Where a chip in remote mode sends its records."""

    def submit(self, frames: list[bytes]) -> list[bytes]:
        """Return a receipt for each record.

        Raises:
            StoreError: the collector is out of reach, for now.
            ProtocolViolation: it refuses the records; they will never be accepted.
        """
        ...


ReceiptCheck = Callable[[bytes, LoggedRecord], object]
"""Returns if the bytes are the collector's receipt for the record, else raises Mismatch or InvalidInput."""


@dataclass(frozen=True)
class ChipSettings:
    """What a chip is and how it behaves; fixed when it is made.

    Attributes:
        ueid: its identity, 7 to 33 bytes.
        firmware: what runs.
        genesis: the first record.
        rate: thousandths of a snapshot per day of active time.
        page_size: bytes.
        capacity: records that the log may hold.
        retention_days: how long a shard is kept; 0 to keep none.
        hash_frozen: hash while the program stands still (no second copy in memory) instead of copying first.
        hold_seconds: remote mode: how long the program waits for the collector before it goes on.
    """

    ueid: bytes
    firmware: Firmware
    genesis: Genesis
    rate: int = 100
    page_size: int = 1 << 20
    capacity: int = 4096
    retention_days: float = 400.0
    hash_frozen: bool = False
    hold_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        if not 1 <= self.rate <= 10**12:
            raise InvalidInput(f"chip: a rate of {self.rate / 1000:g} snapshots a day is out of range")
        if self.capacity < LEAST_CAPACITY:
            raise InvalidInput(
                f"chip: the log must hold {LEAST_CAPACITY} records or more, not {self.capacity}"
            )


@dataclass
class Stall:
    """What one snapshot cost: seconds that the program stood still, seconds in all, and bytes hashed."""

    frozen: float = 0.0
    total: float = 0.0
    hashed: int = 0


class ChipAgent:
    """One chip's agent; see the module's docstring.

    Attributes:
        log: the records so far.
        stalls: what each snapshot of this run cost.
        pending: in remote mode, records without a receipt.
    """

    def __init__(
        self,
        directory: ChipDirectory,
        signer: Signer,
        probe: Probe,
        settings: ChipSettings,
        *,
        clock: Clock | None = None,
        collector: CollectorPort | None = None,
        check_receipt: ReceiptCheck | None = None,
        draw: Callable[[float], float] | None = None,
        pool: Executor | None = None,
    ) -> None:
        if (collector is None) != (settings.genesis.mode == "local"):
            raise InvalidInput(
                f"chip: mode {settings.genesis.mode} and a collector do not go together as given"
            )
        self.directory, self.probe, self.settings = directory, probe, settings
        self.log: list[LoggedRecord] = []
        self.stalls: list[Stall] = []
        self.pending: list[LoggedRecord] = []
        self._signer, self._collector, self._check_receipt = signer, collector, check_receipt
        self._clock: Clock = clock or SystemClock()
        # Of the operating system: nobody who watches earlier draws learns anything about later ones.
        self._draw = draw or secrets.SystemRandom().expovariate
        self._pool = pool
        self._seq, self._previous = 0, NO_RECORD
        self._boots, self._active_before, self._started = 0, 0, 0
        self._firmware, self._owner, self._run = settings.firmware, settings.genesis.owner, b""
        self._boot_seed = b""
        self._next_at = 0.0
        self._has_waited = False
        self._unlogged: list[Acknowledgement] = []
        self.is_full = False

    # -- starting and ending -----------------------------------------------------------------

    def start(self) -> None:
        """Open the log, say what an interruption left of it, and draw the first waiting time.

        Raises:
            StoreError: another agent writes this log, or it is damaged.
            InvalidInput, Mismatch: the log is not this chip's.
        """
        frames, head, cut = self.directory.open()
        key = self._signer.public_key
        self.log = [parse_record(frame, key, what=f"record at {at}") for at, frame in enumerate(frames)]
        if self.log and self.log[0].record.ueid != self.settings.ueid:
            raise InvalidInput(
                f"{self.directory.log_path}: is the log of chip {self.log[0].record.ueid.hex()}"
            )
        self._started = self._clock.monotonic()
        lost = 0
        if self.log:
            self._take_up(self.log)
        if head is not None and head.seq >= self._seq:
            lost = head.seq + 1 - self._seq
            self._seq, self._previous = head.seq + 1, head.digest
        if self._seq == 0:
            self._append(self.settings.genesis)
        elif (new := self.settings.firmware) != self._firmware:
            self.update_firmware(new.digest, new.svn)
        self._boots += 1
        self._boot_seed = secrets.token_bytes(16)
        self._append(Boot(self._boot_seed, cut, lost))
        if self._collector is not None:
            held = self.directory.receipts()
            self.pending = [logged for logged in self.log if logged.record.seq not in held]
        self._rearm()

    def stop(self) -> None:
        """Let another process open the log."""
        self.directory.close()

    def _take_up(self, log: list[LoggedRecord]) -> None:
        last = log[-1].record
        self._seq, self._previous = last.seq + 1, log[-1].digest
        self._boots, self._active_before = last.clocks.boots, last.clocks.active
        self._firmware = last.firmware
        for logged in log:
            match logged.record.event:
                case Genesis(owner=owner) | OwnerChange(after=owner):
                    self._owner = owner
                case LoggedPrecommit(digest=digest):
                    self._run = digest
                case FirmwareUpdate(digest=digest, svn=svn) if logged is log[-1]:
                    self._firmware = Firmware(digest, svn, last.firmware.debug)
                case _:
                    pass

    # -- time --------------------------------------------------------------------------------

    def nap(self) -> float:
        """Return the seconds after which to poll again; the same whether or not a snapshot is near."""
        return NAP

    def poll(self) -> LoggedRecord | None:
        """Take a snapshot if its time has come; deliver what a collector has not acknowledged yet."""
        if self.pending and self._collector is not None:
            self._deliver()
        if self._active() < self._next_at or self.is_full:
            return None
        return self.snapshot()

    def _active(self) -> int:
        return self._active_before + self._clock.monotonic() - self._started

    def _rearm(self) -> None:
        self._next_at = self._active() + self._draw(self.settings.rate / 1000.0) * DAY_MS

    # -- events ------------------------------------------------------------------------------

    def snapshot(self) -> LoggedRecord:
        """Hold the program still, hash its memory, log it, and draw the next waiting time.

        In remote mode the program goes on when the collector has acknowledged, or after ``hold_seconds``.

        Raises:
            StoreError: the disk refused; the program goes on all the same.
        """
        stall = Stall()
        started = time.perf_counter()
        salt = secrets.token_bytes(SALT_BYTES)
        waits = self._collector is not None or self.settings.hash_frozen
        logged: LoggedRecord | None = None
        with self.probe.frozen(copy=not waits) as seen:
            if waits:
                logged = self._log_memory(seen, salt, stall)
                if self._collector is not None:
                    self._deliver_within(self.settings.hold_seconds)
        stall.frozen = time.perf_counter() - started
        if logged is None:
            logged = self._log_memory(seen, salt, stall)
        stall.total = time.perf_counter() - started
        self.stalls.append(stall)
        self._acknowledge()
        self._drop_old_shards()
        self._rearm()
        return logged

    def precommit(self, digest: bytes) -> LoggedRecord:
        """Log a run's pre-commitment; snapshots name it from now on."""
        logged = self._append(LoggedPrecommit(digest))
        self._run = digest
        return logged

    def update_firmware(self, digest: bytes, svn: int) -> LoggedRecord:
        """Log that other firmware runs from the next record on.

        Raises:
            ProtocolViolation: its security version is below the present one (anti-rollback).
        """
        if svn < self._firmware.svn:
            raise ProtocolViolation(
                f"firmware: security version {svn} is below {self._firmware.svn}; no way back"
            )
        logged = self._append(FirmwareUpdate(digest, svn))
        self._firmware = Firmware(digest, svn, self._firmware.debug)
        return logged

    def change_owner(self, after: bytes) -> LoggedRecord:
        """Log that the chip belongs to the holder of another key."""
        logged = self._append(OwnerChange(self._owner, after))
        self._owner = after
        return logged

    def self_test(self) -> LoggedRecord:
        """Hash known bytes and log whether the answer was the known one."""
        found = hashlib.sha256(b"abc").digest()
        known = bytes.fromhex(
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        )  # FIPS 180-4
        return self._append(SelfTest(found == known, found))

    def attest(self, nonce: bytes) -> bytes:
        """Return a signed statement of the log's head for a fresh ``nonce`` (spec/chip-log.md 6).

        Raises:
            InvalidInput: the nonce has not 8 to 64 bytes.
        """
        uptime = self._clock.monotonic() - self._started
        agent = self.settings.genesis.agent
        return attest_head(self.log[-1], nonce, self._boot_seed, agent, self._signer, uptime=uptime)

    # -- writing -----------------------------------------------------------------------------

    def _append(self, event: Event) -> LoggedRecord:
        # The last place is for a snapshot that says the store is full.
        places = self.settings.capacity - (not isinstance(event, Snapshot))
        if len(self.log) >= places or self.is_full:
            raise StoreError(f"{self.directory.log_path}: {len(self.log)} records fill the chip's store")
        active = self._active()
        record = Record(
            seq=self._seq,
            previous=self._previous,
            ueid=self.settings.ueid,
            firmware=self._firmware,
            clocks=Clocks(self._boots, active - self._active_before, active, self._clock.wall()),
            rate=self.settings.rate,
            event=event,
        )
        logged = sign_record(record, self._signer)
        self.directory.append(logged.signed, record.seq, logged.digest)
        self.log.append(logged)
        self._seq, self._previous = record.seq + 1, logged.digest
        if self._collector is not None:
            self.pending.append(logged)
        return logged

    def _log_memory(self, seen: Observation, salt: bytes, stall: Stall) -> LoggedRecord:
        readable = True
        kept: SnapshotOpening | None = None

        def hashed(each: Callable[[bytes | memoryview], object] | None) -> SnapshotOpening:
            nonlocal readable
            settings = self.settings
            found, readable = hash_memory(
                seen, page_size=settings.page_size, salt=salt, ueid=settings.ueid, seq=self._seq,
                each=each, pool=self._pool,
            )  # fmt: skip
            return found

        def keep(file: BinaryIO) -> bytes:
            nonlocal kept
            kept = hashed(file.write)
            return kept.encode()

        if self.settings.retention_days > 0:
            self.directory.write_shard(self._seq, keep)
        opening = kept or hashed(None)
        stall.hashed = opening.size
        last_place = len(self.log) + 1 >= self.settings.capacity
        wall, before = self._clock.wall(), self.log[-1].record.clocks.wall
        flags = (
            TORN * seen.torn
            | QUIESCE_TIMEOUT * seen.timed_out
            | UNREADABLE * (not readable)
            | STORAGE_FULL * last_place
            | CLOCK_UNCERTAIN * (wall is not None and before is not None and wall < before)
            | UNACKNOWLEDGED * bool(self.pending and self._has_waited)
        )
        snapshot = Snapshot(
            self.settings.page_size, len(opening.leaves), opening.size, opening.root(), opening.layout_digest(),
            self._run, flags,
        )  # fmt: skip
        logged = self._append(snapshot)
        self.is_full = last_place
        return logged

    def _drop_old_shards(self) -> None:
        now = self._clock.wall()
        if now is None:
            return
        oldest = now - self.settings.retention_days * DAY_MS
        walls = {logged.record.seq: logged.record.clocks.wall for logged in self.log}
        for seq in self.directory.shards():
            wall = walls.get(seq)
            if wall is not None and wall < oldest:
                self.directory.drop_shard(seq)

    # -- remote mode -------------------------------------------------------------------------

    def _deliver_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deliver()
        while self.pending and time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
            self._deliver()

    def _deliver(self) -> None:
        """Send what is pending and keep the receipts; an unreachable collector leaves it pending."""
        assert self._collector is not None
        try:
            while self.pending:
                batch = self.pending[:BATCH]
                receipts = self._collector.submit([logged.signed for logged in batch])
                if len(receipts) != len(batch):
                    raise ProtocolViolation(
                        f"collector: gave {len(receipts)} receipts for {len(batch)} records"
                    )
                for logged, receipt in zip(batch, receipts, strict=True):
                    if self._check_receipt is not None:
                        self._check_receipt(receipt, logged)
                    self.directory.write_receipt(logged.record.seq, receipt)
                    if isinstance(logged.record.event, Snapshot):
                        self._unlogged.append(
                            Acknowledgement(logged.record.seq, hashlib.sha256(receipt).digest())
                        )
                self.pending = self.pending[len(batch) :]
            self._has_waited = False
        except StoreError:
            self._has_waited = True

    def _acknowledge(self) -> None:
        """Log the receipts that came; the record of it travels with the next delivery."""
        waiting, self._unlogged = self._unlogged, []
        for event in waiting:
            if not self.is_full and len(self.log) + 1 < self.settings.capacity:
                self._append(event)


def boot_log(directory: ChipDirectory, key: PublicKey) -> list[LoggedRecord]:
    """Return the records in a chip's directory, whoever writes them.

    Raises:
        InvalidInput, Mismatch, StoreError: it is not this key's log, or damaged.
    """
    return [parse_record(f, key, what=f"record at {at}") for at, f in enumerate(directory.frames())]
