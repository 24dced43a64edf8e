"""The code that a job or a training loop really runs: its file and every module it imports that is not installed.

Which environment variables the program's own files read, and what they have executed otherwise than by an import in their source,
stands in a journal: a job's own, from when it is built, or this process's.

A job's modules are imported from their source, never from a ``.pyc`` beside it, by a finder that notes the bytes executed and,
where a run is repeated, refuses what the run does not state. What was imported before, or from elsewhere, is found by
following the imports of the program's files through ``sys.modules``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tallystick.errors import InvalidInput, OtherProgram
from tallystick.execution.program_files import (
    HERE,
    OWN,
    document_name,
    is_installed,
    places,
    read_file,
    version_of,
    versions_of,
)
from tallystick.execution.program_source import imports_in, names_held_by, variables_named_in
from tallystick.execution.program_watch import (
    COMPILED,
    HASH_SEED,
    SHARED,
    WATCH,
    Execution,
    ProgramJournal,
    watch,
)
from tallystick.run.program import (
    ABSENT,
    MOST_FILES,
    MOST_VARIABLES,
    PROGRAM_LIMIT,
    Program,
    ProgramDifference,
    ProgramFile,
    compare_environments,
    compare_files,
    compare_versions,
    in_words,
)

LOOKED_AT = 16  # steps between two looks at every loaded module


@dataclass
class LocalProgram:
    """One program: a job's file or a main program, and what it imports.

    Attributes:
        name: of its own file in documents.
        file: that file; it need not exist any longer.
        source: the bytes of it that are run.
        root: the directory that its own modules' names are relative to.
        module: as it was loaded; None before.
        executed: of every module that the finder loaded: file and bytes.
        allowed: what a run that is repeated states; None to load anything.
        journal: what it has read and executed.
        is_main: whether this process is it, whose journal it then is.
    """

    name: str
    file: Path
    source: bytes
    root: Path
    module: ModuleType | None = None
    executed: dict[str, tuple[Path, bytes]] = field(default_factory=dict[str, tuple[Path, bytes]])
    allowed: Program | None = None
    journal: ProgramJournal = field(default_factory=ProgramJournal)
    is_main: bool = False
    _parked: dict[str, ModuleType] = field(default_factory=dict[str, ModuleType])
    _loaded: tuple[int, str | None] = (0, None)
    _names: frozenset[str] = frozenset()
    _own: frozenset[str] = frozenset()
    _named: dict[str, str] = field(default_factory=dict[str, str])
    _paused: tuple[int, int] | None = None
    _judged: int = 0

    def collect(self) -> tuple[Program, dict[str, bytes]]:
        """Return the program as far as it is loaded by now, and the bytes of its files by name.

        Raises:
            InvalidInput: a file is gone, too large, no regular file, or of a name that no document takes.
            OtherProgram: a file has changed since it was loaded, or was executed and is named by no import.
        """
        contents, tops = self._gathered()
        files = tuple(
            ProgramFile(name, len(data), hashlib.sha256(data).hexdigest())
            for name, data in sorted(contents.items())
        )
        return Program(self.name, files, versions_of(tops), self._with_named(self.environment)), contents

    def _gathered(self) -> tuple[dict[str, bytes], set[str]]:
        """Return the bytes of the program's files by name, and the top-level names of what it imports besides."""
        contents, files_seen = {self.name: self.source}, {self.file}
        tops: set[str] = set()
        package = None if self.module is None else vars(self.module).get("__package__")
        todo = [*self.executed, *imports_in(self.source, package or ""), *names_held_by(self.module)]
        seen: set[str] = set()
        while todo or (todo := self._imported_otherwise(files_seen, seen)):
            name = todo.pop()
            todo += [parent for parent, dot, _ in (name.rpartition("."),) if dot]
            module = sys.modules.get(name) or self._parked.get(name)
            if name in seen or module is None:
                continue
            seen.add(name)
            file = self._file_of(name, module)
            if file is None or module is self.module:
                tops.add(name.partition(".")[0])
                continue
            data = self._bytes_of(name, file)
            files_seen.add(file)
            written = document_name(name, file)
            if written == self.name and file == self.file:
                data = self.source
            if contents.setdefault(written, data) != data:
                raise InvalidInput(f"program: two files are called {written}; rename one")
            if len(contents) > MOST_FILES or sum(map(len, contents.values())) > PROGRAM_LIMIT:
                raise InvalidInput(
                    f"program: {written} makes it more than {MOST_FILES} files or {PROGRAM_LIMIT} bytes; "
                    "install what is no part of it as a distribution"
                )
            todo += [*imports_in(data, str(vars(module).get("__package__") or "")), *names_held_by(module)]
        self._own = frozenset(map(str, files_seen))
        return contents, tops

    def _imported_otherwise(self, own: set[Path], seen: set[str]) -> list[str]:
        """Return the modules whose files the program has had executed, and which no import in its source names.

        Raises:
            OtherProgram: it has had a file executed that is no module; by name.
        """
        found = {
            file: each
            for each, execution in self._heard().ran.items()
            if (file := Path(each).resolve()) not in own and _is_had_executed(file, execution, own, self.root)
        }
        if not found:
            return []
        modules = [
            (name, Path(stated).resolve())
            for name, module in list(sys.modules.items())
            if isinstance(stated := getattr(module, "__dict__", {}).get("__file__"), str)
        ]
        names = [
            name
            for name, file in modules
            if file in found and name not in seen and locate(name, self.root) == file
        ]
        if not names:
            raise OtherProgram(
                f"{min(found.values())} was executed by the program, and no import in it says so, so nothing commits to it; "
                "import it by its name, or install it as a distribution"
            )
        return names

    def compare_before(self, stated: Program) -> list[ProgramDifference]:
        """Return in what this machine's files and distributions differ from those stated, having run nothing."""
        if not stated.files:
            return [ProgramDifference("program", self.name, "no files")]
        own: dict[str, str] = {}
        read: list[bytes] = []
        for name in stated.digests():
            data = self.source if name == stated.main else self._located(name)
            if data is not None:
                read.append(data)
                own[name] = hashlib.sha256(data).hexdigest()
        versions = {name: found for name in stated.distributions if (found := version_of(name)) is not None}
        expected = dict(stated.digests())
        if any(b"sys.path" in data for data in read):  # where it will look nobody knows before it runs
            expected = {name: hexed for name, hexed in expected.items() if name in own}
        return compare_files(own, expected) + compare_versions(versions, stated.distributions)

    def compare_loaded(self, stated: Program) -> list[ProgramDifference]:
        """Return what is loaded by now and not stated; what is stated and not loaded yet is no difference."""
        own = {
            stated.main if name == self.name else name: hashlib.sha256(data).hexdigest()
            for name, data in self._gathered()[0].items()
        }
        return compare_files(own, {name: hexed for name, hexed in stated.digests().items() if name in own})

    def verify_committed(
        self, stated: Program, step: int, *, whole: bool = False, reads: bool = True
    ) -> None:
        """Return unless something was loaded since the last call that is not committed to, or read, if ``reads``.

        What is new stands last in the list of modules, but where somebody moves it: all of them are looked at every
        ``LOOKED_AT`` steps, and with ``whole``. Nothing is new while the program is paused.

        Raises:
            OtherProgram: something was; by name.
        """
        if self._paused is not None:
            return
        loaded = len(sys.modules) + len(self.journal.ran), next(reversed(sys.modules), None)
        names = self._names
        if loaded != self._loaded or not step % LOOKED_AT or whole:
            names, self._loaded = frozenset([*sys.modules, *self.journal.ran]), loaded
        if names != self._names:
            self._names = names
            if found := self.compare_loaded(stated):
                raise OtherProgram(
                    f"step {step}: {found[0].subject} was loaded after the program had been committed to; "
                    "import it where the program begins, or in build or batch before the first step"
                )
        if reads and self._judged != (known := len(self.journal.reads)):
            if late := sorted(self.environment.keys() - stated.environment.keys()):
                raise OtherProgram(
                    f"step {step}: environment variable {late[0]} was read after the program had been committed to; "
                    "read it before the first step (of a job: in build), or make it a setting"
                )
            self._judged = known

    # -- what it reads -----------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """Of each environment variable that its files have read by now: as ``Program`` states it."""
        found: dict[str, str] = {}
        own = self._own | {str(self.file), *(str(file) for file, _ in self.executed.values())}
        for (file, name), value in self._heard().reads.items():
            if file in own or os.path.realpath(file) in own:
                found.setdefault(name, value or ABSENT)
        if not self.is_main:  # a module of elsewhere may have read before the job was there
            outside = self._own - {str(self.file), *(str(file) for file, _ in self.executed.values())}
            for (file, name), value in list(WATCH.process.reads.items()):
                if os.path.realpath(file) in outside:
                    found.setdefault(name, value or ABSENT)
        return found

    def name_variables(self) -> None:
        """Take the values of the variables that the source of a main program names, which it may have read or may read yet."""
        if not self.is_main:
            return
        contents, _ = self._gathered()
        for data in contents.values():
            for name in variables_named_in(data):
                value = WATCH.value_of(name)
                self._named.setdefault(name, value or ABSENT)

    def compare_environment(self, stated: Program) -> list[ProgramDifference]:
        """Return the environment variables read by now whose values differ from those stated, or that are not stated.

        Of a main program that was there before anybody watched, all that its source names count as read.
        """
        own = self.environment
        if not self.journal.is_whole:
            own = self._with_named(own)
        if HASH_SEED not in stated.environment:  # a program that no tally started
            own.pop(HASH_SEED, None)
        read = stated.environment.keys() & own.keys()
        return compare_environments(own, {name: stated.environment[name] for name in sorted(read)})

    def _with_named(self, read: Mapping[str, str]) -> dict[str, str]:
        room = max(MOST_VARIABLES - len(read), 0)
        others = [name for name in self._named if name not in read][:room]
        return {**read, **{name: self._named[name] for name in others}}

    def read_anew(self) -> None:
        """Take what the variables read so far are now."""
        self.journal.read_anew()

    def pause(self) -> None:
        """What is read and executed from here on is not the run's, unless it goes on."""
        self._paused = len(self.journal.reads), len(self.journal.ran)

    def go_on(self) -> None:
        """The run goes on: what was read and executed since it paused is its own."""
        self._paused = None

    @property
    def is_paused(self) -> bool:
        """Whether the run has paused, or ended."""
        return self._paused is not None

    def _heard(self) -> ProgramJournal:
        return self.journal if self._paused is None else self.journal.first(*self._paused)

    # -- files -------------------------------------------------------------------------------------

    def _file_of(self, name: str, module: ModuleType) -> Path | None:
        """Return the file of a module that is the program's own; None if it has none or somebody installed it."""
        if name in self.executed:
            return self.executed[name][0]
        stated = vars(module).get("__file__")
        if name.partition(".")[0] == OWN or not isinstance(stated, str):
            return None
        file = Path(stated).resolve()
        return None if is_installed(name, file) else file

    def _bytes_of(self, name: str, file: Path) -> bytes:
        data = read_file(file)
        if name in self.executed and self.executed[name][1] != data:
            raise OtherProgram(f"{file}: has changed since it was imported; begin anew")
        return data

    def _located(self, name: str) -> bytes | None:
        """Return the bytes of the file that importing a stated name would execute; None if there is none."""
        parts = name.split("/")
        module = [*parts[:-1], *([stem] if (stem := parts[-1].partition(".")[0]) != "__init__" else [])]
        file = locate(".".join(module), self.root)
        if file is None or not module or document_name(".".join(module), file) != name or not file.is_file():
            return None
        return read_file(file)

    # -- imports -----------------------------------------------------------------------------------

    def is_stale(self) -> bool:
        """Whether a file beside the program is no longer what was executed."""
        return any(not file.is_file() or file.read_bytes() != data for file, data in self.executed.values())

    def activate(self) -> None:
        """Let imports find this program's modules, in its own directory first; another program's are put away."""
        other = _FINDER.program
        if other is not self and other is not None:
            other.park()
        _FINDER.program = self
        for name in [name for name in self._parked if name not in sys.modules]:
            sys.modules[name] = self._parked.pop(name)
        WATCH.begin_job(self.journal)
        watch()
        if _FINDER not in sys.meta_path:
            at = next((n for n, each in enumerate(sys.meta_path) if each is PathFinder), len(sys.meta_path))
            sys.meta_path.insert(at, _FINDER)

    def park(self) -> None:
        """Take what the finder loaded out of ``sys.modules``."""
        for name in self.executed:
            if name in sys.modules:
                self._parked[name] = sys.modules.pop(name)

    def forget(self) -> None:
        """Let the next use load everything again."""
        self.park()
        self._parked.clear()
        self.executed.clear()
        self.journal.clear()
        self.module = None

    def take(self, name: str, file: Path, data: bytes) -> None:
        """Note that a module is about to be executed.

        Raises:
            OtherProgram: it is not what the run states.
        """
        written = document_name(name, file)
        if self.allowed is not None and written != self.name:
            stated = self.allowed.digests().get(written, ABSENT)
            if (own := hashlib.sha256(data).hexdigest()) != stated:
                raise OtherProgram(str(ProgramDifference(f"program file {written}", own, stated)))
        self.executed[name] = (file, data)


