"""What is looked at before a run is gone on with: no link is written through, and nothing damaged is built on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tallystick.commit.state import CHUNK_BYTES, Entry, state_root
from tallystick.errors import InvalidInput, StoreError
from tallystick.run.documents import JobRecord, PolicyRecord, Specification, StepRecord
from tallystick.run.program import Program, ProgramFile
from tallystick.store import resumption
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.store.resumption import find_resumption, summary_of_file

EVERY, STEPS, SOURCE = 2, 7, b"x = 1\n"
PROGRAM = Program("job.py", (ProgramFile("job.py", len(SOURCE), sha256(SOURCE).hexdigest()),))


def entries_at(done: int) -> list[Entry]:
    return [
        Entry("b", "F32", (2, 3), bytes(range(done, done + 24))),
        Entry("document", "U8", (2,), b"ab"),
        Entry("empty", "F32", (0, 4), b""),
    ]


SPECIFICATION = Specification(
    job=JobRecord("job.py", PROGRAM.digest(), {}, None, PROGRAM),
    policy=PolicyRecord("fp32", {}),
    seed=0,
    steps=STEPS,
    checkpoint_every=EVERY,
    accumulation=1,
    world_size=1,
    initial_state=state_root(entries_at(0)).hex(),
    versions={},
    sites=(),
)


def frame_at(step: int) -> bytes:
    return bytes([step]) * (step + 5)


def record_at(step: int) -> StepRecord:
    root = state_root(entries_at(step + 1)).hex() if SPECIFICATION.is_checkpoint(step) else None
    frame = frame_at(step)
    return StepRecord(step, 0, 1, "1" * 64, frame_digest(frame), len(frame), None, (), False, "0" * 16, root)


def write_steps(run: RunDirectory, start: int, end: int) -> None:
    for step in range(start, end):
        durable = SPECIFICATION.is_checkpoint(step)
        if durable:
            run.write_checkpoint(step + 1, entries_at(step + 1))
        run.append_step(step - step % EVERY, frame_at(step), record_at(step), durable=durable)


def written(path: Path, steps: int = 5) -> RunDirectory:
    run = RunDirectory(path)
    run.create()
    run.write_checkpoint(0, entries_at(0))
    run.write_program({"job.py": SOURCE})
    run.write_document(run.specification_path, SPECIFICATION.encode())
    write_steps(run, 0, steps)
    return run


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def two_ranks(step: int) -> tuple[bytes, bytes]:
    record = record_at(step)
    return record.encode(), replace(record, rank=1).encode()


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


# -- links ------------------------------------------------------------------------------------------------------------

PLACES = (
    "steps.jsonl",
    "specification.json",
    "run.json",
    ".run.json.part",
    "logs",
    "logs/000000.tlog",
    "logs/000004.tlog",
    "checkpoints",
    "checkpoints/000004.safetensors",
    "checkpoints/.000006.safetensors.part",
    "program",
    "program/job.py",
    "program/pieces",
)


@pytest.mark.parametrize("name", PLACES)
def test_what_lies_behind_a_link_is_neither_cut_nor_written(name: str, tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    written(tmp_path / "other", 7)
    place, elsewhere = run.path / name, tmp_path / "other" / name
    if place.is_dir():
        place.rename(tmp_path / "away")
    place.unlink(missing_ok=True)
    place.symlink_to(elsewhere)
    before = files_of(tmp_path)

    with pytest.raises(InvalidInput, match=rf"{name}: is a link to '.*', must be a \w+"):
        find_resumption(run)
    with pytest.raises((InvalidInput, StoreError)):
        run.create()

    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", PLACES)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    place = run.path / name
    if place.is_dir():
        place.rename(tmp_path / "away")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with pytest.raises(InvalidInput, match=rf"{name}: is a pipe, a socket or a device, must be a \w+"):
        find_resumption(run)


@pytest.mark.parametrize("name", ["logs", "checkpoints", "program", "steps.jsonl"])
def test_a_new_run_is_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    other, run = tmp_path / "other", RunDirectory(tmp_path / "run")
    other.mkdir()
    run.path.mkdir()
    (run.path / name).symlink_to(other)
    with pytest.raises(InvalidInput, match=rf"{name}: is a link to"):
        run.create()
    with pytest.raises(InvalidInput, match=rf"{name}: is a link to"):
        find_resumption(run)
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("name", ["logs", "logs/000004.tlog", "steps.jsonl"])
def test_a_link_put_there_meanwhile_is_not_appended_to(name: str, tmp_path: Path) -> None:
    run, other = written(tmp_path / "run"), written(tmp_path / "other")
    (run.path / name).rename(tmp_path / "away")
    (run.path / name).symlink_to(other.path / name)
    before = files_of(other.path)
    with pytest.raises(StoreError, match=r"nothing is written through one|not a directory"):
        write_steps(run, 5, 6)
    assert files_of(other.path) == before


def test_a_temporary_file_that_is_a_link_is_replaced(tmp_path: Path) -> None:
    run, mine = written(tmp_path / "run"), tmp_path / "mine"
    mine.write_bytes(b"keep me")
    (run.path / "checkpoints" / ".000006.safetensors.part").symlink_to(mine)
    run.write_checkpoint(6, entries_at(6))
    assert mine.read_bytes() == b"keep me"
    assert not run.checkpoint_path(6).is_symlink()


def test_a_copy_by_hard_links_keeps_its_bytes(tmp_path: Path) -> None:
    for steps in (4, 5):  # with nothing to cut, and with a step to cut
        run, kept = written(tmp_path / f"run{steps}", steps), tmp_path / f"kept{steps}"
        before = files_of(run.path)
        kept.mkdir()
        for name in before:
            (kept / name).parent.mkdir(exist_ok=True)
            (kept / name).hardlink_to(run.path / name)
        find_resumption(run).cut_back()
        write_steps(run, 4, STEPS)
        assert files_of(kept) == before


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    written(tmp_path / "real")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    run = RunDirectory(tmp_path / "run")
    found = find_resumption(run)
    found.cut_back()
    write_steps(run, found.done, STEPS)
    assert run.load_partial().num_steps == STEPS


def test_records_of_gigabytes_that_are_not_there_are_not_read(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    os.truncate(run.records_path, 8 << 30)
    found = find_resumption(run)
    assert (found.done, found.problem) == (4, None)
    found.cut_back()
    assert run.load_partial().num_steps == 4


# -- damage -----------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[RunDirectory], object], int, str]] = {
    "a byte of the first log": (
        lambda run: edit(run.log_path(0), flipped), 0, r"logs/000000\.tlog: the digest of step 1's frame is",
    ),
    "a byte of a later log": (
        lambda run: edit(run.log_path(2), flipped), 2, r"logs/000002\.tlog: the digest of step 3's frame is",
    ),
    "a longer log": (
        lambda run: edit(run.log_path(0), lambda data: data + b"x"), 0,
        r"logs/000000\.tlog: has 12 bytes, its records speak of 11",
    ),
    "no log": (lambda run: run.log_path(2).unlink(), 2, r"logs/000002\.tlog: not found"),
    "a byte of an earlier state": (
        lambda run: edit(run.checkpoint_path(2), flipped), 0, r"checkpoints/000002\.safetensors: its state's root is",
    ),
    "a byte of the last state": (
        lambda run: edit(run.checkpoint_path(4), flipped), 2, r"checkpoints/000004\.safetensors: its state's root is",
    ),
    "a byte of a header": (
        lambda run: edit(run.checkpoint_path(4), lambda data: data.replace(b"state/1", b"state/0")), 2,
        r"checkpoints/000004\.safetensors: its header is not the one",
    ),
    "no header": (
        lambda run: edit(run.checkpoint_path(4), lambda data: b"\xff" * 8 + data[8:]), 2,
        r"checkpoints/000004\.safetensors: not a safetensors file",
    ),
    "no earlier state": (
        lambda run: run.checkpoint_path(2).unlink(), 0, r"checkpoints/000002\.safetensors: not found",
    ),
    "a record in the middle": (
        lambda run: edit(run.records_path, lambda data: data.replace(*two_ranks(2))),
        2, r"steps\.jsonl: line 2: transcript: record 2 must be step 2 rank 0, is step 2 rank 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_goes_on_from_the_last_state_before_any_damage(name: str, tmp_path: Path) -> None:
    damage, done, said = DAMAGES[name]
    run = written(tmp_path / "run")
    damage(run)
    before = files_of(run.path)
    found = find_resumption(run)
    assert files_of(run.path) == before
    assert found.done == done
    notice = found.notice()
    assert notice is not None
    assert re.search(said, notice)
    assert f"going on from the state after {done} steps" in notice
    found.cut_back()
    write_steps(run, found.done, STEPS)
    assert files_of(run.path) == files_of(written(tmp_path / "whole", STEPS).path)


def test_an_interrupted_run_says_nothing_of_damage(tmp_path: Path) -> None:
    for steps in range(STEPS + 1):
        found = find_resumption(written(tmp_path / f"run{steps}", steps))
        assert found.notice() is None
        assert found.done == (steps if steps == STEPS else steps - steps % EVERY)


REFUSALS: dict[str, tuple[Callable[[RunDirectory], object], str]] = {
    "the first state": (
        lambda run: edit(run.checkpoint_path(0), flipped),
        r"holds the records of 5 steps and no checkpoint .* 000000\.safetensors: its state's root is \w+\.\., "
        r"the specification's initial_state says",
    ),
    "the stated first state": (
        lambda run: run.specification_path.write_bytes(replace(SPECIFICATION, initial_state="0" * 64).encode()),
        r"the specification's initial_state says 0000000000000000\.\.",
    ),
    "a file of the program": (
        lambda run: edit(run.program_path / "job.py", flipped),
        r"program/job\.py: SHA-256 is \w+, the specification says \w+; put the file back",
    ),
    "no program": (lambda run: (run.program_path / "job.py").unlink(), r"program/job\.py: not found"),
    "no specification": (
        lambda run: run.specification_path.unlink(), r"holds steps\.jsonl and no specification",
    ),
    "a log alone": (
        lambda run: [p.unlink() for p in (run.specification_path, run.records_path)],
        r"holds 000000\.tlog and no specification",
    ),
    "neither records nor a first state": (
        lambda run: [p.unlink() for p in (run.records_path, run.checkpoint_path(0))],
        "holds the records of 0 steps and no checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_run_that_cannot_go_on_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    damage, reason = REFUSALS[name]
    run = written(tmp_path / "run")
    damage(run)
    before = files_of(run.path)
    with pytest.raises(InvalidInput, match=reason.replace(" .* ", "(?s:.*)")):
        find_resumption(run)
    assert files_of(run.path) == before


def test_a_state_is_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "PIECE", 2 * CHUNK_BYTES)
    run = written(tmp_path / "run", 0)
    sizes = (0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1, 5 * CHUNK_BYTES)
    state = [Entry(f"w{size}", "U8", (size,), bytes([size % 251]) * size) for size in sizes]
    run.write_checkpoint(9, state)
    assert summary_of_file(run.checkpoint_path(9), "a state").root() == state_root(state)
    read: list[int] = []
    with run.checkpoint_path(9).open("rb") as file:
        read += map(len, resumption._pieces(file, 10 * CHUNK_BYTES))  # pyright: ignore[reportPrivateUsage]
    assert max(read) == 2 * CHUNK_BYTES
    edit(run.checkpoint_path(9), lambda data: data[:-1])
    with pytest.raises(InvalidInput, match="not a safetensors file"):
        summary_of_file(run.checkpoint_path(9), "a state")


def test_a_state_that_is_hardly_on_the_disk_is_never_mapped(tmp_path: Path) -> None:
    """A file may claim more bytes than this process could ever hold; what its header states says enough."""
    run = written(tmp_path / "run")
    os.truncate(run.checkpoint_path(4), 1 << 40)
    found = find_resumption(run)
    assert found.done == 2
    assert re.search(r"000004\.safetensors: .*its tensors have \d+ bytes, \d+ follow", str(found.notice()))
