"""Where a program runs, and copies of it in which the program runs again as if it had not run before."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tallystick.commit.encoding import canonical_json
from tallystick.errors import TallyError
from tallystick.store.files import RunDirectory
from tallystick.store.regular import read_regular

MOST_MADE, MADE_LIMIT = 20_000, 4 << 20  # names of files that a script made, and bytes of them
MOST_ENTRIES = 100_000  # of a folder and below that are looked at; what lies deeper is taken as a whole
COPIED = 1 << 30  # bytes of files that are copied, the smallest first; and of what is free this share at most
SHARE_COPIED = 4
CACHES = "__pycache__"
DEEPEST = 100  # folders within each other that are looked into
AS_A_WHOLE = (".git", CACHES, "node_modules")  # not looked into; nor is an environment of Python's
MIRROR_TIME = 2_400_000_000 * 10**9  # nanoseconds; of two files in a copy the other one is newer
BETWEEN = r":=,;'\"\s"  # what may stand before a path, or behind it


@dataclass(frozen=True)
class FolderListing:
    """What lay in a folder: names relative to it, and those of folders whose content is known; its own is empty.

    ``besides`` are the folders that are another listing's, or tally's.
    """

    path: Path
    names: frozenset[str]
    opened: frozenset[str]
    besides: Sequence[Path]
    is_whole: bool = True  # and not cut off where more lies there than anybody looks at

    def made(self) -> list[str]:
        """Return what has been made in the folder since; of a new folder only that."""
        made, within = list[str](), set[str]()
        for name in sorted(list_folder(self.path, self.besides).names - self.names):
            parent = name.rpartition("/")[0]
            if parent in within:
                within.add(name)
            elif CACHES in name.split("/") or any(
                each.is_relative_to(self.path / name) for each in self.besides
            ):
                continue
            elif parent in self.opened or parent not in self.names:
                made.append(name)
                within.add(name)
        return made

    def mirror(self, place: Path, without: Collection[str] = ()) -> None:
        """Make of an empty folder what this one was; ``without`` some of its files, and what lies in them.

        Its files are copied, the smallest first, as a program that runs there may write into them; large ones are links. Nobody
        commits to their times, which are turned round.
        Sources come before all others: what one of them finds from where it lies (``Path(__file__).resolve()``) is to be found
        here.
        """
        left_out, files, real = set(without), list[tuple[bool, int, str]](), _real(self.path)
        for name in sorted(self.names, key=lambda each: each.split("/")):
            source = self.path / name
            if name in left_out or name.rpartition("/")[0] in left_out:
                left_out.add(name)
            elif name.rpartition("/")[2] == CACHES:  # what is compiled there is compiled from other files
                continue
            elif name in self.opened:
                (place / name).mkdir()
            elif source.is_symlink() and (leads := _real(source)).is_relative_to(real):
                (place / name).symlink_to(place / leads.relative_to(real))
            elif source.is_file():
                files.append((not name.endswith(".py"), source.stat().st_size, name))
            elif os.path.lexists(source):
                (place / name).symlink_to(source)
        left = min(COPIED, shutil.disk_usage(place).free // SHARE_COPIED)
        for _, size, name in sorted(files):
            left -= size
            try:
                if left < 0:
                    raise OSError
                shutil.copy(self.path / name, place / name)
                times = (self.path / name).stat()
                os.utime(place / name, ns=(times.st_atime_ns, MIRROR_TIME - times.st_mtime_ns))
            except OSError:  # or nobody may read it
                (place / name).unlink(missing_ok=True)
                (place / name).symlink_to(self.path / name)


@contextmanager
def _scratch() -> Generator[Path]:
    """Give a new folder, gone in the end; links in it are removed as links, and no mode of what they lead to is changed."""
    place = Path(tempfile.mkdtemp(prefix="tally-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)  # tempfile's own way follows links to make them removable


def list_folder(path: Path, besides: Sequence[Path] = ()) -> FolderListing:
    """Return what lies in a folder, shallow first, without looking into the folders ``besides``, nor into one twice."""
    names, opened, seen = set[str](), list[str](), set[str]()
    top, left_out = path.absolute(), frozenset(str(each.absolute()) for each in besides)
    above = {str(top), *map(str, top.parents)}
    seen |= {os.path.realpath(each) for each in besides} - {os.path.realpath(top)}
    # A folder, and where it really lies, is listed before where links lead to it.
    todo, links = deque([("", os.path.realpath(top))]), deque[str]()
    while todo or links:
        if todo:
            folder, real = todo.popleft()
        else:
            real = os.path.realpath(top / (folder := links.popleft()))
        try:
            found = sorted(os.scandir(top / folder), key=lambda entry: entry.name)
        except OSError:
            continue
        is_whole = folder and any(each.name == "pyvenv.cfg" for each in found)
        if is_whole or real in seen or (real in above and folder):
            continue
        if len(names) + len(found) > MOST_ENTRIES:
            return FolderListing(path, frozenset(names), frozenset(opened), besides, is_whole=False)
        seen.add(real)
        opened.append(folder)
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            names.add(name)
            is_deep = name.count("/") >= DEEPEST
            if is_deep or entry.name in AS_A_WHOLE or entry.path in left_out or not _is_folder(entry):
                continue
            if entry.is_symlink():
                links.append(name)
            else:
                todo.append((name, f"{real.rstrip(os.sep)}/{entry.name}"))
    return FolderListing(path, frozenset(names), frozenset(opened), besides)


def _real(path: Path) -> Path:
    """Return where links lead; of those that lead in a circle, one of them."""
    return Path(os.path.realpath(path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to what nobody may look at
        return False


@dataclass(frozen=True)
class Workplace:
    """The folders that a program is run in and lies in, as they are before it runs.

    Attributes:
        command: as ``run_program`` takes it.
        file: the place of the program's file in ``command``; None of a module.
        folders: the working folder; and the file's, if that is not in it.
    """

    command: Sequence[str]
    file: int | None
    folders: Sequence[FolderListing] = field(default_factory=tuple[FolderListing, ...])

    @classmethod
    def of(cls, command: Sequence[str], file: str | None, besides: Sequence[Path] = ()) -> Workplace:
        """Look at the working folder and at where the program's ``file`` lies; not into the folders ``besides``."""
        here = Path.cwd()
        folders = [list_folder(here, besides)]
        if file is not None:
            lies_in = (here / file).parent.resolve()
            if not lies_in.is_relative_to(here):
                folders.append(list_folder(lies_in, [*besides, here]))
        return cls(tuple(command), None if file is None else list(command).index(file), tuple(folders))

    @property
    def is_whole(self) -> bool:
        """Whether a copy holds all that lies in the folders."""
        return all(listing.is_whole for listing in self.folders)

    @property
    def names(self) -> frozenset[str]:
        """What lay in the folders, relative to them."""
        return frozenset().union(*(listing.names for listing in self.folders))

    def beside(self, names: Collection[str]) -> list[str]:
        """Return what lay in the folders of some ``names`` but sources: a program may have made it when it ran before."""
        folders = {name.rpartition("/")[0] for name in names}
        found = (name for name in self.names if name.rpartition("/")[0] in folders)
        return sorted(name for name in found if not name.endswith((".py", *AS_A_WHOLE)))

    def made(self) -> list[str]:
        """Return what has been made in the folders since, as far as its names are text."""
        names = (name for listing in self.folders for name in listing.made())
        return [name for name in names if name.encode("utf-8", "replace").decode() == name][:MOST_MADE]

    @contextmanager
    def anew(self, without: Collection[str] = ()) -> Generator[Copy]:
        """Give a copy of the working folder as it was before the program ran, gone in the end; ``without`` some of its files.

        What is written there stays there, but for what is written into files that are links.

        Raises:
            TallyError: it cannot be made.
        """
        if not all(listing.opened for listing in self.folders):  # more lies in one than anybody looks at
            yield Copy(self.folders[0].path, self.command, {})
            return
        with _scratch() as place:
            places = [Path(place, str(number), "2", "1", "0") for number in range(len(self.folders))]
            lead = {str(each.path): str(to) for each, to in zip(self.folders, places, strict=True)}
            try:
                for folder, listing in zip(places, self.folders, strict=True):
                    folder.mkdir(parents=True)
                    listing.mirror(folder, without)
                    _surround(folder, listing.path, lead)
            except OSError as problem:
                raise TallyError(f"no copy of the program's folder can be made: {problem}") from problem
            command = [_led(word, lead) for word in self.command]
            if self.file is not None:
                file = self.folders[0].path / self.command[self.file]
                lies_in, last = file.parent.resolve(), self.folders[-1]
                command[self.file] = str(places[-1] / lies_in.relative_to(last.path) / file.name)
            variables = {name: _led(value, lead) for name, value in os.environ.items()}
            other = {name: value for name, value in variables.items() if value != os.environ[name]}
            yield Copy(places[0], command, other)