class _SourceLoader(SourceFileLoader):
    """Loads a module from its source alone and notes the bytes; a ``.pyc`` beside it is somebody's word only."""

    def __init__(self, program: LocalProgram, name: str, path: str) -> None:
        super().__init__(name, path)
        self._program = program

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source, having noted its bytes."""
        path = self.get_filename(fullname)
        data = read_file(Path(path))
        self._program.take(fullname, Path(path), data)
        return self.source_to_code(data, path)


class _Finder:
    """Finds the modules of the active program in its own directory, as ``python job.py`` would; before installed ones."""

    def __init__(self) -> None:
        self.program: LocalProgram | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import ``name`` if it lies below the program's directory, else None."""
        program = self.program
        if program is None or name.partition(".")[0] == OWN:
            return None
        spec = PathFinder.find_spec(name, [str(program.root)] if path is None else path, target)
        if spec is None:
            return None
        if (
            spec.origin is None
        ):  # a directory without __init__.py; a package of that name elsewhere goes first
            elsewhere = PathFinder.find_spec(name, None, target) if path is None else spec
            return spec if elsewhere is None or elsewhere.origin is None else None
        file = Path(spec.origin).resolve()
        if not file.is_relative_to(program.root) or is_installed(name, file):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _SourceLoader(program, name, str(file))
            spec.cached = None
            return spec
        program.take(name, file, read_file(file))
        return spec


