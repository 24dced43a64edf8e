"""A registry at rest: its log of events, signed heads, and an index that can be thrown away and made again.

    entries.jsonl   the log: one signed event a line, appended, never changed
    head.json       the newest signed head: size and root of the log, root of the state
    index.sqlite    chips, parties, proofs' nodes; made from the log alone (``rebuild``)

A head commits to the log (RFC 6962 tree over its lines) and to the state (``commit.directory``: every chip, serial
number, device key, party and model under its own key, so each has one value). Format: spec/registry.md.

Written in the order log, head, index: a process killed at any moment leaves a log that the next opening takes up. A log
shorter than its head says, or other than it, is refused and never repaired in silence.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation, StoreError
from tallystick.fleet.registry.events import apply_event, parse_entry, verify_signatures
from tallystick.fleet.registry.facts import LARGEST_ENTRY, REGISTRY, Party, RegistryEntry, RegistryEvent
from tallystick.fleet.registry.heads import (
    RegistryHead,
    SignedHead,
    parse_signed_head,
    sign_head,
    verify_head,
)
from tallystick.fleet.registry.state_index import TABLES, StateIndex
from tallystick.signing.keys import Signer
from tallystick.store.files import storing, write_whole

SCHEMA = 1
Progress = Callable[[int, int, str], None]


class RegistryLedger(StateIndex):
    """One registry's directory. Close it; ``with`` does, and says ``StoreError`` where the index cannot be used."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._index: sqlite3.Connection | None = None

    def __enter__(self) -> RegistryLedger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(problem, sqlite3.Error):
            raise StoreError(
                f"{self.index_path}: {problem}; another process may be writing, or the index is damaged: "
                "`tally registry rebuild` makes it again"
            ) from problem

    def close(self) -> None:
        """Close the index and forget what was read from it."""
        self._forget()
        if self._index is not None:
            self._index.close()
            self._index = None

    @property
    def log_path(self) -> Path:
        """Where the log lies."""
        return self.path / "entries.jsonl"

    @property
    def head_path(self) -> Path:
        """Where the newest head lies."""
        return self.path / "head.json"

    @property
    def index_path(self) -> Path:
        """Where the index lies."""
        return self.path / "index.sqlite"

    # -- writing -----------------------------------------------------------------------------------

    def append(
        self, entries: Iterable[RegistryEntry], signer: Signer, *, now: int, progress: Progress | None = None
    ) -> SignedHead:
        """Return the head after ``entries`` were checked, applied and written: all of them or none.

        Raises:
            ProtocolViolation, Mismatch: a rule or signature forbids one; the message says which, nothing is written.
            StoreError: the disk refused, or another process is writing.
        """
        index = self._open(create=True)
        lines: list[bytes] = []
        index.execute("BEGIN IMMEDIATE")  # from here on nobody else writes; what was read before may be old
        self._forget()
        try:
            first = before = self._entries(index)
            start = self._size(index)
            touched: set[int] = set()
            for entry in entries:
                line = entry.encode()
                try:
                    self._apply(index, entry, line, first, start, touched)
                except (ProtocolViolation, Mismatch, InvalidInput) as problem:
                    raise type(problem)(f"entry {first}: {problem}") from None
                start += len(line) + 1
                first += 1
                lines.append(line)
                if progress is not None and len(lines) % 64 == 0:
                    progress(len(lines), 0, f"{first} entries")
            if not lines:
                raise InvalidInput("registry: nothing to append")
            head = self._close_batch(index, touched, first, now)
            if signer.public_key != _must(self.party(REGISTRY)).key:
                raise ProtocolViolation(
                    f"registry: heads are signed by key {_must(self.party(REGISTRY)).key.key_id[:16]}.., "
                    f"this is key {signer.public_key.key_id[:16]}.."
                )
            signed = sign_head(head, signer)
            self._write(lines, signed, before)
            index.execute("COMMIT")
        except BaseException:
            index.execute("ROLLBACK")
            self._forget()
            raise
        return signed

    def rebuild(self, *, progress: Progress | None = None) -> RegistryHead:
        """Return the head after the index was made again from the log alone, every event and signature checked.

        Raises:
            Mismatch: log and head disagree; the log is shorter than its head says, or other.
            InvalidInput: the log holds what is no entry.
        """
        self.close()
        for path in (
            self.index_path,
            *(Path(f"{self.index_path}-{end}") for end in ("wal", "shm", "journal")),
        ):
            path.unlink(missing_ok=True)
        signed = self.load_head()
        index = self._open(create=True, check=False)
        index.execute("BEGIN IMMEDIATE")
        touched: set[int] = set()
        number = start = 0
        try:
            for line in self.read_lines(signed.head.entries):
                try:
                    self._apply(index, parse_entry(line), line, number, start, touched)
                except (InvalidInput, Mismatch, ProtocolViolation) as problem:
                    raise Mismatch(f"registry log: entry {number}: {problem}") from None
                start += len(line) + 1
                number += 1
                if progress is not None and number % 64 == 0:
                    progress(number, signed.head.entries, "events checked")
            if number < signed.head.entries:
                raise Mismatch(
                    f"registry: the log holds {number} entries, its head speaks of {signed.head.entries}"
                )
            found = self._close_batch(index, touched, number, signed.head.time)
            _must_be(found, verify_head(signed, _must(self.party(REGISTRY)).key))
            index.execute("COMMIT")
        except BaseException:
            index.execute("ROLLBACK")
            self._forget()
            self.close()
            self.index_path.unlink(missing_ok=True)
            raise
        return found

    # -- reading -----------------------------------------------------------------------------------

    def load_head(self) -> SignedHead:
        """Return the newest head as it was written.

        Raises:
            StoreError: there is none.
            InvalidInput: it is malformed.
        """
        try:
            data = self.head_path.read_bytes()
        except FileNotFoundError:
            raise StoreError(f"{self.head_path}: there is no registry") from None
        except OSError as problem:
            raise StoreError(f"{self.head_path}: cannot be read ({problem.strerror})") from problem
        return parse_signed_head(data)

    def read_lines(self, entries: int) -> Iterator[bytes]:
        """Yield the first ``entries`` lines of the log, at most; a torn last line is not one."""
        with storing(str(self.log_path)), self.log_path.open("rb") as file:
            for _ in range(entries):
                line = file.readline(LARGEST_ENTRY + 2)
                if not line.endswith(b"\n"):
                    if len(line) > LARGEST_ENTRY:
                        raise InvalidInput(f"registry log: a line exceeds the limit of {LARGEST_ENTRY} bytes")
                    return
                yield line[:-1]

    def history(self, chip: str) -> list[tuple[int, RegistryEvent]]:
        """Return the events about a chip, oldest first, with their numbers; reads the whole log."""
        found: list[tuple[int, RegistryEvent]] = []
        for number, line in enumerate(self.read_lines(self.load_head().head.entries)):
            if (
                chip.encode("ascii", "replace") in line
                and chip in (event := parse_entry(line).event).said.named()
            ):
                found.append((number, event))
        return found

    # -- inside ------------------------------------------------------------------------------------

    def _open(self, *, create: bool = False, check: bool = True) -> sqlite3.Connection:
        if self._index is not None:
            return self._index
        fresh = not self.index_path.exists()
        if fresh and not create and not self.log_path.exists():
            raise StoreError(f"{self.path}: there is no registry")
        if fresh and check and self.head_path.exists():
            self.rebuild()
            return self._open()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            index = sqlite3.connect(self.index_path, isolation_level=None, timeout=5.0)
            if fresh:
                index.executescript(TABLES)
                index.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            index.execute("PRAGMA cache_size = -65536")
            index.execute("PRAGMA synchronous = OFF")  # made again from the log if it is lost
            schema = index.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        except sqlite3.Error as problem:
            raise StoreError(
                f"{self.index_path}: is no index ({problem}); `tally registry rebuild` makes it again"
            ) from None
        except OSError as problem:
            raise StoreError(f"{self.path}: cannot be opened ({problem.strerror})") from problem
        if schema != (str(SCHEMA),):
            raise StoreError(
                f"{self.index_path}: is of another version; `tally registry rebuild` makes it again"
            )
        self._index = index
        if check and self.head_path.exists():
            self._must_be_current(index)
        return self._index

    def _must_be_current(self, index: sqlite3.Connection) -> None:
        """Return if the index is that of the newest head, and the log is at least as long; else make the index again."""
        head = self.load_head().head
        row = index.execute("SELECT value FROM meta WHERE name = 'head'").fetchone()
        if row is None or row[0] != head.encode().decode("ascii"):
            self.rebuild()
            return
        if self.log_path.stat().st_size < self._size(index):
            raise Mismatch(
                f"registry: the log has {self.log_path.stat().st_size} bytes, its head speaks of {self._size(index)}; "
                "a log is never shortened"
            )

    def _apply(
        self,
        index: sqlite3.Connection,
        entry: RegistryEntry,
        line: bytes,
        number: int,
        start: int,
        touched: set[int],
    ) -> None:
        verify_signatures(entry, self)
        changes = apply_event(entry.event, self, number)
        self._take(index, entry, line, number, start)
        self._store(index, changes, touched)

    def _write(self, lines: list[bytes], signed: SignedHead, before: int) -> None:
        """Append to the log and replace the head; the log first, so that no head speaks of what is not there."""
        index = self._open()
        (kept,) = index.execute(
            "SELECT COALESCE(SUM(size + 1), 0) FROM entry WHERE number < ?", (before,)
        ).fetchone()
        with storing(str(self.log_path)), self.log_path.open("ab") as file:
            if file.tell() > kept:
                self._set_aside(kept)
                file.seek(0, os.SEEK_END)
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        write_whole(self.head_path, signed.encode())

    def _set_aside(self, kept: int) -> None:
        """Move what lies beyond the newest head out of the log, into a file of its own: no head ever spoke of it."""
        with self.log_path.open("r+b") as file:
            file.seek(kept)
            rest = file.read()
            number = len(list(self.path.glob("unacknowledged-*.jsonl")))
            aside = self.path / f"unacknowledged-{number}.jsonl"
            with aside.open("xb") as other:
                other.write(rest)
                other.flush()
                os.fsync(other.fileno())
            file.truncate(kept)
            os.fsync(file.fileno())


def _must(party: Party | None) -> Party:
    if party is None:
        raise ProtocolViolation("registry: is not opened; its first event opens it")
    return party


def _must_be(found: RegistryHead, stated: RegistryHead) -> None:
    for name in ("registry", "entries", "log_root", "state_root"):
        ours, theirs = getattr(found, name), getattr(stated, name)
        if ours != theirs:
            shown = [value.hex() if isinstance(value, bytes) else str(value) for value in (ours, theirs)]
            raise Mismatch(f"registry: {name.replace('_', ' ')} is {shown[0]}, its head states {shown[1]}")
