"""A program in processes of their own: first as it is, then again before anybody is accused of what its run states otherwise."""

from __future__ import annotations

import importlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tallystick import errors
from tallystick.cli.profiles import OutOfTime, run_aside, run_to_its_end
from tallystick.cli.run.programs import ASKED, Request, arguments_after
from tallystick.cli.run.workplace import Copy, Workplace
from tallystick.cli.terminal import say
from tallystick.errors import JobFailed, TallyError
from tallystick.execution.program_watch import HASH_SEED

if TYPE_CHECKING:
    from tallystick.execution.determinism import Profile
    from tallystick.roles.audit_report import AuditReport, Deviation
    from tallystick.roles.courses import Moved, ProgramCourse
    from tallystick.run.sample import SegmentDraw

LEAST_SECONDS, TIMES = 120.0, 10  # that a program is given to run again; and of what it took first
MOST_BROKEN = 16  # logs of a run that end a program
MOST_LEFT_OUT = 16  # tries to find out which files a program cannot do without
ELSEWHERE = (
    "the clock, the host, the number of processors, the order of a folder, PYTHONHASHSEED or the time zone"
)
OTHER_MACHINES = {"elsewhere": 1, "elsewhere, with many processors": 2}
ZONES = ("TLY-5:43", "TLY+8:17")  # those of nobody


