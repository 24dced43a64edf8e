"""Profiles of arithmetic: libraries read their variables when they load, so a child repeats the command."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tallystick.errors import Nondeterminism, TallyError
from tallystick.execution.determinism import INSTRUCTION_SETS, Profile

Child = Callable[[Sequence[str], Profile], dict[str, Any]]
SEEDED = {"PYTHONHASHSEED": "0"}  # or a process of tally begins anew
PARENT = "TALLYSTICK_PARENT"  # set in a child to the process that waits for it
CHILD = "TALLYSTICK_PROFILE_CHILD"  # set in the child to the profile it was started for
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class OutOfTime(TallyError):
    """A command in a process of its own did not end in its time."""


def python(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter without looking for modules in the working directory."""
    return [sys.executable, "-P", *arguments]


def rerun_under(profile: Profile, arguments: Sequence[str]) -> int | None:
    """Return the exit code of the same command under ``profile``; None if this process already computes so.

    Output, input and signals pass through.

    Raises:
        Nondeterminism: this is the child, and the profile's variables still do not hold.
    """
    if not profile.needs_process:
        if profile.threads is not None:
            import torch

            torch.set_num_threads(profile.threads)
        return None
    if CHILD in os.environ:
        raise Nondeterminism(
            f"profile {profile}: its environment variables did not reach the process started for it"
        )
    return run_to_its_end(arguments, {**profile.environment(), CHILD: str(profile)})


def end_with_parent() -> None:
    """Have a child killed if the process that waits for it is, where the kernel does that: nobody else would end it."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it was killed before that
            os.kill(os.getpid(), signal.SIGKILL)


def run_to_its_end(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    quiet: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Return the exit code of a tally command in a process of its own, with further variables of its ``environment``.

    Output, input and signals pass through; ``quiet`` sends all that is printed to standard error. ``meanwhile`` is done here
    while it runs.
    """
    command = python("-m", "tallystick", *arguments)
    variables = {**SEEDED, **os.environ, **environment, PARENT: str(os.getpid())}
    child = subprocess.Popen(command, env=variables, stdout=2 if quiet else None)

    def pass_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    with _signals(pass_on, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        if meanwhile is not None:
            meanwhile()
        code = child.wait()
    return 128 - code if code < 0 else code


def run_child(
    arguments: Sequence[str], profile: Profile, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the JSON answer of a tally command that runs in a process of its own under ``profile``.

    ``environment`` holds further variables. What it says to people passes through. An audit's verdict is an answer, whatever its
    exit code.

    Raises:
        TallyError: it gave no answer; the message has its own words.
    """
    child = subprocess.run(
        python("-m", "tallystick", *arguments, *(() if "--json" in arguments else ("--json",))),
        env=_variables(profile, environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode == 130:
        raise KeyboardInterrupt
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        answer = {"error": f"ended with exit code {child.returncode} and no answer"}
    if not isinstance(answer, dict) or "error" in answer:
        said = answer.get("error") if isinstance(answer, dict) else answer
        raise TallyError(f"tally {' '.join(arguments[:3])}: {said}")
    return answer


def run_aside(
    arguments: Sequence[str],
    profile: Profile,
    environment: Mapping[str, str],
    folder: Path,
    seconds: float | None = None,
) -> int:
    """Return the exit code of a tally command in ``folder``, under ``profile``, whose program may print what it likes.

    ``environment`` holds further variables, or other values of those that there are. A profile without an instruction set has
    this process's own, whatever its variables ask for.

    All that is printed, by programs that it starts too, goes to standard error.

    Raises:
        TallyError: it could not be started, or has not ended after so many ``seconds``, if any are given, when it is killed.
    """
    try:
        child = subprocess.Popen(
            python("-m", "tallystick", *arguments),
            cwd=folder,
            env=_variables(profile, environment, keeps=profile.instructions == "native"),
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,  # what it starts ends with it
        )
    except OSError as problem:  # standard error has been closed, say
        raise TallyError(f"cannot be started: {problem}") from problem
    try:
        with _signals(_leave, (signal.SIGTERM, signal.SIGHUP)):
            return child.wait(seconds)
    except subprocess.TimeoutExpired as problem:
        raise OutOfTime(f"it has not ended in {seconds:.0f} seconds") from problem
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _leave(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals]
) -> Generator[None]:
    """Inside, signals are handled so; a terminal that closes is ignored where it was, as ``nohup`` has it.

    An interrupt is not: shells have what they run in the background ignore it, and who sends one means it.
    """
    hung_up = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heeded = [number for number in numbers if number != signal.SIGHUP or not hung_up]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def _variables(profile: Profile, more: Mapping[str, str], *, keeps: bool = False) -> dict[str, str]:
    chosen = {name for variables in INSTRUCTION_SETS.values() for name in variables if not keeps}
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    return {
        **SEEDED,
        **inherited,
        "OMP_WAIT_POLICY": "PASSIVE",
        PARENT: str(os.getpid()),
        **profile.environment(),
        **more,
    }


def interrupt_once() -> None:
    """In a profile's child, let one interrupt count: a terminal sends one and the parent another."""
    if CHILD not in os.environ:
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
