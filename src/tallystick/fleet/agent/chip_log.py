"""The numbered findings on a chip's log that somebody hands over (spec/chip-log.md 4).

    records, findings = read_log(frames, key)
    findings += verify_log(records, known=(ChipHead(41, digest),))

Nothing here reads a file or a clock. ``NumberedFinding.severity`` says whether the log can be an honest chip's; what
becomes of that is the reader's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tallystick.commit.codec import Document
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_record import (
    CLOCK_UNCERTAIN,
    DAY_MS,
    STORAGE_FULL,
    TORN,
    Acknowledgement,
    Boot,
    FirmwareUpdate,
    Genesis,
    LoggedPrecommit,
    LoggedRecord,
    Record,
    SelfTest,
    Snapshot,
    parse_record,
)
from tallystick.fleet.sampling.coverage import LARGEST_MEAN, at_most, deficit_p_value
from tallystick.signing.keys import PublicKey

Severity = Literal["violation", "unknown", "note"]


@dataclass(frozen=True)
class ChipHead:
    """A place in a chip's log that somebody knows from elsewhere: a receipt, an inspection, an attestation."""

    seq: int
    digest: bytes
    source: str = "elsewhere"


@dataclass(frozen=True)
class NumberedFinding(Document, what="finding"):
    """Something that an honest chip's log does not hold.

    Attributes:
        rule: number of the rule in spec/chip-log.md section 4.
        name: the rule in a word or two.
        seq: the record's counter, or None.
        text: what, with both values.
        severity: ``violation`` (no honest chip writes this), ``unknown`` (cannot be told; never a pass), ``note``.
    """

    rule: int
    name: str
    seq: int | None
    text: str
    severity: Severity = "violation"


@dataclass(frozen=True)
class LogLimits:
    """What a reader of logs tolerates.

    Attributes:
        boots_per_day: reboots on average, above which a log is a reboot storm.
        fewest_boots: below this many boots there is no storm.
        false_alarm: probability with which an honest chip may be accused of too few snapshots, or of too many torn ones.
        rate: the least rate allowed, thousandths per day; None for whatever the log states.
        drift: share by which a chip's own clocks may differ from the wall clock.
        slack: milliseconds by which they may differ besides.
        torn_share: of snapshots that may be torn.
        idle_share: of wall time, above which time without power is a finding of its own.
    """

    boots_per_day: float = 4.0
    fewest_boots: int = 6
    false_alarm: float = 1e-4
    rate: int | None = None
    drift: float = 0.01
    slack: int = 120_000
    torn_share: float = 0.5
    idle_share: float = 1.0


def read_log(frames: Iterable[bytes], key: PublicKey) -> tuple[list[LoggedRecord], list[NumberedFinding]]:
    """Return the records that ``key`` signed, in the order given, and a finding for each frame that is none."""
    records: list[LoggedRecord] = []
    findings: list[NumberedFinding] = []
    for position, data in enumerate(frames):
        try:
            records.append(parse_record(data, key, what=f"frame {position}"))
        except InvalidInput as problem:
            findings.append(NumberedFinding(1, "malformed record", None, str(problem)))
        except Mismatch as problem:
            findings.append(NumberedFinding(2, "wrong signature", None, str(problem)))
    return records, findings


def verify_log(
    records: Sequence[LoggedRecord],
    *,
    known: Iterable[ChipHead] = (),
    others: Iterable[Sequence[LoggedRecord]] = (),
    limits: LogLimits | None = None,
) -> list[NumberedFinding]:
    """Return everything in ``records`` that an honest chip's log would not hold, in the order of the rules.

    ``known`` are places known from elsewhere, ``others`` copies of the log handed over before. An empty list says
    that the log is whole and consistent up to its last record; that there is no later one only a fresh
    attestation or a receipt shows (``known``).
    """
    limits = limits or LogLimits()
    if not records:
        return [NumberedFinding(3, "no log", None, "the log holds no record", "unknown")]
    found: list[NumberedFinding] = []
    found += _check_start(records[0])
    for before, after in itertools.pairwise(records):
        found += _check_link(before, after, limits)
    found += _check_known(records, known, others)
    found += _check_boots(records, limits)
    found += _check_snapshots(records, limits)
    found += _check_acknowledgements(records)
    return sorted(found, key=lambda finding: finding.rule)


