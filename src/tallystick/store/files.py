"""A run directory: the documents of one run as files, crash-safe (spec/transcript.md 6).

    specification.json            what was ordered; written once, first
    program/helper.py             the files that the run's code came from, as the specification names them; for people to
                                  read, never executed
    steps.jsonl                   one record a line, appended
    logs/000000.tlog              frames of the steps from there to the next checkpoint, back to back
    checkpoints/000020.safetensors  the whole state after 20 steps
    run.json                      the statement; present when the run is finished
    made-files.json               of a script's run: what it made in its folders while it was recorded; a hint, committed nowhere
    objection.json                of an auditor's claim: which step's log of the trainer breaks a rule

Documents appear whole or not at all (temporary name, fsync, rename). A process killed at any moment
leaves a directory that ``resumption`` returns to its last checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path

import safetensors

from tallystick.commit.encoding import digest
from tallystick.commit.state import Entry, HeldState, hold
from tallystick.commit.tensor_file import check_tensor_file
from tallystick.dispute.verdict import OBJECTION_LIMIT, LogObjection, parse_log_objection
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.run.documents import (
    RECORD_LIMIT,
    SPECIFICATION_LIMIT,
    STATEMENT_LIMIT,
    Specification,
    StepRecord,
    parse_run_statement,
    parse_specification,
    parse_step_records,
)
from tallystick.run.transcript import Transcript, verify_transcript
from tallystick.store.regular import content_of, open_found, open_regular, read_regular
from tallystick.store.tensor_files import load_state_file, write_state
from tallystick.store.unlinked import verify_unlinked

FRAME_TAG = "tallystick/log-frame/1"
SCHEME = re.compile(r"[a-z][a-z0-9.+-]+:")  # of an address, as ``s3://bucket/run``, in a path


def frame_digest(frame: bytes) -> str:
    """Return the hexadecimal digest by which a step record names its log frame."""
    return digest(FRAME_TAG, frame).hex()


@contextmanager
def storing(what: str) -> Generator[None]:
    """Turn the operating system's errors into a ``StoreError`` that says what they mean."""
    try:
        yield
    except OSError as problem:
        reason = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "permission denied",
            errno.EPERM: "permission denied",
            errno.ENOTDIR: "a part of the path is not a directory",
            errno.ELOOP: "it is a link, and nothing is written through one",
            errno.ENXIO: "it is a pipe, a socket or a device",
        }.get(problem.errno or 0, os.strerror(problem.errno) if problem.errno else str(problem))
        raise StoreError(f"{what}: {reason}; what was written before is intact") from problem


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write ``path`` so that it is there completely or not at all, whenever the process dies.

    It is at no moment open to more than ``mode`` (less the process's umask) says.

    Raises:
        StoreError: the disk refused; what stood there still does.
    """
    write_pieces(path, (data,), mode=mode)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o666) -> int:
    """Write ``pieces`` one after the other as ``write_whole`` does, and return how many bytes they are.

    Raises:
        StoreError: the disk refused; what stood there still does.
    """
    with _replacing(path, mode) as file:
        for piece in pieces:
            file.write(piece)
        return file.tell()


@contextmanager
def _replacing(path: Path, mode: int = 0o666) -> Generator[BufferedWriter]:
    """Give a new file that takes the place of ``path`` once it has been written; a link there is not followed.

    Raises:
        StoreError: the disk refused; what stood there still does.
    """
    with storing(f"{path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        try:
            temporary.unlink(missing_ok=True)  # of a process that died; never followed if it is a link
        except OSError:  # what cannot be removed is nobody's leave to stop this
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)


def _append(path: Path, data: bytes, *, durable: bool, folder: bool) -> None:
    """Append to a regular file, made if it is absent, through no link; with ``folder`` its directory is none either."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    holder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | (flags if folder else os.O_CLOEXEC))
    try:
        descriptor = os.open(path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | flags, 0o666, dir_fd=holder)
        with os.fdopen(descriptor, "ab") as file:
            if stat.S_IFMT(os.fstat(descriptor).st_mode) != stat.S_IFREG:
                raise InvalidInput(f"{path}: is not a regular file; nothing is written there")
            file.write(data)
            file.flush()
            if durable:
                os.fsync(descriptor)
        if durable:
            os.fsync(holder)
    finally:
        os.close(holder)


def open_file(path: Path, *, what: str, follow: bool = True) -> BufferedReader:
    """Return the file ``path``, which may be a stranger's, opened for reading; a link is followed unless told otherwise.

    Raises:
        StoreError: it is not there or cannot be read.
        InvalidInput: it is a device, a pipe or a directory: none of them is waited for.
    """
    try:
        return open_found(path, str(path), follow=follow)
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file ({what})") from None


def read_whole(path: Path, *, limit: int, what: str, follow: bool = True) -> bytes:
    """Return the bytes of the file ``path``, which may be a stranger's.

    Raises:
        StoreError: it is not there or cannot be read.
        InvalidInput: it is no regular file, has more than ``limit`` bytes, or grows.
    """
    with open_file(path, what=what, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise InvalidInput(f"{path}: {what} must have at most {limit} bytes, has {size}")
        return content_of(file, size, str(path))


@dataclass(frozen=True)
class RunDirectory:
    """Reads and writes the files of one run."""

    path: Path

    @property
    def specification_path(self) -> Path:
        """Where the specification lies."""
        return self.path / "specification.json"

    @property
    def statement_path(self) -> Path:
        """Where the statement of a finished run lies."""
        return self.path / "run.json"

    @property
    def records_path(self) -> Path:
        """Where the step records lie."""
        return self.path / "steps.jsonl"

    @property
    def objection_path(self) -> Path:
        """Where an auditor's claim holds its objection to the trainer's log, if it has one."""
        return self.path / "objection.json"

    @property
    def made_files_path(self) -> Path:
        """Where the names of the files lie that a script made while it was recorded."""
        return self.path / "made-files.json"

    @property
    def program_path(self) -> Path:
        """Where the files of the run's program lie."""
        return self.path / "program"

    def checkpoint_path(self, steps_done: int) -> Path:
        """Where the state after ``steps_done`` steps lies."""
        return self.path / "checkpoints" / f"{steps_done:06d}.safetensors"

    def log_path(self, first_step: int) -> Path:
        """Where the frames of a segment that begins at ``first_step`` lie."""
        return self.path / "logs" / f"{first_step:06d}.tlog"

    # -- writing -----------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold the directory, made if it is absent: nobody else who asks so writes there.

        Raises:
            StoreError: somebody does, or it cannot be made.
        """
        with storing(f"{self.path}: cannot be created"):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{self.path}: another recorder is writing there; wait for it or choose another directory"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(descriptor)

    def create(self) -> None:
        """Make the directory; it must be absent or hold no file.

        Raises:
            StoreError: it holds something, or cannot be made.
            InvalidInput: what would be written there is a link, a pipe or a device; or the path is an address.
        """
        if any(map(SCHEME.fullmatch, self.path.parts)):
            raise InvalidInput(
                f"{self.path}: is an address; a run is recorded into a directory of this machine"
            )
        with storing(f"{self.path}: cannot be created"):
            if self.path.is_dir():
                verify_unlinked(self.path)
            # Empty folders are what a recording leaves that was refused before its first document.
            if self.path.exists() and not (
                self.path.is_dir() and all(p.is_dir() and not p.is_symlink() for p in self.path.rglob("*"))
            ):
                raise StoreError(
                    f"{self.path}: exists and is not empty; choose another directory, or --resume to go on with it"
                )
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            (self.path / "checkpoints").mkdir(exist_ok=True)

    def write_document(self, path: Path, data: bytes) -> None:
        """Write a whole document so that it is there completely or not at all."""
        write_whole(path, data)

    def write_program(self, contents: Mapping[str, bytes]) -> None:
        """Write the files of the run's program by their names, which ``ProgramFile`` has checked."""
        for name, data in contents.items():
            write_whole(self.program_path / name, data)

    def write_checkpoint(
        self, steps_done: int, entries: list[Entry], *, each: Callable[[Entry], Entry] | None = None
    ) -> None:
        """Write a state as a safetensors file with one metadata key; what ``each`` makes of an entry is written."""
        with _replacing(self.checkpoint_path(steps_done)) as file:
            write_state(file, entries, each)

    def append_step(self, first_step: int, frame: bytes, record: StepRecord, *, durable: bool) -> None:
        """Append one step's frame to its segment's log, then its record. ``durable`` waits for the disk."""
        log, records = self.log_path(first_step), self.records_path
        with storing(f"{log}: step {record.step} cannot be written"):
            log.parent.mkdir(parents=True, exist_ok=True)
            _append(log, frame, durable=durable, folder=True)
        with storing(f"{records}: step {record.step} cannot be written"):
            _append(records, record.encode() + b"\n", durable=durable, folder=False)

    # -- reading -----------------------------------------------------------------------------

    def load_specification(self) -> Specification:
        """Return the specification.

        Raises:
            InvalidInput: it is missing or malformed.
        """
        return parse_specification(self._specification())

    def _specification(self) -> bytes:
        return read_regular(
            self.specification_path, "a run directory has a specification.json", SPECIFICATION_LIMIT
        )

    def _records(self, specification: bytes) -> bytes:
        stated = parse_specification(specification)
        limit = stated.steps * stated.world_size * (RECORD_LIMIT + 1)
        return read_regular(self.records_path, "a run directory has a steps.jsonl", limit)

    def load_transcript(self) -> Transcript:
        """Return the transcript of a finished run, its three documents checked against each other.

        Raises:
            InvalidInput: a document is missing or malformed.
            Mismatch: they disagree.
        """
        specification = self._specification()
        return verify_transcript(
            specification,
            self._records(specification),
            read_regular(
                self.statement_path,
                "the run is not finished; `tally record --resume` goes on with it, or says what stops it",
                STATEMENT_LIMIT,
            ),
        )

    def load_partial(self) -> Transcript:
        """Return what there is of a transcript, finished or not."""
        if os.path.lexists(self.statement_path):
            return self.load_transcript()
        specification = self._specification()
        records = self._records(specification) if os.path.lexists(self.records_path) else b""
        whole = records[: records.rfind(b"\n") + 1]
        return Transcript(parse_specification(specification), parse_step_records(whole))

    def load_statement(self) -> bytes:
        """Return the bytes of the statement, checked to be one."""
        data = read_regular(self.statement_path, "the run is not finished", STATEMENT_LIMIT)
        parse_run_statement(data)
        return data

    def load_program(self) -> dict[str, bytes]:
        """Return the files of the run's program by name, as they lie here, checked against the specification.

        Raises:
            InvalidInput: one is missing, no regular file behind no link, or longer than stated.
            Mismatch: one has another digest.
        """
        found: dict[str, bytes] = {}
        for file in self.load_specification().job.program.files:
            *folders, last = file.name.split("/")
            place = self.program_path
            for folder in ("", *folders):
                place = place / folder if folder else place
                if place.is_symlink():
                    raise InvalidInput(f"{place}: is a link; a run's program is read through none")
            data = read_regular(place / last, "a run carries its program", file.size, folder=True)
            if (own := hashlib.sha256(data).hexdigest()) != file.sha256:
                raise Mismatch(
                    f"program/{file.name}: SHA-256 is {own}, the specification says {file.sha256}",
                    where=f"program/{file.name}",
                    own=own,
                    stated=file.sha256,
                )
            found[file.name] = data
        return found

    def load_objection(self) -> LogObjection | None:
        """Return the objection to the trainer's log that this claim holds, or None if it holds none.

        Raises:
            InvalidInput: it is malformed.
        """
        if not os.path.lexists(self.objection_path):
            return None
        return parse_log_objection(read_regular(self.objection_path, "an objection", OBJECTION_LIMIT))

    def load_checkpoint(self, steps_done: int) -> dict[str, Entry]:
        """Return the entries of the state after ``steps_done`` steps, by name.

        Raises:
            InvalidInput: the file is missing, or no safetensors file of a state.
        """
        return load_state_file(
            self.checkpoint_path(steps_done),
            f"the checkpoint after {steps_done} steps is needed",
            folder=True,
        )

    def load_entry(self, steps_done: int, name: str) -> bytes:
        """Return the bytes of one entry of a state, whatever the state's size; they are checked against no root.

        Raises:
            InvalidInput: the file is missing, no safetensors file, or has no such entry of bytes.
        """
        path = self.checkpoint_path(steps_done)
        needed = f"the checkpoint after {steps_done} steps is needed"
        with open_regular(path, needed, folder=True) as opened, storing(f"{path}: cannot be read"):
            check_tensor_file(opened, os.fstat(opened.fileno()).st_size, what=path.name)
        try:
            with safetensors.safe_open(path, framework="np") as file:
                return file.get_tensor(name).tobytes()
        except (OSError, safetensors.SafetensorError, ValueError, TypeError) as problem:
            raise InvalidInput(f"{path.name}: entry {name} cannot be read ({problem})") from None

    def load_committed(self, steps_done: int, root: str) -> dict[str, Entry]:
        """Return the entries of a checkpoint whose root is ``root``.

        Raises:
            InvalidInput: the file is missing or malformed.
            Mismatch: its state has another root.
        """
        return dict(self.load_held(steps_done, root).entries)

    def load_held(self, steps_done: int, root: str) -> HeldState:
        """Return the checkpoint whose root is ``root`` with its summary.

        Raises:
            InvalidInput: the file is missing or malformed.
            Mismatch: its state has another root.
        """
        entries = self.load_checkpoint(steps_done)
        with ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash") as pool:
            state = hold(entries.values(), pool=pool)
        found = state.root.hex()
        if found != root:
            raise Mismatch(
                f"checkpoint after {steps_done} steps: root is {found[:16]}.., the transcript says {root[:16]}..",
                where=f"checkpoint after {steps_done} steps",
                own=found,
                stated=root,
            )
        return state

    def load_frames(self, transcript: Transcript, start: int, end: int) -> dict[int, bytes]:
        """Return the log frames of steps ``start`` to ``end``, both on segment borders or inside one, digests checked.

        Raises:
            InvalidInput: a log file is missing, too short or too long; or of several ranks, whose logs no directory holds.
            Mismatch: a frame's digest is not the one its record states.
        """
        check_ranks(transcript)
        frames: dict[int, bytes] = {}
        first = start - start % transcript.specification.checkpoint_every
        while first < end:
            last = min(first + transcript.specification.checkpoint_every, transcript.num_steps)
            path = self.log_path(first)
            stated = sum(transcript.record(step).log_bytes for step in range(first, last))
            data = read_regular(
                path, f"the log of steps {first} to {last - 1} is needed", stated, folder=True
            )
            offset = 0
            for step in range(first, last):
                record = transcript.record(step)
                frame = data[offset : offset + record.log_bytes]
                offset += record.log_bytes
                if start <= step < end:
                    found = frame_digest(frame)
                    if found != record.log:
                        raise Mismatch(
                            f"step {step}: the log's digest is {found[:16]}.., the transcript says {record.log[:16]}..",
                            where=f"step {step}: log",
                            own=found,
                            stated=record.log,
                        )
                    frames[step] = frame
            if offset != len(data):
                raise InvalidInput(f"{path.name}: holds {len(data)} bytes, its records speak of {offset}")
            first = last
        return frames


def check_ranks(transcript: Transcript) -> None:
    """Return if one rank recorded the run: a directory has no place for the logs of others.

    Raises:
        InvalidInput: several did, and what the others state can be held against nothing.
    """
    ranks = transcript.specification.world_size
    if ranks != 1:
        raise InvalidInput(
            f"world_size: must be 1, is {ranks}; a run directory holds the logs of rank 0 alone, "
            "and nobody could look at those of the others"
        )


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
