"""Neutral runs: what was agreed comes out, and nothing else does, whatever the program tries."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest

from tallystick.cli.main import main
from tallystick.commit.state import Entry, summarise
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.enclave import neutral, neutral_result, sandbox, sealed_job
from tallystick.fleet.enclave.neutral import NeutralInput, NeutralOrder, NeutralOutput
from tallystick.fleet.enclave.neutral_result import NeutralOutcome
from tallystick.fleet.enclave.sandbox import ResourceBounds, run_isolated
from tallystick.fleet.provenance.transcripts import ReportOpening, even_shards
from tallystick.signing.dsse import Envelope, parse_envelope, sign_statement
from tallystick.signing.keys import SigningKey, ed25519_key
from tallystick.store.files import RunDirectory
from tallystick.store.keys import write_key

pytestmark = pytest.mark.sandbox

VERIFIER, OWNER, PLACE, STRANGER = (ed25519_key(bytes([n]) * 32) for n in range(1, 5))
BOUNDS = ResourceBounds(60, 1 << 29, 1 << 20)  # time enough on a machine that does other things too
SECRET = b"the weights that nobody may see"
HONEST = b"""
import json
data = open("/in/data", "rb").read()
good = "pass" if data.startswith(b"the") else "fail"
print(json.dumps({"good": good, "size": len(data), "share": data.count(b"e") / len(data)}))
"""
OUTPUTS = (
    neutral.verdict_output("good"),
    neutral.scalar_output("share", 0.0, 1.0, 11),
    neutral.integer_output("size", 0, 1023),
)


class Parties:
    """A verifier and an owner who agree on one order after the other, and a neutral place."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.data = place / "data"
        self.data.write_bytes(SECRET)

    def order(
        self, program: bytes, outputs: tuple[NeutralOutput, ...] = OUTPUTS, **changes: object
    ) -> NeutralOrder:
        made = NeutralOrder(
            "00" * 16, VERIFIER.public_key.key_id, OWNER.public_key.key_id, hashlib.sha256(program).hexdigest(),
            (NeutralInput("data", "file", hashlib.sha256(SECRET).hexdigest()),), outputs, 64, 2, *astuple(BOUNDS), False,
        )  # fmt: skip
        return replace(made, **changes)  # pyright: ignore[reportArgumentType]

    def sealed(self, order: NeutralOrder, program: bytes, *signers: SigningKey) -> Path:
        signed = None
        for signer in signers or (VERIFIER, OWNER):
            signed = neutral.sign_order(order, signer, signed)
        assert signed is not None
        sealed_job.write_job(self.place / "job", signed, program, {"data": self.data}, {})
        return self.place / "job"

    def run(self, program: bytes, **changes: object) -> NeutralOutcome:
        order = self.order(program, **changes)  # pyright: ignore[reportArgumentType]
        return self.carry_out(self.sealed(order, program))[0]

    def carry_out(self, job: Path) -> tuple[NeutralOutcome, bytes]:
        _, outcome, statement = sealed_job.carry_out(
            job, VERIFIER.public_key, OWNER.public_key, PLACE, now=1_800_000_000
        )
        return outcome, statement


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


def test_what_was_agreed_comes_out_signed(parties: Parties) -> None:
    order = parties.order(HONEST)
    outcome, statement = parties.carry_out(parties.sealed(order, HONEST))
    assert outcome == NeutralOutcome("completed", {"good": "pass", "share": 1, "size": len(SECRET)})
    found = neutral_result.verify_result(statement, order, PLACE.public_key)
    assert found.outcome == outcome
    assert "nothing attests" in found.assurance
    payload = parse_envelope(statement).payload
    assert SECRET not in payload
    assert b"seconds" not in payload


# ------------------------------------------------------------------------- what a hostile program tries

