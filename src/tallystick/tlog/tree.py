"""A transparency log's pieces: checkpoints, tiles, entries and offline proofs (spec/transparency-log.md).

Formats are C2SP's tlog-checkpoint 1.0.0, tlog-tiles 0.1.0 and tlog-proof 1, over the tree of RFC 6962. Nothing
here reads or writes a file: who does passes a function in.

    proof = parse_log_proof(data)
    seen = proof.verify(LogEntry("run", sha256), policy)     # who signed, and when a quorum of witnesses had seen it

An entry of a log is short: the kind of a document and its SHA-256. The document travels beside it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tallystick.commit.encoding import HASH_BYTES, INTEGER_LIMIT, canonical_json, parse_document, parse_hex
from tallystick.commit.merkle import (
    EMPTY_ROOT,
    consistency_ranges,
    inclusion_ranges,
    leaf_hash,
    node_hash,
    range_root,
    verify_inclusion,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.note import Note, NoteKey, decode_base64, parse_note
from tallystick.tlog.policy import LogPolicy

ENTRY_FORMAT = "tallystick/log-entry/1"
ENTRY_KINDS = ("run", "statement", "draw")
ENTRY_LIMIT = 1 << 16  # bytes, less one: bundles give lengths in two
PROOF_HEADER = "c2sp.org/tlog-proof@v1"
LOG_PROOF_LIMIT = 1 << 17  # bytes
TILE_HEIGHT, TILE_WIDTH = 8, 256
ENTRIES = "entries"  # in place of a level, in the path of a bundle of entries

_SIZE = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


@dataclass(frozen=True)
class LogEntry:
    """What a log's leaf says: that a document of ``kind`` has the SHA-256 ``digest`` (hexadecimal)."""

    kind: str
    digest: str

    def __post_init__(self) -> None:
        if self.kind not in ENTRY_KINDS:
            raise InvalidInput(
                f"log entry: kind must be one of {', '.join(ENTRY_KINDS)}, is {self.kind[:80]!r}"
            )
        parse_hex(self.digest, n_bytes=HASH_BYTES, what="log entry: digest")

    @classmethod
    def of(cls, kind: str, document: bytes) -> LogEntry:
        """Return the entry for ``document``."""
        return cls(kind, hashlib.sha256(document).hexdigest())

    def encode(self) -> bytes:
        """Return the leaf's bytes, canonical JSON."""
        return canonical_json({"digest": self.digest, "format": ENTRY_FORMAT, "kind": self.kind})


def parse_log_entry(data: bytes) -> LogEntry:
    """Return the entry that ``data`` encodes.

    Raises:
        InvalidInput: ``data`` is not what ``LogEntry.encode`` returns.
    """
    fields = parse_document(
        data, ENTRY_FORMAT, what="log entry", limit=ENTRY_LIMIT - 1, names=("digest", "format", "kind")
    )
    return LogEntry(fields.text("kind"), fields.text("digest"))


@dataclass(frozen=True)
class Checkpoint:
    """A log's tree at one size: the signed note, and what its text says.

    Attributes:
        note: text and signatures.
        origin: the log's name.
        size: number of entries.
        root: 32 bytes.
    """

    note: Note
    origin: str
    size: int
    root: bytes

    def verify(self, policy: LogPolicy) -> WitnessedCheckpoint:
        """Return which of the policy's keys signed, if a log of the policy did and its quorum of witnesses is met.

        Raises:
            InvalidInput: a malformed signature of a known key.
            Mismatch: no log of the policy, too few witnesses, or a false signature of a known key.
        """
        logs = [key for key in policy.logs if key.name == self.origin]
        if not logs:
            raise Mismatch(f"checkpoint of {self.origin[:80]!r}: the policy has no log of that name")
        if not self.note.verify(logs):
            raise Mismatch(f"checkpoint of {self.origin}: is not signed by the policy's key for that log")
        witnessed = self.note.verify(policy.witnesses.values())
        seen = {
            name: when for name, key in policy.witnesses.items() if (when := witnessed.get(key)) is not None
        }
        return WitnessedCheckpoint(self.origin, self.size, self.root, seen, policy.quorum_time(seen))


@dataclass(frozen=True)
class WitnessedCheckpoint:
    """A verified checkpoint: the witnesses that had seen it, when, and since when a quorum had (None: none is asked for)."""

    origin: str
    size: int
    root: bytes
    witnesses: dict[str, int]
    seen_at: int | None


def checkpoint_text(origin: str, size: int, root: bytes) -> str:
    """Return the text of a checkpoint.

    Raises:
        InvalidInput: a name that is no log's, a size out of range, a root that is not 32 bytes.
    """
    if not 0 < len(origin) < 256 or "+" in origin or not origin.isprintable() or " " in origin:
        raise InvalidInput(
            f"log name {origin[:80]!r}: must be 1 to 255 printable characters, no space, no plus"
        )
    if not 0 <= size < INTEGER_LIMIT or len(root) != HASH_BYTES:
        raise InvalidInput(f"checkpoint: size {size} or root of {len(root)} bytes is out of range")
    return f"{origin}\n{size}\n{base64.b64encode(root).decode()}\n"


