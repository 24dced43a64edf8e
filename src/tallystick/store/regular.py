"""Files of a directory that may be a stranger's: regular ones, opened at once and through no link, read up to a bound."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from tallystick.errors import InvalidInput, StoreError

SPARSE_FROM = (
    1 << 26
)  # bytes; whether a longer file of a stranger is on the disk at all is seen to before it is read
SPARSEST_FILE = 64  # times more bytes than it has on the disk: such a file is not read


def open_regular(path: Path, needed: str, *, folder: bool = False, follow: bool = False) -> BufferedReader:
    """Return a file of a directory that may be a stranger's, opened: a regular file, at once, through no link.

    With ``folder`` the directory that holds it is no link either: one that the stranger made. With ``follow`` a link is
    followed: one that the caller named.

    Raises:
        InvalidInput: it is not there, or it or its directory is a link, a device, a pipe or a directory.
        StoreError: it cannot be read.
    """
    try:
        return open_found(path, shown_as(path, folder=folder), folder=folder, follow=follow)
    except FileNotFoundError:
        raise InvalidInput(f"{shown_as(path, folder=folder)}: not found; {needed}") from None


def open_found(path: Path, shown: str, *, folder: bool = False, follow: bool = False) -> BufferedReader:
    """Return what ``open_regular`` does; a file that is not there is a ``FileNotFoundError``. ``shown`` names it in messages."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        if folder:
            holder = os.open(path.parent, flags | os.O_DIRECTORY)
            try:
                descriptor = os.open(path.name, flags, dir_fd=holder)
            finally:
                os.close(holder)
        else:
            descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise InvalidInput(
                f"{shown}: is not a regular file; links, pipes and devices are not followed"
            ) from None
        raise StoreError(f"{shown}: cannot be read ({problem.strerror})") from problem
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidInput(f"{shown}: is not a regular file; links, pipes and devices are not followed")
    return os.fdopen(descriptor, "rb")


def shown_as(path: Path, *, folder: bool) -> str:
    """Return how messages name a file; what lies in a run's folders without the run's path, as verdicts quote these."""
    return f"{path.parent.name}/{path.name}" if folder else str(path)


def read_regular(
    path: Path, needed: str, limit: int | None = None, *, folder: bool = False, follow: bool = False
) -> bytes:
    """Return a whole file of a stranger's directory; ``limit`` is what earlier documents allow, None if they say nothing.

    Raises:
        InvalidInput: it is no regular file, longer than ``limit``, hardly on the disk at all, or grows.
        StoreError: it cannot be read.
    """
    shown = shown_as(path, folder=folder)
    with open_regular(path, needed, folder=folder, follow=follow) as file:
        found = os.fstat(file.fileno())
        if limit is not None and found.st_size > limit:
            raise InvalidInput(f"{shown}: has {found.st_size} bytes, at most {limit} are allowed")
        verify_there(found, shown)
        return content_of(file, found.st_size, shown)


def verify_there(found: os.stat_result, shown: str) -> None:
    """Return unless a file is long and hardly on the disk at all.

    Raises:
        InvalidInput: it is.
    """
    if found.st_size > SPARSE_FROM and found.st_size > SPARSEST_FILE * 512 * found.st_blocks:
        raise InvalidInput(
            f"{shown}: claims {found.st_size} bytes and has {512 * found.st_blocks} on the disk; it is not read"
        )


def content_of(file: BufferedReader, size: int, shown: str) -> bytes:
    """Return what an open file holds, which must be at most ``size`` bytes.

    Raises:
        InvalidInput: it holds more.
        StoreError: it cannot be read.
    """
    try:
        data = file.read(size + 1)
    except OSError as problem:
        raise StoreError(f"{shown}: cannot be read ({problem.strerror})") from problem
    if len(data) > size:
        raise InvalidInput(f"{shown}: has more than the {size} bytes it said; it grows while it is read")
    return data
