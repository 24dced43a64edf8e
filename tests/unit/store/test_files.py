"""The run directory: whole or not at all, cut back to the last checkpoint that is whole, and never over somebody's files."""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tallystick.commit.state import Entry, summarise
from tallystick.dispute.verdict import OBJECTION_LIMIT
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.run.documents import JobRecord, Notes, PolicyRecord, Specification, StepRecord
from tallystick.store.files import RunDirectory, frame_digest, read_whole, write_whole
from tallystick.store.regular import SPARSE_FROM
from tallystick.store.resumption import find_resumption

EVERY, STEPS = 3, 8


def entries_at(steps_done: int) -> list[Entry]:
    return [
        Entry("a/counter", "I64", (), steps_done.to_bytes(8, "little")),
        Entry("a/document", "U8", (3,), b"abc"),
        Entry("model/empty", "F32", (0, 4), b""),
        Entry("model/weight", "F32", (2, 3), bytes(range(steps_done, steps_done + 24))),
    ]


def root_at(steps_done: int) -> str:
    return summarise(entries_at(steps_done)).root().hex()


def frame_at(step: int) -> bytes:
    return bytes([step]) * (step + 5)


SPECIFICATION = Specification(
    job=JobRecord("job.py", "0" * 64, {"a": "b"}, None),
    policy=PolicyRecord("fp32", {"recalibrate_every": 100}),
    seed=1,
    steps=STEPS,
    checkpoint_every=EVERY,
    accumulation=1,
    world_size=1,
    initial_state=root_at(0),
    versions={},
    sites=(),
    notes=Notes((), ()),
)


def record_at(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        rank=0,
        micro_batches=1,
        batch="1" * 64,
        log=frame_digest(frame_at(step)),
        log_bytes=len(frame_at(step)),
        loss="0x1.0000000000000p+0",
        schedule=(),
        skipped=False,
        fingerprint="0" * 16,
        state_root=root_at(step + 1) if SPECIFICATION.is_checkpoint(step) else None,
    )


def write_begin(run: RunDirectory) -> None:
    run.write_checkpoint(0, entries_at(0))
    run.write_program({"job.py": b"x = 1\n"})
    run.write_document(run.specification_path, SPECIFICATION.encode())


def write_step(run: RunDirectory, step: int) -> None:
    if SPECIFICATION.is_checkpoint(step):
        run.write_checkpoint(step + 1, entries_at(step + 1))
    run.append_step(
        step - step % EVERY, frame_at(step), record_at(step), durable=SPECIFICATION.is_checkpoint(step)
    )


def written(path: Path, steps: int = STEPS, *, finished: bool = True) -> RunDirectory:
    run = RunDirectory(path)
    run.create()
    write_begin(run)
    for step in range(steps):
        write_step(run, step)
    if finished and steps == STEPS:
        run.write_document(run.statement_path, run.load_partial().statement().encode())
    return run


def cut_back(run: RunDirectory) -> int | None:
    """As ``tally record --resume`` does: how many steps stay; None if the run starts over."""
    found = find_resumption(run)
    found.cut_back()
    return None if found.specification is None else found.done


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    transcript = run.load_transcript()
    assert transcript.specification == SPECIFICATION
    assert list(transcript.records) == [record_at(step) for step in range(STEPS)]
    for done in (0, 3, 6, 8):
        found = run.load_committed(done, root_at(done))
        assert list(found.values()) != []
        assert summarise(found.values()).root().hex() == root_at(done)
    assert run.load_frames(transcript, 0, STEPS) == {step: frame_at(step) for step in range(STEPS)}
    assert run.load_frames(transcript, 4, 7) == {step: frame_at(step) for step in (4, 5, 6)}
    assert run.load_statement() == run.statement_path.read_bytes()
    assert sorted(files_of(run.path)) == [
        "checkpoints/000000.safetensors",
        "checkpoints/000003.safetensors",
        "checkpoints/000006.safetensors",
        "checkpoints/000008.safetensors",
        "logs/000000.tlog",
        "logs/000003.tlog",
        "logs/000006.tlog",
        "program/job.py",
        "run.json",
        "specification.json",
        "steps.jsonl",
    ]