# Each writes "pass" if it got what it must not get. Outside the enclosure each of them does: that is the control.
NETWORK = """
import socket
socket.create_connection(("127.0.0.1", {port}), 5).sendall(open({data!r}, "rb").read())
"""
NAMES = """
import socket
socket.getaddrinfo("localhost", 80)
socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close()
"""
# These two try several places and write "pass" if one of them gave way.
WRITE = """
worked = 0
for place in {places!r}:
    try:
        open(place, "ab").write(b"x")
        worked += 1
    except OSError:
        pass
assert worked
"""
READ = """
worked = 0
for place in {places!r}:
    try:
        open(place, "rb").read()
        worked += 1
    except OSError:
        pass
assert worked
"""
PROCESS = """
import os
if os.fork() == 0:
    os._exit(0)
"""
COMMAND = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "pass"], check=True)
"""
MEMORY = """
import os
os.write(os.memfd_create("x"), bytes(1 << 20))
"""
REPORT = """
import json
try:
{body}
    got = "pass"
except Exception:
    got = "fail"
print(json.dumps({{"got": got}}))
"""
GOT = (neutral.verdict_output("got"),)


def attempt(body: str, **names: object) -> bytes:
    lines = body.format(**names).strip().splitlines()
    return REPORT.format(body="\n".join(f"    {line}" for line in lines)).encode()


def works_outside(program: bytes) -> bool:
    child = subprocess.run([sys.executable, "-c", program.decode()], capture_output=True, check=True)
    return json.loads(child.stdout) == {"got": "pass"}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server


def test_a_program_reaches_no_network(parties: Parties, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    control = attempt(NETWORK, port=port, data=str(parties.data))
    assert works_outside(control)
    taken, _ = listener.accept()
    with taken:
        assert taken.recv(100) == SECRET
    assert parties.run(attempt(NETWORK, port=port, data="/in/data"), outputs=GOT).values == {"got": "fail"}
    with pytest.raises(TimeoutError):
        listener.accept()


OUTSIDE = [
    ("names and local sockets", NAMES), ("a process", PROCESS), ("a command", COMMAND), ("uncounted memory", MEMORY),
]  # fmt: skip


@pytest.mark.parametrize("body", [body for _, body in OUTSIDE], ids=[name for name, _ in OUTSIDE])
def test_a_program_gets_nothing_of_the_machine(parties: Parties, body: str) -> None:
    program = attempt(body)
    assert works_outside(program)
    assert parties.run(program, outputs=GOT).values == {"got": "fail"}


def test_a_program_writes_nowhere_but_in_its_scratch(parties: Parties) -> None:
    out = str(parties.place / "leaked")
    assert works_outside(attempt(WRITE, places=[out]))
    Path(out).unlink()
    places = [out, "/in/data", "/in/more", "/program", "/leaked", "/dev/shm/leaked", "/usr/leaked"]
    assert parties.run(attempt(WRITE, places=places), outputs=GOT).values == {"got": "fail"}
    assert not Path(out).exists()
    assert parties.data.read_bytes() == SECRET
    assert parties.run(attempt(WRITE, places=["/scratch/x"]), outputs=GOT).values == {"got": "pass"}


def test_a_program_reads_nothing_but_its_inputs(parties: Parties) -> None:
    outside = parties.place / "of the other party"
    outside.write_bytes(b"x")
    assert works_outside(attempt(READ, places=[str(outside)]))
    places = [str(outside), str(parties.place / "job"), "/etc/passwd", "/proc/1/environ", "/proc/self/maps"]
    assert parties.run(attempt(READ, places=places), outputs=GOT).values == {"got": "fail"}
    assert parties.run(attempt(READ, places=["/in/data"]), outputs=GOT).values == {"got": "pass"}


LEAKS = [
    ("another name", b'print(\'{"good":"pass","share":0.5,"size":1,"more":7}\')'),
    ("a name twice", b'print(\'{"good":"pass","good":"fail","share":0.5,"size":1}\')'),
    ("a text for a verdict", b'print(\'{"good":"pass: 0x7f","share":0.5,"size":1}\')'),
    ("a larger integer", b'print(\'{"good":"pass","share":0.5,"size":1024}\')'),
    ("a float for an integer", b'print(\'{"good":"pass","share":0.5,"size":1.5}\')'),
    ("a scalar out of range", b'print(\'{"good":"pass","share":1e300,"size":1}\')'),
    ("no number", b'print(\'{"good":"pass","share":NaN,"size":1}\')'),
    ("two values", b'print(\'{"good":"pass","share":0.5,"size":1}{}\')'),
    ("a flood", b'while True: print("x" * 10000)'),
    ("no text", b'import sys; sys.stdout.buffer.write(bytes(range(256)))'),
]  # fmt: skip


@pytest.mark.parametrize("program", [program for _, program in LEAKS], ids=[name for name, _ in LEAKS])
def test_what_the_schema_has_no_room_for_does_not_leave(parties: Parties, program: bytes) -> None:
    order = parties.order(program)
    outcome, statement = parties.carry_out(parties.sealed(order, program))
    assert outcome == NeutralOutcome("malformed output", {})
    assert neutral_result.verify_result(statement, order, PLACE.public_key).outcome.values == {}


def test_spelling_and_further_digits_tell_nothing(parties: Parties) -> None:
    """Two programs that print one value with other digits, order and whitespace: the same statement but for their names."""
    programs = (
        b'print(\'{"good":"pass","share":0.2000001,"size":3}\')',
        b'print(\'  {"size":3,  "share":0.1999999999,"good":"pa\\u0073s"}\')',
    )
    first, second = (parties.run(program).values for program in programs)
    assert first == second == {"good": "pass", "share": 2, "size": 3}


CHANCE = [
    ("randomness", b"import os; x = os.urandom(1)[0]"),
    ("the clock", b"import time; x = time.time_ns() % 1000"),
]


@pytest.mark.parametrize("source", [source for _, source in CHANCE], ids=[name for name, _ in CHANCE])
def test_a_result_that_chance_decides_is_none(parties: Parties, source: bytes) -> None:
    program = source + b'\nprint(\'{"good":"pass","share":0.5,"size":%d}\' % x)'
    assert parties.run(program, repeats=6) == NeutralOutcome("not repeatable", {})


def test_standard_error_and_exit_codes_say_one_thing(parties: Parties) -> None:
    for code in (1, 7, 42):
        program = f"import sys; sys.stderr.write(open('/in/data').read()); sys.exit({code})".encode()
        assert parties.run(program) == NeutralOutcome("program failed", {})


def test_an_order_that_could_tell_more_than_its_budget_is_no_order(parties: Parties) -> None:
    wide = (neutral.integer_output("size", 0, 2**16 - 5),)
    assert parties.order(HONEST, outputs=wide, budget=16).bits == 16
    with pytest.raises(InvalidInput, match="can tell 17 bits, the budget is 16"):
        parties.order(HONEST, outputs=(neutral.integer_output("size", 0, 2**16 - 4),), budget=16)


def test_a_result_with_a_value_beyond_the_schema_is_refused_even_if_signed(parties: Parties) -> None:
    order = parties.order(HONEST)
    _, statement = parties.carry_out(parties.sealed(order, HONEST))
    for values in (
        {"good": "pass", "share": 11, "size": 1},
        {"good": "pass", "share": 1},
        {"good": "perhaps", "share": 1, "size": 1},
    ):
        made = neutral_result.result_statement(
            order, NeutralOutcome("completed", values), started="x", versions={}, refused=()
        )
        forged = sign_statement(made, PLACE)
        with pytest.raises(Mismatch, match="result: "):
            neutral_result.verify_result(forged, order, PLACE.public_key)
    with pytest.raises(Mismatch, match="is not signed by any"):
        neutral_result.verify_result(statement, order, STRANGER.public_key)
    with pytest.raises(Mismatch, match="result: order is"):
        neutral_result.verify_result(statement, replace(order, nonce="11" * 16), PLACE.public_key)


# ------------------------------------------------------------------------------------ what may be used


def test_a_program_that_does_not_end_is_ended(parties: Parties) -> None:
    started = time.monotonic()
    end = run_isolated(b"while True: pass", {}, replace(BOUNDS, seconds=1))
    assert (end.reason, end.output) == ("too slow", b"")
    assert time.monotonic() - started < 30
    sleeper = b"import time, sys\nprint('{', flush=True)\nsys.stdout.close()\ntime.sleep(60)"
    assert run_isolated(sleeper, {}, replace(BOUNDS, seconds=1)).reason == "too slow"


BOMBS = [
    ("forks", b"import os\nwhile True: os.fork()"),
    ("threads", b"import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"),
    ("memory", b"x = bytearray(1 << 30)"),
    ("memory in pieces", b"x = []\nwhile True: x.append(bytes(1 << 20))"),
    ("files", b"f = open('/scratch/x', 'wb')\nwhile True: f.write(bytes(1 << 16)); f.flush()"),
    ("descriptors", b"x = []\nwhile True: x.append(open('/program'))"),
    ("killing everything", b"import os\nos.kill(-1, 9)\nos.kill(1, 9)\nos._exit(1)"),
    ("raising its limits", b"import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
]  # fmt: skip


@pytest.mark.parametrize("program", [program for _, program in BOMBS], ids=[name for name, _ in BOMBS])
def test_a_bomb_hurts_itself_alone(program: bytes) -> None:
    end = run_isolated(program, {}, BOUNDS)
    assert (end.reason, end.output) == ("failed", b"")


def memory_of(name: str) -> list[str]:
    """The resident memory of every process of that name; one that is ending has none any more."""
    found: list[str] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if lines[0] == f"Name:\t{name}":
            found += [line for line in lines if line.startswith("VmRSS")]
    return found


def test_no_memory_of_a_run_is_left() -> None:
    mark = f"m{time.time_ns() % 10**13}"
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\ntime.sleep(60)".encode()
    seen: list[str] = []
    end = run_isolated(
        program, {}, replace(BOUNDS, seconds=4), progress=lambda _: seen.extend(memory_of(mark))
    )
    assert end.reason == "too slow"
    assert seen  # while it ran, the same look found it
    assert memory_of(mark) == []


def test_a_runner_that_is_killed_leaves_nothing(parties: Parties) -> None:
    mark = f"k{time.time_ns() % 10**13}"
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\ntime.sleep(60)".encode()
    job = parties.sealed(parties.order(program, seconds=60), program)
    for name, key in (("verifier", VERIFIER), ("owner", OWNER), ("place", PLACE)):
        write_key(parties.place / name, key)
    command = [
        sys.executable, "-m", "tallystick", "neutral", "run", job, "--verifier", parties.place / "verifier.pub",
        "--owner", parties.place / "owner.pub", "--key", parties.place / "place", "--out", parties.place / "result",
    ]  # fmt: skip
    child = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not memory_of(mark):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.kill()
    child.wait()
    while memory_of(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (parties.place / "result").exists()


def test_a_result_can_be_held_back_so_that_its_time_tells_nothing(parties: Parties) -> None:
    outputs, bounds = GOT, replace(BOUNDS, seconds=2)
    program = b'print(\'{"got":"pass"}\')'
    started = time.monotonic()
    assert parties.run(program, outputs=outputs, **asdict(bounds), constant_time=True).verdict == "pass"
    assert time.monotonic() - started > 5.9  # two runs of two seconds, and a second's leave each


# ------------------------------------------------------------------------------------------ what was agreed


def test_nothing_runs_that_both_did_not_sign(parties: Parties) -> None:
    order = parties.order(HONEST)
    for signers, reason in (((VERIFIER,), "owner .* did not sign"), ((OWNER,), "verifier .* did not sign")):
        with pytest.raises(Mismatch, match=reason):
            parties.carry_out(parties.sealed(order, HONEST, *signers))
    with pytest.raises(InvalidInput, match="is neither the verifier's"):
        neutral.sign_order(order, STRANGER)
    # a stranger's signature under the owner's name
    envelope = parse_envelope(neutral.sign_order(order, VERIFIER))
    false = neutral.sign_order(replace(order, owner=STRANGER.public_key.key_id), STRANGER)
    forged = (OWNER.public_key.key_id, parse_envelope(false).signatures[0][1])
    signed = Envelope(envelope.payload_type, envelope.payload, (*envelope.signatures, forged)).encode()
    with pytest.raises(Mismatch, match="did not sign it"):
        neutral.open_order(signed, VERIFIER.public_key, OWNER.public_key)
    both = neutral.sign_order(order, OWNER, neutral.sign_order(order, VERIFIER))
    with pytest.raises(Mismatch, match=r"its owner is .* known here is"):
        neutral.open_order(both, VERIFIER.public_key, STRANGER.public_key)


def test_another_program_is_not_run(parties: Parties) -> None:
    order, other = parties.order(HONEST), HONEST + b"# one byte more"
    with pytest.raises(Mismatch, match=r"program: is .* agreed was"):
        parties.sealed(order, other)
    job = parties.sealed(order, HONEST)
    job.write_bytes(job.read_bytes().replace(b'data.count(b"e")', b'data.count(b"f")'))
    with pytest.raises(Mismatch, match="program program is not the one that the index names"):
        parties.carry_out(job)
    index, _, rest = job.read_bytes().partition(b"\n")
    fields = json.loads(index)
    _, _, size, _ = fields["members"][0]
    changed = rest[size : size + fields["members"][1][2]]
    fields["members"][1][3] = hashlib.sha256(changed).hexdigest()
    job.write_bytes(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n" + rest)
    with pytest.raises(Mismatch, match=r"program: is .* agreed was"):
        parties.carry_out(job)


def test_a_swapped_input_is_not_used(parties: Parties) -> None:
    order = parties.order(HONEST)
    parties.data.write_bytes(SECRET[:-1])
    with pytest.raises(Mismatch, match=r"input data: is .* the order commits to"):
        parties.sealed(order, HONEST)
    parties.data.write_bytes(SECRET)
    job = parties.sealed(order, HONEST)
    data = job.read_bytes()
    swapped = data.replace(SECRET, SECRET.swapcase()).replace(
        hashlib.sha256(SECRET).hexdigest().encode(), hashlib.sha256(SECRET.swapcase()).hexdigest().encode()
    )
    assert len(swapped) == len(data)
    job.write_bytes(swapped)
    with pytest.raises(Mismatch, match=r"input data: is .* the order commits to"):
        parties.carry_out(job)


def test_inputs_are_matched_with_salted_commitments(parties: Parties) -> None:
    """A state is opened by its root's salt, a document by its own; another salt, state or document is refused."""
    run = RunDirectory(parties.place / "run")
    run.create()
    entries = [Entry("model/w", "F32", (2, 3), bytes(range(24)))]
    run.write_checkpoint(4, entries)
    opening = ReportOpening(bytes(range(32)), even_shards({"model/w": 6}, 1))
    program = (
        b"import json; print(json.dumps({'got': 'pass' if len(open('/in/meta').read()) == 4 else 'fail'}))"
    )
    meta = parties.place / "meta"
    meta.write_bytes(b"meta")
    state = opening.commit("checkpoint/4", summarise(entries).root()).hex()
    inputs = (
        NeutralInput("meta", "committed", opening.commit("meta", b"meta").hex(), "meta"),
        NeutralInput("state", "state", state, "checkpoint/4"),
    )
    order = parties.order(program, outputs=GOT, inputs=inputs)
    signed = neutral.sign_order(order, OWNER, neutral.sign_order(order, VERIFIER))
    files, salts = {"meta": meta, "state": run.checkpoint_path(4)}, sealed_job.salts_for(order, opening)
    job = parties.place / "job"
    sealed_job.write_job(job, signed, program, files, salts)
    assert job.stat().st_mode & 0o077 == 0
    assert opening.secret.hex().encode() not in job.read_bytes()
    assert parties.carry_out(job)[0].verdict == "pass"
    with pytest.raises(Mismatch, match="input meta"):
        sealed_job.write_job(job, signed, program, files, {**salts, "meta": bytes(32)})
    run.write_checkpoint(4, [replace(entries[0], data=bytes(24))])
    with pytest.raises(Mismatch, match="input state"):
        sealed_job.write_job(job, signed, program, files, salts)
    with pytest.raises(InvalidInput, match="salt state is missing"):
        sealed_job.write_job(job, signed, program, files, {"meta": salts["meta"]})


