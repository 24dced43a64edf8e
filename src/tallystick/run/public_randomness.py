"""Positions drawn from public randomness: what every announcement shares (spec/plan.md section 7).

    announcement's bytes + beacon value -> seed -> one Philox stream per stratum -> the first positions of a permutation

An announcement is canonical JSON that names its own format, so one kind never gives another kind's draw.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tallystick.commit.encoding import digest
from tallystick.errors import InvalidInput
from tallystick.numerics.random import Key, randint

SEED_TAG = "tallystick/draw-seed/1"
STREAM_TAG = "tallystick/draw-stream/1"
SAMPLE_TAG = "tallystick/draw-sample/1"
BEACON_BYTES = (32, 64)  # drand's randomness and a NIST beacon pulse

PIECE = 1 << 18  # tickets drawn at a time
Indexes = npt.NDArray[np.int64]
_NAME = re.compile(r"[!-~]{1,200}", re.ASCII)


def is_draw_name(text: str) -> bool:
    """Return whether ``text`` may name a beacon's source or a stratum: 1 to 200 printable ASCII characters, no space."""
    return _NAME.fullmatch(text) is not None


def draw_seed(announcement: bytes, beacon_value: bytes) -> bytes:
    """Return the 32 bytes that an announcement and its beacon round's value lead to.

    Raises:
        InvalidInput: the value does not have 32 to 64 bytes.
    """
    least, most = BEACON_BYTES
    if not least <= len(beacon_value) <= most:
        raise InvalidInput(f"draw: a beacon value of {len(beacon_value)} bytes; must have {least} to {most}")
    return digest(SEED_TAG, announcement, beacon_value)


def draw_positions(seed: bytes, name: str, population: int, samples: int) -> Indexes:
    """Return ``samples`` of the positions 0 .. ``population`` - 1 of stratum ``name``, in the order drawn, int64."""
    first = digest(STREAM_TAG, seed, name.encode("ascii"))
    key = int.from_bytes(first[:4], "little"), int.from_bytes(first[4:8], "little")
    return _first(key, population, samples)


def sample_digest(seed: bytes, samples: dict[str, Indexes]) -> bytes:
    """Return 32 bytes that name seed and samples, for comparing draws without their lists."""
    parts = [seed]
    for name, positions in samples.items():
        parts += [name.encode("ascii"), positions.astype("<u8").tobytes()]
    return digest(SAMPLE_TAG, *parts)


def _first(key: Key, population: int, samples: int) -> Indexes:
    """The first ``samples`` positions of the stream's permutation, without sorting the others."""
    held = positions = np.empty(0, dtype=np.int64)
    piece = max(PIECE, samples)  # a short announcement may speak of many
    for first in range(0, population if samples else 0, piece):
        # The 64-bit numbers less 2**63: the same order.
        tickets = randint(key, first, min(piece, population - first), -(1 << 63), 1 << 63)
        near = np.flatnonzero(tickets < held[-1]) if held.size == samples else np.arange(tickets.size)
        tickets = np.concatenate([held, tickets[near]])
        positions = np.concatenate([positions, near.astype(np.int64) + first])
        least = np.argsort(tickets, kind="stable")[:samples]
        held, positions = tickets[least], positions[least]
    return positions
