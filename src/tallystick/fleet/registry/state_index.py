"""A registry's index: chips, parties, models and the state's nodes in SQLite; made again from the log where it is lost.

The state (``commit.directory``) has every chip, serial number, device key, party and model under its own key, so each has
one value. Format: spec/registry.md section 5.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from heapq import merge

from tallystick.commit.directory import PREFIX_BITS, MapProof, bucket_leaf, depth_for, map_root, prefix_of
from tallystick.commit.encoding import canonical_json
from tallystick.commit.merkle import EMPTY_ROOT, consistency_proof, leaf_hash, node_hash, root
from tallystick.errors import ProtocolViolation, StoreError
from tallystick.fleet.registry.events import registry_id
from tallystick.fleet.registry.facts import Changes, Chip, Model, Party, RegistryEntry
from tallystick.fleet.registry.heads import RegistryHead
from tallystick.signing.keys import parse_public_key

MOST_PENDING = 100_000  # changed chips held in memory before they go to the index
_CHIP = "chip, model, maker, serial, key, board, owner, custodian, status, exempt_until, inspected, entry"

TABLES = """
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


class StateIndex(ABC):
    """What a registry's index knows; ``_open`` gives the database, current with the log."""

    def __init__(self) -> None:
        self._parties: dict[str, Party | None] = {}
        self._models: dict[str, Model | None] = {}
        self._id: str | None = None
        self._pending: dict[str, Chip] = {}

    @abstractmethod
    def _open(self, *, create: bool = False, check: bool = True) -> sqlite3.Connection: ...

    def find_chip(self, chip: str) -> Chip | None:
        """Return the chip as it stands, None if it is not registered."""
        return self.chips([chip]).get(chip)

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

    def prove_extension(self, old: RegistryHead) -> list[bytes]:
        """Return the hashes that show the log under ``old`` to be a prefix of the log now (RFC 9162 2.1.4)."""
        index = self._open()
        return consistency_proof(_leaves(index), old.entries)

    # -- what rules look at --------------------------------------------------------------------------

    @property
    def registry_id(self) -> str:
        """The digest of the opening event; empty before it."""
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

    # -- changing ----------------------------------------------------------------------------------

    def _take(
        self, index: sqlite3.Connection, entry: RegistryEntry, line: bytes, number: int, start: int
    ) -> None:
        """Write down where an entry stands."""
        event = leaf_hash(entry.event.encode())
        try:
            index.execute(
                "INSERT INTO entry VALUES (?, ?, ?, ?, ?)", (number, leaf_hash(line), start, len(line), event)
            )
        except sqlite3.IntegrityError:
            raise ProtocolViolation(f"{entry.event.kind}: this event stands in the log already") from None
        if entry.event.kind == "open":
            self._id = registry_id(entry.event)
            index.execute("INSERT INTO meta VALUES ('id', ?)", (self._id,))

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

    def _close_batch(
        self, index: sqlite3.Connection, touched: set[int], entries: int, now: int
    ) -> RegistryHead:
        """Bring the state's nodes up to date and return the head that they give."""
        self._flush(index, touched)
        (size,) = index.execute("SELECT (SELECT COUNT(*) FROM item) + (SELECT COUNT(*) FROM chip)").fetchone()
        depth = depth_for(size)
        if self._shape(index)[0] != depth or len(touched) > (1 << depth) // 8:
            merkle = _all_nodes(index, depth)
        else:
            merkle = _some_nodes(index, depth, {prefix >> (PREFIX_BITS - depth) for prefix in touched})
        head = RegistryHead(
            self.registry_id, entries, root(_leaves(index)), map_root(depth, size, merkle), now
        )
        values = {"depth": depth, "size": size, "head": head.encode().decode("ascii")}
        index.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(name, str(value)) for name, value in values.items()],
        )
        return head

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