@dataclass(frozen=True)
class Copy:
    """A folder as a program found it: where it is, the command there, and variables that lead there too."""

    path: Path
    command: Sequence[str]
    variables: Mapping[str, str]


def _surround(copy: Path, path: Path, lead: Mapping[str, str]) -> None:
    """Put links around a copy, two folders up, to what lies there around the folder itself."""
    for up, down, over, under in zip(
        path.parents, (path, path.parent), copy.parents, (copy, copy.parent), strict=False
    ):
        try:
            found = sorted(os.scandir(up), key=lambda entry: entry.name)[:MOST_ENTRIES]
        except OSError:  # nobody may look at it
            continue
        for entry in (each for each in found if not os.path.lexists(over / each.name)):
            leads = under if entry.name == down.name else lead.get(entry.path, entry.path)
            (over / entry.name).symlink_to(leads)


def _led(text: str, lead: Mapping[str, str]) -> str:
    """Return ``text`` with each path into a folder led into its copy."""
    for path, place in lead.items():
        if path == os.sep:
            continue
        text = re.sub(f"(?<![^{BETWEEN}]){re.escape(path)}(?![^/{BETWEEN}])", lambda _, to=place: to, text)
    return text


def write_made_files(directory: RunDirectory, place: Workplace) -> None:
    """Write beside a run what its script has made, now or when the run was begun."""
    made = [*dict.fromkeys([*load_made_files(directory), *place.made()])][:MOST_MADE]
    while len(document := canonical_json({"files": made})) > MADE_LIMIT:
        made = made[: len(made) // 2]
    if made:
        directory.write_document(directory.made_files_path, document)


def load_made_files(directory: RunDirectory) -> list[str]:
    """Return what a run's script is said to have made; nothing if that cannot be read, as nothing is committed to."""
    try:
        data = read_regular(directory.made_files_path, "files that a script made", MADE_LIMIT)
        found: Any = json.loads(data)["files"]
    except (TallyError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
