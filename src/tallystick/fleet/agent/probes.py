"""Probes: how an agent sees the memory of a program (Linux).

``ProcessMemory`` stops another process, reads the tensors it registered (``tallystick.integrations.observed``) and lets
it go on. ``SharedMemory`` reads tensors that lie in files of /dev/shm.

A program that is observed publishes a control block, a file that both map:

    "TALLYOBS" | u64 sequence | u64 steps done | u64 regions | (u64 address | u64 bytes) per region

The sequence is odd while the optimizer writes or the table changes. All of it is the program's own word, as is
fitting for a software agent.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import kind_of
from tallystick.commit.field_rules import Via, Whole
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.agent.memory import Observation, Reader, Region, reader_of
from tallystick.store.files import storing

OBSERVED_FORMAT = "tallystick/observed/1"
MANIFEST_FORMAT = "tallystick/shared-memory/1"
CONTROL_MAGIC = b"TALLYOBS"
CONTROL_HEAD = struct.Struct("<8sQQQ")
CONTROL_ENTRY = struct.Struct("<QQ")
QUIESCE_SECONDS = 2.0  # how long to wait for a moment when no optimizer writes
RETRY_SECONDS = 0.003
STOP_SECONDS = 5.0
REGISTRATION_LIMIT = 1 << 24
LARGEST_REGION = 1 << 42


def _read_path(value: object, what: str) -> Path:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be a string, is {kind_of(value)}")
    return Path(value)


FilePath = Annotated[Path, Via(str, _read_path)]


@dataclass(frozen=True)
class Observed(Document, form=OBSERVED_FORMAT, what="registration", limit=REGISTRATION_LIMIT):
    """A program that registered itself: its process, when that started, its control block and its regions."""

    pid: int
    started: int
    control: FilePath
    regions: tuple[tuple[str, str, str], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for region in self.regions:
            Region(*region, 0)
        if self.pid <= 1:
            raise InvalidInput(f"registration: process {self.pid} is none that can be observed")


@dataclass(frozen=True)
class SharedManifest(Document, form=MANIFEST_FORMAT, what="manifest", limit=REGISTRATION_LIMIT):
    """Tensors that lie in files: name, dtype, kind, file, offset and bytes of each."""

    regions: tuple[tuple[str, str, str, FilePath, Whole, int], ...]


@dataclass(frozen=True)
class Control:
    """What a control block says at one moment."""

    sequence: int
    step: int
    places: tuple[tuple[int, int], ...]

    @property
    def is_quiet(self) -> bool:
        """Whether no optimizer writes."""
        return self.sequence % 2 == 0


def parse_control(data: bytes, regions: int, *, what: str) -> Control:
    """Return the control block in ``data``.

    Raises:
        InvalidInput: no control block, or one of another number of regions.
    """
    if len(data) < CONTROL_HEAD.size + regions * CONTROL_ENTRY.size:
        raise InvalidInput(f"{what}: a control block for {regions} regions is longer than {len(data)} bytes")
    magic, sequence, step, count = CONTROL_HEAD.unpack_from(data)
    if magic != CONTROL_MAGIC or count != regions:
        raise InvalidInput(f"{what}: is no control block for {regions} regions")
    places = tuple(
        cast("tuple[int, int]", CONTROL_ENTRY.unpack_from(data, CONTROL_HEAD.size + i * CONTROL_ENTRY.size))
        for i in range(regions)
    )
    if any(size > LARGEST_REGION for _, size in places):
        raise InvalidInput(f"{what}: a region of more than {LARGEST_REGION} bytes")
    return Control(sequence, step, places)


class ProcessMemory:
    """The registered tensors of other processes, read while those are stopped.

    If the agent itself is killed meanwhile, a small process of its own lets the program go on: a snapshot never
    ends a job.
    """

    def __init__(self, registered: Path, *, quiesce_seconds: float = QUIESCE_SECONDS) -> None:
        self.registered = registered
        self.quiesce_seconds = quiesce_seconds
        self._guards: dict[int, subprocess.Popen[bytes]] = {}
        self._buffer = bytearray()

    def programs(self) -> list[Observed]:
        """Return the registered programs that run; registrations of others are deleted."""
        found: list[Observed] = []
        for path in sorted(self.registered.glob("[0-9]*.json")):
            try:
                program = Observed.parse(path.read_bytes(), what=str(path))
            except FileNotFoundError:
                continue
            if start_of(program.pid) == program.started:
                found.append(program)
            else:
                with suppress(OSError):
                    path.unlink()
        return found

    def close(self) -> None:
        """Let the guards end."""
        for guard in self._guards.values():
            if guard.stdin is not None:
                guard.stdin.close()
            guard.wait()
        self._guards.clear()

    @contextmanager
    def frozen(self, *, copy: bool) -> Generator[Observation]:
        """Stop the programs, wait for a quiet moment if need be, and let them go on afterwards."""
        stopped: list[Observed] = []
        try:
            programs, controls, timed_out = self._stop_quietly(stopped)
            observation = self._observe(programs, controls, timed_out, copy=copy)
            if not copy:
                yield observation
        finally:
            for program in stopped:
                _continue(program)
        if copy:
            yield observation

    def _stop_quietly(self, stopped: list[Observed]) -> tuple[list[Observed], list[Control], bool]:
        """Stop all programs at a moment when none writes, or after the time for that is over."""
        deadline = time.monotonic() + self.quiesce_seconds
        while True:
            programs = self.programs()
            for program in programs:
                self._guard(program)
                stopped.append(program)
                _stop(program)
            late = time.monotonic() >= deadline
            try:
                controls = [_control_of(program) for program in programs]
            except InvalidInput:
                if late:  # otherwise the program was about to list more tensors
                    raise
                controls = []
            quiet = len(controls) == len(programs) and all(control.is_quiet for control in controls)
            if quiet or (late and len(controls) == len(programs)):
                return programs, controls, not quiet
            for program in stopped:
                _continue(program)
            stopped.clear()
            time.sleep(RETRY_SECONDS)

    def _observe(
        self, programs: Sequence[Observed], controls: Sequence[Control], timed_out: bool, *, copy: bool
    ) -> Observation:
        regions: list[Region] = []
        readers: list[Reader] = []
        total = sum(size for control in controls for _, size in control.places)
        if copy and len(self._buffer) < total:
            self._buffer = bytearray(total)
        view, at = memoryview(self._buffer), 0
        for number, (program, control) in enumerate(zip(programs, controls, strict=True)):
            prefix = f"{number}/" if len(programs) > 1 else ""
            with storing(f"process {program.pid}: its memory cannot be read"):
                descriptor = os.open(f"/proc/{program.pid}/mem", os.O_RDONLY)
            try:
                for (name, dtype, kind), (address, size) in zip(program.regions, control.places, strict=True):
                    regions.append(Region(prefix + name, dtype, kind, size))
                    if copy:
                        target = view[at : at + size]
                        at += size
                        readers.append(
                            reader_of(target) if _read(descriptor, address, target) else _unreadable
                        )
                    else:
                        readers.append(_Live(program.pid, address))
            finally:
                os.close(descriptor)
        steps = {control.step for control in controls}
        torn = any(not control.is_quiet for control in controls)
        return Observation(
            tuple(regions), tuple(readers), steps.pop() if len(steps) == 1 else None, torn, timed_out
        )

    def _guard(self, program: Observed) -> None:
        guard = self._guards.get(program.pid)
        if guard is None or guard.poll() is not None:
            # Reads until the agent is gone, whatever ended it, then lets the program go on.
            self._guards[program.pid] = subprocess.Popen(
                ["/bin/sh", "-c", f"read -r _; kill -CONT {program.pid} 2>/dev/null"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


@dataclass(frozen=True)
class _Live:
    """Reads another process's memory while it is stopped."""

    pid: int
    address: int

    def __call__(self, start: int, size: int) -> bytes | None:
        try:
            descriptor = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY)
            try:
                data = os.pread(descriptor, size, self.address + start)
            finally:
                os.close(descriptor)
        except (OSError, OverflowError):
            return None
        return data if len(data) == size else None


