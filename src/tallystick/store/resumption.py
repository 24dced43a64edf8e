"""Where an interrupted run can be gone on from: what its directory holds that is whole, and what must go first.

Every log frame and every checkpoint that would stay is hashed against its record, as an auditor will. Bytes that rotted on
this disk would make an honest trainer's run a mismatch; who resumes goes on from the last state before them. Finding
out changes nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

import safetensors

from tallystick.commit.encoding import frame
from tallystick.commit.merkle import EMPTY_ROOT, leaf_hashes
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, DTYPE_BYTES, EntrySummary, StateSummary, check_tensor
from tallystick.commit.tensor_file import check_tensor_file
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import RECORD_LIMIT, Specification, StepRecord, parse_step_record
from tallystick.run.transcript import check_record
from tallystick.store.files import FRAME_TAG, RunDirectory, storing, write_pieces
from tallystick.store.regular import open_regular
from tallystick.store.tensor_files import STATE_METADATA, safetensors_header
from tallystick.store.unlinked import FOLDERS, is_part, verify_unlinked

PIECE = 128 * CHUNK_BYTES  # bytes in memory at a time, for each thread that hashes
_FRAME_HEAD = frame(FRAME_TAG)  # the frame's tag; a single part follows


@dataclass(frozen=True)
class Resumption:
    """How far the run in a directory got.

    Attributes:
        directory: where it lies.
        specification: None if there is no state to go on from, and nothing recorded that would be lost: it starts over.
        records: of the steps that stay.
        problem: what is damaged and keeps later steps from staying; None if the run only broke off.
        lost: how many recorded steps must be computed again because of that.
    """

    directory: RunDirectory
    specification: Specification | None = None
    records: tuple[StepRecord, ...] = ()
    problem: str | None = None
    lost: int = 0

    @property
    def done(self) -> int:
        """The number of steps that stay."""
        return len(self.records)

    def notice(self) -> str | None:
        """Return in words what is damaged and what follows from it; None if the run only broke off."""
        if self.problem is None:
            return None
        again = f"; {self.lost} recorded steps are computed again" if self.lost else ""
        return f"{self.problem}: going on from the state after {self.done} steps{again}"

    def cut_back(self) -> None:
        """Remove from the directory what is not of those steps.

        Raises:
            StoreError: the directory cannot be written.
        """
        run = self.directory
        with storing(f"{run.path}: cannot be resumed"):
            for folder in (run.path, run.path / "checkpoints"):
                for part in [path for path in _files_in(folder) if is_part(path.name)]:
                    part.unlink()
            if self.specification is None:
                return
            run.statement_path.unlink(missing_ok=True)
            if os.path.lexists(run.records_path):
                self._cut_records()
            for path, number in _numbered(run, "logs"):
                if number >= self.done:
                    path.unlink()
            for path, number in _numbered(run, "checkpoints"):
                if number > self.done:
                    path.unlink()

    def _cut_records(self) -> None:
        """Write the records anew unless they are all: a file with another name elsewhere, a backup's, stays as it is."""
        path = self.directory.records_path
        found = path.lstat()
        if found.st_size != sum(len(r.encode()) + 1 for r in self.records) or found.st_nlink != 1:
            write_pieces(path, (record.encode() + b"\n" for record in self.records))


def find_resumption(run: RunDirectory) -> Resumption:
    """Return how far the run got whose steps are all whole; nothing is changed.

    Raises:
        StoreError: the directory cannot be read.
        InvalidInput: it holds something that is no run or is written through a link, no state that its records could go on
            from, or another program than its specification states.
    """
    with storing(f"{run.path}: cannot be resumed"):
        verify_unlinked(run.path)
        logs = _numbered(run, "logs")
        states = [path for path, number in _numbered(run, "checkpoints") if number > 0]
        if not os.path.lexists(run.specification_path):
            others = [p for p in _files_in(run.path) if p.name not in FOLDERS and not is_part(p.name)]
            if stray := [*others, *(path for path, _ in logs), *states]:
                raise InvalidInput(
                    f"{run.path}: holds {stray[0].name} and no specification; this is not a run"
                )
            return Resumption(run)
        specification = run.load_specification()
        records, problem = _records_of(run, specification)
        done, damage = _whole_steps(run, specification, records)
        if done is None and not records and not logs and not states:
            return Resumption(run)
        if done is None:
            raise InvalidInput(
                f"{run.path}: holds the records of {len(records)} steps and no checkpoint that they could go on from: {damage}"
            )
        _verify_program(run)
    lost = 0 if damage is None else len(records) - done
    return Resumption(run, specification, tuple(records[:done]), damage or problem, lost)


def _files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _numbered(run: RunDirectory, folder: str) -> list[tuple[Path, int]]:
    """Return the logs or checkpoints with the numbers that they are named after.

    Raises:
        InvalidInput: one has another name, or is a directory.
    """
    suffix = {"logs": ".tlog", "checkpoints": ".safetensors"}[folder]
    found: list[tuple[Path, int]] = []
    for path in _files_in(run.path / folder):
        if path.suffix == suffix:
            if not path.is_file() or not path.stem.isascii() or not path.stem.isdigit():
                raise InvalidInput(f"{path}: a run has no such file")
            found.append((path, int(path.stem)))
    return found