def run_first(
    arguments: Sequence[str],
    command: Sequence[str],
    *,
    quiet: bool,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Return what a tally command says of a program that runs in a process of its own, which sees this one's input and output.

    ``meanwhile`` is done here while it runs.

    Raises:
        KeyboardInterrupt: it was interrupted, and has said so.
        TallyError: what it raised; or its process ended without an answer.
    """
    answer = _answer(
        lambda asked: run_to_its_end(arguments, {ASKED: asked.encode()}, quiet=quiet, meanwhile=meanwhile),
        Request("", arguments_after(command)),
    )
    if "error" not in answer:
        return answer
    raise getattr(errors, answer["kind"], TallyError)(answer["error"])


def _answer(run: Callable[[Request], int], request: Request) -> dict[str, Any]:
    """Return what comes of a request that ``run`` has a process do, again without the log of each step that it ends within."""
    broken = dict[str, str]()
    while True:
        with place_of_answer() as place:
            asked = replace(request, answer=place, broken=broken)
            answer = answer_of(asked, run(asked))
        if "broken" not in answer:
            return answer
        step, text = answer["broken"]
        if len(broken) == MOST_BROKEN:
            raise JobFailed(
                f"step {step}: the program ends within it, and within {MOST_BROKEN} others: {text}"
            )
        say(
            f"step {step}: the program ended within it ({text[:100]}); it is run again without the log of that step"
        )
        broken[str(step)] = text


@contextmanager
def place_of_answer() -> Generator[str]:
    """Give a file for the answer of another process: in memory if it can be, where no program fills the disk or removes it."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory() as held:
            yield str(Path(held, "answer.json"))
        return
    descriptor = os.memfd_create("answer")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def answer_of(request: Request, code: int) -> dict[str, Any]:
    """Return what came of a request whose process has ended with an exit ``code``.

    Raises:
        KeyboardInterrupt: it was interrupted before it answered.
        JobFailed: it ended before it answered.
    """
    try:
        return json.loads(Path(request.answer).read_text())
    except (OSError, ValueError) as problem:
        if code == 130:
            raise KeyboardInterrupt from problem
        raise JobFailed(
            f"the process of the program ended with exit code {code} before anything could be said of it"
        ) from problem


def follow_first(
    arguments: Sequence[str], command: Sequence[str], sample: SegmentDraw | None, *, quiet: bool
) -> tuple[AuditReport, Mapping[int, Moved]]:
    """Return what following a program finds, by ``run_first``, and where steps that differ led."""
    answer = run_first(arguments, command, quiet=quiet, meanwhile=_load_reports)
    from tallystick.roles.audit_report import AuditReport

    moved = {int(start): each for start, each in answer["moved"].items()}
    return AuditReport.parse(answer["report"], sample), moved


def _load_reports() -> None:
    """Load what reports are read with, and torch with it, which takes a second."""
    importlib.import_module("tallystick.roles.courses")


@dataclass
class SecondRuns:
    """What a program comes to elsewhere, under the other arithmetics of a panel, and with noise, each in a process of its own."""

    place: Workplace
    run: Path
    profile: Profile  # here
    made: Sequence[str] = ()  # while the run was recorded
    began: float = field(default_factory=time.monotonic)  # before the program runs
    _seconds: float = 0.0  # for each time that it runs again
    _without: Sequence[str] = ()
    _needed: list[str] = field(default_factory=list[str])  # files without which the program gave no answer
    _is_other_asked: bool = False  # nothing differs here
    _is_in_place: bool = False  # the copies of the folder are of no use
    _found: dict[str, list[ProgramCourse]] = field(default_factory=dict[str, "list[ProgramCourse]"])

    def doubts(self, own: ProgramCourse, end: int) -> Deviation | ProgramCourse:
        """Return why nobody is accused of a segment's ``own`` course, or the course that accuses; programs run to ``end``.

        This machine's own arithmetic is asked for it without the files that the script made while it was recorded, then with
        another surrounding; then other arithmetics are.
        """
        from tallystick.execution.determinism import Profile
        from tallystick.roles.courses import find_doubt
        from tallystick.roles.panel import panel_profiles

        self._seconds = self._seconds or max(LEAST_SECONDS, TIMES * self._taken())
        first = min(own.deviations, key=lambda each: each.step)
        if there := sorted(self.place.names.intersection(self.made)):
            beside = self.place.beside(there)  # and of another name: runs/1 for runs/0
            for names in (there, beside) if set(beside) > set(there) else (there,):
                anew = self._without_files(names, own.start, end)
                if anew is not None and not anew.deviations:
                    named = ", ".join(self._without)[:200]
                    said = f"as stated without {named}, made when it ran before: audit where it is not"
                    return replace(first, kind="cannot_reproduce", own=said)
                own = own if anew is None else anew
        if said := self._said_of_other_runs(own, end):
            return replace(first, kind="cannot_reproduce", own=said[:300])
        others: dict[str, ProgramCourse] = {}
        for profile in (*panel_profiles(), Profile(threads=1, jitter=True)):
            name = str(profile)
            try:
                others[name] = self._course(name, profile, own.start, end)
            except TallyError as problem:
                said = f"{first.own[:20]} here; under {profile} the program gave no answer: {problem}"
                return replace(first, kind="cannot_reproduce", own=said[:300])
            if (doubt := find_doubt(own, others, is_whole=profile.jitter)) is not None:
                return doubt
        return own

    def find_other(self, end: int) -> str | None:
        """Return which other surrounding or arithmetic does not come to what the run states up to ``end``; None if all do."""
        from tallystick.execution.determinism import Profile
        from tallystick.roles.panel import panel_profiles

        self._seconds = self._seconds or max(LEAST_SECONDS, TIMES * self._taken())
        self._is_other_asked = True
        asked = {name: (self.profile, number) for name, number in OTHER_MACHINES.items()}
        asked |= {str(p): (p, 0) for p in (*panel_profiles(), Profile(threads=1, jitter=True))}
        for name, (profile, number) in asked.items():
            try:
                courses = self._followed(profile, end, number)
            except TallyError as problem:
                return f"under {name} no answer: {problem}"[:300]
            if (first := next((d for c in courses for d in c.deviations), None)) is not None:
                return f"under {name} step {first.step}: {first.subject} is another"[:300]
        return None

    def _taken(self) -> float:
        """Return the seconds since the program began, of processors if those are more: one thread may do the work of all."""
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return max(time.monotonic() - self.began, spent.ru_utime + spent.ru_stime)

    def _without_files(self, names: list[str], start: int, end: int) -> ProgramCourse | None:
        """Return this machine's own course where some files are not, and ask the others there, too; None if it has none.

        Files that the program cannot do without stay: who names what it reads says nothing.
        """
        tries, before, needed_before = MOST_LEFT_OUT, self._without, self._needed

        def ask(without: Sequence[str]) -> ProgramCourse | None:
            nonlocal tries
            tries, self._without = tries - 1, without
            self._found.pop("here", None)
            try:
                return self._course("here", self.profile, start, end) if tries >= 0 else None
            except TallyError:
                return None

        def needed(among: list[str]) -> list[str]:
            """Return which of these it needs, of which it needs some."""
            if len(among) == 1:
                return among
            half = len(among) // 2
            parts = (among[:half], among[half:])
            return [name for part in parts if ask(part) is None for name in needed(part)]

        course = ask(names)
        if course is None and len(names) > 1:
            self._needed = needed(names)
            rest, tries = [name for name in names if name not in self._needed], 1
            course = ask(rest) if rest else None
        if course is None:
            self._without, self._needed = before, needed_before or names
            self._found.pop("here", None)
        return course

    def _said_of_other_runs(self, own: ProgramCourse, end: int) -> str:
        """Return why second runs of this very arithmetic say nothing, or that they hang on what is around them; empty if neither.

        Where a copy of the folder is at fault, they run in the folder itself from here on.
        """
        from tallystick.roles.courses import ProgramCourse
        from tallystick.roles.elsewhen import NO_CALENDARS, has_calendars

        if not has_calendars():
            return NO_CALENDARS

        def asked(name: str) -> ProgramCourse | TallyError:
            try:
                return self._course(name, self.profile, own.start, end)
            except TallyError as problem:
                return problem

        while True:
            answers, failed = list[bool](), ""
            for elsewhere in map(asked, OTHER_MACHINES):
                if isinstance(elsewhere, TallyError):
                    failed = f"no answer: {elsewhere}"
                elif own.is_as(elsewhere):
                    answers.append(True)
                else:
                    answers.append(False)
                    break
            if answers and all(answers):  # where it fails it says nothing, of one processor say
                return ""
            again = asked("again")
            if isinstance(again, ProgramCourse) and own.is_as(again):
                return f"elsewhere {failed if not answers else 'another thing'}: it depends on {ELSEWHERE}"
            if isinstance(again, TallyError):
                said = f"the program gave no answer: {again}"
            elif not self._is_in_place and self.place.is_whole:
                return (
                    "in a copy of its folder the program does something else: it depends on where it lies or on times of "
                    "files, or is not the same twice"
                )
            else:
                said = "the program does something else"
            if self._needed:
                return f"run a second time, {said}; {', '.join(self._needed)[:100]} was made when it was recorded"
            if self._is_in_place or self._without or isinstance(again, OutOfTime):
                return f"run a second time, {said}"
            say(f"in a copy of its folder {said}: it is run again in the folder itself")
            self._is_in_place = True
            self._found.clear()

    def _course(self, name: str, profile: Profile, start: int, end: int) -> ProgramCourse:
        if name not in self._found:
            self._found[name] = self._followed(profile, end, OTHER_MACHINES.get(name, 0))
        found = next((each for each in self._found[name] if each.start == start), None)
        if found is None:
            raise TallyError(f"it did not come to step {start}")
        return found

    def _followed(self, profile: Profile, end: int, elsewhere: int = 0) -> list[ProgramCourse]:
        """Return what is not as stated in each segment up to ``end``: in a copy of the folder, or in itself."""
        without = f" without {', '.join(self._without)[:200]}" if self._without else ""
        where = " as on another machine" if elsewhere else ""
        why = "before the auditor is accused" if self._is_other_asked else "before anybody is accused"
        what = "nothing differs here" if self._is_other_asked else "what the program computes differs"
        say(f"{what}: it is run again under {profile}{where}{without}, {why}")
        if self._is_in_place:
            copy = Copy(self.place.folders[0].path, self.place.command, {})
            return self._told(profile, copy, end, elsewhere)
        with self.place.anew(self._without) as copy:
            return self._told(profile, copy, end, elsewhere)

    def _told(self, profile: Profile, copy: Copy, end: int, elsewhere: int) -> list[ProgramCourse]:
        from tallystick.roles.audit_report import AuditReport
        from tallystick.roles.courses import ProgramCourse

        command = [
            "audit",
            str(self.run),
            "--steps",
            f"0:{end}",
            "--profile",
            str(profile),
            "--",
            *copy.command,
        ]
        variables = {**copy.variables, **(_other_surroundings(elsewhere) if elsewhere else {})}

        def run(asked: Request) -> int:
            given = {**variables, ASKED: asked.encode()}
            return run_aside(command, profile, given, copy.path, self._seconds)

        answer = _answer(run, Request("", arguments_after(self.place.command), elsewhere))
        if "error" in answer:
            raise TallyError(answer["error"])
        report = AuditReport.parse(answer["report"], None)
        return [ProgramCourse.of(each, answer["moved"].get(str(each.start), {})) for each in report.segments]


def _other_surroundings(number: int) -> dict[str, str]:
    """Return variables of which Python makes something else on each machine, and that a program need not read for that."""
    from tallystick.roles.elsewhen import calendar_of

    own = os.environ.get(HASH_SEED, "")
    around = {HASH_SEED: str(number + (own == str(number)) * 2), "TZ": ZONES[number - 1]}
    return around | calendar_of(number)