def snapshots_of(records: Iterable[LoggedRecord]) -> list[tuple[LoggedRecord, Snapshot]]:
    """Return the snapshots of a log in order, each with its record."""
    return [(r, r.record.event) for r in records if isinstance(r.record.event, Snapshot)]


def active_days(records: Sequence[LoggedRecord]) -> float:
    """Return the days in use between the first and last record."""
    return (records[-1].record.clocks.active - records[0].record.clocks.active) / DAY_MS if records else 0.0


# -- the rules, spec/chip-log.md 4 ------------------------------------------------------------------


def _check_start(first: LoggedRecord) -> list[NumberedFinding]:
    if first.record.seq == 0:
        return []
    text = f"the log begins with record {first.record.seq}; records 0 to {first.record.seq - 1} are missing"
    return [NumberedFinding(3, "missing beginning", first.record.seq, text)]


def _check_link(before: LoggedRecord, after: LoggedRecord, limits: LogLimits) -> list[NumberedFinding]:
    a, b = before.record, after.record
    found: list[NumberedFinding] = []

    def note(rule: int, name: str, text: str, severity: Severity = "violation") -> None:
        found.append(NumberedFinding(rule, name, b.seq, text, severity))

    if b.ueid != a.ueid:
        note(4, "another chip", f"record {b.seq} is of chip {b.ueid.hex()}, the one before of {a.ueid.hex()}")
    if b.seq != a.seq + 1:
        how = "a gap" if b.seq > a.seq + 1 else "a repetition" if b.seq == a.seq else "a step back"
        note(5, "counter", f"after counter {a.seq} comes {b.seq}: {how}")
    elif b.previous != before.digest:
        note(
            6,
            "broken chain",
            f"record {b.seq} names {b.previous.hex()[:16]}.., the one before is {before.digest.hex()[:16]}..",
        )
    is_boot = isinstance(b.event, Boot)
    expected = a.clocks.boots + is_boot
    if b.clocks.boots != expected:
        note(
            7,
            "boot count",
            f"is {b.clocks.boots} in record {b.seq}, must be {expected} after {a.clocks.boots}",
        )
    if not is_boot and b.clocks.uptime < a.clocks.uptime:
        note(8, "uptime went back", f"from {a.clocks.uptime} to {b.clocks.uptime} ms without a boot")
    if b.clocks.active < a.clocks.active:
        note(8, "active time went back", f"from {a.clocks.active} to {b.clocks.active} ms")
    found += _check_clock(a, b, limits)
    found += _check_firmware(a, b)
    if isinstance(b.event, Boot) and b.event.lost:
        note(
            5,
            "records lost",
            f"the chip itself says that {b.event.lost} records before record {b.seq} are lost",
        )
    return found


