"""The chip agent: what it writes, that nothing is lost when it is killed, and that its times are memoryless."""

from __future__ import annotations

import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.errors import InvalidInput, ProtocolViolation, StoreError
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings
from tallystick.fleet.agent.chip_log import LogLimits, verify_log
from tallystick.fleet.agent.chip_record import (
    DAY_MS,
    STORAGE_FULL,
    TORN,
    Boot,
    Firmware,
    Genesis,
    LoggedRecord,
    SelfTest,
    Snapshot,
    parse_record,
)
from tallystick.fleet.agent.memory import Region, SnapshotOpening, verify_opening
from tallystick.fleet.agent.probes import (
    MANIFEST_FORMAT,
    ProcessMemory,
    SharedManifest,
    SharedMemory,
)
from tallystick.signing.cose import EAT, open_sign1, parse_cbor
from tallystick.signing.keys import ed25519_key
from tallystick.store.chips import ChipDirectory
from tallystick.testing.held_memory import HeldMemory

KEY = ed25519_key(b"\5" * 32)
SETTINGS = ChipSettings(
    ueid=b"\1" + bytes(16),
    firmware=Firmware(bytes(32), 1),
    genesis=Genesis("maker", "model", "simulated", bytes(32), "local"),
    rate=100,
    page_size=64,
)


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        return self.now

    def wall(self) -> int:
        return 10**12 + self.now


OPEN: list[ChipAgent] = []


@pytest.fixture(autouse=True)
def ended():
    yield
    while OPEN:
        OPEN.pop().stop()


def held(data: bytes = bytes(200)) -> HeldMemory:
    return HeldMemory(lambda: [(Region("model/weight", "U8", "weights", len(data)), data)])


def agent_at(path: Path, clock: Time, settings: ChipSettings = SETTINGS, **more: object) -> ChipAgent:
    agent = ChipAgent(ChipDirectory(path), KEY, held(), settings, clock=clock, **more)  # pyright: ignore[reportArgumentType]
    OPEN.append(agent)
    agent.start()
    return agent


def log_at(path: Path) -> list[LoggedRecord]:
    return [parse_record(frame, KEY.public_key) for frame in ChipDirectory(path).frames()]


def test_snapshots_fire_at_random_times_and_the_log_is_whole(tmp_path: Path) -> None:
    clock = Time()
    agent = agent_at(tmp_path, clock, draw=random.Random(1).expovariate)
    for _ in range(365):
        clock.now += DAY_MS
        agent.poll()
    taken = [logged for logged in agent.log if isinstance(logged.record.event, Snapshot)]
    assert 20 <= len(taken) <= 55  # 36.5 expected
    assert verify_log(agent.log) == []
    assert log_at(tmp_path) == agent.log


def test_a_shard_opens_its_snapshot_and_no_other(tmp_path: Path) -> None:
    agent = agent_at(tmp_path, Time())
    first, second = agent.snapshot(), agent.snapshot()
    directory = ChipDirectory(tmp_path)
    opening = SnapshotOpening.parse(directory.opening(first.record.seq))
    event = first.record.event
    assert isinstance(event, Snapshot)
    verify_opening(opening, root=event.root, layout=event.layout)
    assert directory.memory_path(first.record.seq).read_bytes() == bytes(200)
    other = second.record.event
    assert isinstance(other, Snapshot)
    assert other.root != event.root  # the same memory: the salt differs
    assert (tmp_path / "shards" / f"{first.record.seq:06d}" / "memory.bin").stat().st_mode & 0o077 == 0


