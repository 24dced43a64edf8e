"""A transparency log in a directory that any static file server can serve (C2SP tlog-tiles).

    checkpoint                     the newest signed tree; replaced whole
    tile/0/000, tile/0/000.p/5     hashes, 256 to a tile; a partial tile has its width in its name
    tile/entries/000, ..           the entries, likewise
    log.vkey                       the log's public key, for convenience
    pending/000000000012           entries from index 12 on, not yet under a checkpoint; not for serving

Tiles are written once and never changed. A process killed at any moment leaves a log that the next call goes on
with: entries stay pending until a checkpoint over them is on the disk. One process at a time may write.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tallystick.commit.encoding import HASH_BYTES
from tallystick.commit.merkle import EMPTY_ROOT, leaf_hash, verify_consistency, verify_inclusion
from tallystick.commit.merkle import root as merkle_root
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.signing.note import NOTE, NOTE_LIMIT, Note, NoteKey, NoteSigner
from tallystick.store.files import read_whole, storing, write_whole
from tallystick.tlog.tree import (
    ENTRY_LIMIT,
    TILE_WIDTH,
    Checkpoint,
    LogEntry,
    LogProof,
    Tile,
    TileTree,
    checkpoint_text,
    encode_entries,
    parse_checkpoint,
    parse_entries,
    tile_holding,
    tiles_of,
)

_BUNDLE_LIMIT = TILE_WIDTH * (ENTRY_LIMIT + 1)
_PENDING_LIMIT = 1 << 30  # bytes; the log's own operator wrote them


@dataclass(frozen=True)
class LogDirectory:
    """Reads and appends to one log."""

    path: Path

    @property
    def checkpoint_path(self) -> Path:
        """Where the newest signed tree lies."""
        return self.path / "checkpoint"

    # -- writing -----------------------------------------------------------------------------

    def create(self, origin: str, signer: NoteSigner) -> Checkpoint:
        """Make an empty log and sign its empty tree.

        Raises:
            StoreError: the directory holds something.
            InvalidInput: a name that is no log's, or a key of another name or type.
        """
        _must_sign_as_log(signer, origin)
        text = checkpoint_text(origin, 0, EMPTY_ROOT)
        with storing(f"{self.path}: cannot be created"):
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise StoreError(
                    f"{self.path}: exists and is not empty; a log begins in a directory of its own"
                )
            self.path.mkdir(parents=True, exist_ok=True)
        with self._writing():
            write_whole(self.path / "log.vkey", f"{signer.key}\n".encode())
            return self._publish(signer.sign(Note(text)))

    def add(self, entries: Sequence[bytes]) -> list[tuple[int, bool]]:
        """Return the index of each entry, and whether it is new; new ones are pending until the next checkpoint.

        Raises:
            InvalidInput: one is too long.
        """
        encode_entries(entries)
        with self._writing():
            size = self.checkpoint().size
            known = {entry: index for index, entry in enumerate(self.entries(size))}
            pending = self._pending(size)
            known |= {entry: index for index, entry in pending.items()}
            first = size + len(pending)
            new: dict[bytes, int] = {}
            found: list[tuple[int, bool]] = []
            for entry in entries:
                is_new = entry not in known and entry not in new
                if is_new:
                    new[entry] = first + len(new)
                found.append((known[entry] if entry in known else new[entry], is_new))
            if new:
                write_whole(self.path / "pending" / f"{first:012d}", encode_entries(list(new)))
            return found

    def sign(self, signer: NoteSigner) -> Checkpoint:
        """Put what is pending under a new checkpoint and sign it; with nothing pending, return the one there is.

        Nothing is signed that does not begin with the tree of the checkpoint before.

        Raises:
            InvalidInput: another log's key.
            Mismatch: the tiles are not those of the last checkpoint, or it is not signed by this key.
            StoreError: a tile that has to be written holds something else, or the last checkpoint is missing.
        """
        with self._writing():
            last = self.checkpoint()
            _must_sign_as_log(signer, last.origin)
            if not last.note.verify([signer.key]):
                raise Mismatch(f"{self.checkpoint_path}: is not signed by the key {signer.key.name} given")
            old = TileTree(last.size, self.read_tile)
            _must_be_root(old.root(), last, "its tiles lead to")
            pending = self._pending(last.size)
            self._refuse_rollback(last.size, pending)
            if pending:
                last = self._extend(last, list(pending.values()), signer)
            self._forget_pending()
            return last

    def attach(self, checkpoint: Checkpoint) -> None:
        """Add the signatures of ``checkpoint``, which must be of the tree that is published here.

        Raises:
            Mismatch: it is another tree.
        """
        with self._writing():
            own = self.checkpoint()
            if own.note.text != checkpoint.note.text:
                raise Mismatch(
                    f"{self.checkpoint_path}: has {own.size} entries, the cosigned checkpoint {checkpoint.size}",
                    where=f"entries of {self.checkpoint_path}",
                    own=str(own.size),
                    stated=str(checkpoint.size),
                )
            note = own.note
            for line in checkpoint.note.signatures:
                note = note.with_signature(line)
            self._publish(note)

    # -- reading -----------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return the newest checkpoint, unverified.

        Raises:
            StoreError: there is none.
            InvalidInput: it is malformed.
        """
        data = read_whole(self.checkpoint_path, limit=NOTE_LIMIT, what="a log has a checkpoint")
        return parse_checkpoint(data, what=str(self.checkpoint_path))

    def read_tile(self, tile: Tile) -> bytes:
        """Return the bytes of a tile, or what the full tile has of it once the partial one is gone.

        Raises:
            StoreError: neither is there.
        """
        path = self.path / tile.path
        if path.exists() or tile.width == TILE_WIDTH:
            return read_whole(path, limit=_BUNDLE_LIMIT, what="a tile of the log")
        full = Tile(tile.level, tile.index, TILE_WIDTH)
        data = read_whole(self.path / full.path, limit=_BUNDLE_LIMIT, what="a tile of the log")
        if tile.level >= 0:
            return data[: tile.width * HASH_BYTES]
        return encode_entries(parse_entries(data, what=full.path)[: tile.width])

    def entries(self, size: int) -> Iterator[bytes]:
        """Yield the first ``size`` entries in order."""
        for tile in tiles_of(size):
            if tile.level >= 0:
                return
            yield from self._bundle(tile)

    def prove(self, entry: LogEntry) -> LogProof:
        """Return the proof that ``entry`` lies under the newest checkpoint.

        Raises:
            InvalidInput: it does not.
            Mismatch: the tiles are not those of the checkpoint.
        """
        last, wanted = self.checkpoint(), entry.encode()
        index = next((at for at, known in enumerate(self.entries(last.size)) if known == wanted), None)
        if index is None:
            waits = wanted in self._pending(last.size).values()
            why = "waits for the next checkpoint (tally log checkpoint)" if waits else "is not in the log"
            raise InvalidInput(f"{self.path}: {entry.kind} {entry.digest[:16]}.. {why}")
        path = TileTree(last.size, self.read_tile).inclusion(index)
        verify_inclusion(leaf_hash(wanted), index=index, size=last.size, proof=path, root=last.root)
        return LogProof(index, tuple(path), last)

    def verify(self) -> int:
        """Return the number of tiles, if every one is what the entries make it and they lead to the checkpoint.

        Raises:
            InvalidInput: a malformed tile or entry.
            Mismatch: a tile or the root is another.
            StoreError: a tile is missing.
        """
        last = self.checkpoint()
        count = 0
        for tile in tiles_of(last.size):
            data = self.read_tile(tile)
            if tile.level >= 0 and data != self._tile(tile, last.size):
                raise Mismatch(f"{tile.path}: is not what the tiles below it lead to")
            count += 1
        _must_be_root(TileTree(last.size, self.read_tile).root(), last, "its tiles lead to")
        return count

    # -- inside ------------------------------------------------------------------------------

    def _extend(self, last: Checkpoint, new: list[bytes], signer: NoteSigner) -> Checkpoint:
        size = last.size + len(new)
        for tile in tiles_of(size, since=last.size):
            if tile.level < 0:
                first = tile.index * TILE_WIDTH
                kept = self._kept(tile, last.size)
                data = encode_entries(
                    [*kept, *new[first + len(kept) - last.size : first + tile.width - last.size]]
                )
            else:
                data = self._tile(tile, size)
            self._write_tile(tile, data)
        tree = TileTree(size, self.read_tile)
        root = tree.root()
        proof = tree.consistency(last.size)
        verify_consistency(old_size=last.size, size=size, old_root=last.root, root=root, proof=proof)
        return self._publish(signer.sign(Note(checkpoint_text(last.origin, size, root))))

    def _bundle(self, tile: Tile) -> list[bytes]:
        """The entries of a bundle, as many as its address says."""
        entries = parse_entries(self.read_tile(tile), what=tile.path)
        if len(entries) != tile.width:
            raise InvalidInput(f"{tile.path}: must have {tile.width} entries, has {len(entries)}")
        return entries

    def _kept(self, tile: Tile, size: int) -> list[bytes]:
        """The entries of a bundle that a tree of ``size`` entries already has."""
        width = min(TILE_WIDTH, size - tile.index * TILE_WIDTH)
        if width <= 0:
            return []
        old = Tile(-1, tile.index, width)
        return self._bundle(old)

    def _tile(self, tile: Tile, size: int) -> bytes:
        """What the tiles below make of a tile of hashes."""
        if tile.level == 0:
            bundle = Tile(-1, tile.index, tile.width)
            return b"".join(leaf_hash(entry) for entry in self._bundle(bundle))
        first = tile.index * TILE_WIDTH
        # A full tile of the level below is one hash here: eight levels of the tree at once.
        return b"".join(
            _tile_root(self.read_tile(tile_holding(tile.level - 1, (first + i) * TILE_WIDTH, size)))
            for i in range(tile.width)
        )

    def _write_tile(self, tile: Tile, data: bytes) -> None:
        path = self.path / tile.path
        if path.exists():
            if path.read_bytes() != data:
                raise StoreError(f"{path}: holds other bytes; a log is never rewritten")
            return
        write_whole(path, data)

    def _publish(self, note: Note) -> Checkpoint:
        write_whole(self.checkpoint_path, note.encode())
        return parse_checkpoint(note.encode())

    def _pending(self, size: int) -> dict[int, bytes]:
        """The entries after the first ``size``, by index, without a gap."""
        found: dict[int, bytes] = {}
        for path, first in self._pending_files():
            data = read_whole(path, limit=_PENDING_LIMIT, what="pending entries")
            for index, entry in enumerate(parse_entries(data, what=str(path)), start=first):
                if index >= size:
                    found[index] = entry
        if list(found) != list(range(size, size + len(found))):
            raise StoreError(
                f"{self.path / 'pending'}: holds entries {list(found)[:4]} .. after {size}; a log has no gaps"
            )
        return found

    def _pending_files(self) -> list[tuple[Path, int]]:
        folder = self.path / "pending"
        with storing(f"{folder}: cannot be read"):
            return sorted((path, int(path.name)) for path in folder.glob("[0-9]*")) if folder.is_dir() else []

    def _forget_pending(self) -> None:
        for path, _ in self._pending_files():
            with storing(f"{path}: cannot be removed"):
                path.unlink()

    def _refuse_rollback(self, size: int, pending: dict[int, bytes]) -> None:
        """Refuse to go on where bundles hold entries after the checkpoint that are not pending: it was set back."""
        index, width = divmod(size, TILE_WIDTH)
        places = [(index, w) for w in range(width + 1, TILE_WIDTH + 1)]
        places += [(index + 1, w) for w in range(1, TILE_WIDTH + 1)]
        for tile in (Tile(-1, at, w) for at, w in places):
            if not (self.path / tile.path).exists():
                continue
            held = self._bundle(tile)
            for number, entry in enumerate(held, start=tile.index * TILE_WIDTH):
                if number >= size and pending.get(number) != entry:
                    raise StoreError(
                        f"{self.path}: entry {number} is in the tiles and the checkpoint has {size} entries; "
                        "a log is never shortened: restore its newest checkpoint"
                    )

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Hold the log's lock; another process waits."""
        if not self.path.is_dir():
            raise StoreError(f"{self.path}: there is no such log; tally log init makes one")
        with storing(f"{self.path}: cannot be locked"):
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Witness:
    """A witness's memory: for each log the last checkpoint it cosigned, as one file a log."""

    folder: Path

    def cosign(self, log: LogDirectory, log_key: NoteKey, signer: NoteSigner, now: int) -> Checkpoint:
        """Return the log's checkpoint with this witness's signature, if it goes on from the last one seen.

        What was seen is on the disk before a signature exists, so a witness that dies forgets nothing.

        Raises:
            Mismatch: the log's signature is missing or false, its tree is smaller than the one seen before, has the
                same size and another root, or does not begin with it.
        """
        seen = log.checkpoint()
        if log_key.name != seen.origin or not seen.note.verify([log_key]):
            raise Mismatch(f"{log.checkpoint_path}: is not signed by {log_key.name}")
        before = self.last(seen.origin)
        if before is not None:
            if seen.size < before.size:
                raise Mismatch(
                    f"log {seen.origin}: has {seen.size} entries, had {before.size}; it was shortened",
                    where=f"log {seen.origin}: entries",
                    own=seen.size,
                    stated=before.size,
                )
            tree = TileTree(seen.size, log.read_tile)
            proof = tree.consistency(before.size) if seen.size > before.size else []
            verify_consistency(
                old_size=before.size, size=seen.size, old_root=before.root, root=seen.root, proof=proof
            )
        cosigned = signer.sign(seen.note, now=now)
        write_whole(self._path(seen.origin), seen.note.encode())
        return parse_checkpoint(cosigned.encode())

    def last(self, origin: str) -> Checkpoint | None:
        """Return the last checkpoint of the log that was cosigned, or None."""
        path = self._path(origin)
        if not path.exists():
            return None
        return parse_checkpoint(read_whole(path, limit=NOTE_LIMIT, what="a witness's memory"), what=str(path))

    def _path(self, origin: str) -> Path:
        return self.folder / f"{leaf_hash(origin.encode()).hex()}.checkpoint"


def _tile_root(data: bytes) -> bytes:
    return merkle_root([data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)])


def _must_sign_as_log(signer: NoteSigner, origin: str) -> None:
    if signer.key.kind != NOTE or signer.key.name != origin:
        raise InvalidInput(f"log {origin}: the key signs as {signer.key.name}, type {signer.key.kind:#04x}")


def _must_be_root(found: bytes, stated: Checkpoint, what: str) -> None:
    if found != stated.root:
        raise Mismatch(
            f"log {stated.origin}: the checkpoint of {stated.size} entries has root {stated.root.hex()}, "
            f"{what} {found.hex()}",
            where=f"log {stated.origin}: root of {stated.size} entries",
            own=found.hex(),
            stated=stated.root.hex(),
        )
