"""Whether a job is the same in every process: asked before it convicts anybody (spec/dispute.md 14).

The order of a set of strings hangs on the interpreter's hash seed, an unseeded generator on the clock. Whoever repeats such a
job has other data or another loss, and so has whoever repeats it again. Processes with other hash seeds, clocks, time zones
and orders of directories build it and repeat a step; what they do not have in common is nobody's doing. All but one take
earlier steps before: a job that keeps count beside its state (in ``after_step``, or in the function of a scheduler) is
another one for whoever begins at a checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from tallystick.commit.state import HeldState
from tallystick.execution.job import JobSource
from tallystick.roles.elsewhen import NO_CALENDARS, has_calendars
from tallystick.roles.panel import PanelQuestion, opinions_on, same_arithmetic

MANY_PROCESSORS = 61
STEPS_BEFORE = 2  # that a process takes before the one that all repeat
PARTS = {
    "settings": "optimizer and scheduler",
    "built": "what is not trained",
    "batch": "the data",
    "step": "what a step computes",
}


def find_unsteady(
    run: Path, source: JobSource | None, step: int, state: HeldState | None = None
) -> str | None:
    """Return what processes on this machine do not agree on, of the job of the ``run`` and of its data in ``step``.

    None if they agree, or if the job is no file's and cannot be given to another process.

    Args:
        run: a directory with the run's documents.
        source: the job's.
        step: whose data are compared.
        state: before any step of the run, which both repeat; without it no step is.
    """
    if source is None or type(source) is not JobSource:
        return None
    if not has_calendars():
        return NO_CALENDARS
    said = opinions_on(PanelQuestion("same", run, run, source, step, agreed=state), same_arithmetic())
    found: list[Mapping[str, str]] = []
    for opinion in said:
        if opinion is None or not opinion.answer.startswith("{"):
            return "another process cannot build the job"
        found.append(json.loads(opinion.answer))
    parts = [name for key, name in PARTS.items() if len({each.get(key) for each in found}) > 1]
    if not parts:
        return None
    return (
        f"step {step}: processes on one machine do not agree on {' and '.join(parts)} of the job: the order of a set, "
        "an unseeded generator, the clock, the time zone, the order of a directory, a count kept beside the state? Sort sets and "
        "names of files, seed generators in build() and batch(), keep counts in buffers"
    )


def shift_place(number: int) -> None:
    """Let this process, from now on, seem to be on another machine: order of directories, processors and name.

    With an odd number it has one processor and lists directories from their end, else many, in an order that is nobody's. What
    hangs on processors (``count // 2``, ``min(4, count)``) or on an order (the one in the middle) is another thing in one of two.
    """
    if not number:
        return
    listed, scanned, is_odd = os.listdir, os.scandir, number % 2 == 1
    processors = 1 if is_odd else MANY_PROCESSORS

    def shuffled(entries: list[Any]) -> list[Any]:
        if is_odd:
            return entries[::-1]
        return sorted(entries, key=lambda each: sha256(os.fsencode(getattr(each, "name", each))).digest())

    later: dict[str, Any] = {
        "listdir": lambda path=".": shuffled(listed(path)),
        "scandir": lambda path=".": _Entries(shuffled(list(scanned(path)))),
        "cpu_count": lambda: processors,
        "process_cpu_count": lambda: processors,
        "sched_getaffinity": lambda _: set(range(processors)),
    }
    for name, function in later.items():
        if hasattr(os, name):
            setattr(os, name, _Function("os", name, function))
    for module in (socket, platform):
        name = "gethostname" if module is socket else "node"
        setattr(module, name, _Function(module.__name__, name, lambda: f"elsewhere-{number}"))


class _Function:
    """Stands for a function of the interpreter's: no method where a class holds it, and pickled by its name."""

    def __init__(self, module: str, name: str, call: Callable[..., Any]) -> None:
        self.__module__, self.__name__, self.__qualname__, self._call = module, name, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__name__


class _Entries:
    """What ``os.scandir`` returns, in an order of its own."""

    def __init__(self, entries: Iterable[os.DirEntry[Any]]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[Any]]:
        return self._left

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the entries that are left."""
        self._left = iter(())