def test_waiting_times_of_a_fleet_are_a_poisson_process(tmp_path: Path) -> None:
    """600 chip-years of real draws, restarted at random: counts have a Poisson's mean, variance and silent share."""
    mean, counts = 3.0, []
    agent = agent_at(tmp_path, Time())
    restarts = random.Random(2)
    for _ in range(600):
        active, count = 0.0, 0
        agent._started, agent._active_before = 0, 0
        clock: Time = agent._clock  # pyright: ignore[reportAssignmentType]
        clock.now = 0
        agent._rearm()
        while True:
            # a restart before the snapshot draws again, as start() does
            if restarts.random() < 0.5:
                clock.now = min(int(agent._next_at), clock.now + int(restarts.random() * 10 * DAY_MS))
                if clock.now < int(agent._next_at):
                    agent._rearm()
                    if clock.now > 30 * DAY_MS:
                        break
                    continue
            active = agent._next_at
            if active > 30 * DAY_MS:
                break
            clock.now = int(active)
            count += 1
            agent._rearm()
        counts.append(count)
    n = len(counts)
    average = sum(counts) / n
    variance = sum((c - average) ** 2 for c in counts) / (n - 1)
    silent = counts.count(0) / n
    assert abs(average - mean) < 5 * math.sqrt(mean / n)
    assert abs(variance - mean) < 5 * mean * math.sqrt(2 / n + 1 / (n * mean))
    expected = math.exp(-mean)
    assert abs(silent - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


def test_a_regular_schedule_would_fail_that_test() -> None:
    counts = [3] * 600
    variance = sum((c - 3.0) ** 2 for c in counts) / 599
    assert abs(variance - 3.0) > 5 * 3.0 * math.sqrt(2 / 600 + 1 / 1800)


def test_a_restart_goes_on_with_the_chain(tmp_path: Path) -> None:
    clock = Time()
    agent = agent_at(tmp_path, clock)
    agent.precommit(b"\2" * 32)
    agent.snapshot()
    agent.stop()
    clock.now += DAY_MS
    again = agent_at(tmp_path, clock)
    logged = again.snapshot()
    assert isinstance(logged.record.event, Snapshot)
    assert logged.record.event.run == b"\2" * 32
    assert logged.record.clocks.boots == 2
    assert verify_log(again.log) == []


def test_two_agents_cannot_write_one_log(tmp_path: Path) -> None:
    agent_at(tmp_path, Time())
    with pytest.raises(StoreError, match="another process is writing"):
        agent_at(tmp_path, Time())


@pytest.mark.parametrize("missing", range(1, 60, 7))
def test_a_half_written_record_is_cut_and_said(tmp_path: Path, missing: int) -> None:
    clock = Time()
    agent = agent_at(tmp_path, clock)
    whole = (tmp_path / "log.journal").read_bytes()
    head = (tmp_path / "head.json").read_bytes()
    agent.snapshot()
    agent.stop()
    full = (tmp_path / "log.journal").read_bytes()
    (tmp_path / "log.journal").write_bytes(full[: len(full) - missing])
    (tmp_path / "head.json").write_bytes(head)  # the power went before the head was written
    again = agent_at(tmp_path, clock)
    boot = again.log[-1].record.event
    assert isinstance(boot, Boot)
    assert boot == replace(boot, cut=len(full) - missing - len(whole), lost=0)
    assert verify_log(again.log) == []
    assert (tmp_path / "log.journal.cut0").read_bytes() == full[len(whole) : len(full) - missing]


def test_a_shortened_log_says_so_for_ever(tmp_path: Path) -> None:
    clock = Time()
    agent = agent_at(tmp_path, clock)
    agent.precommit(b"\2" * 32)
    before = (tmp_path / "log.journal").read_bytes()
    agent.snapshot()
    agent.snapshot()
    agent.stop()
    (tmp_path / "log.journal").write_bytes(before)  # the owner takes two snapshots out
    again = agent_at(tmp_path, clock)
    boot = again.log[-1].record.event
    assert isinstance(boot, Boot)
    assert boot.lost == 2
    assert {f.rule for f in verify_log(again.log)} == {5}


def test_damage_in_the_middle_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    agent = agent_at(tmp_path, Time())
    agent.snapshot()
    agent.stop()
    path = tmp_path / "log.journal"
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match="damaged at byte"):
        agent_at(tmp_path, Time())
    assert path.read_bytes() == damaged