def _check_clock(a: Record, b: Record, limits: LogLimits) -> list[NumberedFinding]:
    if a.clocks.wall is None or b.clocks.wall is None:
        return []
    wall = b.clocks.wall - a.clocks.wall
    uncertain = isinstance(b.event, Snapshot) and bool(b.event.flags & CLOCK_UNCERTAIN)
    severity: Severity = "unknown" if uncertain else "violation"
    if wall < -limits.slack:
        return [
            NumberedFinding(9, "wall clock went back", b.seq, f"by {-wall} ms since record {a.seq}", severity)
        ]
    own = b.clocks.uptime - (0 if isinstance(b.event, Boot) else a.clocks.uptime)
    allowed = wall * (1 + limits.drift) + limits.slack
    if own < 0:
        return []  # rule 8 speaks of it
    if own > allowed:
        return [
            NumberedFinding(9, "clocks", b.seq, f"{own} ms of uptime in {wall} ms of wall clock", severity)
        ]
    if b.clocks.active - a.clocks.active > allowed:
        used = b.clocks.active - a.clocks.active
        return [
            NumberedFinding(
                9, "clocks", b.seq, f"{used} ms of active time in {wall} ms of wall clock", severity
            )
        ]
    same_boot = not isinstance(b.event, Boot)
    if same_boot and wall > own * (1 + limits.drift) + limits.slack:
        return [
            NumberedFinding(
                9, "clocks", b.seq, f"{wall} ms of wall clock in {own} ms of uptime without a boot", severity
            )
        ]
    return []


def _check_firmware(a: Record, b: Record) -> list[NumberedFinding]:
    found: list[NumberedFinding] = []
    announced = a.event if isinstance(a.event, FirmwareUpdate) else None
    if b.firmware.svn < a.firmware.svn:
        text = f"security version fell from {a.firmware.svn} to {b.firmware.svn}"
        found.append(NumberedFinding(10, "firmware rollback", b.seq, text))
    expected = (
        (announced.digest, announced.svn) if announced is not None else (a.firmware.digest, a.firmware.svn)
    )
    if (b.firmware.digest, b.firmware.svn) != expected:
        text = (
            f"is {b.firmware.digest.hex()[:16]}.. version {b.firmware.svn}, "
            f"must be {expected[0].hex()[:16]}.. version {expected[1]}"
        )
        found.append(NumberedFinding(10, "firmware", b.seq, text))
    if b.firmware.debug and not a.firmware.debug:
        found.append(NumberedFinding(10, "debugging opened", b.seq, "an open debugger can write any record"))
    return found


def _check_known(
    records: Sequence[LoggedRecord], known: Iterable[ChipHead], others: Iterable[Sequence[LoggedRecord]]
) -> list[NumberedFinding]:
    own = {logged.record.seq: logged.digest for logged in records}
    last = records[-1].record.seq
    found: list[NumberedFinding] = []
    for head in known:
        if head.seq > last:
            text = f"ends at record {last}, {head.source} knows record {head.seq}"
            found.append(NumberedFinding(11, "truncated", head.seq, text))
        elif own.get(head.seq, head.digest) != head.digest:
            text = f"record {head.seq} is {own[head.seq].hex()[:16]}.., {head.source} knows {head.digest.hex()[:16]}.."
            found.append(NumberedFinding(12, "fork", head.seq, text))
    for other in others:
        for logged in other:
            seq = logged.record.seq
            if seq > last:
                found.append(
                    NumberedFinding(
                        11, "truncated", seq, f"ends at record {last}, an earlier copy holds record {seq}"
                    )
                )
                break
            if own.get(seq, logged.digest) != logged.digest:
                text = f"record {seq} has two versions, both signed by the chip: a fork or a rollback"
                found.append(NumberedFinding(12, "fork", seq, text))
                break
    return found


def _check_boots(records: Sequence[LoggedRecord], limits: LogLimits) -> list[NumberedFinding]:
    boots = sum(isinstance(logged.record.event, Boot) for logged in records)
    first, last = records[0].record.clocks, records[-1].record.clocks
    spanned = (
        (last.wall - first.wall)
        if last.wall is not None and first.wall is not None
        else last.active - first.active
    )
    days = max(spanned / DAY_MS, 1.0)
    found: list[NumberedFinding] = []
    if boots >= limits.fewest_boots and boots / days > limits.boots_per_day:
        text = f"{boots} boots in {days:.1f} days; {limits.boots_per_day:g} a day are tolerated"
        found.append(NumberedFinding(13, "reboot storm", None, text))
    if last.wall is not None and first.wall is not None and spanned > 0:
        idle = 1.0 - (last.active - first.active) / spanned
        if idle > limits.idle_share:
            text = f"{100 * idle:.1f} % of the wall time was without a live agent; {100 * limits.idle_share:g} % is tolerated"
            found.append(NumberedFinding(14, "coverage", None, text))
    return found


