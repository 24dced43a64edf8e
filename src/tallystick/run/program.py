"""What code a run was computed with: the program's own files, and the installed distributions they import (spec/transcript.md 2).

Names are module paths relative to the program (``helper.py``, ``models/net.py``): no document says where a file lies on
anybody's machine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, canonical_json, digest, parse_hex
from tallystick.commit.field_rules import HashText, Spare
from tallystick.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM_TAG = "tallystick/program/1"
FILE_LIMIT = 2**24  # bytes of one file
PROGRAM_LIMIT = 2**26  # bytes of all files
MOST_FILES = 4096
MOST_DISTRIBUTIONS = 4096
MOST_VARIABLES = 64
LONGEST_NAME = 240  # bytes
LONGEST_VERSION = 100

# Printable ASCII that every file system takes as part of a name; no part begins with a dot or ends with a dot or space.
_PART = r"(?!\.)[ !#-)+-.0-9;=@-\[\]-{}~]*[!#-)+,\-0-9;=@-\[\]-{}~]"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)
_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)
_VERSION = re.compile(rf"[!-~]{{1,{LONGEST_VERSION}}}", re.ASCII)
_VARIABLE = re.compile(r"[!-<>-~]{1,128}", re.ASCII)
ABSENT = "absent"
UNREAD = "not read"


@dataclass(frozen=True)
class ProgramFile(Document, what="program: file"):
    """One file of a program.

    Attributes:
        name: relative, with ``/`` between its parts.
        size: bytes.
        sha256: of its bytes, hexadecimal.
    """

    name: str
    size: int
    sha256: HashText

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.name) > LONGEST_NAME or _NAME.fullmatch(self.name) is None:
            raise InvalidInput(
                f"program: a file's name must be a relative path in printable ASCII of at most {LONGEST_NAME} bytes, "
                f"is {self.name[:80]!r}"
            )
        if not 0 <= self.size <= FILE_LIMIT:
            raise InvalidInput(f"program: {self.name} must have at most {FILE_LIMIT} bytes, has {self.size}")

    def label(self) -> str:
        """Return what errors call this one."""
        return f"program: {self.name[:80]}"


@dataclass(frozen=True)
class Program(Document, what="program"):
    """The files that a run's code came from, and what they import of installed distributions.

    Attributes:
        main: name of the file that was run: the job's, or the main program's; empty if there are no files.
        files: ascending by name.
        distributions: version by name.
        environment: of each environment variable that the files read: SHA-256 of its value in UTF-8, hexadecimal, or
            ``absent``. No value is written: it may be a place on somebody's machine, or secret.

    Raises:
        InvalidInput: a name, size, digest or version breaks its rule, or the files are not in order.
    """

    main: str = ""
    files: tuple[ProgramFile, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Annotated[Mapping[str, str], Spare()] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if len(self.files) > MOST_FILES or len(self.distributions) > MOST_DISTRIBUTIONS:
            raise InvalidInput(
                f"program: at most {MOST_FILES} files and {MOST_DISTRIBUTIONS} distributions are allowed, "
                f"there are {len(self.files)} and {len(self.distributions)}"
            )
        for one, following in itertools.pairwise(self.files):
            if one.name >= following.name:
                raise InvalidInput(
                    f"program: files must be strictly ascending by name, {following.name!r} follows {one.name!r}"
                )
        if (total := sum(file.size for file in self.files)) > PROGRAM_LIMIT:
            raise InvalidInput(f"program: all files must have at most {PROGRAM_LIMIT} bytes, have {total}")
        if self.main not in (file.name for file in self.files) and (self.main or self.files):
            raise InvalidInput(f"program: main must be one of its files, is {self.main[:80]!r}")
        for name, version in self.distributions.items():
            if _DISTRIBUTION.fullmatch(name) is None or _VERSION.fullmatch(version) is None:
                raise InvalidInput(
                    f"program: not a distribution and its version: {name[:80]!r} {version[:80]!r}"
                )
        if len(self.environment) > MOST_VARIABLES:
            raise InvalidInput(
                f"program: at most {MOST_VARIABLES} environment variables may be read, by name; read are "
                f"{len(self.environment)}, and a copy of os.environ reads them all; what a job depends on is better a setting"
            )
        for name, value in self.environment.items():
            if _VARIABLE.fullmatch(name) is None:
                raise InvalidInput(
                    f"program: an environment variable's name must be 1 to 128 printable characters of ASCII without =, "
                    f"is {name[:80]!r}"
                )
            if value != ABSENT:
                parse_hex(value, n_bytes=HASH_BYTES, what=f"program: environment variable {name}")

    def digests(self) -> dict[str, str]:
        """Return the digest of each file by name, hexadecimal."""
        return {file.name: file.sha256 for file in self.files}

    def digest(self) -> str:
        """Return the hexadecimal digest over all files and which of them is run, and over nothing else."""
        files = [file.fields() for file in self.files]
        return digest(PROGRAM_TAG, canonical_json({"files": files, "main": self.main})).hex()


@dataclass(frozen=True)
class ProgramDifference:
    """One file, distribution or environment variable in which two programs differ; digests, versions or ``absent``."""

    subject: str
    own: str
    stated: str

    def __str__(self) -> str:
        return f"{self.subject} is {self.own}, stated is {self.stated}"


def compare_programs(own: Program, stated: Program) -> list[ProgramDifference]:
    """Return in which files, distributions and environment variables two programs differ, in this order."""
    return [
        *compare_files(own.digests(), stated.digests()),
        *compare_versions(own.distributions, stated.distributions),
        *compare_environments(own.environment, stated.environment),
    ]


def compare_files(own: Mapping[str, str], stated: Mapping[str, str]) -> list[ProgramDifference]:
    """Return the files whose digests differ, or that one side alone has."""
    return [
        ProgramDifference(f"program file {name}", own.get(name, ABSENT), stated.get(name, ABSENT))
        for name in sorted(own.keys() | stated.keys())
        if own.get(name) != stated.get(name)
    ]


def compare_versions(own: Mapping[str, str], stated: Mapping[str, str]) -> list[ProgramDifference]:
    """Return the distributions whose public versions differ, or that one side alone has.

    What stands behind a plus sign says how a release was built (``2.9.1+cpu``), not which it is.
    """
    return [
        ProgramDifference(f"distribution {name}", own.get(name, ABSENT), stated.get(name, ABSENT))
        for name in sorted(own.keys() | stated.keys())
        if own.get(name, ABSENT).partition("+")[0] != stated.get(name, ABSENT).partition("+")[0]
    ]


def compare_environments(own: Mapping[str, str], stated: Mapping[str, str]) -> list[ProgramDifference]:
    """Return the environment variables whose values differ, or that one side's program alone has read."""
    return [
        ProgramDifference(f"environment variable {name}", own.get(name, UNREAD), stated.get(name, UNREAD))
        for name in sorted(own.keys() | stated.keys())
        if own.get(name, UNREAD) != stated.get(name, UNREAD)
    ]


def in_words(found: Sequence[ProgramDifference], *, most: int = 3) -> str:
    """Return differences as one line, the first few in full."""
    shown = "; ".join(map(str, found[:most]))
    return shown if len(found) <= most else f"{shown}; and {len(found) - most} more"
