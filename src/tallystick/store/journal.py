"""An append-only file of byte records that survives being killed, and never gets shorter unnoticed.

    "TALLYLOG" 01 | (u32 LE length | first 8 bytes of SHA-256(length | record) | record)*

A record is on the disk, whole, when ``append`` returns. The tail of a write that was interrupted is moved to a file
beside the journal at the next opening; damage anywhere else is an error and changes nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tallystick.errors import InvalidInput, StoreError
from tallystick.store.files import read_whole, storing

MAGIC = b"TALLYLOG\x01"
JOURNAL_RECORD_LIMIT = 1 << 20
JOURNAL_LIMIT = 1 << 30  # bytes of a stranger's journal
_HEAD = struct.Struct("<I8s")


@dataclass(frozen=True)
class Contents:
    """What a journal's bytes hold: whole records, and where the first one that is not whole begins (or None)."""

    records: tuple[bytes, ...]
    broken_at: int | None
    is_tail: bool = True


def parse_journal(data: bytes, *, what: str = "journal") -> Contents:
    """Return the whole records of a journal's bytes.

    Raises:
        InvalidInput: the bytes do not begin as a journal does.
    """
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise InvalidInput(f"{what}: does not begin as a journal of version 1 does")
    if len(data) < len(MAGIC):
        return Contents((), 0)
    records: list[bytes] = []
    at = len(MAGIC)
    while at < len(data):
        if at + _HEAD.size > len(data):
            return Contents(tuple(records), at)
        length, check = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if length > JOURNAL_RECORD_LIMIT:
            return Contents(tuple(records), at, is_tail=False)
        if end > len(data):
            return Contents(tuple(records), at)
        record = data[at + _HEAD.size : end]
        if _check(record) != check:
            return Contents(tuple(records), at, is_tail=end == len(data))
        records.append(record)
        at = end
    return Contents(tuple(records), None)


def is_written(path: Path) -> bool:
    """Whether a process has the journal open for writing."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


class Journal:
    """One open journal; only one process at a time can have it open for writing.

    Attributes:
        records: every whole record, oldest first.
        cut: bytes of an interrupted write that were moved aside when it was opened.
    """

    def __init__(self, path: Path, *, expected: int = 0) -> None:
        """Open or create ``path``; ``expected`` is how many records it is known to hold.

        Raises:
            StoreError: another process has it open, it is damaged, or the disk refused.
        """
        self.path = path
        self.cut = 0
        with storing(f"{path}: cannot be opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            path.chmod(0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise StoreError(f"{path}: another process is writing it") from None
            self._file.seek(0)
            data = self._file.read()
            found = parse_journal(data, what=str(path))
            if data and found.broken_at is not None:
                if not found.is_tail and len(found.records) < expected:
                    self._file.close()
                    raise StoreError(
                        f"{path}: damaged at byte {found.broken_at}, after {len(found.records)} whole records of "
                        f"{expected}; nothing was changed"
                    )
                self._move_aside(data[found.broken_at :])
                self.cut = len(data) - found.broken_at
                self._file.truncate(found.broken_at)
            if len(data) < len(MAGIC):
                self._file.truncate(0)
                self._file.write(MAGIC)
            self._flush()
        self.records = list(found.records)

    def append(self, record: bytes) -> None:
        """Write one record; it is on the disk when this returns.

        Raises:
            StoreError: the disk refused; what was written before is intact.
        """
        if len(record) > JOURNAL_RECORD_LIMIT:
            raise InvalidInput(f"{self.path}: a record of {len(record)} bytes exceeds {JOURNAL_RECORD_LIMIT}")
        with storing(f"{self.path}: a record cannot be written"):
            start = self._file.seek(0, os.SEEK_END)
            try:
                self._file.write(_HEAD.pack(len(record), _check(record)) + record)
                self._flush()
            except OSError:
                self._file.truncate(start)
                raise
        self.records.append(record)

    def close(self) -> None:
        """Let others open it."""
        self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _move_aside(self, tail: bytes) -> None:
        number = 0
        while (aside := self.path.with_name(f"{self.path.name}.cut{number}")).exists():
            number += 1
        with aside.open("xb") as file:
            file.write(tail)
            file.flush()
            os.fsync(file.fileno())


def read_journal(path: Path) -> tuple[bytes, ...]:
    """Return the whole records of a journal that may be in use by another process.

    Raises:
        StoreError: it cannot be read, or is damaged before its end.
        InvalidInput: it is no journal.
    """
    found = parse_journal(read_whole(path, limit=JOURNAL_LIMIT, what="a journal"), what=str(path))
    if found.broken_at is not None and not found.is_tail:
        raise StoreError(
            f"{path}: damaged at byte {found.broken_at}, after {len(found.records)} whole records"
        )
    return found.records


def _check(record: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<I", len(record)) + record).digest()[:8]
