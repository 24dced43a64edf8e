"""Runs a program that nobody trusts: no network, no files but its own, no other process, bounded time, memory and output.

    problem = find_problem()                       # why this machine cannot, in words; None if it can
    end = run_isolated(program, {"a": data}, ResourceBounds(60, 1 << 30, 1 << 26))

Linux namespaces through bubblewrap (``bwrap``): a root of its own without a writable byte but ``/scratch``; the inputs
read-only under ``/in``, the program as ``/program``; this Python and its libraries read-only; own network, process, IPC and
user namespaces, no capability, no new privileges. A system call filter refuses sockets, processes (threads are allowed) and
memory that no limit counts. Inputs and scratch lie in memory alone, and are gone with the last process.

Every run is preceded by ``check_isolation``, which tries in the same enclosure what a hostile program would. Not promised:
anything against the kernel, the processor's side channels, or the machine's operator (spec/neutral-run.md 6).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import selectors
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from tallystick.errors import InvalidInput, StoreError

OUTPUT_LIMIT = 1 << 16  # bytes; what a schema allows fits many times
FILES_LIMIT = 256
POLL = 0.2  # seconds between two looks at the clock
PREPARED = "--ro-bind-data"
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
X32 = 0x40000000

# Numbers of the system calls that are refused (linux/arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h):
# sockets, other processes, memory that RLIMIT_AS does not count, and doors into the kernel that no program needs.
REFUSED: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "fork": 57, "vfork": 58, "socket": 41, "socketpair": 53, "memfd_create": 319, "memfd_secret": 447,
        "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "io_uring_setup": 425, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
        "pivot_root": 155, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "bpf": 321,
        "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323,
        "open_by_handle_at": 304, "init_module": 175, "finit_module": 313, "kexec_load": 246, "pidfd_getfd": 438,
    },
    "aarch64": {
        "socket": 198, "socketpair": 199, "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186,
        "semget": 190, "mq_open": 180, "io_uring_setup": 425, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "bpf": 280, "perf_event_open": 241,
        "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282, "open_by_handle_at": 265,
        "init_module": 105, "finit_module": 273, "kexec_load": 104, "pidfd_getfd": 438,
    },
}  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # its flags lie in memory that a filter cannot read: "not there" makes libraries use clone

# What stands between the enclosure and the program: limits that it cannot raise, then the program in this very process.
LAUNCH = """
import os, resource, sys
address, seconds, files = map(int, sys.argv[1:4])
for what, most in ((resource.RLIMIT_AS, address), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_NOFILE, files),
                   (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
os.execv(sys.executable, [sys.executable, "-I", "-B", "/program", *sys.argv[4:]])
"""

# What a hostile program would try; it prints the names of what worked. The files named behind it exist outside.
PROBE = b"""
import json, os, sys, threading
done = []
def attempt(name, act):
    try:
        act()
    except (OSError, RuntimeError):
        return
    done.append(name)
def fork():
    if os.fork() == 0:
        os._exit(0)
import socket, tempfile
attempt("socket", lambda: socket.socket().close())
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX).close())
attempt("process", fork)
attempt("hidden memory", lambda: os.memfd_create("x"))
for place in ("/x", "/in/x", "/dev/x", "/dev/shm/x", "/usr/x", "/program", sys.prefix + "/x"):
    attempt("write " + place, lambda: open(place, "ab").write(b"x"))
for place in ("/proc/1/environ", "/etc/passwd", "/sys/kernel", *sys.argv[1:]):
    attempt("read " + place, lambda: os.listdir(place) if os.path.isdir(place) else open(place, "rb").read(1))
