"""A Python program run in this process, as ``python`` would, while tally records or follows what it attaches."""

from __future__ import annotations

import importlib.util
import json
import os
import posix
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from tallystick.errors import InvalidInput, JobFailed, TallyError
from tallystick.execution.program_watch import HASH_SEED, WATCH, journal_of_its_own

if TYPE_CHECKING:
    from tallystick.roles.attached import Attached, ProgramRun

ASKED = "TALLYSTICK_PROGRAM_REQUEST"  # a variable, for a process that runs a program for another one
INTERPRETER = "python"  # how the names of interpreters begin
_LEFT: list[int] = []  # what the program gave to ``os._exit``


def refuse_with_program(**given: object) -> None:
    """Return if no option was given that only jobs have; ``given`` are theirs, by name, None where it was left out.

    Raises:
        InvalidInput: one was.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise InvalidInput(
                f"--{name.replace('_', '-')}: is for jobs; a program has its own arguments, after --"
            )


def arguments_after(command: Sequence[str]) -> list[str]:
    """Return the arguments of the program itself in ``python FILE ARGUMENTS`` or ``python -m MODULE ARGUMENTS``.

    Raises:
        InvalidInput: it is no such command.
    """
    return _parsed(command)[2]


def file_of(command: Sequence[str]) -> str | None:
    """Return the word of such a command that is the program's file; None of a module."""
    is_module, name, _ = _parsed(command)
    return None if is_module else name


def _parsed(command: Sequence[str]) -> tuple[bool, str, list[str]]:
    """Return whether a module is meant, its name or the file, and the program's arguments."""
    first, rest = Path(command[0]).name, list(command[1:])
    if first.endswith(".py"):
        return False, command[0], rest
    if not first.startswith(INTERPRETER):
        raise InvalidInput(
            f"{' '.join(command)[:80]}: is no job and no Python program; a job is one word, a program is given as "
            "-- python FILE ARGUMENTS"
        )
    if rest[:1] == ["-m"] and len(rest) > 1:
        return True, rest[1], rest[2:]
    if not rest or rest[0].startswith("-"):
        raise InvalidInput(
            f"{' '.join(command)[:80]}: python needs a FILE or -m MODULE here, and no options of its own"
        )
    if not Path(rest[0]).is_file():
        is_folder = Path(rest[0]).is_dir()
        raise InvalidInput(
            f"{rest[0]}: {'is a folder, no program' if is_folder else 'there is no such program'}"
        )
    return False, rest[0], rest[1:]


@dataclass(frozen=True)
class Request:
    """What another process of tally asks this one for, which is to run a program and may end with it.

    Attributes:
        answer: the file for what comes of it, JSON.
        arguments: the program's, as its first run had them.
        elsewhere: the number of another machine whose clock, host's name, processors and order of folders the program is to see;
            0 for none.
        trial: steps after which it ends, when it has shown what of it no other machine could repeat; 0 for no trial.
        broken: steps within which it ended before under the run's log, as texts, and why.
    """

    answer: str
    arguments: Sequence[str]
    elsewhere: int = 0
    trial: int = 0
    broken: Mapping[str, str] = field(default_factory=dict[str, str])

    def encode(self) -> str:
        """Return it as the text of a variable."""
        return json.dumps(vars(self))

    @classmethod
    def take(cls) -> Request | None:
        """Return what this process is asked for, and let no program know of it; None if it is a user's own."""
        text = os.environ.pop(ASKED, None)
        return None if text is None else cls(**json.loads(text))

    @contextmanager
    def answering(self) -> Generator[dict[str, Any]]:
        """Inside, make the answer; it is written at the end, or else what was raised."""
        answer: dict[str, Any] = {}
        if self.elsewhere:
            from tallystick.roles.rebuilt import shift_place

            shift_place(self.elsewhere)
        try:
            yield answer
        except TallyError as problem:
            answer |= {"error": str(problem), "kind": type(problem).__name__}
        Path(self.answer).write_text(json.dumps(answer))
        if _LEFT:
            _leave(0)

    def leave_with(
        self, answer: dict[str, Any], attached: Attached, done: Callable[[Attached], None]
    ) -> NoReturn:
        """Write the ``answer``, once the run is finished and ``done`` has put it there, and end this process."""
        try:
            attached.finish()
            done(attached)
        except TallyError as problem:
            answer |= {"error": str(problem), "kind": type(problem).__name__}
        Path(self.answer).write_text(json.dumps(answer))
        _leave(0)