_FINDER = _Finder()


def _is_had_executed(file: Path, execution: Execution, own: set[Path], root: Path) -> bool:
    """Whether one of the program's own files had a file executed that nobody installed, directly or through a library.

    What a library reads for it in a language of its own (a template) is data; what nobody else can have had executed, in a thread
    of the standard library's, is the program's. Of shared libraries those below its directory are, which it loads itself.
    """
    sites, standard = places()
    if file.is_relative_to(HERE) or any(file.is_relative_to(place) for place in (*sites, *standard)):
        return False
    if not (file.is_file() or file.parent.is_file()):
        return False
    if SHARED in file.suffixes and not file.is_relative_to(root):
        return False
    through = execution.above if file.suffix in COMPILED else {execution.by} - {None}
    return execution.by is None or any(Path(each).resolve() in own for each in through if each is not None)


def locate(name: str, root: Path | None = None) -> Path | None:
    """Return the file that importing a dotted name executes, ``root`` searched first; imports nothing, None if there is none."""
    parts = name.split(".")
    places: Sequence[str] | None = None
    for count, part in enumerate(parts, start=1):
        if not part.isidentifier():
            return None
        full = ".".join(parts[:count])
        spec = None
        if count == 1 and root is not None:
            spec = PathFinder.find_spec(full, [str(root)])
        if spec is None or spec.origin is None:
            own = _found(full) if count == 1 else PathFinder.find_spec(full, places)
            spec = own if own is not None else spec
        if spec is None:
            return None
        if count == len(parts):
            return None if spec.origin is None or not spec.has_location else Path(spec.origin).resolve()
        places = list(spec.submodule_search_locations or ())
        if not places:
            return None
    return None


def _found(name: str) -> ModuleSpec | None:
    """Return how a top-level name would be imported were it not, and no program active."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if finder is not _FINDER)
    return next((spec for spec in specs if spec is not None), None)


def verify_program(program: LocalProgram, stated: Program, *, accusing: bool = False) -> None:
    """Return if what is loaded by now is what is stated.

    What an environment variable names may be the same under another value (a directory, say). Where somebody is accused
    its value must be the one stated.

    Raises:
        OtherProgram: it is not; by name.
    """
    found = program.compare_loaded(stated)
    if accusing:
        found += program.compare_environment(stated)
    if found:
        raise OtherProgram(in_words(found))