thread = threading.Thread(target=lambda: done.append("thread"))
thread.start(); thread.join()
open("/scratch/x", "wb").write(b"x")
print(json.dumps(done))
"""

EndReason = Literal["ended", "failed", "too slow", "too much output"]


@dataclass(frozen=True)
class ResourceBounds:
    """What a program may use: wall seconds, bytes of address space, bytes of files under ``/scratch``."""

    seconds: int
    memory: int
    scratch: int


@dataclass(frozen=True)
class End:
    """How a program ended, and what it had printed; nothing else of it is kept."""

    reason: EndReason
    output: bytes


def find_problem() -> str | None:
    """Return why programs cannot be isolated on this machine, in words, or None if they can."""
    if sys.platform != "linux" or platform.machine() not in AUDIT_ARCH:
        return f"needs Linux on {' or '.join(AUDIT_ARCH)}, this is {sys.platform} on {platform.machine()}"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (Debian: apt-get install bubblewrap)"
    try:
        check_isolation()
    except StoreError as problem:
        return str(problem)
    return None


def check_isolation() -> tuple[str, ...]:
    """Return what was tried in the enclosure and did not work.

    Raises:
        StoreError: the enclosure cannot be made here (no namespaces for this user, often inside another container), or
            something worked that must not.
    """
    with tempfile.NamedTemporaryFile(prefix="tallystick-outside-") as outside:
        outside.write(b"x")
        outside.flush()
        command = [outside.name]
        with _enclosure(PROBE, {}, ResourceBounds(30, 1 << 32, 1 << 16), command) as (arguments, descriptors):
            child = subprocess.run(
                arguments, pass_fds=descriptors, stdin=subprocess.DEVNULL, capture_output=True, check=False,
                timeout=60,
            )  # fmt: skip
    if child.returncode != 0:
        said = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word"]
        raise StoreError(
            f"sandbox: bubblewrap cannot isolate a program here ({said[0][:200]}); in a container it needs "
            "permission for user namespaces"
        )
    worked = cast("list[str]", json.loads(child.stdout))
    if worked != ["thread"]:
        raise StoreError(
            f"sandbox: the enclosure leaks, a test program could: {', '.join(worked) or 'no thread'}"
        )
    return (
        "sockets", "other processes", "memory outside the limit", "writing outside /scratch", "files of the machine",
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Return what isolates and runs programs here: names and versions."""
    found = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False)
    return {
        "bubblewrap": found.stdout.strip().removeprefix("bubblewrap "),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def run_isolated(
    program: bytes,
    inputs: Mapping[str, int],
    bounds: ResourceBounds,
    *,
    progress: Callable[[float], None] = lambda _: None,
) -> End:
    """Return how ``program`` (Python source, or a zip of modules) ended, with what it printed on stdout.

    ``inputs`` are open descriptors of the inputs' bytes, by the name under ``/in``. ``progress`` is called with the
    seconds gone. When this returns, every process of the program is gone, and with them all it had in memory.

    Raises:
        StoreError: it cannot be started.
    """
    with _enclosure(program, inputs, bounds, ()) as (arguments, descriptors):
        child = subprocess.Popen(
            arguments, pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )  # fmt: skip
        assert child.stdout is not None
        try:
            reason, output = _watch(child, bounds.seconds, progress)
        finally:
            child.kill()
            # Its end is the end of the last process that held the pipe: all of the enclosure's.
            while os.read(child.stdout.fileno(), 1 << 16):
                pass
            child.stdout.close()
            child.wait()
    return End(reason, output if reason == "ended" else b"")


@contextmanager
def held_in_memory(data: Iterable[bytes], *, most: int, what: str) -> Generator[int]:
    """Give the descriptor of a file in memory that holds ``data`` and that nobody can change any more.

    Raises:
        InvalidInput: it has more than ``most`` bytes.
    """
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size = 0
        for piece in data:
            size += len(piece)
            if size > most:
                raise InvalidInput(f"{what}: must have at most {most} bytes")
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )  # fmt: skip
        yield descriptor
    finally:
        os.close(descriptor)


