"""The code that a job or a training loop really runs: its file and every module it imports that is not installed.

Which environment variables a job's own files read is noted too, from when the job is built.

A job's modules are imported from their source, never from a ``.pyc`` beside it, by a finder that notes the bytes executed and,
where a run is repeated, refuses what the run does not state. What was imported before, or from elsewhere, is found by
following the imports of the program's files through ``sys.modules``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

from tallystick.errors import InvalidInput, OtherProgram
from tallystick.execution.program_watch import watch
from tallystick.run.program import (
    ABSENT,
    FILE_LIMIT,
    MOST_FILES,
    PROGRAM_LIMIT,
    Program,
    ProgramDifference,
    ProgramFile,
    compare_environments,
    compare_files,
    compare_versions,
    in_words,
)
from tallystick.version import __version__

OWN = "tallystick"  # compared by version: a job that it ships is a file all the same
HERE = Path(__file__).resolve().parent.parent  # of what OWN's version says
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
        environment: of each environment variable that its files read, as ``Program`` states it.
        ran: files whose code the program had executed, by an import or otherwise.
    """

    name: str
    file: Path
    source: bytes
    root: Path
    module: ModuleType | None = None
    executed: dict[str, tuple[Path, bytes]] = field(default_factory=dict[str, tuple[Path, bytes]])
    allowed: Program | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    ran: set[str] = field(default_factory=set[str])
    _parked: dict[str, ModuleType] = field(default_factory=dict[str, ModuleType])
    _loaded: tuple[int, str | None] = (0, None)
    _names: frozenset[str] = frozenset()

    def collect(self) -> tuple[Program, dict[str, bytes]]:
        """Return the program as far as it is loaded by now, and the bytes of its files by name.

        Raises:
            InvalidInput: a file is gone, too large, no regular file, or of a name that no document takes.
            OtherProgram: a file has changed since it was loaded.
        """
        contents, files_seen = {self.name: self.source}, {self.file}
        tops: set[str] = set()
        package = None if self.module is None else vars(self.module).get("__package__")
        todo = [*self.executed, *_imports(self.source, package or ""), *_held_by(self.module)]
        seen: set[str] = set()
        while todo:
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
            written = _document_name(name, file)
            if written == self.name and file == self.file:
                data = self.source
            if contents.setdefault(written, data) != data:
                raise InvalidInput(f"program: two files are called {written}; rename one")
            if len(contents) > MOST_FILES or sum(map(len, contents.values())) > PROGRAM_LIMIT:
                raise InvalidInput(
                    f"program: {written} makes it more than {MOST_FILES} files or {PROGRAM_LIMIT} bytes; "
                    "install what is no part of it as a distribution"
                )
            todo += [*_imports(data, str(vars(module).get("__package__") or "")), *_held_by(module)]
        for each in sorted(self.ran):
            if (file := Path(each).resolve()) not in files_seen and (file.is_file() or file.parent.is_file()):
                raise OtherProgram(
                    f"{each} was executed by the program, and no import in it says so, so nothing commits to it; "
                    "import it by its name, or install it as a distribution"
                )
        files = tuple(
            ProgramFile(name, len(data), hashlib.sha256(data).hexdigest())
            for name, data in sorted(contents.items())
        )
        return Program(self.name, files, _versions(tops), dict(self.environment)), contents

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
        versions = {name: found for name in stated.distributions if (found := _version_of(name)) is not None}
        expected = dict(stated.digests())
        if any(b"sys.path" in data for data in read):  # where it will look nobody knows before it runs
            expected = {name: hexed for name, hexed in expected.items() if name in own}
        return compare_files(own, expected) + compare_versions(versions, stated.distributions)

    def compare_loaded(self, stated: Program) -> list[ProgramDifference]:
        """Return what is loaded by now and not stated; what is stated and not loaded yet is no difference."""
        found, _ = self.collect()
        own = {(stated.main if name == self.name else name): hexed for name, hexed in found.digests().items()}
        return compare_files(own, {name: hexed for name, hexed in stated.digests().items() if name in own})

    def verify_committed(self, stated: Program, step: int, *, whole: bool = False) -> None:
        """Return unless something was loaded since the last call that is not committed to.

        What is new stands last in the list of modules, but where somebody moves it: all of them are looked at every
        ``LOOKED_AT`` steps, and with ``whole``.

        Raises:
            OtherProgram: something was; by name.
        """
        if late := sorted(self.environment.keys() - stated.environment.keys()):
            raise OtherProgram(
                f"step {step}: environment variable {late[0]} was read after the program had been committed to; "
                "read it in build, or make it a setting of the job"
            )
        loaded = len(sys.modules) + len(self.ran), next(reversed(sys.modules), None)
        if loaded == self._loaded and step % LOOKED_AT and not whole:
            return
        names, self._loaded = frozenset(sys.modules) | self.ran, loaded
        if names == self._names:
            return
        self._names = names
        if found := self.compare_loaded(stated):
            raise OtherProgram(
                f"step {step}: {found[0].subject} was loaded after the program had been committed to; "
                "import it where the program begins, or in build or batch before the first step"
            )

    def compare_environment(self, stated: Program) -> list[ProgramDifference]:
        """Return the environment variables read by now whose values differ from those stated, or that are not stated."""
        read = stated.environment.keys() & self.environment.keys()
        return compare_environments(
            self.environment, {name: stated.environment[name] for name in sorted(read)}
        )

    def read_anew(self) -> None:
        """Take what the variables read so far are now."""
        for name in self.environment:
            self.environment[name] = _stated_value(os.environ.get(name))

    def note_variable(self, file: str, name: str, value: str | None) -> None:
        """Note that code of ``file`` read an environment variable, if that file is the program's."""
        if file == str(self.file) or any(file == str(each) for each, _ in self.executed.values()):
            self.environment.setdefault(name, _stated_value(value))

    def note_execution(self, file: str, frame: FrameType | None) -> None:
        """Note that code of ``file`` is executed, if one of the program's own files has it executed and nobody installed it."""
        if file in self.ran or file == str(self.file) or not file.endswith((".py", ".pyc")):
            return
        sites, standard = _places()
        path = Path(file).resolve()
        if path.is_relative_to(HERE) or any(path.is_relative_to(place) for place in (*sites, *standard)):
            return
        own = {str(self.file), *(str(each) for each, _ in self.executed.values())}
        while frame is not None and frame.f_code.co_filename not in own:
            frame = frame.f_back
        if frame is not None:
            self.ran.add(file)

    # -- files -------------------------------------------------------------------------------------

    def _file_of(self, name: str, module: ModuleType) -> Path | None:
        """Return the file of a module that is the program's own; None if it has none or somebody installed it."""
        if name in self.executed:
            return self.executed[name][0]
        stated = vars(module).get("__file__")
        if name.partition(".")[0] == OWN or not isinstance(stated, str):
            return None
        file = Path(stated).resolve()
        return None if _is_installed(name, file) else file

    def _bytes_of(self, name: str, file: Path) -> bytes:
        data = _read(file)
        if name in self.executed and self.executed[name][1] != data:
            raise OtherProgram(f"{file}: has changed since it was imported; begin anew")
        return data

    def _located(self, name: str) -> bytes | None:
        """Return the bytes of the file that importing a stated name would execute; None if there is none."""
        parts = name.split("/")
        module = [*parts[:-1], *([stem] if (stem := parts[-1].partition(".")[0]) != "__init__" else [])]
        file = locate(".".join(module), self.root)
        if file is None or not module or _document_name(".".join(module), file) != name or not file.is_file():
            return None
        return _read(file)

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
        watch(_active)
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
        self.environment.clear()
        self.ran.clear()
        self.module = None

    def take(self, name: str, file: Path, data: bytes) -> None:
        """Note that a module is about to be executed.

        Raises:
            OtherProgram: it is not what the run states.
        """
        written = _document_name(name, file)
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
        data = _read(Path(path))
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
        if not file.is_relative_to(program.root) or _is_installed(name, file):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _SourceLoader(program, name, str(file))
            spec.cached = None
            return spec
        program.take(name, file, _read(file))
        return spec


