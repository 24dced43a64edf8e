"""Every case of vectors/draw, the page that draws their bytes, and what holds for all draws."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.commit.encoding import frame
from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.draw import DrawAnnouncement, DrawnStratum, draw_sample, parse_announcement
from tallystick.numerics.random import permutation
from tallystick.run import public_randomness

REPOSITORY = Path(__file__).parents[3]
CASES = sorted((REPOSITORY / "vectors" / "draw").iterdir())
BEACON = b"\x33" * 32
EXAMPLE = DrawAnnouncement(
    7, b"\x11" * 32, 3, 1_800_000_000, b"\x22" * 32, "drand/quicknet", 41, 1_800_003_600, (DrawnStratum("north", 10, 3),)
)  # fmt: skip


def case_of(name: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / "vectors" / "draw" / name / "input.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_vector(folder: Path) -> None:
    assert (folder / "README.md").read_text(encoding="utf-8").strip()
    case = case_of(folder.name)
    data, beacon = case["announcement"].encode(), bytes.fromhex(case["beacon"])
    assert folder.name.endswith("_fail") == ("reason" in case)
    if "reason" in case:
        with pytest.raises(InvalidInput, match=re.escape(case["reason"])):
            draw_sample(parse_announcement(data), beacon)
        return
    announcement = parse_announcement(data)
    assert announcement.encode() == data
    drawn = draw_sample(announcement, beacon)
    assert drawn.seed.hex() == case["seed"]
    assert {name: sample.tolist() for name, sample in drawn.samples.items()} == case["samples"]
    assert drawn.digest().hex() == case["digest"]


def test_the_vectors_are_what_the_script_writes(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "vectors_monitor.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    assert files_under(tmp_path / "draw") == files_under(REPOSITORY / "vectors" / "draw")


def files_under(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_the_plan_page_draws_the_bytes_of_the_worked_example() -> None:
    text = (REPOSITORY / "spec" / "plan.md").read_text(encoding="utf-8")
    blocks = [
        bytes.fromhex("".join(line.partition("#")[0] for line in block.splitlines()))
        for block in re.findall(r"```hex\n(.*?)```", text, flags=re.DOTALL)
    ]
    announcement, message, seed, stream, key, tickets, digest_message, digest = blocks
    drawn = draw_sample(parse_announcement(announcement), BEACON)
    assert announcement == EXAMPLE.encode()
    assert announcement.decode() in text.replace("\n    ", "")
    assert message == frame(public_randomness.SEED_TAG, announcement, BEACON)
    assert hashlib.sha256(message).digest() == seed == drawn.seed
    assert stream == frame(public_randomness.STREAM_TAG, seed, b"north")
    assert hashlib.sha256(stream).digest() == key
    first = np.frombuffer(tickets, dtype="<u8")
    assert np.argsort(first, kind="stable")[:3].tolist() == drawn.samples["north"].tolist()
    assert digest_message == frame(
        public_randomness.SAMPLE_TAG, seed, b"north", drawn.samples["north"].astype("<u8").tobytes()
    )
    assert hashlib.sha256(digest_message).digest() == digest == drawn.digest()


@settings(max_examples=50)
@given(st.integers(1, 300), st.data(), st.binary(min_size=32, max_size=64))
def test_a_sample_is_the_head_of_the_streams_permutation(
    chips: int, data: st.DataObject, beacon: bytes
) -> None:
    samples = data.draw(st.integers(0, chips))
    announcement = replace(EXAMPLE, strata=(DrawnStratum("north", chips, samples),))
    drawn = draw_sample(announcement, beacon)
    key = hashlib.sha256(frame(public_randomness.STREAM_TAG, drawn.seed, b"north")).digest()
    words = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")
    assert drawn.samples["north"].tolist() == permutation(words, chips)[:samples].tolist()
    assert parse_announcement(announcement.encode()) == announcement


def test_every_chip_is_drawn_about_as_often_as_any_other() -> None:
    announcement = replace(EXAMPLE, strata=(DrawnStratum("north", 20, 5),))
    counts = np.zeros(20, dtype=np.int64)
    draws = 2000
    for value in range(draws):
        counts[draw_sample(announcement, value.to_bytes(32, "little")).samples["north"]] += 1
    # 500 expected each, standard deviation 19.4; the draws are fixed, so this never fails by chance.
    assert abs(counts - draws // 4).max() < 5 * 19.4


def test_another_announcement_draws_otherwise() -> None:
    drawn = draw_sample(EXAMPLE, BEACON)
    assert drawn.samples["north"].size == 3
    assert draw_sample(replace(EXAMPLE, period=8), BEACON).digest() != drawn.digest()


def test_roots_of_another_length_and_sources_with_spaces_are_refused() -> None:
    with pytest.raises(InvalidInput, match="registry: must be 64 lower-case"):
        replace(EXAMPLE, registry=b"\x22" * 31)
    with pytest.raises(InvalidInput, match="beacon's source"):
        replace(EXAMPLE, beacon_source="two words")


@given(st.binary(max_size=80))
def test_nothing_but_invalid_input_leaves_the_parser(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_announcement(data)
