"""A Python program run in this process, as ``python`` would, while tally records or follows what it attaches."""

from __future__ import annotations

import importlib.util
import json
import os
import posix
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from tallystick.cli.profiles import OutOfTime, run_aside
from tallystick.cli.run.workplace import Workplace
from tallystick.cli.terminal import say
from tallystick.errors import InvalidInput, JobFailed, TallyError
from tallystick.execution.program_watch import journal_of_its_own

if TYPE_CHECKING:
    from tallystick.execution.determinism import Profile
    from tallystick.roles.attached import Attached, ProgramRun
    from tallystick.roles.audit_report import Deviation
    from tallystick.roles.courses import ProgramCourse

ALONE = "TALLYSTICK_ONE_ARITHMETIC"  # a file, for a process that is asked what a program comes to under another arithmetic
LEAST_SECONDS, TIMES = 120.0, 10  # that a program is given to run again; and of what it took first
INTERPRETER = "python"  # how the names of interpreters begin


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
        raise InvalidInput(f"{rest[0]}: there is no such program")
    return False, rest[0], rest[1:]


@dataclass
class OtherArithmetics:
    """What a program comes to under the other arithmetics of a panel and with noise, each in a process of its own."""

    place: Workplace
    run: Path
    made: Sequence[str] = ()  # while the run was recorded
    profile: Profile | None = None  # here
    began: float = field(default_factory=time.monotonic)  # before the program runs
    _seconds: float = 0.0  # for each time that it runs again
    _without: list[str] = field(default_factory=list[str])
    _named: list[str] = field(default_factory=list[str])  # files without which the program gave no answer
    _is_in_place: bool = False  # the copies of the folder are of no use
    _found: dict[str, list[ProgramCourse]] = field(default_factory=dict[str, "list[ProgramCourse]"])

    def doubts(self, own: ProgramCourse, end: int) -> Deviation | None:
        """Return what of a segment's ``own`` course another arithmetic has otherwise, saying so, or None; they run to ``end``.

        Before, this machine's own is asked for it without the files that the script made while it was recorded.
        """
        from tallystick.execution.determinism import Profile
        from tallystick.roles.courses import find_doubt
        from tallystick.roles.panel import panel_profiles

        if not self._seconds:  # processors' seconds, too: one thread may have to do the work of all
            took = max(time.monotonic() - self.began, time.process_time())
            self._seconds = max(LEAST_SECONDS, TIMES * took)
        first = min(own.deviations, key=lambda each: each.step)
        if (there := sorted(self.place.names.intersection(self.made))) and self.profile is not None:
            anew = self._without_files(there, own.start, end)
            if anew is not None and not anew.deviations:
                said = f"as stated without {', '.join(there)[:200]}, made when it was recorded: audit where it is not"
                return replace(first, kind="cannot_reproduce", own=said)
            own = own if anew is None else anew
        others: dict[str, ProgramCourse] = {}
        for profile in (*panel_profiles(), Profile(threads=1, jitter=True)):
            name = str(profile)
            try:
                others[name] = self._course(name, profile, own.start, end)
            except TallyError as problem:
                said = f"{first.own[:20]} here; under {profile} the program gave no answer: {problem}"
                return replace(first, kind="cannot_reproduce", own=said[:300])
            if self._is_in_place and (said := self._said_of_a_second_time(own, end)):
                return replace(first, kind="cannot_reproduce", own=said)
            if (doubt := find_doubt(own, others, is_whole=profile.jitter)) is not None:
                return doubt
        return None

    def _without_files(self, names: list[str], start: int, end: int) -> ProgramCourse | None:
        """Return this machine's own course where some files are not, and ask the others there, too; None if it has none."""
        assert self.profile is not None
        self._without = names
        try:
            return self._course("here", self.profile, start, end)
        except TallyError:  # who names files that the script needs says nothing
            self._without, self._named = [], names
            self._found["here"] = []
            return None

    def _said_of_a_second_time(self, own: ProgramCourse, end: int) -> str:
        """Return why runs in the folder itself say nothing, where this machine's own second one parts from the run elsewhere."""
        assert self.profile is not None
        try:
            again = self._course("again", self.profile, own.start, end)
        except TallyError as problem:
            return f"run a second time in its folder, the program gave no answer: {problem}"[:300]
        same = again.first == own.first
        return "" if same else "run a second time in its folder, the program does something else"

    def _course(self, name: str, profile: Profile, start: int, end: int) -> ProgramCourse:
        if name not in self._found:
            self._found[name] = self._followed(profile, end)
        found = next((each for each in self._found[name] if each.start == start), None)
        if found is None:
            raise TallyError(f"it did not come to step {start}")
        return found

    def _followed(self, profile: Profile, end: int) -> list[ProgramCourse]:
        """Return what is not as stated in each segment up to ``end``: in a copy of the folder, or in itself."""
        without = f" without {', '.join(self._without)[:200]}" if self._without else ""
        say(
            f"what the program computes differs: it is run again under {profile}{without}, before anybody is accused"
        )
        options = ("audit", str(self.run), "--steps", f"0:{end}", "--profile", str(profile), "--")
        if not self._is_in_place:
            try:
                with self.place.anew(self._without) as (folder, command):
                    return self._told([*options, *command], profile, folder)
            except TallyError as problem:
                if self._without or self.profile is None or isinstance(problem, OutOfTime):
                    raise
                if self._named:
                    named = ", ".join(self._named)[:100]
                    raise TallyError(f"{problem}; {named} was made when it was recorded") from problem
                say(
                    f"in a copy of its folder the program gave no answer ({problem}): it is run in the folder"
                )
            self._is_in_place = True
        return self._told([*options, *self.place.command], profile, self.place.folders[0].path)

    def _told(self, arguments: list[str], profile: Profile, folder: Path) -> list[ProgramCourse]:
        from tallystick.roles.courses import ProgramCourse

        with tempfile.TemporaryDirectory() as held:
            told = Path(held, "courses.json")
            code = run_aside(arguments, profile, {ALONE: str(told)}, folder, self._seconds)
            try:
                answer = json.loads(told.read_text())
            except (OSError, ValueError) as problem:
                raise TallyError(f"it ended with exit code {code}") from problem
        if isinstance(answer, str):
            raise TallyError(answer)
        return [ProgramCourse.parse(each) for each in answer]