def test_a_full_store_refuses_and_says_so(tmp_path: Path) -> None:
    agent = agent_at(tmp_path, Time(), replace(SETTINGS, capacity=8))
    last = [agent.snapshot() for _ in range(6)][-1]
    assert isinstance(last.record.event, Snapshot)
    assert last.record.event.flags & STORAGE_FULL
    with pytest.raises(StoreError, match="fill the chip's store"):
        agent.snapshot()
    assert {f.rule for f in verify_log(agent.log)} == {20}


def test_shards_go_after_their_time_and_not_before(tmp_path: Path) -> None:
    clock = Time()
    agent = agent_at(tmp_path, clock, replace(SETTINGS, retention_days=30.0))
    first = agent.snapshot().record.seq
    clock.now += 20 * DAY_MS
    second = agent.snapshot().record.seq
    assert ChipDirectory(tmp_path).shards() == [first, second]
    clock.now += 15 * DAY_MS
    third = agent.snapshot().record.seq
    assert ChipDirectory(tmp_path).shards() == [second, third]


def test_a_torn_snapshot_is_flagged(tmp_path: Path) -> None:
    probe = held()
    probe.torn = True
    agent = agent_at(tmp_path, Time())
    agent.probe = probe
    event = agent.snapshot().record.event
    assert isinstance(event, Snapshot)
    assert event.flags & TORN


def test_the_firmware_cannot_go_back(tmp_path: Path) -> None:
    agent = agent_at(tmp_path, Time())
    agent.update_firmware(b"\1" * 32, 2)
    with pytest.raises(ProtocolViolation, match="no way back"):
        agent.update_firmware(b"\2" * 32, 1)
    agent.self_test()
    agent.change_owner(b"\3" * 32)
    assert verify_log(agent.log) == []


def test_an_attestation_speaks_of_the_head_and_the_nonce(tmp_path: Path) -> None:
    agent = agent_at(tmp_path, Time())
    nonce = os.urandom(16)
    signed = open_sign1(agent.attest(nonce), EAT, KEY.public_key, what="token", limit=4096)
    claims = parse_cbor(signed.payload, what="claims", limit=4096)
    assert isinstance(claims, dict)
    assert claims[10] == nonce
    assert claims[-70002] == (1).to_bytes(8, "big") + agent.log[-1].digest
    with pytest.raises(InvalidInput, match="8 to 64 bytes"):
        agent.attest(b"short")


def test_few_snapshots_are_noticed_when_the_owner_stops_the_timer(tmp_path: Path) -> None:
    clock = Time()
    agent = agent_at(tmp_path, clock)
    clock.now += 200 * DAY_MS  # no poll: the owner lets the agent sleep
    agent.self_test()
    assert {f.rule for f in verify_log(agent.log)} == {16}
    assert verify_log(agent.log, limits=LogLimits(false_alarm=1e-12)) == []


CHILD = """
    import mmap, os, struct, sys, time
    from pathlib import Path
    from tallystick.fleet.agent.probes import CONTROL_HEAD, CONTROL_ENTRY, CONTROL_MAGIC, start_of
    from tallystick.commit.encoding import canonical_json
    import ctypes
    folder = Path(sys.argv[1]); torn = int(sys.argv[2])
    data = ctypes.create_string_buffer(bytes(range(200)), 200)
    control = folder / "c.control"
    entry = CONTROL_ENTRY.pack(ctypes.addressof(data), 200)
    control.write_bytes(CONTROL_HEAD.pack(CONTROL_MAGIC, torn, 17, 1) + entry)
    (folder / f"{os.getpid()}.json").write_bytes(canonical_json({
        "control": str(control), "format": "tallystick/observed/1", "pid": os.getpid(),
        "regions": [["model/weight", "U8", "weights"]], "started": start_of(os.getpid())}))
    print("ready", flush=True)
    while True:
        print(time.monotonic(), flush=True)
        time.sleep(0.01)
"""