_FINDER = _Finder()


def _active() -> LocalProgram | None:
    return _FINDER.program


def _stated_value(value: str | None) -> str:
    return ABSENT if value is None else hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


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


def _read(file: Path) -> bytes:
    """Return the bytes of a program's file.

    Raises:
        InvalidInput: it is gone, no regular file, or longer than a program's file may be.
    """
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise InvalidInput(f"{file}: is no regular file, and a program's files are")
            data = opened.read(FILE_LIMIT + 1)
    except OSError as problem:
        raise InvalidInput(
            f"{file}: the program imports it, and it cannot be read ({problem.strerror})"
        ) from None
    if len(data) > FILE_LIMIT:
        raise InvalidInput(
            f"{file}: a program's file must have at most {FILE_LIMIT} bytes; install it as a distribution"
        )
    return data


def _document_name(module: str, file: Path) -> str:
    parts = module.split(".")
    if file.name.partition(".")[0] == "__init__":
        return "/".join([*parts, file.name])
    suffix = next((s for s in (".py", *EXTENSION_SUFFIXES, ".pyc") if file.name.endswith(s)), file.suffix)
    return "/".join(parts) + suffix


def _found(name: str) -> ModuleSpec | None:
    """Return how a top-level name would be imported were it not, and no program active."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if finder is not _FINDER)
    return next((spec for spec in specs if spec is not None), None)


@functools.cache
def _places() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The directories of installed distributions, and those of the standard library."""
    paths = sysconfig.get_paths()
    sites = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
    # PYTHONPATH and .pth files add more; a distribution with an egg-info may lie in its own sources, under work.
    found = importlib.metadata.distributions()
    sites |= {str(each.locate_file("")) for each in found if each.read_text("METADATA") is not None}
    return (
        tuple({Path(place).resolve() for place in sites}),
        tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")}),
    )


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the module names that they bring."""
    return importlib.metadata.packages_distributions()


def _is_installed(name: str, file: Path) -> bool:
    """Whether a module is a distribution's or the standard library's; what lies among them unowned is neither's."""
    sites, standard = _places()
    if any(file.is_relative_to(place) for place in sites):
        return name.partition(".")[0] in _distributions()
    return any(file.is_relative_to(place) for place in standard)


def _version_of(distribution: str) -> str | None:
    if distribution == OWN:
        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(tops: set[str]) -> dict[str, str]:
    """Return the version of every installed distribution that brings one of these modules."""
    names = {distribution for top in tops for distribution in _distributions().get(top, ())}
    names |= {OWN} & tops
    return {name: found for name in sorted(names) if (found := _version_of(name)) is not None}


def _names_in(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (name for name in (base,) if name)
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


@functools.lru_cache(maxsize=1024)
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Return the dotted names that a source imports anywhere in it, or might: of ``from a import b`` also ``a.b``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(dict.fromkeys(_names_in(tree, package)))


def _held_by(module: ModuleType | None) -> list[str]:
    """Return the names of the modules that a module's names stand for, or whose functions and classes it holds."""
    found: list[object] = []
    for value in () if module is None else list(vars(module).values()):
        if isinstance(value, ModuleType):
            found.append(value.__name__)
        elif isinstance(value, (FunctionType, type)):
            found.append(value.__module__)
    return [name for name in found if isinstance(name, str)]


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
