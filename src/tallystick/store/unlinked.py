"""Before a run directory is written to: nothing that a recording writes may be a link, a pipe or a device.

Whoever may write in a directory may put a link there; who records through it, or cuts back what it leads to, destroys
another's files.
"""

from __future__ import annotations

import os
from pathlib import Path

from tallystick.errors import InvalidInput

DOCUMENTS = ("specification.json", "steps.jsonl", "run.json", "made-files.json", "objection.json")
FOLDERS = ("logs", "checkpoints", "program")


def verify_unlinked(run: Path) -> None:
    """Return if the documents of a directory are regular files and its folders directories of such, as far as they are there.

    The directory itself may be a link: its owner named it.

    Raises:
        InvalidInput: one is something else; by name.
        OSError: it cannot be listed.
    """
    with os.scandir(run) as entries:
        for entry in entries:
            if entry.name in FOLDERS:
                if not entry.is_dir(follow_symlinks=False):
                    raise InvalidInput(
                        f"{entry.path}: {_kind(entry)}, must be a directory; nothing is written there"
                    )
                _verify_within(Path(entry.path))
            elif entry.name in DOCUMENTS or is_part(entry.name):
                _verify_file(entry)


def is_part(name: str) -> bool:
    """Whether a file of that name was being written when its writer died."""
    return name.startswith(".") and name.endswith(".part")


def _verify_within(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _verify_within(Path(entry.path))
            else:
                _verify_file(entry)


def _verify_file(entry: os.DirEntry[str]) -> None:
    if not entry.is_file(follow_symlinks=False):
        raise InvalidInput(f"{entry.path}: {_kind(entry)}, must be a regular file; nothing is written there")


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return f"is a link to {str(Path(entry.path).readlink())[:80]!r}"
    if entry.is_dir(follow_symlinks=False):
        return "is a directory"
    return "is a file" if entry.is_file(follow_symlinks=False) else "is a pipe, a socket or a device"
