"""A chip's directory: its log, the place of its last record, receipts, shards for the owner, and requests to it.

chip.json              what the chip is; written once
chip.key, chip.key.pub the device key; in a TPM: chip.tpm.json, chip.key.pub, and tpm.pub, the attestation key
log.journal            signed records (store/journal.py)
head.json              counter and digest of the last record, apart from the log
receipts/000012.cose   a collector's receipt for record 12
shards/000012/         opening.json and memory.bin of snapshot 12, readable by the owner alone
observed/PID.json      programs that registered themselves
requests/              what the owner asks of a running agent
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tallystick.commit.encoding import canonical_json, parse_document
from tallystick.errors import InvalidInput, StoreError
from tallystick.store.files import read_whole, storing, sync_directory, write_whole
from tallystick.store.journal import Journal, read_journal

HEAD_FORMAT = "tallystick/chip-head/1"
SMALL_LIMIT = 1 << 20
OPENING_LIMIT = 1 << 28  # bytes; four million pages


@dataclass(frozen=True)
class StoredHead:
    """Counter and digest of the last record that was written."""

    seq: int
    digest: bytes


class ChipDirectory:
    """The files of one chip."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal: Journal | None = None

    @property
    def settings_path(self) -> Path:
        """Where it says what the chip is."""
        return self.path / "chip.json"

    @property
    def key_path(self) -> Path:
        """Where the device key lies."""
        return self.path / "chip.key"

    @property
    def tpm_path(self) -> Path:
        """Where it says which key of a TPM is the device key, instead of a key file."""
        return self.path / "chip.tpm.json"

    @property
    def log_path(self) -> Path:
        """Where the log lies."""
        return self.path / "log.journal"

    @property
    def observed_path(self) -> Path:
        """Where programs register themselves."""
        return self.path / "observed"

    @property
    def attestation_path(self) -> Path:
        """What the running agent attested last."""
        return self.path / "attestation.cwt"

    @property
    def requests_path(self) -> Path:
        """Where the owner leaves requests."""
        return self.path / "requests"

    # -- the log -----------------------------------------------------------------------------

    def open(self) -> tuple[list[bytes], StoredHead | None, int]:
        """Open the log for writing; return its records, the head kept apart, and how many bytes were cut.

        Raises:
            StoreError: another process has it open, it is damaged, or cannot be read.
        """
        head = self.head()
        self._journal = Journal(self.log_path, expected=0 if head is None else head.seq + 1)
        return list(self._journal.records), head, self._journal.cut

    def append(self, frame: bytes, seq: int, digest: bytes) -> None:
        """Write a record, then the head: both are on the disk when this returns."""
        if self._journal is None:
            raise StoreError(f"{self.log_path}: is not open for writing")
        self._journal.append(frame)
        head = {"digest": digest.hex(), "format": HEAD_FORMAT, "seq": seq}
        write_whole(self.path / "head.json", canonical_json(head))

    def close(self) -> None:
        """Let another process open the log."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def frames(self) -> tuple[bytes, ...]:
        """Return the records written so far, whoever writes them."""
        return read_journal(self.log_path)

    def head(self) -> StoredHead | None:
        """Return the head kept apart from the log, None before the first record.

        Raises:
            InvalidInput: the file is malformed.
        """
        path = self.path / "head.json"
        if not path.exists():
            return None
        fields = parse_document(
            read_whole(path, limit=SMALL_LIMIT, what="a chip's head"),
            HEAD_FORMAT,
            what=str(path),
            limit=SMALL_LIMIT,
            names=("digest", "format", "seq"),
        )
        digest = fields.text("digest")
        if len(digest) != 96:
            raise InvalidInput(f"{path}: a digest has 96 hexadecimal digits")
        return StoredHead(fields.integer("seq"), bytes.fromhex(digest))

    # -- receipts and shards -----------------------------------------------------------------

    def write_receipt(self, seq: int, receipt: bytes) -> None:
        """Keep a collector's receipt."""
        write_whole(self.path / "receipts" / f"{seq:06d}.cose", receipt)

    def receipts(self) -> dict[int, bytes]:
        """Return all receipts by the counter of their record."""
        found = sorted((self.path / "receipts").glob("[0-9]*.cose"))
        return {int(p.stem): read_whole(p, limit=SMALL_LIMIT, what="a receipt") for p in found}

    def write_shard(self, seq: int, opening: Callable[[BinaryIO], bytes]) -> bytes:
        """Let ``opening`` write a snapshot's memory and return its opening; both appear together.

        Raises:
            StoreError: the disk refused; no half of a shard is left.
        """
        folder = self.path / "shards" / f"{seq:06d}"
        part = folder.with_name(f".{folder.name}.part")
        with storing(f"{folder}: the shard cannot be kept"):
            part.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                descriptor = os.open(part / "memory.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    data = opening(file)
                    file.flush()
                    os.fsync(file.fileno())
                write_whole(part / "opening.json", data, mode=0o600)
                part.replace(folder)
                sync_directory(folder.parent)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        return data

    def shards(self) -> list[int]:
        """Return the counters of the snapshots whose shards are kept."""
        return sorted(int(p.name) for p in (self.path / "shards").glob("[0-9]*"))

    def opening(self, seq: int) -> bytes:
        """Return the opening of a snapshot.

        Raises:
            StoreError: it is not kept.
        """
        path = self.path / "shards" / f"{seq:06d}" / "opening.json"
        return read_whole(path, limit=OPENING_LIMIT, what="a snapshot's opening")

    def memory_path(self, seq: int) -> Path:
        """Where the memory of a snapshot lies."""
        return self.path / "shards" / f"{seq:06d}" / "memory.bin"

    def drop_shard(self, seq: int) -> None:
        """Delete a shard whose time is over."""
        with storing(f"{self.path}: shard {seq} cannot be deleted"):
            shutil.rmtree(self.path / "shards" / f"{seq:06d}")

    # -- requests ----------------------------------------------------------------------------

    def requests(self) -> list[str]:
        """Return the names of the owner's requests, oldest first."""
        found = [p for p in self.requests_path.glob("[a-z]*") if not p.name.endswith(".part")]
        with suppress(FileNotFoundError):
            found.sort(key=lambda p: p.stat().st_mtime)
        return [p.name for p in found]

    def ask(self, name: str) -> Path:
        """Leave a request; the agent deletes it when it is done."""
        path = self.requests_path / name
        write_whole(path, b"")
        return path

    def done(self, name: str) -> None:
        """Delete a request."""
        (self.requests_path / name).unlink(missing_ok=True)
