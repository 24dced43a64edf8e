"""A small made-up industry for benchmarks, demonstrations and tests: a maker, two owners, an inspector, and their events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from tallystick.fleet.registry.events import registry_id, sign_event
from tallystick.fleet.registry.facts import REGISTRY, RegistryEntry, RegistryEvent
from tallystick.signing.keys import SigningKey, ed25519_key

START = 1_800_000_000
PARTIES = {"fab": ["maker", "owner"], "north": ["owner"], "south": ["owner"], "watch": ["inspector"]}


class Industry:
    """Draws up signed events one after the other; keys, nonces and names depend on nothing but their numbers."""

    def __init__(self, name: str = "world") -> None:
        self.keys: dict[str, SigningKey] = {party: key_of(party) for party in (REGISTRY, *PARTIES)}
        self._number = 0
        self.registry = ""
        self.opening = self.event("open", {"name": name, "key": self.spki(REGISTRY)}, REGISTRY)
        self.registry = registry_id(self.opening.event)

    def spki(self, party: str) -> str:
        """Return a party's public key as events hold it."""
        return self.keys[party].public_key.spki.hex()

    def event(self, kind: str, body: Mapping[str, object], *signers: str) -> RegistryEntry:
        """Return the next event, signed by ``signers``."""
        self._number += 1
        event = RegistryEvent(kind, START + self._number, f"{self._number:032x}", self.registry, body)
        return sign_event(event, {name: self.keys[name] for name in signers})

    def beginning(self) -> list[RegistryEntry]:
        """Return the opening, all parties and one model."""
        entries = [self.opening]
        for party, roles in PARTIES.items():
            body = {"name": party, "roles": roles, "key": self.spki(party)}
            entries.append(self.event("party", body, REGISTRY))
        body = {"name": "gx1", "vendor": "fab", "flop_per_chip_day": "86400000000000000000"}
        return [*entries, self.event("model", body, REGISTRY)]

    def make(self, chips: list[str], *, model: str = "gx1") -> list[RegistryEntry]:
        """Return the events by which ``chips`` are made and packaged."""
        rows = [[chip, f"SN-{chip[:12]}", key_of(chip).public_key.key_id] for chip in chips]
        return [
            self.event("fab", {"maker": "fab", "model": model, "chips": chips}, "fab"),
            self.event("package", {"maker": "fab", "chips": rows}, "fab"),
        ]

    def sell(self, chips: list[str], giver: str, taker: str) -> RegistryEntry:
        """Return a transfer signed by both."""
        return self.event("transfer", {"from": giver, "to": taker, "chips": chips}, giver, taker)

    def lives(self, chips: int, lot: int, *, made_only: bool = False) -> Iterator[RegistryEntry]:
        """Yield four events a lot: made, packaged, put on a board, sold; or the first alone."""
        for first in range(0, chips, lot):
            names = [chip_name(at) for at in range(first, min(chips, first + lot))]
            # Made-up device keys: to sign with them is no part of this.
            rows = [
                [name, f"SN-{first + at:09d}", hashlib.sha256(name.encode()).hexdigest()]
                for at, name in enumerate(names)
            ]
            yield self.event("fab", {"maker": "fab", "model": "gx1", "chips": names}, "fab")
            if made_only:
                continue
            yield self.event("package", {"maker": "fab", "chips": rows}, "fab")
            yield self.event("board", {"holder": "fab", "board": f"B-{first}", "chips": names}, "fab")
            yield self.sell(names, "fab", "north")


def chip_name(number: int) -> str:
    """Return the UEID of chip ``number``: 17 bytes in hexadecimal."""
    return hashlib.sha256(f"tallystick/chip/{number}".encode()).hexdigest()[:34]


def key_of(name: str) -> SigningKey:
    """Return the Ed25519 key that belongs to a name."""
    return ed25519_key(hashlib.sha256(f"tallystick/testing/{name}".encode()).digest())
