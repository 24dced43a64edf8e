"""Where a program runs, and copies of it in which the program runs again as if it had not run before."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tallystick.commit.encoding import canonical_json
from tallystick.errors import TallyError
from tallystick.store.files import RunDirectory
from tallystick.store.regular import read_regular

MOST_MADE, MADE_LIMIT = 1_000, 1 << 20  # names of files that a script made, and bytes of them
LARGEST_COPY = 1 << 20  # bytes of a source
MOST_ENTRIES = 10_000  # of a folder and below that are looked at; what lies deeper is taken as a whole


@dataclass(frozen=True)
class FolderListing:
    """What lay in a folder: names relative to it, and those of folders whose content is known; its own is empty.

    ``besides`` are the folders that are another listing's, or tally's.
    """

    path: Path
    names: frozenset[str]
    opened: frozenset[str]
    besides: Sequence[Path]

    def made(self) -> list[str]:
        """Return what has been made in the folder since; of a new folder only that."""
        made, within = list[str](), set[str]()
        for name in sorted(list_folder(self.path, self.besides).names - self.names):
            parent = name.rpartition("/")[0]
            if parent in within:
                within.add(name)
            elif "__pycache__" in name or any(each.is_relative_to(self.path / name) for each in self.besides):
                continue
            elif parent in self.opened or parent not in self.names:
                made.append(name)
                within.add(name)
        return made

    def mirror(self, place: Path, without: Collection[str] = ()) -> None:
        """Make of an empty folder what this one was, by links to its files; ``without`` some, and what lies in them.

        Sources are copies: what one of them finds from where it lies (``Path(__file__).resolve()``) is to be found here.
        """
        left_out = set(without)
        for name in sorted(self.names, key=lambda each: each.split("/")):
            source = self.path / name
            if name in left_out or name.rpartition("/")[0] in left_out:
                left_out.add(name)
            elif name in self.opened:
                (place / name).mkdir()
            elif name.endswith(".py") and source.is_file() and source.stat().st_size <= LARGEST_COPY:
                shutil.copy(source, place / name)
            elif os.path.lexists(source):
                (place / name).symlink_to(source)


@contextmanager
def _scratch() -> Generator[Path]:
    """Give a new folder, gone in the end; links in it are removed as links, and no mode of what they lead to is changed."""
    place = Path(tempfile.mkdtemp(prefix="tally-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)  # tempfile's own way follows links to make them removable


def list_folder(path: Path, besides: Sequence[Path] = ()) -> FolderListing:
    """Return what lies in a folder, shallow first, without looking into links and the folders ``besides``."""
    names, opened = set[str](), list[str]()
    todo = [""]
    for folder in todo:  # which grows
        try:
            found = sorted(os.scandir(path / folder), key=lambda entry: entry.name)
        except OSError:
            continue
        if len(names) + len(found) > MOST_ENTRIES:
            break
        opened.append(folder)
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            names.add(name)
            if entry.is_dir(follow_symlinks=False) and Path(entry.path) not in besides:
                todo.append(name)
    return FolderListing(path, frozenset(names), frozenset(opened), besides)


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
    def of(cls, command: Sequence[str], besides: Sequence[Path] = ()) -> Workplace:
        """Look at the working folder and at where the program's file lies; not into the folders ``besides``."""
        here = Path.cwd()
        file = next((n for n, word in enumerate(command[:2]) if word.endswith(".py")), None)
        folders = [list_folder(here, besides)]
        if file is not None:
            lies_in = (here / command[file]).parent.resolve()
            if not lies_in.is_relative_to(here):
                folders.append(list_folder(lies_in, [*besides, here]))
        return cls(tuple(command), file, tuple(folders))

    @property
    def names(self) -> frozenset[str]:
        """What lay in the folders, relative to them."""
        return frozenset().union(*(listing.names for listing in self.folders))

    def made(self) -> list[str]:
        """Return what has been made in the folders since."""
        return [name for listing in self.folders for name in listing.made()][:MOST_MADE]

    @contextmanager
    def anew(self, without: Collection[str] = ()) -> Generator[tuple[Path, list[str]]]:
        """Give a folder as the working one was before the program ran, and the command there; ``without`` some of its files.

        What is written there is gone in the end, but for what is written into files that were there before.

        Raises:
            TallyError: it cannot be made.
        """
        command = list(self.command)
        if not all(listing.opened for listing in self.folders):  # more lies in one than anybody looks at
            yield self.folders[0].path, command
            return
        with _scratch() as place:
            places = [Path(place, str(number)) for number in range(len(self.folders))]
            try:
                for folder, listing in zip(places, self.folders, strict=True):
                    folder.mkdir()
                    listing.mirror(folder, without)
            except OSError as problem:
                raise TallyError(f"no copy of the program's folder can be made: {problem}") from problem
            if self.file is not None:
                file = self.folders[0].path / command[self.file]
                lies_in, last = file.parent.resolve(), self.folders[-1]
                command[self.file] = str(places[-1] / lies_in.relative_to(last.path) / file.name)
            yield places[0], command


def write_made_files(directory: RunDirectory, place: Workplace) -> None:
    """Write beside a run what its script has made, now or when the run was begun."""
    if made := [*dict.fromkeys([*load_made_files(directory), *place.made()])]:
        directory.write_document(directory.made_files_path, canonical_json({"files": made[:MOST_MADE]}))


def load_made_files(directory: RunDirectory) -> list[str]:
    """Return what a run's script is said to have made; nothing if that cannot be read, as nothing is committed to."""
    try:
        data = read_regular(directory.made_files_path, "files that a script made", MADE_LIMIT)
        found: Any = json.loads(data)["files"]
    except (TallyError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
