"""A registry at rest: its log of deeds, signed heads, and an index that can be thrown away and made again.

    entries.jsonl   the log: one signed deed a line, appended, never changed
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from types import TracebackType

from tallystick.commit.directory import PREFIX_BITS, MapProof, bucket_leaf, depth_for, map_root, prefix_of
from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    canonical_json,
    frame,
    parse_canonical_json,
    parse_hex,
)
from tallystick.commit.merkle import (
    EMPTY_ROOT,
    consistency_proof,
    leaf_hash,
    node_hash,
    root,
    verify_consistency,
)
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation, StoreError
from tallystick.fleet.registry.events import apply_deed, chips_of, parse_entry, registry_id, verify_signatures
from tallystick.fleet.registry.facts import LARGEST_ENTRY, REGISTRY, Changes, Chip, Deed, Entry, Model, Party
from tallystick.signing.keys import PublicKey, Signer, parse_public_key
from tallystick.store.files import storing

HEAD_FORMAT = "tallystick/registry-head/1"
HEAD_TAG = "tallystick/registry-head/1"
LARGEST_HEAD = 1 << 16
SCHEMA = 1
MOST_PENDING = 100_000  # changed chips held in memory before they go to the index
_CHIP = "chip, model, maker, serial, key, board, owner, custodian, status, exempt_until, inspected, entry"

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entry (number INTEGER PRIMARY KEY, leaf BLOB NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
                    deed BLOB NOT NULL UNIQUE);
CREATE TABLE chip (prefix INTEGER, chip TEXT, model TEXT, maker TEXT, serial TEXT, key TEXT, board TEXT, owner TEXT,
                   custodian TEXT, status TEXT, exempt_until INTEGER, inspected INTEGER, entry INTEGER,
                   PRIMARY KEY (prefix, chip)) WITHOUT ROWID;
CREATE TABLE party (name TEXT PRIMARY KEY, roles TEXT NOT NULL, key BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE model (name TEXT PRIMARY KEY, vendor TEXT NOT NULL, rate TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE item (prefix INTEGER, key BLOB, value BLOB NOT NULL, PRIMARY KEY (prefix, key)) WITHOUT ROWID;
CREATE TABLE node (level INTEGER, at INTEGER, hash BLOB NOT NULL, PRIMARY KEY (level, at)) WITHOUT ROWID;
"""
_ALL_ITEMS = "SELECT prefix, key, value FROM item ORDER BY prefix, key"
_ALL_CHIPS = f"SELECT prefix, {_CHIP} FROM chip ORDER BY prefix, chip"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Head:
    """What the registry answers for at one moment: a log of ``entries`` deeds and the state after them."""

    registry: str
    entries: int
    log_root: bytes
    state_root: bytes
    time: int

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(
            {
                "format": HEAD_FORMAT,
                "registry": self.registry,
                "entries": self.entries,
                "log": self.log_root.hex(),
                "state": self.state_root.hex(),
                "time": self.time,
            }
        )


@dataclass(frozen=True)
class SignedHead:
    """A head and the registry's signature over it."""

    head: Head
    signature: bytes

    def fields(self) -> list[object]:
        """Return the signed head as it stands in documents."""
        return [self.head.encode().decode("ascii"), self.signature.hex()]

    def encode(self) -> bytes:
        """Return the signed head as canonical JSON."""
        return canonical_json(self.fields())


def sign_head(head: Head, signer: Signer) -> SignedHead:
    """Return ``head`` with the registry's signature."""
    return SignedHead(head, signer.sign(frame(HEAD_TAG, head.encode())))


