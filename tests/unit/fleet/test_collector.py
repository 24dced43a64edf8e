"""The collector: order, outage, replay, forks and lies; and what a log is worth."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation, StoreError
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings
from tallystick.fleet.agent.chip_log import ChipHead, verify_log
from tallystick.fleet.agent.chip_record import UNACKNOWLEDGED, Firmware, Genesis, Snapshot, sign_record
from tallystick.fleet.agent.collector import Collector, find_equivocation, parse_receipt, verify_receipt
from tallystick.fleet.agent.memory import Region
from tallystick.fleet.attestation.assurance import (
    TOKEN_LIMIT,
    CheckedEvidence,
    derive_assurance,
    parse_attestation,
)
from tallystick.fleet.attestation.tpm_verification import TpmFacts
from tallystick.integrations.chip_http import HttpCollector, serve_collector
from tallystick.signing.cose import EAT, encode_cbor, open_sign1, parse_cbor, sign1
from tallystick.signing.keys import ed25519_key
from tallystick.store.chips import ChipDirectory
from tallystick.testing.held_memory import HeldMemory

CHIP, OTHER = ed25519_key(b"\5" * 32), ed25519_key(b"\6" * 32)
COLLECTOR, STRANGER = ed25519_key(b"\7" * 32), ed25519_key(b"\1" * 32)
UEID = b"\1" + bytes(16)
REMOTE = ChipSettings(
    UEID,
    Firmware(bytes(32), 1),
    Genesis("maker", "model", "software", bytes(32), "remote", bytes.fromhex(COLLECTOR.public_key.key_id)),
    page_size=64,
    hold_seconds=0.0,
)
LOCAL = replace(REMOTE, genesis=Genesis("maker", "model", "software", bytes(32), "local"))


class Line:
    """The way to a collector, which can be cut, also after the records arrived."""

    def __init__(self, collector: Collector) -> None:
        self.collector, self.is_cut, self.loses_answers = collector, False, False

    def submit(self, frames: list[bytes]) -> list[bytes]:
        if self.is_cut:
            raise StoreError("out of reach")
        receipts = self.collector.submit(frames)
        if self.loses_answers:
            raise StoreError("the answer was lost")
        return receipts


Made = Callable[..., ChipAgent]


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    made = Collector(tmp_path / "collector", COLLECTOR, {UEID: CHIP.public_key})
    yield made
    made.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    agents: list[ChipAgent] = []

    def made(name: str, line: Line | None, settings: ChipSettings = REMOTE) -> ChipAgent:
        probe = HeldMemory(lambda: [(Region("w", "U8", "weights", 100), bytes(100))])
        agent = ChipAgent(
            ChipDirectory(tmp_path / name), CHIP, probe, settings, collector=line,
            check_receipt=functools.partial(verify_receipt, key=COLLECTOR.public_key),
        )  # fmt: skip
        agents.append(agent)
        agent.start()
        return agent

    yield made
    for agent in agents:
        agent.stop()


def test_every_snapshot_is_acknowledged_before_the_program_goes_on(collector: Collector, make: Made) -> None:
    line = Line(collector)
    agent = make("chip", line)
    inside: list[int] = []
    inner = agent.probe.frozen

    class Watched:
        def frozen(self, *, copy: bool):
            from contextlib import contextmanager

            @contextmanager
            def held():
                with inner(copy=copy) as seen:
                    yield seen
                    inside.append(len(collector.log(UEID)))

            return held()

    agent.probe = Watched()
    seq = agent.snapshot().record.seq
    assert inside == [seq + 1]  # the collector had it while the program stood still
    agent.poll()
    assert [r.digest for r in collector.log(UEID)] == [r.digest for r in agent.log]
    assert verify_log(agent.log) == []


def test_an_outage_is_survived_and_said(collector: Collector, make: Made) -> None:
    line = Line(collector)
    agent = make("chip", line)
    agent.snapshot()
    line.is_cut = True
    agent.snapshot()
    second = agent.snapshot()
    assert isinstance(second.record.event, Snapshot)
    assert second.record.event.flags & UNACKNOWLEDGED
    assert {(f.rule, f.severity) for f in verify_log(agent.log)} == {(21, "unknown")}
    line.is_cut = False
    agent.poll()
    agent.snapshot()
    agent.poll()
    assert verify_log(agent.log) == []
    assert len(collector.log(UEID)) == len(agent.log)


def test_the_program_waits_for_the_collector_as_long_as_was_said(collector: Collector, make: Made) -> None:
    line = Line(collector)
    agent = make("chip", line, replace(REMOTE, hold_seconds=0.3))
    line.is_cut = True
    agent.snapshot()
    assert agent.stalls[-1].frozen >= 0.3
    line.is_cut = False
    patient = make("patient", line, replace(REMOTE, hold_seconds=60.0))
    patient.snapshot()
    assert patient.stalls[-1].frozen < 60.0, "an answer ends the waiting"


def test_a_lost_answer_is_asked_for_again(collector: Collector, make: Made) -> None:
    line = Line(collector)
    line.loses_answers = True
    agent = make("chip", line)
    agent.snapshot()
    assert agent.pending
    line.loses_answers = False
    agent.poll()
    assert not agent.pending
    assert len(collector.log(UEID)) == len(agent.log)


def test_a_restart_delivers_what_was_pending(collector: Collector, make: Made) -> None:
    line = Line(collector)
    line.is_cut = True
    agent = make("chip", line)
    agent.snapshot()
    agent.stop()
    line.is_cut = False
    again = make("chip", line)
    again.poll()
    assert [r.digest for r in collector.log(UEID)] == [r.digest for r in again.log]


def test_a_fork_is_refused_and_kept(collector: Collector, make: Made) -> None:
    agent = make("a", None, LOCAL)
    twin = make("b", None, LOCAL)
    collector.submit([r.signed for r in agent.log])
    with pytest.raises(ProtocolViolation, match="a fork"):
        collector.submit([r.signed for r in twin.log])
    (kept,) = collector.forks(UEID)
    assert {f.rule for f in verify_log(collector.log(UEID), others=[[kept]])} == {12}


def test_a_replay_is_answered_and_changes_nothing(collector: Collector, make: Made) -> None:
    agent = make("a", None, LOCAL)
    frames = [r.signed for r in agent.log]
    first = collector.submit(frames)
    again = collector.submit(frames)
    assert len(collector.log(UEID)) == len(frames)
    for one, two, logged in zip(first, again, agent.log, strict=True):
        assert (
            verify_receipt(one, logged, COLLECTOR.public_key).digest
            == parse_receipt(two, COLLECTOR.public_key).digest
        )


def test_a_gap_a_stranger_and_another_key_are_refused(collector: Collector, make: Made) -> None:
    agent = make("a", None, LOCAL)
    agent.snapshot()
    with pytest.raises(ProtocolViolation, match="record 0 is missing"):
        collector.submit([agent.log[2].signed])
    stranger = sign_record(replace(agent.log[0].record, ueid=b"\2" * 17), CHIP)
    with pytest.raises(InvalidInput, match="not registered"):
        collector.submit([stranger.signed])
    with pytest.raises(Mismatch):
        collector.submit([sign_record(agent.log[0].record, OTHER).signed])
    assert collector.log(UEID) == []


def test_a_collector_starts_again_where_it_was(tmp_path: Path, make: Made) -> None:
    agent = make("a", None, LOCAL)
    first = Collector(tmp_path / "c", COLLECTOR, {UEID: CHIP.public_key})
    first.submit([agent.log[0].signed])
    first.close()
    second = Collector(tmp_path / "c", COLLECTOR, {UEID: CHIP.public_key})
    second.submit([agent.log[1].signed])
    assert len(second.log(UEID)) == 2
    second.close()


def test_a_lying_collector_is_convicted_by_its_own_receipts(
    collector: Collector, tmp_path: Path, make: Made
) -> None:
    agent, twin = make("a", None, LOCAL), make("b", None, LOCAL)
    other = Collector(tmp_path / "other", COLLECTOR, {UEID: CHIP.public_key})  # the same key, another history
    signed = collector.submit([r.signed for r in agent.log]) + other.submit([r.signed for r in twin.log])
    other.close()
    receipts = [parse_receipt(data, COLLECTOR.public_key) for data in signed]
    assert {f.seq for f in find_equivocation(receipts)} == {0, 1}
    assert find_equivocation(receipts[:2]) == []


def test_a_chip_believes_no_other_collectors_receipts(tmp_path: Path, make: Made) -> None:
    false = Collector(tmp_path / "false", STRANGER, {UEID: CHIP.public_key})
    with pytest.raises(Mismatch, match="names key"):
        make("chip", Line(false)).snapshot()
    false.close()


def test_records_travel_over_http(collector: Collector, make: Made) -> None:
    server = serve_collector(collector, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        line = HttpCollector(f"http://127.0.0.1:{server.server_address[1]}", timeout=5.0)
        agent = make("chip", line)
        agent.snapshot()
        agent.poll()
        assert len(collector.log(UEID)) == len(agent.log)
        twin = make("twin", None, LOCAL)
        with pytest.raises(ProtocolViolation, match="a fork"):
            line.submit([r.signed for r in twin.log])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(StoreError, match="out of reach"):
        line.submit([agent.log[0].signed])


def quote_of(head: ChipHead) -> TpmFacts:
    """What a verified quote over a head would be."""
    return TpmFacts(head, ((0, bytes(32)),), (0,), 1, 1, 0, True, 1)


def test_a_software_agent_never_shows_more_than_its_evidence(make: Made) -> None:
    agent = make("chip", None, LOCAL)
    agent.snapshot()
    nonce = os.urandom(32)
    attested = parse_attestation(agent.attest(nonce), CHIP.public_key, nonce)
    log, findings = agent.log, verify_log(agent.log, known=[attested.head])
    assert findings == []

    def level(evidence: CheckedEvidence) -> int:
        return derive_assurance(log, findings, evidence).level

    assert level(CheckedEvidence()) == 0
    assert level(CheckedEvidence(known_key=True)) == 0
    assert level(CheckedEvidence(known_key=True, attestation=attested)) == 1
    assert level(CheckedEvidence(known_key=True, attestation=attested, quote=quote_of(attested.head))) == 2
    stale = quote_of(replace(attested.head, seq=attested.head.seq - 1))
    assert level(CheckedEvidence(known_key=True, attestation=attested, quote=stale)) == 1
    everything = CheckedEvidence(True, attested, quote_of(attested.head), True, True, True)
    assert level(everything) == 2  # it is software
    agent.snapshot()  # the log went on: that attestation is stale
    assert derive_assurance(agent.log, [], CheckedEvidence(True, attested)).level == 0


@pytest.mark.parametrize("claim", [261, 263, 267])
def test_a_claim_that_is_true_or_false_is_no_number(claim: int, make: Made) -> None:
    """To Python false is 0, the debug status of a locked chip."""
    nonce = bytes(16)
    token = make("chip", None, LOCAL).attest(nonce)
    payload = open_sign1(token, EAT, CHIP.public_key, what="token", limit=TOKEN_LIMIT).payload
    claims = parse_cbor(payload, what="token", limit=TOKEN_LIMIT)
    assert isinstance(claims, dict)
    parse_attestation(sign1(encode_cbor(claims), EAT, CHIP), CHIP.public_key, nonce)
    wrong = sign1(encode_cbor({**claims, claim: False}), EAT, CHIP)
    with pytest.raises(InvalidInput, match="missing or of another type"):
        parse_attestation(wrong, CHIP.public_key, nonce)


def test_only_inspected_firmware_reaches_the_top(make: Made) -> None:
    firmware = replace(LOCAL, genesis=replace(LOCAL.genesis, agent="firmware"))
    agent = make("chip", None, firmware)
    nonce = os.urandom(32)
    attested = parse_attestation(agent.attest(nonce), CHIP.public_key, nonce)
    assert derive_assurance(agent.log, [], CheckedEvidence(True, attested, endorsed=True)).level == 3
    assert (
        derive_assurance(agent.log, [], CheckedEvidence(True, attested, endorsed=True, inspected=True)).level
        == 3
    )
    assert derive_assurance(agent.log, [], CheckedEvidence(True, attested, None, True, True, True)).level == 4
    simulated = make("sim", None, replace(LOCAL, genesis=replace(LOCAL.genesis, agent="simulated")))
    attested = parse_attestation(simulated.attest(nonce), CHIP.public_key, nonce)
    everything = CheckedEvidence(True, attested, quote_of(attested.head), True, True, True)
    assert derive_assurance(simulated.log, [], everything).level == 0


def test_a_violation_in_the_log_leaves_nothing_of_its_worth(make: Made) -> None:
    agent = make("chip", None, LOCAL)
    nonce = os.urandom(32)
    attested = parse_attestation(agent.attest(nonce), CHIP.public_key, nonce)
    shortened = agent.log[1:]
    assert derive_assurance(shortened, verify_log(shortened), CheckedEvidence(True, attested)).level == 0
    with pytest.raises(Mismatch, match="asked was"):
        parse_attestation(agent.attest(nonce), CHIP.public_key, os.urandom(32))