def run_program(command: Sequence[str], wanted: ProgramRun, *, quiet: bool) -> Attached:
    """Run a program to its end as ``__main__``, and return what it attached, which has ended too.

    ``quiet`` sends what it prints to standard error, and what programs print that it starts.

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
        with (
            _told_of_its_end(),
            wanting(wanted),
            journal_of_its_own(),
            _streams_kept(),
            _printed_aside() if quiet else nullcontext(),
        ):
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
    """Inside, no exit code comes of this process without a verdict; its children leave and are replaced as ever.

    ``os._exit`` is ``sys.exit`` here, and what replaces the process (``os.exec*``) fails.
    """
    names, process = ("_exit", "execv", "execve"), os.getpid()
    before = {(module, name): getattr(module, name) for module in (os, posix) for name in names}
    leave, replacing = os._exit, {"execv": os.execv, "execve": os.execve}

    def told(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        raise SystemExit(status)

    def refused(name: str, *given: Any, **named: Any) -> NoReturn:
        if os.getpid() != process:
            replacing[name](*given, **named)
        raise JobFailed(
            f"the program would replace its process by another program (os.{name}), and nothing could be said of it: "
            "start it as what it would become, or let it leave that out"
        )

    instead = {"_exit": told, **{name: partial(refused, name) for name in replacing}}
    for module, name in before:  # os.execl, os.execvp and the like call these
        setattr(module, name, instead[name])
    try:
        yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


@contextmanager
def _printed_aside() -> Generator[None]:
    """Inside, what is printed goes to standard error, by file descriptor too."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def _streams_kept() -> Generator[None]:
    """Inside, closing standard output or error does nothing; afterwards they are what they were, for what is still to be said."""
    before: dict[str, Any] = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for stream in before.values():
        stream.close = lambda: None
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)
            vars(stream).pop("close", None)


def _load(name: str, *, is_module: bool) -> tuple[ModuleType, CodeType]:
    """Return a new main module for a program and its code, none of which has run."""
    main, file = ModuleType("__main__"), Path(name)
    if is_module:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or spec.origin is None:
            raise InvalidInput(f"python -m {name}: there is no such module, or it is no program")
        main.__spec__, main.__package__, file = spec, spec.parent, Path(spec.origin)
    main.__file__ = str(file.absolute())
    try:
        return main, compile(file.read_bytes(), main.__file__, "exec")
    except (SyntaxError, OSError) as problem:
        raise InvalidInput(f"{name}: cannot be run: {problem}") from problem


def _run(name: str, main: ModuleType, code: CodeType) -> None:
    try:
        exec(code, vars(main))  # the caller's own program, asked for by name
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise JobFailed(f"{name}: ended with exit code {ended.code}") from ended
    except (TallyError, KeyboardInterrupt):
        raise
    except Exception as problem:
        traceback.print_exc()
        raise JobFailed(f"{name}: raised {type(problem).__name__}: {problem}") from problem
