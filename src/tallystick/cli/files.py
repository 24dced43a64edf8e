"""Documents that commands read and write: bounded reads, writes that are whole or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

from tallystick.errors import InvalidInput, StoreError


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most ``limit`` bytes.

    Raises:
        StoreError: there is no such file, or it cannot be read.
        InvalidInput: it is longer.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file") from None
    except OSError as problem:
        raise StoreError(f"{path}: cannot be read ({problem.strerror})") from problem
    if len(data) > limit:
        raise InvalidInput(f"{path}: exceeds the limit of {limit} bytes")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there completely or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"{path}: cannot be written ({problem.strerror})") from problem
