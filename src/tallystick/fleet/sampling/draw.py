"""Which chips are inspected: a sample that nobody could foresee and anybody can draw again.

Format and derivation, with the bytes drawn: spec/plan.md section 7. The order is the point: the owners' reports
are committed, the announcement names them and a beacon round still to come, the beacon speaks, the sample follows.

    announcement -> beacon value -> seed = SHA-256(both) -> one Philox stream per stratum -> the first `samples`
    positions of a permutation of its chips
"""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.commit.encoding import HASH_BYTES, Fields, canonical_json, parse_document, parse_hex
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.public_randomness import Indexes, draw_positions, draw_seed, is_draw_name, sample_digest

FORMAT = "tallystick/draw/1"
LARGEST_ANNOUNCEMENT = 1 << 20
MOST_CHIPS = 1 << 28  # tickets of eight bytes are sorted in memory


@dataclass(frozen=True)
class Frame:
    """The chips of one stratum, positions 0 .. chips - 1 of the committed list, and how many are drawn."""

    name: str
    chips: int
    samples: int


@dataclass(frozen=True)
class Announcement:
    """What is published before the beacon speaks: which reports, which list of chips, which beacon round.

    ``reports`` is the root over the owners' reports and ``reports_closed`` the second (UTC, since 1970) after which
    none was accepted; ``registry`` is the root of the list that the positions refer to; the beacon's round is
    published at second ``beacon_time``, later than that.
    """

    period: int
    reports: bytes
    reports_count: int
    reports_closed: int
    registry: bytes
    beacon_source: str
    beacon_round: int
    beacon_time: int
    strata: tuple[Frame, ...]

    def __post_init__(self) -> None:
        if len(self.reports) != HASH_BYTES or len(self.registry) != HASH_BYTES:
            raise InvalidInput(f"draw: roots must have {HASH_BYTES} bytes")
        numbers = (self.period, self.reports_count, self.reports_closed, self.beacon_round)
        if min(numbers) < 0 or max(*numbers, self.beacon_time) >= 2**63:
            raise InvalidInput("draw: numbers must lie in [0, 2**63)")
        if self.beacon_time <= self.reports_closed:
            raise InvalidInput(
                f"draw: the beacon speaks at {self.beacon_time}, reports close at {self.reports_closed}; "
                "it must speak after them"
            )
        if not is_draw_name(self.beacon_source):
            raise InvalidInput(
                "draw: the beacon's source must be 1 to 200 printable ASCII characters without spaces"
            )
        names = [frame.name for frame in self.strata]
        if not names or names != sorted(set(names)):
            raise InvalidInput("draw: there must be strata, in ascending order of their names, none twice")
        for frame in self.strata:
            if not is_draw_name(frame.name):
                raise InvalidInput(
                    "draw: a stratum's name must be 1 to 200 printable ASCII characters without spaces"
                )
            if not 0 < frame.chips <= MOST_CHIPS or not 0 <= frame.samples <= frame.chips:
                raise InvalidInput(
                    f"draw: stratum {frame.name}: {frame.samples} samples of {frame.chips} chips; "
                    f"chips must lie in [1, {MOST_CHIPS}] and samples within them"
                )

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(
            {
                "format": FORMAT,
                "period": self.period,
                "reports": {
                    "root": self.reports.hex(),
                    "count": self.reports_count,
                    "closed": self.reports_closed,
                },
                "registry": self.registry.hex(),
                "beacon": {
                    "source": self.beacon_source,
                    "round": self.beacon_round,
                    "time": self.beacon_time,
                },
                "strata": [[frame.name, frame.chips, frame.samples] for frame in self.strata],
            }
        )


@dataclass(frozen=True)
class Draw:
    """The seed and, for each stratum, the positions to inspect in the order they were drawn, int64."""

    announcement: Announcement
    seed: bytes
    samples: dict[str, Indexes]

    def digest(self) -> bytes:
        """Return 32 bytes that name seed and sample, for comparing draws without their lists."""
        return sample_digest(self.seed, self.samples)


def parse_announcement(data: bytes) -> Announcement:
    """Return the announcement whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes, a beacon that does not speak after the reports close, a number out of range.
    """
    top = parse_document(
        data,
        FORMAT,
        what="draw",
        limit=LARGEST_ANNOUNCEMENT,
        names=("format", "period", "reports", "registry", "beacon", "strata"),
    )
    reports = Fields(top.value("reports"), what="draw: reports", names=("root", "count", "closed"))
    beacon = Fields(top.value("beacon"), what="draw: beacon", names=("source", "round", "time"))
    return Announcement(
        period=top.integer("period"),
        reports=parse_hex(reports.text("root"), n_bytes=HASH_BYTES, what="draw: reports root"),
        reports_count=reports.integer("count"),
        reports_closed=reports.integer("closed"),
        registry=parse_hex(top.text("registry"), n_bytes=HASH_BYTES, what="draw: registry"),
        beacon_source=beacon.text("source"),
        beacon_round=beacon.integer("round"),
        beacon_time=beacon.integer("time"),
        strata=tuple(_frame(item) for item in top.items("strata")),
    )


def draw_sample(announcement: Announcement, beacon_value: bytes) -> Draw:
    """Return the sample that ``announcement`` and the value of its beacon round determine.

    Whether the value is that round's is for the caller to check with the beacon's own signature. Takes
    seconds and 30 bytes a chip for 10**7 chips.

    Raises:
        InvalidInput: the value does not have 32 to 64 bytes.
    """
    seed = draw_seed(announcement.encode(), beacon_value)
    samples = {
        frame.name: draw_positions(seed, frame.name, frame.chips, frame.samples)
        for frame in announcement.strata
    }
    return Draw(announcement, seed, samples)


def verify_draw(announcement: Announcement, beacon_value: bytes, claimed: bytes) -> Draw:
    """Return the draw if its digest is ``claimed``.

    Raises:
        InvalidInput: as draw_sample.
        Mismatch: another seed or sample.
    """
    drawn = draw_sample(announcement, beacon_value)
    if drawn.digest() != claimed:
        raise Mismatch(f"draw: its digest is {drawn.digest().hex()}, {claimed.hex()} is claimed")
    return drawn


def _frame(item: object) -> Frame:
    match item:
        case [str(name), int(chips), int(samples)] if type(chips) is int and type(samples) is int:
            return Frame(name, chips, samples)
        case _:
            raise InvalidInput("draw: a stratum must be [name, chips, samples]")