def test_the_check_finds_an_enclosure_that_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before every run is one: with the filter taken away it finds what then works."""
    assert "sockets" in sandbox.check_isolation()
    allow_all = b"\x06\x00\x00\x00\x00\x00\xff\x7f"
    monkeypatch.setattr(sandbox, "_filter", lambda: allow_all)
    with pytest.raises(StoreError, match="could: socket, unix socket, process, hidden memory"):
        sandbox.check_isolation()


def test_a_container_that_forbids_namespaces_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parties: Parties
) -> None:
    """What bubblewrap says there, by a program of its name; nothing of the job runs."""
    order = parties.order(HONEST)
    job = parties.sealed(order, HONEST)
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/bin:/usr/bin")
    with pytest.raises(
        StoreError, match=r"No permissions to create new namespace.* needs permission for user namespaces"
    ):
        parties.carry_out(job)


def test_a_machine_without_bubblewrap_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["neutral", "check"]) == 2
    assert "bubblewrap is not installed" in capfd.readouterr().err


def test_from_an_order_to_a_result_on_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, key in (("verifier", VERIFIER), ("owner", OWNER), ("place", PLACE)):
        write_key(tmp_path / name, key)
    (tmp_path / "program.py").write_bytes(HONEST)
    (tmp_path / "data").write_bytes(SECRET)
    keys = ["--verifier", tmp_path / "verifier.pub", "--owner", tmp_path / "owner.pub"]
    program = ["--program", tmp_path / "program.py"]

    def tally(*arguments: object, code: int = 0) -> dict[str, object]:
        assert main(["neutral", *map(str, arguments), "--json"]) == code
        return json.loads(capfd.readouterr().out)

    order = [
        "order", *program, "--input", f"data=file:{tmp_path / 'data'}", "--output", "good=verdict", "--output",
        "share=scalar:0:1:11", "--output", "size=integer:0:1023", *keys, "--key", tmp_path / "verifier", "--memory-mb",
        512, "--seconds", 60, "--out", tmp_path / "order",
    ]  # fmt: skip
    assert "can tell 15 bits" in str(tally(*order, "--budget", 14, code=2)["error"])
    assert tally(*order, "--budget", 15)["bits"] == 15
    pack = [
        "pack",
        tmp_path / "order",
        *program,
        "--input",
        f"data={tmp_path / 'data'}",
        "--out",
        tmp_path / "job",
    ]
    run = ["run", tmp_path / "job", *keys, "--key", tmp_path / "place", "--out", tmp_path / "result"]
    tally(*pack)
    assert "did not sign it" in str(tally(*run, code=1)["error"])
    assert not (tmp_path / "result").exists()
    tally("sign", tmp_path / "order", "--key", tmp_path / "owner", *program, "--out", tmp_path / "order")
    assert len(str(tally("show", tmp_path / "order")["signed_by"]).split(",")) == 2
    tally(*pack)
    assert tally(*run)["outputs"] == {"good": "pass", "share": 1, "size": len(SECRET)}
    verify = ["verify", tmp_path / "result", "--order", tmp_path / "order", *keys, "--neutral"]
    assert tally(*verify, tmp_path / "place.pub")["verdict"] == "pass"
    tally(*verify, tmp_path / "owner.pub", code=1)
    assert "must be NAME=verdict" in str(tally(*order, "--budget", 15, "--output", "x=any", code=2)["error"])