def test_checkpoints_are_safetensors_files_that_others_can_read(tmp_path: Path) -> None:
    from safetensors import safe_open

    run = written(tmp_path / "run", 0)
    with safe_open(run.checkpoint_path(0), framework="numpy") as file:
        assert file.metadata() == {"format": "tallystick/state/1"}
        assert sorted(file.keys()) == [entry.name for entry in entries_at(0)]
        assert file.get_tensor("model/weight").tobytes() == bytes(range(24))
        assert file.get_tensor("model/empty").shape == (0, 4)


@pytest.mark.parametrize("path", ["s3://bucket/run", "/work/gs://bucket/run", "file:///tmp/run"])
def test_an_address_is_no_directory(path: str) -> None:
    """Its scheme would be a folder's name."""
    with pytest.raises(InvalidInput, match="is an address; a run is recorded into a directory"):
        RunDirectory(Path(path)).create()


def test_a_directory_that_holds_a_file_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "deep" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep me")
    with pytest.raises(StoreError, match="exists and is not empty"):
        RunDirectory(tmp_path).create()
    with pytest.raises(StoreError, match="exists and is not empty"):
        RunDirectory(mine).create()
    with pytest.raises(StoreError, match="a part of the path is not a directory"):
        RunDirectory(mine / "run").create()
    assert mine.read_text() == "keep me"


