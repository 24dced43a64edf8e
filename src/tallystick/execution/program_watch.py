"""What a program does that no import in its source says: reading environment variables, executing files by other ways."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol


class Watched(Protocol):
    """Who is told what the active program does."""

    def note_variable(self, file: str, name: str, value: str | None) -> None:
        """Code of ``file`` read an environment variable."""

    def note_execution(self, file: str, frame: FrameType | None) -> None:
        """Code of ``file`` is about to be executed by what runs in ``frame``."""


@functools.cache
def watch(active: Callable[[], Watched | None]) -> None:
    """Tell the program that ``active`` gives, from now on, what is read and executed; nobody can undo that in this process."""
    _watch_environment(active)
    sys.addaudithook(functools.partial(_heard, active))


def _heard(active: Callable[[], Watched | None], event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and arguments and isinstance(arguments[0], CodeType):
        program, file = active(), arguments[0].co_filename
        if program is not None and not file.startswith("<"):
            program.note_execution(file, inspect.currentframe())


def _watch_environment(active: Callable[[], Watched | None]) -> None:
    plain: Any = type(os.environ)

    def read(self: object, name: object) -> object:
        value = None
        try:
            value = plain.__getitem__(self, name)
        finally:
            frame, program = inspect.currentframe(), active()
            while frame is not None and _is_between(str(frame.f_globals.get("__name__"))):
                frame = frame.f_back
            if frame is not None and program is not None and isinstance(name, (str, bytes)):
                stated = os.fsdecode(value) if isinstance(value, (str, bytes)) else None
                program.note_variable(frame.f_code.co_filename, os.fsdecode(name), stated)
        return value

    watched = type("Environ", (plain,), {"__getitem__": read})
    os.environ.__class__ = watched
    if os.supports_bytes_environ:
        os.environb.__class__ = watched


def _is_between(module: str) -> bool:
    """Whether a module may stand between a reader and a variable: the standard library, and this one."""
    return module == __name__ or module.partition(".")[0] in sys.stdlib_module_names
