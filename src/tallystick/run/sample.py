"""A sampled audit: which segments of a published run are repeated, and what that finds (spec/evidence-bundle.md 3).

    announcement = announce(...)                 # says everything but the beacon's value; published first
    draw = draw_segments(announcement, value)    # anybody gets the same segments
    draw.announcement.power()                    # exact, against the worst arrangement of false steps

A *false step* is one whose segment, repeated from the state committed before it, shows a deviation. Segments are
drawn alike and without replacement, so whoever wants to be missed packs false steps into as few segments as they fit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import At, Hash, Hex, Least, Positive, Size, Whole
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.public_randomness import (
    BEACON_BYTES,
    draw_positions,
    draw_seed,
    is_draw_name,
    sample_digest,
)

ANNOUNCEMENT_FORMAT = "tallystick/audit-announcement/1"
DRAW_FORMAT = "tallystick/audit-draw/1"
STRATUM = "segments"
DRAW_LIMIT = 1 << 24  # bytes
MOST_SEGMENTS = 1 << 24  # tickets of eight bytes are sorted in memory

_SHARE = re.compile(r"0\.[0-9]{1,12}|1", re.ASCII)


@dataclass(frozen=True)
class LogPosition(Document, what="log"):
    """The checkpoint under which a run was published, and when a quorum of witnesses had seen it (None: no witness)."""

    origin: Annotated[str, Size(1, 255)]
    size: Positive
    root: Hash
    seen_at: Whole | None


@dataclass(frozen=True)
class Announcement(Document, form=ANNOUNCEMENT_FORMAT, what="audit announcement", limit=DRAW_LIMIT):
    """Everything about a sampled audit that is fixed before the beacon speaks.

    Attributes:
        run_root, tree_size: of the published run.
        steps, checkpoint_every: its steps and the length of its segments; the last one may be shorter.
        fraction, detect: decimal texts f and p: false steps of at least a share f are to be found with probability p.
        samples: how many segments are drawn.
        log: where the run is published, or None: then nothing shows that it was before the beacon spoke.
        beacon_source, beacon_round, beacon_time: which value decides, and the second at which it is published.

    Raises:
        InvalidInput: a field out of range, more samples than segments, or a beacon that speaks before the publication.
    """

    run_root: Hash
    tree_size: Positive
    steps: Positive
    checkpoint_every: Positive
    fraction: str
    detect: str
    samples: int
    log: LogPosition | None
    beacon_source: Annotated[str, At("beacon", "source")]
    beacon_round: Annotated[int, At("beacon", "round"), Least(0)]
    beacon_time: Annotated[int, At("beacon", "time"), Least(0)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_draw_name(self.beacon_source):
            raise InvalidInput(
                "audit draw: the beacon's source must be 1 to 200 printable ASCII characters, no space"
            )
        parse_share(self.fraction, what="fraction")
        parse_share(self.detect, what="detect")
        if self.segments > MOST_SEGMENTS or not 1 <= self.samples <= self.segments:
            raise InvalidInput(
                f"audit draw: {self.samples} of {self.segments} segments; samples must lie within them, "
                f"and they below {MOST_SEGMENTS}"
            )
        seen_at = None if self.log is None else self.log.seen_at
        if seen_at is not None and seen_at >= self.beacon_time:
            raise InvalidInput(
                f"audit draw: the beacon speaks at {self.beacon_time}, the run was published at {seen_at}; "
                "it must speak after that"
            )

    @property
    def segments(self) -> int:
        """How many segments the run has."""
        return -(-self.steps // self.checkpoint_every)

    @property
    def false_steps(self) -> int:
        """The fewest steps that are a share ``fraction`` of all."""
        return math.ceil(parse_share(self.fraction, what="fraction") * self.steps)

    def power(self) -> Fraction:
        """Return the exact probability with which the sample hits a false step, for the worst arrangement of them."""
        return self.power_for(parse_share(self.fraction, what="fraction"))

    def power_for(self, fraction: Fraction) -> Fraction:
        """Return the same for another share of false steps than the one announced."""
        false_steps = math.ceil(fraction * self.steps)
        fewest = fewest_segments(self.steps, self.checkpoint_every, false_steps)
        return detection(self.segments, fewest, self.samples)


@dataclass(frozen=True)
class SegmentDraw(Document, form=DRAW_FORMAT, what="audit draw", limit=DRAW_LIMIT):
    """An announcement, its beacon's value, and the segments they lead to: (first step, end) in ascending order."""

    announcement: Announcement
    beacon_value: Annotated[bytes, Hex(), Size(*BEACON_BYTES)]
    digest: Hash
    segments: tuple[tuple[int, int], ...]