class SharedMemory:
    """Tensors of another process that lie in files, as a manifest (canonical JSON) lists them.

    ``{"format": "tallystick/shared-memory/1", "regions": [[name, dtype, kind, path, offset, bytes], ..]}``. Nothing is
    stopped: memory is copied and read again, and what differed meanwhile makes the snapshot torn.
    """

    def __init__(self, manifest: Path) -> None:
        self.manifest = manifest
        try:
            data = manifest.read_bytes()
        except OSError as problem:
            raise StoreError(f"{manifest}: cannot be read ({problem.strerror})") from problem
        self.regions = [
            (Region(name, dtype, kind, size), path, offset)
            for name, dtype, kind, path, offset, size in SharedManifest.parse(
                data, what=str(manifest)
            ).regions
        ]

    @contextmanager
    def frozen(self, *, copy: bool) -> Generator[Observation]:
        """Copy the memory, whether or not ``copy`` asks for it: nothing stops its owner."""
        first = [self._read(*place) for place in self.regions]
        again = [self._read(*place) for place in self.regions]
        readers = tuple(_unreadable if data is None else reader_of(data) for data in again)
        yield Observation(tuple(region for region, _, _ in self.regions), readers, None, first != again)

    def _read(self, region: Region, path: Path, offset: int) -> bytes | None:
        if region.size == 0:
            return b""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                data = mapped[offset : offset + region.size]
        except (OSError, ValueError):
            return None
        return data if len(data) == region.size else None


def start_of(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None if there is none.

    It tells a process from a later one of its number.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _unreadable(start: int, size: int) -> None:
    del start, size


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold anything


def _stop(program: Observed) -> None:
    with suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_SECONDS
    while (fields := _stat(program.pid)) is not None and fields[0] not in "TtZX":
        if time.monotonic() > deadline:
            raise StoreError(f"process {program.pid}: did not stop within {STOP_SECONDS:g} s")
        time.sleep(0.0001)


def _continue(program: Observed) -> None:
    with suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGCONT)


def _control_of(program: Observed) -> Control:
    try:
        data = program.control.read_bytes()
    except OSError as problem:
        raise StoreError(f"{program.control}: cannot be read ({problem.strerror})") from problem
    return parse_control(data, len(program.regions), what=str(program.control))


def _read(descriptor: int, address: int, target: memoryview) -> bool:
    """Fill ``target`` from another process; whether that was possible."""
    done = 0
    try:
        while done < len(target):
            n = os.preadv(descriptor, [target[done:]], address + done)
            if n == 0:
                return False
            done += n
    except (OSError, OverflowError):
        return False
    return True