def _check_snapshots(records: Sequence[LoggedRecord], limits: LogLimits) -> list[NumberedFinding]:
    found: list[NumberedFinding] = []
    expected = 0.0
    least = limits.rate
    for before, after in itertools.pairwise(records):
        used = max(after.record.clocks.active - before.record.clocks.active, 0) / DAY_MS
        expected += used * (before.record.rate if least is None else max(before.record.rate, least)) / 1000.0
    for before, after in zip((None, *records[:-1]), records, strict=True):
        rate = after.record.rate
        if least is not None and rate < least and (before is None or before.record.rate != rate):
            text = f"is {rate / 1000:g} a day from record {after.record.seq} on, {least / 1000:g} is demanded"
            found.append(NumberedFinding(15, "snapshot rate", after.record.seq, text))
    taken = snapshots_of(records)
    # More hours of use than any chip has make no log more suspect than the largest mean does.
    chance = deficit_p_value(len(taken), min(expected, LARGEST_MEAN))
    if chance < limits.false_alarm:
        text = f"{len(taken)} snapshots where {expected:.1f} were to be expected; chance {chance:.1e}"
        found.append(NumberedFinding(16, "suppressed snapshots", None, text))
    torn = sum(bool(event.flags & TORN) for _, event in taken)
    chance = at_most(len(taken) - torn, len(taken), 1.0 - limits.torn_share)
    if torn and chance < limits.false_alarm:
        share = f"{100 * limits.torn_share:g} %"
        text = f"{torn} of {len(taken)} snapshots are torn; {share} are tolerated, chance of so many {chance:.1e}"
        found.append(NumberedFinding(17, "torn snapshots", None, text))
    committed: set[bytes] = set()
    for logged in records:
        event = logged.record.event
        if isinstance(event, LoggedPrecommit):
            committed.add(event.digest)
        elif isinstance(event, Snapshot) and event.run and event.run not in committed:
            text = f"names run {event.run.hex()[:16]}.., which no record before it commits to"
            found.append(NumberedFinding(18, "pre-commitment", logged.record.seq, text))
        elif isinstance(event, SelfTest) and not event.passed:
            found.append(NumberedFinding(19, "self-test", logged.record.seq, "the chip failed its own test"))
    full = next((r for r, event in taken if event.flags & STORAGE_FULL), None)
    if full is not None:
        found.append(
            NumberedFinding(20, "storage full", full.record.seq, "nothing is logged after this", "unknown")
        )
    return found


def _check_acknowledgements(records: Sequence[LoggedRecord]) -> list[NumberedFinding]:
    genesis = records[0].record.event
    acknowledged = {r.record.event.seq for r in records if isinstance(r.record.event, Acknowledgement)}
    found = [
        NumberedFinding(
            21,
            "acknowledgement",
            r.record.seq,
            f"acknowledges record {r.record.event.seq}, which comes later",
        )
        for r in records
        if isinstance(r.record.event, Acknowledgement) and r.record.event.seq >= r.record.seq
    ]
    if not isinstance(genesis, Genesis) or genesis.mode != "remote":
        return found
    missing = [r.record.seq for r, _ in snapshots_of(records) if r.record.seq not in acknowledged]
    # The last snapshot's receipt may be on its way.
    missing = [seq for seq in missing if seq < records[-1].record.seq]
    if missing:
        text = f"snapshots {', '.join(map(str, missing[:5]))}{', ..' if len(missing) > 5 else ''} were never acknowledged"
        found.append(NumberedFinding(21, "unacknowledged", missing[0], text, "unknown"))
    return found