def parse_checkpoint(data: bytes, *, what: str = "checkpoint") -> Checkpoint:
    """Return the checkpoint that ``data`` is the encoding of; its signatures are not verified.

    Lines after the third are refused: nobody could audit what they say.

    Raises:
        InvalidInput: not a signed note, or another text than three lines of name, size and root.
    """
    note = parse_note(data, what=what)
    lines = note.text.split("\n")
    if len(lines) != 4:
        raise InvalidInput(f"{what}: the text must have 3 lines, has {len(lines) - 1}")
    origin, size, encoded = lines[:3]
    if not _SIZE.fullmatch(size) or int(size) >= INTEGER_LIMIT:
        raise InvalidInput(f"{what}: the size {size[:80]!r} is no number below 2**63")
    root = decode_base64(encoded, what=f"{what}: root")
    if checkpoint_text(origin, int(size), root) != note.text:
        raise InvalidInput(f"{what}: another spelling of its text")
    if size == "0" and root != EMPTY_ROOT:
        raise InvalidInput(f"{what}: the root {root.hex()} is not that of an empty tree")
    return Checkpoint(note, origin, int(size), root)


def is_split_view(one: Checkpoint, other: Checkpoint, keys: Sequence[NoteKey]) -> bool:
    """Return whether one key of ``keys`` signed two different trees of one size: evidence against it by itself.

    A log whose trees differ in size may be inconsistent too; that needs a consistency proof that cannot be made.
    """
    if (one.origin, one.size) != (other.origin, other.size) or one.root == other.root:
        return False
    return any(_signed(one, key) and _signed(other, key) for key in keys)


def _signed(checkpoint: Checkpoint, key: NoteKey) -> bool:
    try:
        return bool(checkpoint.note.verify([key]))
    except (InvalidInput, Mismatch):
        return False


