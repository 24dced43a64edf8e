"""Profiles of arithmetic: libraries read their variables when they load, so a child repeats the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.determinism import Profile

CHILD = "TALLYSTICK_PROFILE_CHILD"  # set in the child to the profile it was started for


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
    environment = {**os.environ, **profile.environment(), CHILD: str(profile)}
    child = subprocess.Popen(python("-m", "tallystick", *arguments), env=environment)

    def pass_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def interrupt_once() -> None:
    """In a profile's child, let one interrupt count: a terminal sends one and the parent another."""
    if CHILD not in os.environ:
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def check_device(device: str) -> None:
    """Return if torch can compute on ``device``.

    Raises:
        InvalidInput: another word than cpu or cuda, or no such device here.
    """
    if device == "cpu":
        return
    if device != "cuda":
        raise InvalidInput(f"device {device}: unknown; known are cpu, cuda")
    import torch

    if not torch.cuda.is_available():
        raise InvalidInput("device cuda: torch sees no CUDA device on this machine")
