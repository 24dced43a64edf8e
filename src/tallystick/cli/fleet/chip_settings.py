"""A chip's settings, chip.json: what tally chip init writes and every other command reads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

from tallystick.commit.encoding import Fields, parse_canonical_json, parse_hex
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.agent import agent as agent_module
from tallystick.fleet.agent.agent import ChipSettings
from tallystick.fleet.agent.chip_record import Firmware, Genesis
from tallystick.integrations.chip_http import HttpCollector
from tallystick.signing.keys import PublicKey
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import read_whole
from tallystick.store.keys import load_public_key

FORMAT = "tallystick/chip/1"
SECURITY_VERSION = 1  # of this agent; raised when an older one must no longer run
SETTINGS_LIMIT = 1 << 16


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
    return chip, settings_of(_settings(chip), known, what=str(chip.settings_path)), known


def settings_of(
    document: dict[str, object], collector: PublicKey | None, *, what: str = "chip"
) -> ChipSettings:
    """Return the settings that ``chip.json`` holds.

    Raises:
        InvalidInput: malformed, or out of range.
    """
    names = (
        "capacity", "collector", "format", "hash_frozen", "hold_ms", "owner", "page_size", "rate_milli",
        "retention_days", "ueid",
    )  # fmt: skip
    fields = Fields(document, what=what, names=names)
    fields.constant("format", FORMAT)
    ueid, owner = fields.text("ueid"), parse_hex(fields.text("owner"), n_bytes=32, what=f"{what}: owner")
    if (fields.optional_text("collector") is None) != (collector is None):
        raise InvalidInput(f"{what}: a collector and its key go together")
    mode = "local" if collector is None else "remote"
    identity = b"" if collector is None else bytes.fromhex(collector.key_id)
    return ChipSettings(
        ueid=parse_hex(ueid, n_bytes=len(ueid) // 2, what=f"{what}: ueid"),
        firmware=Firmware(agent_digest(), SECURITY_VERSION),
        genesis=Genesis("tallystick", "software agent", "software", owner, mode, identity),
        rate=fields.integer("rate_milli"),
        page_size=fields.integer("page_size"),
        capacity=fields.integer("capacity"),
        retention_days=float(fields.integer("retention_days")),
        hash_frozen=fields.boolean("hash_frozen"),
        hold_seconds=fields.integer("hold_ms") / 1000,
    )


def agent_digest() -> bytes:
    """Return SHA-256 over the sources of the agent: what stands for a software agent's firmware."""
    folder = Path(agent_module.__file__).parent
    hashed = hashlib.sha256()
    for name in ("agent.py", "chip_record.py", "memory.py", "probes.py"):
        hashed.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return hashed.digest()


def _settings(chip: ChipDirectory) -> dict[str, object]:
    what = str(chip.settings_path)
    data = read_whole(chip.settings_path, limit=SETTINGS_LIMIT, what="a chip's settings")
    value = parse_canonical_json(data, what=what, limit=SETTINGS_LIMIT)
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: must be an object")
    return cast("dict[str, object]", value)


def collector_of(chip: ChipDirectory) -> HttpCollector | None:
    """Return the collector that a chip's settings name, or None in local mode."""
    url = _settings(chip).get("collector")
    return HttpCollector(url) if isinstance(url, str) else None