def run_program(command: Sequence[str], wanted: ProgramRun) -> Attached:
    """Run a program to its end as ``__main__``, and return what it attached, which has ended too.

    Raises:
        InvalidInput: it is no Python program, or it attached nothing.
        JobFailed: it raised something; what it had recorded is unfinished.
    """
    from tallystick.roles.attached import wanting

    is_module, name, arguments = _parsed(command)
    before, here = (list(sys.argv), list(sys.path), sys.modules["__main__"]), Path.cwd()
    sys.path.insert(0, str(Path.cwd() if is_module else Path(name).resolve().parent))
    try:
        main, code = _load(name, is_module=is_module)
        shown = str(main.__file__) if is_module else name
        sys.argv[:], sys.modules["__main__"] = [shown, *arguments], main
        with _told_of_its_end(), wanting(wanted), journal_of_its_own():
            _run(name, main, code)
            if wanted.attached is None:
                raise InvalidInput(
                    f"{name}: ended without tallystick.attach(model, optimizer); without it there is nothing to record or follow"
                )
            wanted.attached.finish()  # while the program is what is running
    except BaseException:
        if wanted.attached is not None:
            wanted.attached.abandon()
        raise
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = before
        os.chdir(here)
    return wanted.attached


@contextmanager
def _told_of_its_end() -> Generator[None]:
    """Inside, ``os._exit`` is ``sys.exit`` in the thread that runs the program, so that it may end as it likes.

    Other threads (a watchdog, say) and its children leave as ever; and in the end so does this process.
    """
    leave, process = os._exit, os.getpid()
    places: tuple[Any, ...] = (os, posix)

    def told(status: int) -> NoReturn:
        if os.getpid() != process or threading.current_thread() is not threading.main_thread():
            leave(status)
        _LEFT.append(status)
        raise SystemExit(status)

    for module in places:
        module._exit = told
    try:
        yield
    finally:
        for module in places:
            module._exit = leave


def _load(name: str, *, is_module: bool) -> tuple[ModuleType, CodeType]:
    """Return a new main module for a program and its code, none of which has run."""
    main, file = ModuleType("__main__"), Path(name)
    if is_module:
        spec = _found(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _found(f"{name}.__main__")
        if spec is None or spec.origin is None:
            raise InvalidInput(f"python -m {name}: there is no such module, or it is no program")
        main.__spec__, main.__package__, file = spec, spec.parent, Path(spec.origin)
    main.__file__ = str(file.absolute())
    try:
        return main, compile(file.read_bytes(), main.__file__, "exec")
    except (SyntaxError, OSError) as problem:
        raise InvalidInput(f"{name}: cannot be run: {problem}") from problem


def _found(name: str) -> ModuleSpec | None:
    """Return where a module lies, whose packages are imported for that; None if it or one of them is not there."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
            raise InvalidInput(
                f"python -m {name}: a package that it is in cannot be imported: {problem}"
            ) from problem
        return None


def _run(name: str, main: ModuleType, code: CodeType) -> None:
    process = os.getpid()
    WATCH.process.note_variable(str(main.__file__), HASH_SEED, os.environ.get(HASH_SEED))  # of every set
    try:
        exec(code, vars(main))  # the caller's own program, asked for by name
    except BaseException as problem:
        if os.getpid() != process:
            _leave(_status_of(problem))
        if isinstance(problem, SystemExit):
            if problem.code not in (None, 0):
                raise JobFailed(
                    f"{name}: ended with exit code {problem.code}, which leaves a run unfinished; it is to end with 0, or to "
                    "call run.finish() of run = tallystick.attach(..) before"
                ) from problem
            return
        if isinstance(problem, TallyError) or not isinstance(problem, Exception):
            raise
        traceback.print_exc()
        raise JobFailed(f"{name}: raised {type(problem).__name__}: {problem}") from problem
    if os.getpid() != process:
        _leave(0)


def _status_of(problem: BaseException) -> int:
    """Return the exit code of a process in which nobody caught ``problem``, having printed what Python prints of it."""
    if not isinstance(problem, SystemExit):
        traceback.print_exc()
        return 1
    if problem.code is None or isinstance(problem.code, int):
        return problem.code or 0
    print(problem.code, file=sys.stderr)
    return 1


def _leave(status: int) -> NoReturn:
    """End this process at once, of a child that the program has forked and that came to its end, say."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)