def _watch(
    child: subprocess.Popen[bytes], seconds: int, progress: Callable[[float], None]
) -> tuple[EndReason, bytes]:
    assert child.stdout is not None
    started, output = time.monotonic(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (gone := time.monotonic() - started) < seconds:
            progress(gone)
            if not selector.select(min(POLL, seconds - gone)):
                continue
            piece = os.read(child.stdout.fileno(), 1 << 16)
            output += piece
            if len(output) > OUTPUT_LIMIT:
                return "too much output", b""
            if not piece:
                try:
                    return ("ended" if child.wait(max(0.1, seconds - gone)) == 0 else "failed"), output
                except subprocess.TimeoutExpired:
                    break
    return "too slow", b""


@contextmanager
def _enclosure(
    program: bytes, inputs: Mapping[str, int], bounds: ResourceBounds, arguments: Sequence[str]
) -> Generator[tuple[list[str], tuple[int, ...]]]:
    """Give the command line of bubblewrap, and the descriptors that it reads."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise StoreError("sandbox: bubblewrap is not installed (Debian: apt-get install bubblewrap)")
    python, shown = _python()
    with ExitStack() as stack:
        source = stack.enter_context(held_in_memory((program,), most=1 << 30, what="program"))
        rules = stack.enter_context(held_in_memory((_filter(),), most=1 << 16, what="filter"))
        words = [
            bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv",
            "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "neutral", "--seccomp", str(rules),
            "--setenv", "HOME", "/scratch", "--setenv", "TMPDIR", "/scratch", "--setenv", "PYTHONHASHSEED", "0",
            "--setenv", "LC_ALL", "C.UTF-8",
        ]  # fmt: skip
        words += shown
        words += ["--dev", "/dev", "--size", str(bounds.scratch), "--tmpfs", "/scratch", "--dir", "/in"]
        for name, descriptor in inputs.items():
            os.lseek(descriptor, 0, os.SEEK_SET)
            words += [PREPARED, str(descriptor), f"/in/{name}"]
        os.lseek(source, 0, os.SEEK_SET)
        os.lseek(rules, 0, os.SEEK_SET)
        words += [
            PREPARED,
            str(source),
            "/program",
            "--remount-ro",
            "/dev",
            "--remount-ro",
            "/",
            "--chdir",
            "/scratch",
        ]
        # CPU seconds of all threads together: the wall clock decides, this only ends what outlives its watcher.
        cpu = bounds.seconds * (os.cpu_count() or 1) + 5
        words += [
            "--", python, "-I", "-S", "-c", LAUNCH, str(bounds.memory), str(cpu), str(FILES_LIMIT), *arguments,
        ]  # fmt: skip
        yield words, (source, rules, *inputs.values())


def _python() -> tuple[str, list[str]]:
    """Return this Python's path, and the bubblewrap options that show it and its libraries read-only."""
    words: list[str] = []
    for top in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        path = Path(top)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), top]
        elif path.is_dir():
            words += ["--ro-bind", top, top]
    # Libraries ask it which instructions there are; it says nothing of anybody's data.
    words += ["--ro-bind", "/proc/cpuinfo", "/proc/cpuinfo"]
    prefixes = dict.fromkeys(os.path.realpath(place) for place in (sys.base_prefix, sys.prefix))
    for place in prefixes:
        if not place.startswith("/usr/") and place != "/usr":
            words += ["--ro-bind", place, place]
    python = (
        Path(os.path.realpath(sys.prefix))
        / "bin"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
    )
    return str(python if python.exists() else Path(sys.executable)), words


def _filter() -> bytes:
    """Return the classic BPF program of the system call filter for this machine."""
    machine = platform.machine()
    refused = sorted(REFUSED[machine].values())
    load, jump_if, jump_least, jump_any, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    deny, absent = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    steps: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),  # the architecture
        (jump_if, 1, 0, AUDIT_ARCH[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the call's number
    ]
    if machine == "x86_64":
        steps += [(jump_least, 0, 1, X32), (give, 0, 0, deny)]
    for number in refused:
        steps += [(jump_if, 0, 1, number), (give, 0, 0, deny)]
    steps += [
        (jump_if, 0, 1, CLONE3),
        (give, 0, 0, absent),
        (jump_if, 0, 3, CLONE[machine]),
        (load, 0, 0, 16),  # the low half of its first argument
        (jump_any, 1, 0, CLONE_THREAD),
        (give, 0, 0, deny),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)