# ---------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True, order=True)
class Tile:
    """A tile's address: ``level`` -1 is a bundle of entries, ``width`` counts hashes or entries, 1 to 256."""

    level: int
    index: int
    width: int

    @property
    def path(self) -> str:
        """The path below the log's prefix, such as tile/0/x001/234.p/5."""
        digits = f"{self.index:03d}"
        digits = digits.zfill(-(-len(digits) // 3) * 3)
        parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
        name = "/".join([*(f"x{part}" for part in parts[:-1]), parts[-1]])
        partial = "" if self.width == TILE_WIDTH else f".p/{self.width}"
        return f"tile/{ENTRIES if self.level < 0 else self.level}/{name}{partial}"


def tiles_of(size: int, *, since: int = 0) -> Iterator[Tile]:
    """Yield the tiles of a tree of ``size`` entries that one of ``since`` does not have: bundles, then levels upwards."""
    for level in range(-1, 8):
        whole, old = size, since
        for _ in range(max(level, 0)):
            whole, old = whole // TILE_WIDTH, old // TILE_WIDTH
        if whole == old:
            return
        for index in range(old // TILE_WIDTH, -(-whole // TILE_WIDTH)):
            yield Tile(level, index, min(TILE_WIDTH, whole - index * TILE_WIDTH))


def tile_holding(level: int, index: int, size: int) -> Tile:
    """Return the tile of a tree of ``size`` entries that has hash ``index`` of tile level ``level`` (-1: entries)."""
    whole = size
    for _ in range(max(level, 0)):
        whole //= TILE_WIDTH
    at = index // TILE_WIDTH
    if not 0 <= index < whole:
        raise InvalidInput(f"log: level {level} of a tree of {size} entries has no hash {index}")
    return Tile(level, at, min(TILE_WIDTH, whole - at * TILE_WIDTH))


Reader = Callable[[Tile], bytes]


@dataclass
class TileTree:
    """A tree of ``size`` entries, read tile by tile as hashes are asked for; nothing in it is trusted.

    What is read is only as good as the root it leads to: compare with ``root()`` or verify the proof.
    """

    size: int
    read: Reader

    def __post_init__(self) -> None:
        self._tiles: dict[Tile, bytes] = {}

    def root(self) -> bytes:
        """Return the root over all entries."""
        return range_root(0, self.size, self.subtree) if self.size else EMPTY_ROOT

    def inclusion(self, index: int) -> list[bytes]:
        """Return the inclusion proof of entry ``index``."""
        return [range_root(start, end, self.subtree) for start, end in inclusion_ranges(index, self.size)]

    def consistency(self, old_size: int) -> list[bytes]:
        """Return the proof that the tree begins with its first ``old_size`` entries."""
        return [
            range_root(start, end, self.subtree) for start, end in consistency_ranges(old_size, self.size)
        ]

    def subtree(self, level: int, index: int) -> bytes:
        """Return the hash of the full subtree of 2**level entries number ``index``.

        Raises:
            InvalidInput: a tile has another length than its width.
        """
        row, below = divmod(level, TILE_HEIGHT)
        first = index << below
        tile = tile_holding(row, first + (1 << below) - 1, self.size)
        data = self._tile(tile)
        at = (first - tile.index * TILE_WIDTH) * HASH_BYTES
        hashes = [data[at + i * HASH_BYTES : at + (i + 1) * HASH_BYTES] for i in range(1 << below)]
        while len(hashes) > 1:
            hashes = [node_hash(hashes[i], hashes[i + 1]) for i in range(0, len(hashes), 2)]
        return hashes[0]

    def _tile(self, tile: Tile) -> bytes:
        if tile not in self._tiles:
            data = self.read(tile)
            if len(data) != tile.width * HASH_BYTES:
                raise InvalidInput(f"{tile.path}: must have {tile.width * HASH_BYTES} bytes, has {len(data)}")
            self._tiles[tile] = data
        return self._tiles[tile]


def encode_entries(entries: Sequence[bytes]) -> bytes:
    """Return a bundle of entries: each with its length before it, two bytes, big-endian.

    Raises:
        InvalidInput: an entry of 65,536 bytes or more.
    """
    if long := [len(entry) for entry in entries if len(entry) >= ENTRY_LIMIT]:
        raise InvalidInput(f"log entry: {long[0]} bytes reach the limit of {ENTRY_LIMIT}")
    return b"".join(len(entry).to_bytes(2, "big") + entry for entry in entries)


def parse_entries(data: bytes, *, what: str) -> list[bytes]:
    """Return the entries of a bundle; how many there must be is for the caller to check.

    Raises:
        InvalidInput: it ends within an entry.
    """
    entries: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        if end > len(data) or at + 2 > len(data):
            raise InvalidInput(f"{what}: ends within entry {len(entries)}")
        entries.append(data[at + 2 : end])
        at = end
    return entries


# ------------------------------------------------------------------------------------------- offline proofs


@dataclass(frozen=True)
class LogProof:
    """That an entry lies in a log: its index, the path, and the checkpoint that the path leads to; self-contained."""

    index: int
    path: tuple[bytes, ...]
    checkpoint: Checkpoint

    def encode(self) -> bytes:
        """Return the bytes of a ``.tlog-proof`` file."""
        lines = [PROOF_HEADER, f"index {self.index}"]
        lines += [base64.b64encode(node).decode() for node in self.path]
        return ("\n".join(lines) + "\n\n").encode() + self.checkpoint.note.encode()

    def verify(self, entry: LogEntry, policy: LogPolicy) -> WitnessedCheckpoint:
        """Return the checkpoint as its witnesses saw it, if ``entry`` lies under it and the policy accepts it.

        Raises:
            InvalidInput: a path of another length than index and size demand.
            Mismatch: the path leads elsewhere, or as for ``Checkpoint.verify``.
        """
        tree = self.checkpoint
        leaf = leaf_hash(entry.encode())
        verify_inclusion(leaf, index=self.index, size=tree.size, proof=self.path, root=tree.root)
        return tree.verify(policy)


def parse_log_proof(data: bytes, *, what: str = "log proof") -> LogProof:
    """Return the proof in ``data``; it is not verified.

    A line of extra data is refused: nothing authenticates it, and no document of this kind has any.

    Raises:
        InvalidInput: another form, or another spelling of it.
    """
    if len(data) > LOG_PROOF_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {LOG_PROOF_LIMIT}")
    head, blank, note = data.partition(b"\n\n")
    if not blank:
        raise InvalidInput(f"{what}: has no empty line before its checkpoint")
    try:
        lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what}: byte {error.start} is not ASCII") from None
    if lines[0] != PROOF_HEADER:
        raise InvalidInput(f"{what}: must begin with {PROOF_HEADER}, not {lines[0][:80]!r}")
    index = lines[1].removeprefix("index ") if len(lines) > 1 and lines[1].startswith("index ") else ""
    if not _SIZE.fullmatch(index) or int(index) >= INTEGER_LIMIT:
        raise InvalidInput(f"{what}: the second line must be an index below 2**63, is {lines[1:2]}")
    path = tuple(decode_base64(line, what=f"{what}: node") for line in lines[2:])
    if any(len(node) != HASH_BYTES for node in path):
        raise InvalidInput(f"{what}: a node must have {HASH_BYTES} bytes")
    return LogProof(int(index), path, parse_checkpoint(note, what=f"{what}: checkpoint"))
