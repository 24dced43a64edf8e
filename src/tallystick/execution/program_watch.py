"""What a program does that no import in its source says: reading environment variables, executing files by other ways.

It is noted in journals by the files whose code does it, from when ``tallystick`` is imported; which files are a program's own is
known later, when it is collected.
"""

from __future__ import annotations

import functools
import os
import site
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

HASH_SEED = "PYTHONHASHSEED"  # which Python reads before anybody's code
COMPILED, SHARED = (".py", ".pyc"), ".so"
EXECUTING = ("exec", "function.__new__", "ctypes.dlopen")  # with a code object, or the name of a file
# Of the standard library: what these read is how they speak to people, to a network or to another process.
SURROUNDINGS = ("argparse.py", "gettext.py", "optparse.py", "subprocess.py", "urllib/request.py")


class Execution(NamedTuple):
    """Who had a file executed: the innermost code that is not the standard library's, and all files on the stack."""

    by: str | None
    above: frozenset[str]


@dataclass
class ProgramJournal:
    """What was read and executed, in this order.

    Attributes:
        reads: by file that read and name of the variable: SHA-256 of the value at first, or None where it was not set.
        ran: of each file that was executed, who had it executed.
        is_whole: whether it begins with the program that is running.
    """

    reads: dict[tuple[str, str], str | None] = field(default_factory=dict[tuple[str, str], str | None])
    ran: dict[str, Execution] = field(default_factory=dict[str, Execution])
    is_whole: bool = False

    def note_variable(self, file: str, name: str, value: str | None) -> None:
        """Note that code of ``file`` read an environment variable."""
        if (file, name) not in self.reads:
            self.reads[file, name] = digest_of(value)

    def note_execution(self, file: str, execution: Execution) -> None:
        """Note that code of ``file`` is about to be executed."""
        self.ran.setdefault(file, execution)

    def read_anew(self) -> None:
        """Take what the variables read so far are now."""
        for key in list(self.reads):
            self.reads[key] = digest_of(os.environ.get(key[1]))

    def first(self, reads: int, ran: int) -> ProgramJournal:
        """Return a copy of what came first."""
        return ProgramJournal(dict(islice(self.reads.items(), reads)), dict(islice(self.ran.items(), ran)))

    def clear(self) -> None:
        """Forget everything."""
        self.reads.clear()
        self.ran.clear()


class _Watch:
    """The journals that are told: this process's, the active job's, and, of what a thread of nobody's does, the ``latest``."""

    def __init__(self) -> None:
        self.process, self.job = ProgramJournal(), ProgramJournal()
        self.latest = self.process

    def begin_job(self, journal: ProgramJournal) -> None:
        """Tell a job's journal from now on."""
        self.job = self.latest = journal

    def begin_main(self) -> ProgramJournal:
        """Return this process's journal, of a main program that begins to be recorded or followed."""
        self.latest = self.process
        return self.process

    def value_of(self, name: str) -> str | None:
        """Return what a variable is, as a journal has it: as somebody read it first, or as it is now."""
        read = (value for (_, each), value in list(self.process.reads.items()) if each == name)
        return next(read, digest_of(os.environ.get(name)))


WATCH = _Watch()


@contextmanager
def journal_of_its_own() -> Generator[None]:
    """Inside, a program runs from its beginning, and this process's journal is its."""
    before, WATCH.process = WATCH.process, ProgramJournal(is_whole=True)
    WATCH.begin_main()
    watch()
    try:
        yield
    finally:
        WATCH.process = before
        WATCH.begin_main()


def digest_of(value: str | None) -> str | None:
    """Return the SHA-256 of a variable's value, hexadecimal; None if it is not set."""
    return None if value is None else sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


@functools.cache
def watch() -> None:
    """Note, from now on, what is read and executed; nobody can undo that in this process."""
    _watch_environment()
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in EXECUTING or not arguments or sys.is_finalizing():
        return
    above = sys._getframe().f_back  # pyright: ignore[reportPrivateUsage]
    what = arguments[0]
    file = (_imported_by(above) or what.co_filename) if isinstance(what, CodeType) else what
    if isinstance(file, str) and file and not file.startswith(("<", *_installed())):
        _tell_execution(file, above)


def _imported_by(frame: FrameType | None) -> str | None:
    """Return the file of the module that Python's own import is about to execute, whatever its code says of itself."""
    for above in islice(_up(frame), 2):
        code = above.f_code
        if code.co_name == "exec_module" and code.co_filename.startswith("<frozen importlib"):
            origin = getattr(getattr(above.f_locals.get("module"), "__spec__", None), "origin", None)
            return origin if isinstance(origin, str) else None
    return None


def _tell_execution(file: str, frame: FrameType | None) -> None:
    files = [absolute(above.f_code.co_filename) for above in _up(frame) if not _is_between(above)]
    execution = Execution(files[0] if files else None, frozenset(files))
    for journal in (WATCH.process, WATCH.job) if files else (WATCH.latest,):
        journal.note_execution(absolute(file), execution)


def _watch_environment() -> None:
    plain: Any = type(os.environ)

    def read(self: object, name: object) -> object:
        value = None
        try:
            value = plain.__getitem__(self, name)
        finally:
            if isinstance(name, (str, bytes)):
                stated = os.fsdecode(value) if isinstance(value, (str, bytes)) else None
                _tell_variable(os.fsdecode(name), stated)
        return value

    watched = type("Environ", (plain,), {"__getitem__": read})
    os.environ.__class__ = watched
    if os.supports_bytes_environ:
        os.environb.__class__ = watched


def _tell_variable(name: str, value: str | None) -> None:
    for above in _up(sys._getframe().f_back):  # pyright: ignore[reportPrivateUsage]
        file = above.f_code.co_filename
        if file in _surroundings():
            return
        if not _is_between(above):
            for journal in (WATCH.process, WATCH.job):
                journal.note_variable(absolute(file), name, value)
            return


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def absolute(file: str) -> str:
    """Return where a file lies, links on the way not followed."""
    return file if file.startswith(os.sep) else str(Path(file).absolute())


def _is_between(frame: FrameType) -> bool:
    """Whether it may stand between who reads and what is read: the standard library, text, and this module."""
    return _is_standard(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_standard(file: str) -> bool:
    return (
        file.startswith("<")
        or file == __file__
        or (file.startswith(_standard()) and "-packages/" not in file)
    )


@functools.cache
def _standard() -> tuple[str, ...]:
    place = Path(os.__file__).parent
    return tuple({f"{place}{os.sep}", f"{place.resolve()}{os.sep}"})


@functools.cache
def _surroundings() -> frozenset[str]:
    return frozenset(place + name for place in _standard() for name in SURROUNDINGS)


@functools.cache
def _installed() -> tuple[str, ...]:
    """How the files of the standard library, and of nearly all that is installed, begin."""
    here = Path(__file__).absolute().parent.parent
    return (*_standard(), *(f"{place}{os.sep}" for place in (here, *site.getsitepackages())))
