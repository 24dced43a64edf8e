from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Mismatch
from tallystick.run import public_randomness
from tallystick.run.public_randomness import draw_positions
from tallystick.run.sample import (
    Announcement,
    LogPosition,
    announce,
    detection,
    draw_segments,
    fewest_segments,
    parse_announcement,
    parse_draw,
    samples_needed,
)

LOG = LogPosition("log.example/runs", 7, b"\x22" * 32, 1_800_000_000)
VALUE = b"\x33" * 32


def announcement(**changes: Any) -> Announcement:
    given: dict[str, Any] = {
        "run_root": b"\x11" * 32, "tree_size": 201, "steps": 200, "checkpoint_every": 6, "fraction": "0.1",
        "detect": "0.9", "log": LOG, "beacon": ("drand/quicknet", 41, 1_800_003_600),
    }  # fmt: skip
    return announce(**{**given, **changes})


def hits(lengths: list[int], false: frozenset[int], samples: int) -> Fraction:
    """The probability that a sample of segments holds a step of ``false``, by counting every sample."""
    borders = list(itertools.accumulate([0, *lengths]))
    marked = {i for i in range(len(lengths)) if any(borders[i] <= step < borders[i + 1] for step in false)}
    draws = list(itertools.combinations(range(len(lengths)), samples))
    return Fraction(sum(bool(marked & set(draw)) for draw in draws), len(draws))


@pytest.mark.parametrize(("steps", "every"), [(9, 3), (8, 3), (7, 3), (6, 2), (5, 1), (7, 4), (4, 9)])
def test_the_power_is_the_least_over_every_arrangement_of_false_steps_and_every_sample(
    steps: int, every: int
) -> None:
    lengths = [min(every, steps - start) for start in range(0, steps, every)]
    for false_steps in range(1, steps + 1):
        for samples in range(1, len(lengths) + 1):
            arrangements = itertools.combinations(range(steps), false_steps)
            least = min(hits(lengths, frozenset(false), samples) for false in arrangements)
            fewest = fewest_segments(steps, every, false_steps)
            assert detection(len(lengths), fewest, samples) == least


def test_spreading_false_steps_out_helps_the_auditor() -> None:
    """The control: the published shortcut, one false step a segment, would promise more than it keeps."""
    packed = detection(10, fewest_segments(100, 10, 10), 5)
    spread = detection(10, 10, 5)
    assert (packed, spread) == (Fraction(1, 2), 1)


@given(st.integers(1, 60), st.integers(1, 60), st.fractions(Fraction(1, 100), Fraction(99, 100)))
def test_no_smaller_sample_is_enough(segments: int, marked: int, detect: Fraction) -> None:
    marked = min(marked, segments)
    samples = samples_needed(segments, marked, detect)
    assert detection(segments, marked, samples) >= detect
    assert samples == 1 or detection(segments, marked, samples - 1) < detect


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_the_probability_is_hypergeometric(segments: int, marked: int, samples: int) -> None:
    from math import comb

    marked, samples = min(marked, segments), min(samples, segments)
    assert detection(segments, marked, samples) == 1 - Fraction(
        comb(segments - marked, samples), comb(segments, samples)
    )


def test_the_issues_example_of_99_percent_and_1_percent() -> None:
    found = announcement(steps=100_000, checkpoint_every=100, fraction="0.01", detect="0.99")
    assert (found.segments, found.false_steps, found.samples) == (1000, 1000, 368)
    assert Fraction(99, 100) <= found.power() < Fraction(991, 1000)
    assert detection(1000, 10, 367) < Fraction(99, 100)


def test_anybody_draws_the_same_segments_and_no_segment_twice() -> None:
    drawn = draw_segments(announcement(), VALUE)
    assert drawn == draw_segments(announcement(), VALUE) == parse_draw(drawn.encode())
    assert len(drawn.segments) == len(set(drawn.segments)) == drawn.announcement.samples == 15
    assert all(end - start == 6 or end == 200 for start, end in drawn.segments)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_root": b"\x12" + b"\x11" * 31},
        {"log": LogPosition("log.example/runs", 8, b"\x22" * 32, 1_800_000_000)},
        {"beacon": ("drand/quicknet", 42, 1_800_003_600)},
    ],
)
def test_another_run_log_or_round_is_another_draw(changes: dict[str, Any]) -> None:
    assert draw_segments(announcement(**changes), VALUE).digest != draw_segments(announcement(), VALUE).digest


def test_a_beacon_that_speaks_before_the_publication_is_refused() -> None:
    with pytest.raises(InvalidInput, match="it must speak after that"):
        announcement(beacon=("drand/quicknet", 41, 1_800_000_000))
    announcement(beacon=("drand/quicknet", 41, 1_800_000_001))


@pytest.mark.parametrize("text", ["0", "0.0", "1.0", "2", "-0.5", "0,5", ".5", "1e-2", "0.1234567890123", ""])
def test_a_share_has_one_form(text: str) -> None:
    with pytest.raises(InvalidInput, match="must be a decimal number"):
        announcement(detect=text)


def test_a_draw_that_was_edited_is_refused() -> None:
    data = draw_segments(announcement(), VALUE).encode()
    fields = json.loads(data)

    def spelt(**changes: object) -> bytes:
        return json.dumps({**fields, **changes}, sort_keys=True, separators=(",", ":")).encode()

    assert spelt() == data
    with pytest.raises(Mismatch, match="leads to digest"):
        parse_draw(spelt(segments=fields["segments"][:-1]))
    with pytest.raises(Mismatch, match="leads to digest"):
        parse_draw(spelt(beacon_value="34" * 32))
    with pytest.raises(InvalidInput, match="samples must lie within"):
        parse_draw(spelt(announcement={**fields["announcement"], "samples": 0}))
    with pytest.raises(InvalidInput, match="beacon_value must have 32 to 64 bytes, has 31"):
        parse_draw(spelt(beacon_value="34" * 31))
    with pytest.raises(InvalidInput, match="unknown"):
        parse_draw(spelt(note=1))
    assert parse_announcement(announcement().encode()) == announcement()


@settings(max_examples=50)
@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for parse in (parse_draw, parse_announcement):
        with pytest.raises(InvalidInput):
            parse(data)


def test_a_draw_is_the_same_however_many_tickets_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short announcement may speak of many segments: not all tickets are in memory at once."""
    for population, samples in ((1, 0), (1, 1), (100, 1), (100, 40), (100, 100)):
        drawn: list[list[int]] = []
        for piece in (1 << 18, 7):
            monkeypatch.setattr(public_randomness, "PIECE", piece)
            drawn.append(draw_positions(bytes(32), "segments", population, samples).tolist())
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) == samples