def test_empty_folders_are_no_run(tmp_path: Path) -> None:
    """A recording that was refused before its first document can be tried again in the same place."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.create()
    write_begin(run)
    with pytest.raises(StoreError, match="exists and is not empty"):
        run.create()


Damage = Callable[[RunDirectory], None]


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


RESUMED: dict[str, tuple[int, Damage, int | None]] = {
    "nothing yet": (0, lambda run: run.specification_path.unlink(), None),
    "nothing but folders": (
        0,
        lambda run: [p.unlink() for p in run.path.rglob("*") if p.is_file()] and None,
        None,
    ),
    "the specification alone": (0, lambda run: run.checkpoint_path(0).unlink(), None),
    "no step": (0, lambda run: None, 0),
    "steps before the first checkpoint": (2, lambda run: None, 0),
    "a whole segment": (3, lambda run: None, 3),
    "a segment and a step": (4, lambda run: None, 3),
    "a log without its record": (4, lambda run: cut(run.records_path, len(record_at(3).encode()) + 1), 3),
    "half a record": (5, lambda run: cut(run.records_path, 7), 3),
    "half a frame": (5, lambda run: cut(run.log_path(3), 2), 3),
    "a checkpoint without its record": (5, lambda run: run.write_checkpoint(6, entries_at(6)), 3),
    "half a checkpoint": (6, lambda run: cut(run.checkpoint_path(6), 5), 3),
    "no last checkpoint": (6, lambda run: run.checkpoint_path(6).unlink(), 3),
    "another state in the last checkpoint": (6, lambda run: run.write_checkpoint(6, entries_at(5)), 3),
    "a short log before the last checkpoint": (6, lambda run: cut(run.log_path(3), 1), 3),
    "no log before the last checkpoint": (6, lambda run: run.log_path(3).unlink(), 3),
    "temporary files": (
        4,
        lambda run: [(run.path / d / ".x.part").write_bytes(b"half") for d in ("", "checkpoints")] and None,
        3,
    ),
    "all but the statement": (8, lambda run: None, 8),
    "rubbish after the records": (4, lambda run: run.records_path.open("ab").write(b"{}\n{}\n") and None, 3),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_broke_off_goes_on_from_its_last_whole_checkpoint(name: str, tmp_path: Path) -> None:
    steps, damage, expected = RESUMED[name]
    run = written(tmp_path / "run", steps, finished=False)
    damage(run)
    assert cut_back(run) == expected
    if expected is None:
        write_begin(run)
    for step in range(expected or 0, STEPS):
        write_step(run, step)
    run.write_document(run.statement_path, run.load_partial().statement().encode())
    assert files_of(run.path) == files_of(written(tmp_path / "whole").path)


def test_a_finished_run_is_cut_back_to_its_end_and_finished_again(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    before = files_of(run.path)
    assert cut_back(run) == STEPS
    assert not run.statement_path.exists()
    run.write_document(run.statement_path, run.load_partial().statement().encode())
    assert files_of(run.path) == before


def test_whatever_was_written_last_may_be_cut_anywhere(tmp_path: Path) -> None:
    """Truncate the newest log, checkpoint or the records: what is left goes on to the same bytes."""
    whole = files_of(written(tmp_path / "whole").path)
    dice = random.Random(3)
    for number in range(40):
        run = written(tmp_path / f"run{number}", dice.randrange(STEPS + 1), finished=False)
        newest = [max((run.path / folder).iterdir(), default=None) for folder in ("logs", "checkpoints")]
        last = dice.choice([*newest, run.records_path])
        if last is not None and last.exists() and last.name != "000000.safetensors":
            last.write_bytes(last.read_bytes()[: dice.randrange(last.stat().st_size + 1)])
        done = cut_back(run)
        for step in range(done or 0, STEPS):
            write_step(run, step)
        run.write_document(run.statement_path, run.load_partial().statement().encode())
        assert files_of(run.path) == whole, number


def test_records_without_any_usable_checkpoint_are_refused_and_kept(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 2, finished=False)
    run.checkpoint_path(0).unlink()
    before = files_of(run.path)
    with pytest.raises(
        InvalidInput, match="holds the records of 2 steps and no checkpoint that they could go on from"
    ):
        cut_back(run)
    assert files_of(run.path) == before


def test_what_is_no_run_is_not_cut_back(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(InvalidInput, match=r"holds mine\.txt and no specification; this is not a run"):
        cut_back(RunDirectory(tmp_path))
    run = written(tmp_path / "run", 4, finished=False)
    (run.path / "logs" / "notes.tlog").write_text("mine")
    with pytest.raises(InvalidInput, match=r"notes\.tlog: a run has no such file"):
        cut_back(run)


def test_frames_are_checked_against_their_records(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    transcript = run.load_transcript()
    whole = run.log_path(3).read_bytes()
    run.log_path(3).write_bytes(whole[:-1] + b"\x00")
    with pytest.raises(Mismatch, match="step 5: the log's digest is"):
        run.load_frames(transcript, 3, 6)
    assert run.load_frames(transcript, 0, 3).keys() == {0, 1, 2}
    run.log_path(3).write_bytes(whole + b"\x00")
    with pytest.raises(InvalidInput, match=r"000003\.tlog: has 28 bytes, at most 27 are allowed"):
        run.load_frames(transcript, 3, 6)
    run.log_path(3).write_bytes(whole[:-4])
    with pytest.raises((InvalidInput, Mismatch)):
        run.load_frames(transcript, 3, 6)
    run.log_path(3).unlink()
    with pytest.raises(InvalidInput, match=r"000003\.tlog: not found; the log of steps 3 to 5 is needed"):
        run.load_frames(transcript, 0, 8)


def test_a_checkpoint_of_another_state_is_a_mismatch(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 3, finished=False)
    with pytest.raises(
        Mismatch, match=r"checkpoint after 3 steps: root is \w+\.\., the transcript says \w+\.\."
    ) as raised:
        run.load_committed(3, root_at(4))
    found = raised.value
    assert (found.where, found.own, found.stated) == ("checkpoint after 3 steps", root_at(3), root_at(4))
    with pytest.raises(
        InvalidInput, match=r"000009\.safetensors: not found; the checkpoint after 9 steps is needed"
    ):
        run.load_checkpoint(9)


def header_of(fields: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 32, "not a safetensors file"),
        (
            header_of({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4),
            "not a safetensors file",
        ),
        (
            header_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 8),
            "not a safetensors file",
        ),
        (
            header_of({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4),
            "which no state holds",
        ),
        (header_of({"w": {"dtype": "BOOL", "shape": [4], "data_offsets": [0, 4]}}, b"\0\1\2\0"), "BOOL byte"),
        (header_of({"": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"\0"), "name"),
    ],
)
def test_a_malformed_checkpoint_is_invalid_input(data: bytes, reason: str, tmp_path: Path) -> None:
    run = written(tmp_path / "run", 0)
    run.checkpoint_path(0).write_bytes(data)
    with pytest.raises(InvalidInput, match=reason):
        run.load_checkpoint(0)


def test_mutated_checkpoints_end_in_a_refusal_or_in_other_entries(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 0)
    path = run.checkpoint_path(0)
    whole, dice = path.read_bytes(), random.Random(5)
    for _ in range(300):
        data = bytearray(whole)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(data))
        try:
            run.load_committed(0, root_at(0))
        except (InvalidInput, Mismatch):
            continue
        assert run.load_checkpoint(0).keys() == {entry.name for entry in entries_at(0)}


def test_an_unfinished_run_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 5, finished=False)
    with pytest.raises(InvalidInput, match="the run is not finished"):
        run.load_transcript()
    with pytest.raises(InvalidInput, match="the run is not finished"):
        run.load_statement()
    assert len(run.load_partial().records) == 5


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Python warns of forking beside threads; the child uses none
def test_a_directory_that_may_not_be_written_is_named_and_left_whole() -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        run = written(Path(place) / "run", 4, finished=False)
        before = files_of(run.path)
        every = (run.path, *run.path.rglob("*"))
        for path in every:
            path.chmod(0o555 if path.is_dir() else 0o444)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setuid(65534)  # to root nothing is read-only
            os.write(writer, "\n".join(refusals(run)).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()
        assert len(lines) == 5
        assert all("permission denied; what was written before is intact" in line for line in lines), lines
        for path in every:
            path.chmod(0o755)
        assert files_of(run.path) == before
        assert cut_back(run) == 3


def refusals(run: RunDirectory) -> list[str]:
    """What a run directory says to every way of writing."""
    found: list[str] = []
    for act in (
        RunDirectory(run.path / "new").create,
        lambda: run.write_program({"job.py": b"other"}),
        lambda: run.write_checkpoint(9, []),
        lambda: run.append_step(3, b"frame", record_at(4), durable=False),
        lambda: cut_back(run),
    ):
        try:
            act()
        except StoreError as problem:
            found.append(str(problem))
        except BaseException as problem:  # noqa: BLE001
            found.append(repr(problem))
    return found


def test_a_secret_is_at_no_moment_open_to_others_and_a_link_is_not_followed(tmp_path: Path) -> None:
    secret, elsewhere = tmp_path / "secret", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"untouched")
    (tmp_path / ".secret.part").symlink_to(elsewhere)  # where the temporary file would be
    write_whole(secret, b"s", mode=0o600)
    assert (secret.read_bytes(), elsewhere.read_bytes()) == (b"s", b"untouched")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert not secret.is_symlink()


# -- a stranger's directory -------------------------------------------------------------------------------------------

FILES: dict[str, Callable[[RunDirectory], Path]] = {
    "specification": lambda run: run.specification_path,
    "records": lambda run: run.records_path,
    "statement": lambda run: run.statement_path,
    "log": lambda run: run.log_path(0),
    "checkpoint": lambda run: run.checkpoint_path(0),
    "objection": lambda run: run.objection_path,
}


def read_all(run: RunDirectory) -> None:
    run.load_objection()
    transcript = run.load_transcript()
    run.load_frames(transcript, 0, STEPS)
    run.load_statement()
    run.load_committed(0, root_at(0))
    run.load_entry(0, "a/document")


@pytest.mark.parametrize("kind", ["device", "pipe", "link", "link to nothing", "directory", "socket"])
@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_of_a_run_are_read_and_nothing_is_waited_for(
    name: str, kind: str, tmp_path: Path
) -> None:
    run = written(tmp_path / "run", STEPS)
    path = FILES[name](run)
    honest = tmp_path / "honest"
    if path.exists():
        path.rename(honest)
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(honest)
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "absent")
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as open_socket:
            os.chdir(path.parent)  # the name of a socket is short
            open_socket.bind(path.name)
    with pytest.raises((InvalidInput, StoreError), match=r"regular file|No such device"):
        read_all(run)


@pytest.mark.parametrize("folder", ["logs", "checkpoints"])
def test_a_folder_of_a_run_that_is_a_link_is_not_followed(folder: str, tmp_path: Path) -> None:
    run = written(tmp_path / "run", STEPS)
    read_all(run)
    (run.path / folder).rename(tmp_path / "elsewhere")
    (run.path / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="is not a regular file"):
        read_all(run)


@pytest.mark.parametrize(
    ("name", "more"), [("specification", 1 << 26), ("statement", 1 << 12), ("log", 1), ("objection", 1 << 27)]
)
def test_a_file_longer_than_earlier_documents_allow_is_refused_unread(
    name: str, more: int, tmp_path: Path
) -> None:
    run = written(tmp_path / "run", STEPS)
    path = FILES[name](run)
    path.touch()
    os.truncate(path, path.stat().st_size + more)
    with pytest.raises(InvalidInput, match=r"has \d+ bytes, at most \d+ are allowed"):
        read_all(run)


def test_a_checkpoint_that_is_hardly_on_the_disk_is_not_read(tmp_path: Path) -> None:
    run = written(tmp_path / "run", STEPS)
    for size, reason in (
        (SPARSE_FROM, "not a safetensors file"),
        (SPARSE_FROM + 1, r"claims 67108865 bytes and has \d+ on the disk"),
        (1 << 40, r"claims 1099511627776 bytes and has \d+ on the disk"),
    ):
        os.truncate(run.checkpoint_path(0), size)
        with pytest.raises(InvalidInput, match=reason):
            run.load_checkpoint(0)


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.writing():
        with pytest.raises(StoreError, match="another recorder is writing there"), run.writing():
            raise AssertionError
        run.create()  # an empty directory still
    with run.writing():
        pass


def test_a_strangers_file_may_be_as_long_as_its_limit_and_not_longer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16))
    assert len(read_whole(path, limit=16, what="a file")) == 16
    with pytest.raises(InvalidInput, match="must have at most 15 bytes"):
        read_whole(path, limit=15, what="a file")
    run = written(tmp_path / "run", STEPS)
    limit = len(run.load_objection().encode()) if run.load_objection() else OBJECTION_LIMIT
    for size, refused in ((limit, False), (OBJECTION_LIMIT + 1, True)):
        run.objection_path.unlink(missing_ok=True)
        run.objection_path.write_bytes(b" " * size)
        with pytest.raises(InvalidInput, match="at most 16384 are allowed" if refused else "log objection"):
            run.load_objection()


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run", STEPS)
    honest, size = os.fstat, run.specification_path.stat().st_size

    def shrunk(descriptor: int) -> os.stat_result:
        found = honest(descriptor)
        return os.stat_result((*found[:6], size - 1, *found[7:])) if found.st_size == size else found

    monkeypatch.setattr(os, "fstat", shrunk)
    with pytest.raises(InvalidInput, match="it grows while it is read"):
        run.load_specification()
