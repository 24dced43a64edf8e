"""Chip logs: honest ones pass, and no single change of one goes unnoticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead, LogLimits, read_log, verify_log
from tallystick.fleet.agent.chip_record import (
    DAY_MS,
    NO_RECORD,
    TORN,
    Boot,
    Clocks,
    Event,
    Firmware,
    FirmwareUpdate,
    Genesis,
    LoggedPrecommit,
    LoggedRecord,
    Record,
    Snapshot,
    parse_record,
    sign_record,
)
from tallystick.fleet.sampling.coverage import deficit_p_value
from tallystick.signing.keys import ed25519_key, generate_key

KEY = ed25519_key(b"\7" * 32)
UEID = b"\1" + bytes(16)
FIRMWARE = Firmware(bytes(32), 1)
GENESIS = Genesis("maker", "model", "simulated", bytes(32), "local")
SNAPSHOT = Snapshot(4096, 3, 10000, bytes(32), bytes(32))


def write(events: list[tuple[Event, float]], rate: int = 1000) -> list[LoggedRecord]:
    """A log whose events come so many days after each other."""
    log: list[LoggedRecord] = []
    boots, up, active, wall, firmware = 0, 0, 0, 10**12, FIRMWARE
    for event, days in [(GENESIS, 0.0), *events]:
        step = int(days * DAY_MS)
        wall, active, up = wall + step, active + step, up + step
        if isinstance(event, Boot):
            boots, up = boots + 1, 0
        previous = log[-1].digest if log else NO_RECORD
        record = Record(len(log), previous, UEID, firmware, Clocks(boots, up, active, wall), rate, event)
        log.append(sign_record(record, KEY))
        if isinstance(event, FirmwareUpdate):
            firmware = Firmware(event.digest, event.svn)
    return log


def honest(days: int = 30, seed: int = 1) -> list[LoggedRecord]:
    draw = random.Random(seed)
    events: list[tuple[Event, float]] = [(Boot(bytes(16)), 0.0), (LoggedPrecommit(b"\2" * 32), 0.0)]
    at = 0.0
    while (at := at + (gap := draw.expovariate(1.0))) < days:
        events.append((replace(SNAPSHOT, root=draw.randbytes(32), run=b"\2" * 32), gap))
    return write(events)


def rules(log: list[LoggedRecord], **more: object) -> set[int]:
    return {finding.rule for finding in verify_log(log, **more)}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_log_has_no_findings(seed: int) -> None:
    log = honest(seed=seed)
    assert verify_log(log, known=[ChipHead(log[-1].record.seq, log[-1].digest)]) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_record_can_be_removed_repeated_or_moved(data: st.DataObject) -> None:
    log = honest(days=12)
    at = data.draw(st.integers(0, len(log) - 1))
    known = [ChipHead(log[-1].record.seq, log[-1].digest)]
    assert rules(log[:at] + log[at + 1 :], known=known) & {3, 5, 11}
    assert rules([*log[: at + 1], log[at], *log[at + 1 :]], known=known) & {5}
    to = data.draw(st.integers(0, len(log) - 1))
    if to != at:
        moved = log[:at] + log[at + 1 :]
        moved.insert(to, log[at])
        assert rules(moved, known=known) & {3, 5}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_bit_of_a_record_can_be_turned(data: st.DataObject) -> None:
    signed = honest(days=3)[1].signed
    bit = data.draw(st.integers(0, 8 * len(signed) - 1))
    turned = bytearray(signed)
    turned[bit // 8] ^= 1 << bit % 8
    with pytest.raises((InvalidInput, Mismatch)):
        parse_record(bytes(turned), KEY.public_key)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_other_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_record(b"\xd2\x84" + data, KEY.public_key)


def test_a_truncated_log_is_noticed_by_whoever_knows_a_later_record() -> None:
    log = honest()
    assert rules(log[:-3]) == set()  # nothing inside shows it: this is what known heads are for
    assert rules(log[:-3], known=[ChipHead(log[-1].record.seq, log[-1].digest)]) == {11}
    assert rules(log[:-3], others=[log]) == {11}


def test_a_fork_and_a_rollback_are_noticed_by_whoever_saw_the_other_branch() -> None:
    log = honest()
    other = write([(Boot(bytes(16)), 0.0)] + [(SNAPSHOT, 1.0)] * 30)
    assert 12 in rules(other, others=[log])
    assert 12 in rules(other, known=[ChipHead(5, log[5].digest)])


def test_a_record_rewritten_by_the_key_holder_breaks_the_chain_after_it() -> None:
    log = honest()
    changed = sign_record(replace(log[4].record, event=SNAPSHOT), KEY)
    assert 6 in rules([*log[:4], changed, *log[5:]])


def test_another_chips_key_signs_nothing_here() -> None:
    log = honest()
    forged = sign_record(log[3].record, generate_key())
    records, findings = read_log([r.signed for r in [*log[:3], forged, *log[4:]]], KEY.public_key)
    assert [f.rule for f in findings] == [2]
    assert 5 in rules(records)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: replace(r, ueid=b"\2" * 17), 4),
        (lambda r: replace(r, seq=r.seq + 1), 5),
        (lambda r: replace(r, clocks=replace(r.clocks, boots=2)), 7),
        (lambda r: replace(r, clocks=replace(r.clocks, uptime=0, wall=None)), 8),
        (lambda r: replace(r, clocks=replace(r.clocks, active=0)), 8),
        (lambda r: replace(r, clocks=replace(r.clocks, wall=0)), 9),
        (lambda r: replace(r, clocks=replace(r.clocks, uptime=r.clocks.uptime + 10**9)), 9),
        (lambda r: replace(r, firmware=Firmware(bytes(32), 0)), 10),
        (lambda r: replace(r, firmware=Firmware(b"\1" * 32, 1)), 10),
        (lambda r: replace(r, firmware=Firmware(bytes(32), 1, True)), 10),
        (lambda r: replace(r, event=replace(SNAPSHOT, run=b"\3" * 32)), 18),
    ],
)
def test_a_wrong_field_has_its_rule(change: Callable[[Record], Record], rule: int) -> None:
    log = honest()[:7]
    last = sign_record(change(log[-1].record), KEY)
    assert rule in rules([*log[:-1], last])
    assert rules(log) == set()


def test_suppressed_snapshots_show_as_a_deficit() -> None:
    events: list[tuple[Event, float]] = [(Boot(bytes(16)), 0.0)] + [(SNAPSHOT, 6.0)] * 5  # one in six days
    assert rules(write(events)) == {16}
    assert rules(write(events, rate=167)) == set()
    assert rules(write(events, rate=167), limits=LogLimits(rate=1000)) == {15, 16}


@pytest.mark.parametrize(("torn", "taken"), [(14, 14), (19, 20), (69, 100)])
def test_more_torn_snapshots_than_chance_explains_are_a_finding_and_no_fewer(torn: int, taken: int) -> None:
    def log(torn: int) -> list[LoggedRecord]:
        events = [(replace(SNAPSHOT, flags=TORN if number < torn else 0), 1.0) for number in range(taken)]
        return write([(Boot(bytes(16)), 0.0), *events])

    assert rules(log(torn)) == {17}
    assert rules(log(torn - 1)) == set()
    assert rules(log(torn), limits=LogLimits(torn_share=0.8)) == set()


def test_a_chip_with_few_snapshots_is_not_accused_of_torn_ones() -> None:
    """Six of ten are torn once in 150 times where each is with probability 0.2."""
    events = [(replace(SNAPSHOT, flags=TORN), 1.0)] * 10
    assert rules(write([(Boot(bytes(16)), 0.0), *events])) == set()


def test_a_reboot_storm_is_noticed_and_a_few_reboots_are_not() -> None:
    boots: list[tuple[Event, float]] = [(Boot(bytes(16)), 0.01)]
    assert 13 in rules(write(boots * 30))
    assert rules(write(boots * 3)) == set()


def test_the_firmware_may_change_where_the_log_announces_it() -> None:
    new = FirmwareUpdate(b"\1" * 32, 2)
    assert rules(write([(Boot(bytes(16)), 0.0), (new, 0.1), (Boot(bytes(16)), 0.1)])) == set()


def test_honest_chips_are_accused_of_suppression_as_rarely_as_promised() -> None:
    draw = random.Random(3)
    accused = 0
    limits = LogLimits(false_alarm=0.01)
    for _ in range(4000):
        count, total = 0, 0.0
        while (total := total + draw.expovariate(0.1)) < 90:
            count += 1
        accused += deficit_p_value(count, 9.0) < limits.false_alarm
    assert accused / 4000 < 0.01 + 3 * (0.01 * 0.99 / 4000) ** 0.5


def test_the_poisson_sum_is_right() -> None:
    assert deficit_p_value(0, 2.0) == pytest.approx(0.1353352832366127)
    assert deficit_p_value(3, 2.0) == pytest.approx(0.857123460498547)
    assert deficit_p_value(0, 800.0) < 1e-300