def _records_of(run: RunDirectory, specification: Specification) -> tuple[list[StepRecord], str | None]:
    """Return the records up to the first that is none, and what is wrong with that if more lines follow it."""
    records: list[StepRecord] = []
    if not os.path.lexists(run.records_path):
        return records, None
    with open_regular(run.records_path, "a run directory has a steps.jsonl") as file:
        while (line := file.readline(RECORD_LIMIT + 1)).endswith(b"\n"):
            try:
                record = parse_step_record(line[:-1])
                check_record(specification, len(records), record)
            except InvalidInput as problem:
                more = file.readline(RECORD_LIMIT + 1).endswith(b"\n")
                return records, f"steps.jsonl: line {len(records)}: {problem}" if more else None
            records.append(record)
    return records, None


def _whole_steps(
    run: RunDirectory, specification: Specification, records: Sequence[StepRecord]
) -> tuple[int | None, str | None]:
    """Return how many steps have whole logs and checkpoints, all before them included, and what is damaged after that.

    The number is None if the first state itself is not whole.
    """
    segments: list[list[StepRecord]] = [[]]
    for record in records:
        segments[-1].append(record)
        if record.state_root is not None:
            segments.append([])
    closed = [segment for segment in segments if segment and segment[-1].state_root is not None]
    first = _damage_of(_state_damage(run, 0, specification.initial_state))
    if first is not None:
        return None, first
    with ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash") as pool:
        found = pool.map(lambda segment: _damage_of(_segment_damage(run, segment)), closed)
        for segment, damage in zip(closed, found, strict=True):
            if damage is not None:
                pool.shutdown(cancel_futures=True)
                return segment[0].step, damage
    return (closed[-1][-1].step + 1 if closed else 0), None


def _damage_of(checks: Iterable[str]) -> str | None:
    """Return the first damage that was found, or what makes a file unreadable; None if there is none."""
    try:
        return next(iter(checks), None)
    except InvalidInput as problem:
        return str(problem)


def _segment_damage(run: RunDirectory, segment: Sequence[StepRecord]) -> Iterator[str]:
    yield from _log_damage(run.log_path(segment[0].step), segment)
    last = segment[-1]
    assert last.state_root is not None
    yield from _state_damage(run, last.step + 1, last.state_root)


def _log_damage(path: Path, records: Sequence[StepRecord]) -> Iterator[str]:
    shown = f"logs/{path.name}"
    with open_regular(path, f"the log of steps {records[0].step} to {records[-1].step}", folder=True) as file:
        size, stated = os.fstat(file.fileno()).st_size, sum(record.log_bytes for record in records)
        if size != stated:
            yield f"{shown}: has {size} bytes, its records speak of {stated}"
            return
        for record in records:
            found = hashlib.sha256(_FRAME_HEAD + record.log_bytes.to_bytes(8, "little"))
            for piece in _pieces(file, record.log_bytes):
                found.update(piece)
            if (own := found.hexdigest()) != record.log:
                yield f"{shown}: the digest of step {record.step}'s frame is {own[:16]}.., its record says {record.log[:16]}.."


def _state_damage(run: RunDirectory, steps_done: int, root: str) -> Iterator[str]:
    path = run.checkpoint_path(steps_done)
    own = summary_of_file(path, f"the state after {steps_done} steps").root().hex()
    if own != root:
        where = "the specification's initial_state" if steps_done == 0 else "its record"
        yield f"checkpoints/{path.name}: its state's root is {own[:16]}.., {where} says {root[:16]}.."


def summary_of_file(path: Path, needed: str) -> StateSummary:
    """Return the summary of the state in a file as ``write_checkpoint`` writes it, with little of it in memory at a time.

    Raises:
        InvalidInput: the file is missing, or is not byte for byte what would be written for a state.
    """
    shown = f"{path.parent.name}/{path.name}"
    with open_regular(path, needed, folder=True) as file:
        check_tensor_file(file, os.fstat(file.fileno()).st_size, what=shown)
        file.seek(0)
        header, ordered = safetensors_header(_stated_tensors(path, shown), STATE_METADATA)
        if file.read(len(header)) != header:
            raise InvalidInput(f"{shown}: its header is not the one that a state of these tensors has")
        entries = [replace(each, tensor_root=_hashed(file, each.nbytes)) for each in ordered]
    return StateSummary(tuple(sorted(entries, key=lambda entry: entry.name.encode())))


def _stated_tensors(path: Path, shown: str) -> list[EntrySummary]:
    """Return the tensors that a safetensors file's header states, each with the root of nothing."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            names = list(file.keys())
            slices = [(name, file.get_slice(name)) for name in names]
            stated = [(name, str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices]
    except (safetensors.SafetensorError, ValueError, TypeError) as problem:
        raise InvalidInput(f"{shown}: not a safetensors file ({problem})") from None
    for name, dtype, shape in stated:
        check_tensor(name, dtype, shape)
    return [
        EntrySummary(name, dtype, shape, DTYPE_BYTES[dtype] * math.prod(shape), EMPTY_ROOT)
        for name, dtype, shape in stated
    ]


def _hashed(file: BufferedReader, size: int) -> bytes:
    """Return the tensor root of the next ``size`` bytes."""
    pieces = _pieces(file, size)
    return merkle_root([leaf for piece in pieces for leaf in leaf_hashes(memoryview(piece), CHUNK_BYTES)])


def _pieces(file: BufferedReader, size: int) -> Iterator[bytes]:
    """Yield the next ``size`` bytes of a file, or what there is of them."""
    while size > 0 and (piece := file.read(min(size, PIECE))):
        size -= len(piece)
        yield piece


def _verify_program(run: RunDirectory) -> None:
    try:
        run.load_program()
    except Mismatch as problem:
        raise InvalidInput(f"{problem}; put the file back as it was recorded") from None