def parse_signed_head(value: object, *, what: str = "registry head") -> SignedHead:
    """Return the signed head that ``SignedHead.fields`` writes.

    Raises:
        InvalidInput: another form.
    """
    match value:
        case [str(text), str(signature)] if len(signature) <= 512 and text.isascii():
            inner = parse_canonical_json(text.encode("ascii"), what=what, limit=LARGEST_HEAD)
        case _:
            raise InvalidInput(f"{what}: must be [head, signature]")
    fields = Fields(inner, what=what, names=("format", "registry", "entries", "log", "state", "time"))
    fields.constant("format", HEAD_FORMAT)
    head = Head(
        fields.text("registry"),
        fields.integer("entries"),
        parse_hex(fields.text("log"), n_bytes=HASH_BYTES, what=f"{what}: log"),
        parse_hex(fields.text("state"), n_bytes=HASH_BYTES, what=f"{what}: state"),
        fields.integer("time"),
    )
    parse_hex(head.registry, n_bytes=HASH_BYTES, what=f"{what}: registry")
    if head.entries < 1 or head.time < 0:
        raise InvalidInput(f"{what}: {head.entries} entries at {head.time}; a head has at least one")
    return SignedHead(head, parse_hex(signature, n_bytes=len(signature) // 2, what=f"{what}: signature"))


def verify_head(signed: SignedHead, key: PublicKey) -> Head:
    """Return the head if ``key`` signed it.

    Raises:
        Mismatch: it did not.
    """
    key.verify(signed.signature, frame(HEAD_TAG, signed.head.encode()), what="registry head")
    return signed.head


class Ledger:
    """One registry's directory. Close it; ``with`` does, and says ``StoreError`` where the index cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index: sqlite3.Connection | None = None
        self._parties: dict[str, Party | None] = {}
        self._models: dict[str, Model | None] = {}
        self._id: str | None = None
        self._pending: dict[str, Chip] = {}

    def __enter__(self) -> Ledger:
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
        self, entries: Iterable[Entry], signer: Signer, *, now: int, progress: Progress | None = None
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

    def rebuild(self, *, progress: Progress | None = None) -> Head:
        """Return the head after the index was made again from the log alone, every deed and signature checked.

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
                    progress(number, signed.head.entries, "deeds checked")
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
        return parse_signed_head(parse_canonical_json(data, what="registry head", limit=LARGEST_HEAD))

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

    def find_chip(self, chip: str) -> Chip | None:
        """Return the chip as it stands, None if it is not registered."""
        return self.chips([chip]).get(chip)

    def history(self, chip: str) -> list[tuple[int, Deed]]:
        """Return the deeds about a chip, oldest first, with their numbers; reads the whole log."""
        found: list[tuple[int, Deed]] = []
        for number, line in enumerate(self.read_lines(self.load_head().head.entries)):
            if chip.encode("ascii", "replace") in line and chip in chips_of(deed := parse_entry(line).deed):
                found.append((number, deed))
        return found

    def each_chip(self, *, owner: str | None = None) -> Iterator[Chip]:
        """Yield all chips, or one owner's, in ascending order of their names."""
        index = self._open()
        if owner is None:
            rows = index.execute(f"SELECT {_CHIP} FROM chip ORDER BY chip")
        else:
            rows = index.execute(f"SELECT {_CHIP} FROM chip WHERE owner = ? ORDER BY chip", (owner,))
        for row in rows:
            yield Chip(*row)

    def each_party(self) -> list[Party]:
        """Return all parties by name."""
        rows = self._open().execute("SELECT name, roles, key FROM party ORDER BY name")
        return [Party(name, tuple(roles.split(",")), parse_public_key(key)) for name, roles, key in rows]

    def each_model(self) -> list[Model]:
        """Return all models by name."""
        rows = self._open().execute("SELECT name, vendor, rate FROM model ORDER BY name")
        return [Model(name, vendor, int(rate)) for name, vendor, rate in rows]

    def prove_key(self, key: bytes) -> MapProof:
        """Return the proof of what ``key`` has in the state of the newest head."""
        index = self._open()
        depth, size = self._shape(index)
        bucket = prefix_of(key) >> (PREFIX_BITS - depth)
        path: list[bytes] = []
        at = bucket
        for level in range(depth):
            path.append(_node(index, level, at ^ 1))
            at >>= 1
        items = tuple((bytes(k), bytes(v)) for k, v in _bucket(index, bucket, depth))
        return MapProof(depth, size, _node(index, depth, 0), bucket, items, tuple(path))

    def prove_extension(self, old: Head) -> list[bytes]:
        """Return the hashes that show the log under ``old`` to be a prefix of the log now (RFC 9162 2.1.4)."""
        index = self._open()
        return consistency_proof(_leaves(index), old.entries)

    # -- what rules look at --------------------------------------------------------------------------

    @property
    def registry_id(self) -> str:
        """The digest of the opening deed; empty before it."""
        if self._id is None:
            row = self._open().execute("SELECT value FROM meta WHERE name = 'id'").fetchone()
            self._id = "" if row is None else str(row[0])
        return self._id

    def party(self, name: str) -> Party | None:
        """Return the party of this name."""
        if name not in self._parties:
            row = (
                self._open().execute("SELECT name, roles, key FROM party WHERE name = ?", (name,)).fetchone()
            )
            self._parties[name] = (
                None if row is None else Party(row[0], tuple(row[1].split(",")), parse_public_key(row[2]))
            )
        return self._parties[name]

    def model(self, name: str) -> Model | None:
        """Return the model of this name."""
        if name not in self._models:
            row = (
                self._open()
                .execute("SELECT name, vendor, rate FROM model WHERE name = ?", (name,))
                .fetchone()
            )
            self._models[name] = None if row is None else Model(row[0], row[1], int(row[2]))
        return self._models[name]

    def chips(self, names: Sequence[str]) -> dict[str, Chip]:
        """Return those of the named chips that are registered, in the order named."""
        found: dict[str, Chip] = {}
        index = self._open()
        for name in names:
            if (chip := self._pending.get(name)) is None:
                row = index.execute(
                    f"SELECT {_CHIP} FROM chip WHERE prefix = ? AND chip = ?",
                    (prefix_of(chip_key(name)), name),
                ).fetchone()
                if row is None:
                    continue
                chip = Chip(*row)
            found[name] = chip
        return found

    def holders(self, kind: str, marks: Sequence[str]) -> dict[str, str]:
        """Return which chip has each serial number or device key, where one has."""
        index = self._open()
        found: dict[str, str] = {}
        keys = {_mark(kind, mark): mark for mark in marks}
        for key, mark in keys.items():
            row = index.execute(
                "SELECT value FROM item WHERE prefix = ? AND key = ?", (prefix_of(key), key)
            ).fetchone()
            if row is not None:
                found[mark] = bytes(row[0]).decode("ascii")
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
                index.executescript(_TABLES)
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
        self, index: sqlite3.Connection, entry: Entry, line: bytes, number: int, start: int, touched: set[int]
    ) -> None:
        verify_signatures(entry, self)
        changes = apply_deed(entry.deed, self, number)
        deed = leaf_hash(entry.deed.encode())
        try:
            index.execute(
                "INSERT INTO entry VALUES (?, ?, ?, ?, ?)", (number, leaf_hash(line), start, len(line), deed)
            )
        except sqlite3.IntegrityError:
            raise ProtocolViolation(f"{entry.deed.kind}: this deed stands in the log already") from None
        if entry.deed.kind == "open":
            self._id = registry_id(entry.deed)
            index.execute("INSERT INTO meta VALUES ('id', ?)", (self._id,))
        self._store(index, changes, touched)

    def _store(self, index: sqlite3.Connection, changes: Changes, touched: set[int]) -> None:
        items: list[tuple[int, bytes, bytes]] = []
        for party in changes.parties:
            self._parties[party.name] = party
            index.execute(
                "INSERT OR REPLACE INTO party VALUES (?, ?, ?)",
                (party.name, ",".join(party.roles), party.key.spki),
            )
            value = canonical_json({"roles": list(party.roles), "key": party.key.spki.hex()})
            items.append(_item(b"party/" + party.name.encode("ascii"), value))
        for model in changes.models:
            self._models[model.name] = model
            rate = str(model.flop_per_chip_day)
            index.execute("INSERT OR REPLACE INTO model VALUES (?, ?, ?)", (model.name, model.vendor, rate))
            value = canonical_json({"vendor": model.vendor, "flop_per_chip_day": rate})
            items.append(_item(b"model/" + model.name.encode("ascii"), value))
        items += [_item(_mark(kind, mark), chip.encode("ascii")) for kind, mark, chip in changes.marks]
        index.executemany("INSERT OR REPLACE INTO item VALUES (?, ?, ?)", items)
        touched.update(prefix for prefix, _, _ in items)
        self._pending.update(changes.chips)
        if len(self._pending) >= MOST_PENDING:
            self._flush(index, touched)

    def _flush(self, index: sqlite3.Connection, touched: set[int]) -> None:
        rows = [(prefix_of(chip_key(chip.chip)), *chip) for chip in self._pending.values()]
        rows.sort()  # neighbours in the table are written together
        index.executemany("INSERT OR REPLACE INTO chip VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", rows)
        touched.update(row[0] for row in rows)
        self._pending.clear()

    def _close_batch(self, index: sqlite3.Connection, touched: set[int], entries: int, now: int) -> Head:
        """Bring the state's nodes up to date and return the head that they give."""
        self._flush(index, touched)
        (size,) = index.execute("SELECT (SELECT COUNT(*) FROM item) + (SELECT COUNT(*) FROM chip)").fetchone()
        depth = depth_for(size)
        if self._shape(index)[0] != depth or len(touched) > (1 << depth) // 8:
            merkle = _all_nodes(index, depth)
        else:
            merkle = _some_nodes(index, depth, {prefix >> (PREFIX_BITS - depth) for prefix in touched})
        head = Head(self.registry_id, entries, root(_leaves(index)), map_root(depth, size, merkle), now)
        values = {"depth": depth, "size": size, "head": head.encode().decode("ascii")}
        index.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(name, str(value)) for name, value in values.items()],
        )
        return head

    def _write(self, lines: list[bytes], signed: SignedHead, before: int) -> None:
        """Append to the log and replace the head; the log first, so that no head speaks of what is not there."""
        index = self._open()
        (kept,) = index.execute(
            "SELECT COALESCE(SUM(size + 1), 0) FROM entry WHERE number < ?", (before,)
        ).fetchone()
        with storing(str(self.log_path)):
            with self.log_path.open("ab") as file:
                if file.tell() > kept:
                    self._set_aside(kept)
                    file.seek(0, os.SEEK_END)
                file.write(b"".join(line + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            temporary = self.head_path.with_name(".head.json.part")
            with temporary.open("wb") as file:
                file.write(signed.encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.head_path)

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

    def _entries(self, index: sqlite3.Connection) -> int:
        return int(index.execute("SELECT COUNT(*) FROM entry").fetchone()[0])

    def _size(self, index: sqlite3.Connection) -> int:
        return int(index.execute("SELECT COALESCE(MAX(start + size + 1), 0) FROM entry").fetchone()[0])

    def _shape(self, index: sqlite3.Connection) -> tuple[int, int]:
        rows = dict(index.execute("SELECT name, value FROM meta WHERE name IN ('depth', 'size')").fetchall())
        return int(rows.get("depth", -1)), int(rows.get("size", 0))

    def _forget(self) -> None:
        self._parties.clear()
        self._models.clear()
        self._pending.clear()
        self._id = None


def chip_key(chip: str) -> bytes:
    """Return the key under which the state has a chip."""
    return b"chip/" + chip.encode("ascii")


def verify_extension(old: Head, new: Head, proof: Sequence[bytes]) -> None:
    """Return if the log under ``new`` begins with the one under ``old``: nothing was taken back or rewritten.

    Raises:
        Mismatch: another registry, or the proof leads elsewhere.
        InvalidInput: the new log is shorter, or the proof has another length.
    """
    if old.registry != new.registry:
        raise Mismatch(f"registry: {new.registry[:16]}.. is not {old.registry[:16]}..")
    verify_consistency(
        old_size=old.entries, size=new.entries, old_root=old.log_root, root=new.log_root, proof=proof
    )


def _mark(kind: str, mark: str) -> bytes:
    return f"{kind}/{mark}".encode("ascii")


def _item(key: bytes, value: bytes) -> tuple[int, bytes, bytes]:
    return prefix_of(key), key, value


def _leaves(index: sqlite3.Connection) -> list[bytes]:
    return [bytes(leaf) for (leaf,) in index.execute("SELECT leaf FROM entry ORDER BY number")]


def _bucket(index: sqlite3.Connection, bucket: int, depth: int) -> list[tuple[bytes, bytes]]:
    first = bucket << (PREFIX_BITS - depth)
    last = ((bucket + 1) << (PREFIX_BITS - depth)) - 1
    rows = index.execute("SELECT key, value FROM item WHERE prefix BETWEEN ? AND ?", (first, last)).fetchall()
    chips = index.execute(f"SELECT {_CHIP} FROM chip WHERE prefix BETWEEN ? AND ?", (first, last)).fetchall()
    found = [(bytes(key), bytes(value)) for key, value in rows]
    return sorted([*found, *((chip_key(row[0]), Chip(*row).encode()) for row in chips)])


def _node(index: sqlite3.Connection, level: int, at: int) -> bytes:
    row = index.execute("SELECT hash FROM node WHERE level = ? AND at = ?", (level, at)).fetchone()
    if row is None:
        raise StoreError(
            f"registry index: lacks node {at} of level {level}; `tally registry rebuild` makes it again"
        )
    return bytes(row[0])


def _all_nodes(index: sqlite3.Connection, depth: int) -> bytes:
    """Compute every node of the state's tree and return its root."""
    index.execute("DELETE FROM node")
    row: list[bytes] = []
    shift, open_bucket, items = PREFIX_BITS - depth, 0, list[tuple[bytes, bytes]]()
    empty = bucket_leaf([])
    others = ((prefix, bytes(key), bytes(value)) for prefix, key, value in index.execute(_ALL_ITEMS))
    chips = (
        (prefix, chip_key(fields[0]), Chip(*fields).encode()) for prefix, *fields in index.execute(_ALL_CHIPS)
    )
    for prefix, key, value in merge(others, chips):
        while prefix >> shift != open_bucket:
            row.append(bucket_leaf(sorted(items)) if items else empty)
            open_bucket += 1
            items = []
        items.append((key, value))
    row.append(bucket_leaf(sorted(items)) if items else empty)
    row += [empty] * ((1 << depth) - len(row))
    for level in range(depth + 1):
        index.executemany(
            "INSERT INTO node VALUES (?, ?, ?)", [(level, at, node) for at, node in enumerate(row)]
        )
        if level < depth:
            row = [node_hash(row[at], row[at + 1]) for at in range(0, len(row), 2)]
    return row[0] if row else EMPTY_ROOT


def _some_nodes(index: sqlite3.Connection, depth: int, buckets: set[int]) -> bytes:
    """Compute the nodes above ``buckets`` again and return the root."""
    nodes = {bucket: bucket_leaf(_bucket(index, bucket, depth)) for bucket in buckets}
    for level in range(depth + 1):
        index.executemany(
            "INSERT OR REPLACE INTO node VALUES (?, ?, ?)", [(level, at, node) for at, node in nodes.items()]
        )
        if level < depth:
            nodes = {
                at: node_hash(_node(index, level, 2 * at), _node(index, level, 2 * at + 1))
                for at in {at >> 1 for at in nodes}
            }
    return _node(index, depth, 0)


def _must(party: Party | None) -> Party:
    if party is None:
        raise ProtocolViolation("registry: is not opened; its first deed opens it")
    return party


def _must_be(found: Head, stated: Head) -> None:
    for name in ("registry", "entries", "log_root", "state_root"):
        ours, theirs = getattr(found, name), getattr(stated, name)
        if ours != theirs:
            shown = [value.hex() if isinstance(value, bytes) else str(value) for value in (ours, theirs)]
            raise Mismatch(f"registry: {name.replace('_', ' ')} is {shown[0]}, its head states {shown[1]}")
