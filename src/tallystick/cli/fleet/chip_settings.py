"""A chip's settings, chip.json: what tally chip init writes and every other command reads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Hash, Hex
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.agent import agent as agent_module
from tallystick.fleet.agent.agent import ChipSettings
from tallystick.fleet.agent.chip_record import Firmware, Genesis
from tallystick.integrations.chip_http import HttpCollector
from tallystick.signing.keys import PublicKey
from tallystick.store.chips import ChipDirectory
from tallystick.store.documents import read_document
from tallystick.store.keys import load_public_key

FORMAT = "tallystick/chip/1"
SECURITY_VERSION = 1  # of this agent; raised when an older one must no longer run
SETTINGS_LIMIT = 1 << 16


@dataclass(frozen=True)
class ChipConfiguration(Document, form=FORMAT, what="chip", limit=SETTINGS_LIMIT):
    """What ``chip.json`` holds: a chip's identity, its owner's key id, and how its agent behaves (``ChipSettings``)."""

    ueid: Annotated[bytes, Hex()]
    owner: Hash
    rate_milli: int
    page_size: int
    capacity: int
    retention_days: int
    hash_frozen: bool
    hold_ms: int
    collector: str | None

    def settings(self, collector: PublicKey | None) -> ChipSettings:
        """Return what the agent runs with; ``collector`` is the collector's key, None in local mode.

        Raises:
            InvalidInput: out of range, or a collector without its key.
        """
        if (self.collector is None) != (collector is None):
            raise InvalidInput("chip: a collector and its key go together")
        mode = "local" if collector is None else "remote"
        identity = b"" if collector is None else bytes.fromhex(collector.key_id)
        return ChipSettings(
            ueid=self.ueid,
            firmware=Firmware(agent_digest(), SECURITY_VERSION),
            genesis=Genesis("tallystick", "software agent", "software", self.owner, mode, identity),
            rate=self.rate_milli,
            page_size=self.page_size,
            capacity=self.capacity,
            retention_days=float(self.retention_days),
            hash_frozen=self.hash_frozen,
            hold_seconds=self.hold_ms / 1000,
        )


def load_chip(directory: Path) -> tuple[ChipDirectory, ChipSettings, PublicKey | None]:
    """Return a chip's directory, what it is, and its collector's key.

    Raises:
        StoreError: no chip lies there.
        InvalidInput: its settings are malformed.
    """
    chip = ChipDirectory(directory)
    if not chip.settings_path.exists():
        raise StoreError(f"{directory}: no chip lies there; `tally chip init` makes one")
    path = chip.path / "collector.pub"
    known = load_public_key(path) if path.exists() else None
    return chip, read_document(ChipConfiguration, chip.settings_path).settings(known), known


def agent_digest() -> bytes:
    """Return SHA-256 over the sources of the agent: what stands for a software agent's firmware."""
    folder = Path(agent_module.__file__).parent
    hashed = hashlib.sha256()
    for name in ("agent.py", "chip_record.py", "memory.py", "probes.py"):
        hashed.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return hashed.digest()


def collector_of(chip: ChipDirectory) -> HttpCollector | None:
    """Return the collector that a chip's settings name, or None in local mode."""
    url = read_document(ChipConfiguration, chip.settings_path).collector
    return None if url is None else HttpCollector(url)