def parse_share(text: str, *, what: str) -> Fraction:
    """Return the share that ``text`` writes, in (0, 1].

    Raises:
        InvalidInput: not 1 or 0. and up to twelve digits, or zero.
    """
    if not _SHARE.fullmatch(text) or (share := Fraction(text)) == 0:
        raise InvalidInput(f"{what} {text[:40]!r}: must be a decimal number in (0, 1], such as 0.99")
    return share


def fewest_segments(steps: int, every: int, false_steps: int) -> int:
    """Return the fewest segments that hold ``false_steps`` of a run's steps: the long ones first.

    All segments have ``every`` steps but perhaps the last; that one is used only when no other is left.
    """
    return min(-(-false_steps // every), -(-steps // every))


def detection(segments: int, marked: int, samples: int) -> Fraction:
    """Return the probability that ``samples`` of ``segments``, drawn without replacement, hit one of ``marked``; exact.

    1 - C(n - m, s) / C(n, s). It grows with m: more segments with false steps are found sooner.
    """
    # The product is symmetric in m and s; the shorter form is taken.
    few, many = min(marked, samples), max(marked, samples)
    if few + many > segments:
        return Fraction(1) if few else Fraction(0)
    top = bottom = 1
    for i in range(few):
        top *= segments - many - i
        bottom *= segments - i
    return 1 - Fraction(top, bottom)


def samples_needed(segments: int, marked: int, detect: Fraction) -> int:
    """Return the fewest samples whose ``detection`` reaches ``detect``; all segments at most."""
    low, high = 1, segments
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detection(segments, marked, middle) >= detect else (middle + 1, high)
    return low


def announce(
    *,
    run_root: bytes,
    tree_size: int,
    steps: int,
    checkpoint_every: int,
    fraction: str,
    detect: str,
    log: LogPosition | None,
    beacon: tuple[str, int, int],
) -> Announcement:
    """Return the announcement with the fewest samples that reach ``detect``; ``beacon`` is source, round and time.

    Raises:
        InvalidInput: as for ``Announcement``.
    """
    segments = -(-steps // checkpoint_every)
    false_steps = math.ceil(parse_share(fraction, what="fraction") * steps)
    fewest = fewest_segments(steps, checkpoint_every, false_steps)
    samples = samples_needed(segments, fewest, parse_share(detect, what="detect"))
    return Announcement(
        run_root, tree_size, steps, checkpoint_every, fraction, detect, samples, log, *beacon
    )  # fmt: skip


def draw_segments(announcement: Announcement, beacon_value: bytes) -> SegmentDraw:
    """Return the segments that the announcement and the value of its beacon round determine.

    Whether the value is that round's is for the caller to check with the beacon's own signature.

    Raises:
        InvalidInput: the value does not have 32 to 64 bytes.
    """
    seed = draw_seed(announcement.encode(), beacon_value)
    positions = draw_positions(seed, STRATUM, announcement.segments, announcement.samples)
    every = announcement.checkpoint_every
    starts = sorted(int(position) * every for position in positions)
    segments = tuple((start, min(start + every, announcement.steps)) for start in starts)
    return SegmentDraw(announcement, beacon_value, sample_digest(seed, {STRATUM: positions}), segments)


parse_announcement = Announcement.parse


def parse_draw(data: bytes) -> SegmentDraw:
    """Return the draw that ``data`` encodes, drawn again.

    Raises:
        InvalidInput: ``data`` is not what ``SegmentDraw.encode`` returns.
        Mismatch: its announcement and beacon value lead to other segments.
    """
    stated = SegmentDraw.parse(data)
    drawn = draw_segments(stated.announcement, stated.beacon_value)
    if drawn != stated:
        raise Mismatch(
            f"audit draw: the beacon's value leads to digest {drawn.digest.hex()[:16]}.., {stated.digest.hex()[:16]}.. "
            "or its segments are stated otherwise",
            where="audit draw",
            own=drawn.digest.hex(),
            stated=stated.digest.hex(),
        )
    return drawn
