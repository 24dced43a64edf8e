"""Write the test vectors of draws.

Seeds, keys and tickets come from hashlib and ten lines of Philox, straight from spec/plan.md; nothing here
imports the package. The vectors so test the package against a second reading of its specification.

    python scripts/vectors_monitor.py vectors
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from vector_cases import Case, canonical, write_cases

MASK = 2**32 - 1


def write(root: Path) -> None:
    """Write every case below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "draw", draw_cases())


def framed(tag: str, *parts: bytes) -> bytes:
    return (
        bytes([len(tag)]) + tag.encode() + b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    )


def sha(tag: str, *parts: bytes) -> bytes:
    return hashlib.sha256(framed(tag, *parts)).digest()


def philox(counter: int, k0: int, k1: int) -> list[int]:
    c = [counter & MASK, counter >> 32, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & MASK, (a >> 32) ^ c[3] ^ k1, a & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c


def tickets(key: bytes, chips: int) -> list[int]:
    k0, k1 = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")
    words = [word for counter in range(-(-chips // 2)) for word in philox(counter, k0, k1)]
    return [words[2 * i] + (words[2 * i + 1] << 32) for i in range(chips)]


def drawn(announcement: bytes, beacon: bytes, strata: list[list[Any]]) -> Case:
    seed = sha("tallystick/draw-seed/1", announcement, beacon)
    samples: dict[str, list[int]] = {}
    parts = [seed]
    for name, chips, count in strata:
        order = tickets(sha("tallystick/draw-stream/1", seed, name.encode()), chips)
        samples[name] = sorted(range(chips), key=lambda i: (order[i], i))[:count]
        parts += [name.encode(), b"".join(i.to_bytes(8, "little") for i in samples[name])]
    return {"seed": seed.hex(), "samples": samples, "digest": sha("tallystick/draw-sample/1", *parts).hex()}


def document(**changes: Any) -> Case:
    fields: Case = {
        "format": "tallystick/draw/1",
        "period": 7,
        "reports": {"root": "11" * 32, "count": 3, "closed": 1_800_000_000},
        "registry": "22" * 32,
        "beacon": {"source": "drand/quicknet", "round": 41, "time": 1_800_003_600},
        "strata": [["north", 10, 3]],
    }
    return {**fields, **changes}


def accepted(beacon: bytes = b"\x33" * 32, **changes: Any) -> Case:
    fields = document(**changes)
    data = canonical(fields)
    return {"announcement": data.decode(), "beacon": beacon.hex(), **drawn(data, beacon, fields["strata"])}


def refused(reason: str, data: bytes | None = None, beacon: bytes = b"\x33" * 32, **changes: Any) -> Case:
    text = (canonical(document(**changes)) if data is None else data).decode()
    return {"announcement": text, "beacon": beacon.hex(), "error": "InvalidInput", "reason": reason}


def draw_cases() -> dict[str, tuple[str, Case]]:
    late = {"source": "drand/quicknet", "round": 41, "time": 1_800_000_000}
    spaced = json.dumps(document(), sort_keys=True).encode()
    return {
        "worked-example": ("The worked example of spec/plan.md: three of ten chips.", accepted()),
        "another-beacon-value": ("One bit of the beacon's value is another sample.", accepted(b"\x32" + b"\x33" * 31)),
        "another-report": (
            "Another root over the reports is another sample.",
            accepted(reports={"root": "12" + "11" * 31, "count": 3, "closed": 1_800_000_000}),
        ),
        "longest-beacon-value": ("A pulse of 64 bytes.", accepted(bytes(range(64)))),
        "two-strata": (
            "Each stratum has a stream of its own.",
            accepted(strata=[["north", 25, 5], ["south", 25, 5]]),
        ),
        "every-chip": ("All chips, in the order drawn.", accepted(strata=[["north", 7, 7]])),
        "no-chip": ("A stratum that is left out this time still stands there.", accepted(strata=[["north", 7, 0]])),
        "one-chip": ("Nothing to choose.", accepted(strata=[["north", 1, 1]])),
        "beacon-not-later_fail": (
            "The beacon speaks in the second in which reports close.",
            refused("it must speak after them", beacon=b"\x33" * 32, data=canonical(document(beacon=late))),
        ),
        "beacon-too-short_fail": ("31 bytes.", refused("a beacon value of 31 bytes; must have 32 to 64", None, b"\x33" * 31)),
        "beacon-too-long_fail": ("65 bytes.", refused("a beacon value of 65 bytes; must have 32 to 64", None, b"\x33" * 65)),
        "more-samples-than-chips_fail": (
            "Eleven of ten.", refused("11 samples of 10 chips", strata=[["north", 10, 11]]),
        ),
        "no-chips_fail": ("A stratum of nothing.", refused("0 samples of 0 chips", strata=[["north", 0, 0]])),
        "no-strata_fail": ("Nothing to draw from.", refused("there must be strata", strata=[])),
        "strata-out-of-order_fail": (
            "South before north.",
            refused("in ascending order of their names", strata=[["south", 5, 1], ["north", 5, 1]]),
        ),
        "stratum-twice_fail": (
            "One name twice.", refused("none twice", strata=[["north", 5, 1], ["north", 5, 1]]),
        ),
        "stratum-flag-as-number_fail": (
            "true is not one sample.", refused("a stratum must be [name, chips, samples]", strata=[["north", 5, True]]),
        ),
        "stratum-name-with-space_fail": (
            "A name that a list of names could not hold.",
            refused("a stratum's name must be", strata=[["north pole", 5, 1]]),
        ),
        "other-format_fail": ("Version 2.", refused("format must be", format="tallystick/draw/2")),
        "unknown-field_fail": ("A field that the page does not have.", refused("field 'note' is unknown", note=1)),
        "negative-period_fail": ("Periods count from 0.", refused("numbers must lie in", period=-1)),
        "short-root_fail": (
            "31 bytes of root.", refused("must be 64 lower-case hexadecimal digits", registry="22" * 31),
        ),
        "whitespace_fail": ("The same value, spelt with spaces.", refused("not the canonical encoding", spaced)),
        "trailing-newline_fail": (
            "One byte more.", refused("not the canonical encoding", canonical(document()) + b"\n"),
        ),
    }  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]))