@pytest.fixture
def child(tmp_path: Path, request: pytest.FixtureRequest):
    torn = getattr(request, "param", 0)
    code = textwrap.dedent(CHILD)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(torn)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def state_of(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("copy", [False, True])
def test_another_process_is_stopped_read_and_goes_on(
    tmp_path: Path, child: subprocess.Popen[str], copy: bool
) -> None:
    probe = ProcessMemory(tmp_path)
    with probe.frozen(copy=copy) as seen:
        assert state_of(child) != "T" if copy else state_of(child) == "T"
        assert seen.step == 17
        assert not seen.torn
        assert bytes(seen.readers[0](0, 200) or b"") == bytes(range(200))
    assert state_of(child) != "T"
    probe.close()


@pytest.mark.parametrize("child", [1], indirect=True)
def test_a_process_that_never_rests_is_read_torn(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    probe = ProcessMemory(tmp_path, quiesce_seconds=0.05)
    with probe.frozen(copy=True) as seen:
        assert seen.torn
        assert seen.timed_out
    assert state_of(child) != "T"
    probe.close()


def test_a_program_that_ended_is_forgotten(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    probe = ProcessMemory(tmp_path)
    with probe.frozen(copy=True) as seen:
        assert seen.regions == ()
    assert not list(tmp_path.glob("*.json"))


def test_a_killed_agent_leaves_the_program_running(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    code = f"""
from pathlib import Path
import time
from tallystick.fleet.agent.probes import ProcessMemory
with ProcessMemory(Path({str(tmp_path)!r})).frozen(copy=False):
    print("frozen", flush=True)
    time.sleep(60)
"""
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "frozen\n"
    assert state_of(child) == "T"
    agent.kill()
    agent.wait()
    agent.stdout.close()
    deadline = time.monotonic() + 10
    while state_of(child) == "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(child) != "T"


def test_an_agent_killed_at_any_moment_loses_no_record_it_spoke_of(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_agent import KEY, SETTINGS, held
from tallystick.fleet.agent.agent import ChipAgent
from tallystick.store.chips import ChipDirectory
agent = ChipAgent(ChipDirectory(Path({str(tmp_path)!r})), KEY, held(), SETTINGS)
agent.start()
while True:
    print(agent.snapshot().digest.hex(), flush=True)
"""
    spoken: set[str] = set()
    draw = random.Random(5)
    for _ in range(4):
        agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert agent.stdout is not None
        spoken.add(agent.stdout.readline().strip())
        time.sleep(draw.random() * 0.1)
        agent.send_signal(signal.SIGKILL)
        spoken |= {line.strip() for line in agent.stdout if len(line) == 97}
        agent.wait()
        agent.stdout.close()
    log = log_at(tmp_path)
    assert spoken <= {logged.digest.hex() for logged in log}
    loose = LogLimits(boots_per_day=1e9)
    assert [f for f in verify_log(log, limits=loose) if f.rule != 3] == []


def test_tensors_in_files_are_read_as_the_manifest_says(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(range(256)))
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(
        SharedManifest((("model/w", "U8", "weights", tmp_path / "weights", 16, 100),)).encode()
    )
    with SharedMemory(manifest).frozen(copy=False) as seen:
        assert bytes(seen.readers[0](0, 100) or b"") == bytes(range(16, 116))
        assert not seen.torn
    manifest.write_bytes(
        SharedManifest((("model/w", "U8", "weights", tmp_path / "absent", 0, 100),)).encode()
    )
    with SharedMemory(manifest).frozen(copy=False) as seen:
        assert seen.readers[0](0, 100) is None
    for place in ("true,100", "0,true"):
        manifest.write_text(f'{{"format":"{MANIFEST_FORMAT}","regions":[["w","U8","weights","w",{place}]]}}')
        with pytest.raises(InvalidInput, match=r"regions\[0\]\[[45]\] must be an integer"):
            SharedMemory(manifest)
    manifest.write_text("{}")
    with pytest.raises(InvalidInput, match="missing"):
        SharedMemory(manifest)


def test_the_digest_of_the_self_test_is_sha256s(tmp_path: Path) -> None:
    event = agent_at(tmp_path, Time()).self_test().record.event
    assert event == SelfTest(True, hashlib.sha256(b"abc").digest())
