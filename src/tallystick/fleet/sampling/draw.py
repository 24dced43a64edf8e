"""Which chips are inspected: a sample that nobody could foresee and anybody can draw again.

Format and derivation, with the bytes drawn: spec/plan.md section 7. The order is the point: the owners' reports
are committed, the announcement names them and a beacon round still to come, the beacon speaks, the sample follows.

    announcement -> beacon value -> seed = SHA-256(both) -> one Philox stream per stratum -> the first `samples`
    positions of a permutation of its chips
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES
from tallystick.commit.field_rules import At, Hash, Hex, Via
from tallystick.errors import InvalidInput
from tallystick.run.public_randomness import Indexes, draw_positions, draw_seed, is_draw_name, sample_digest

FORMAT = "tallystick/draw/1"
LARGEST_ANNOUNCEMENT = 1 << 20
MOST_CHIPS = 1 << 28  # tickets of eight bytes are sorted in memory


@dataclass(frozen=True)
class DrawnStratum(Document, what="draw: stratum"):
    """The chips of one stratum, positions 0 .. chips - 1 of the committed list, and how many are drawn."""

    name: str
    chips: int
    samples: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_draw_name(self.name):
            raise InvalidInput(
                "draw: a stratum's name must be 1 to 200 printable ASCII characters without spaces"
            )
        if not 0 < self.chips <= MOST_CHIPS or not 0 <= self.samples <= self.chips:
            raise InvalidInput(
                f"draw: stratum {self.name}: {self.samples} samples of {self.chips} chips; "
                f"chips must lie in [1, {MOST_CHIPS}] and samples within them"
            )


def _read_frame(value: object, what: str) -> DrawnStratum:
    match value:
        case [str(name), int(chips), int(samples)] if type(chips) is int and type(samples) is int:
            return DrawnStratum(name, chips, samples)
        case _:
            raise InvalidInput(f"{what}: a stratum must be [name, chips, samples]")


@dataclass(frozen=True)
class DrawAnnouncement(Document, form=FORMAT, what="draw", limit=LARGEST_ANNOUNCEMENT):
    """What is published before the beacon speaks: which reports, which list of chips, which beacon round.

    ``reports`` is the root over the owners' reports and ``reports_closed`` the second (UTC, since 1970) after which
    none was accepted; ``registry`` is the root of the list that the positions refer to; the beacon's round is
    published at second ``beacon_time``, later than that.

    Raises:
        InvalidInput: a beacon that does not speak after the reports close, a number out of range, strata out of order.
    """

    period: int
    reports: Annotated[bytes, At("reports", "root"), Hex(HASH_BYTES)]
    reports_count: Annotated[int, At("reports", "count")]
    reports_closed: Annotated[int, At("reports", "closed")]
    registry: Hash
    beacon_source: Annotated[str, At("beacon", "source")]
    beacon_round: Annotated[int, At("beacon", "round")]
    beacon_time: Annotated[int, At("beacon", "time")]
    strata: tuple[Annotated[DrawnStratum, Via(DrawnStratum.row, _read_frame)], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass(frozen=True)
class Draw:
    """The seed and, for each stratum, the positions to inspect in the order they were drawn, int64."""

    announcement: DrawAnnouncement
    seed: bytes
    samples: dict[str, Indexes]

    def digest(self) -> bytes:
        """Return 32 bytes that name seed and sample, for comparing draws without their lists."""
        return sample_digest(self.seed, self.samples)


parse_announcement = DrawAnnouncement.parse


def draw_sample(announcement: DrawAnnouncement, beacon_value: bytes) -> Draw:
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
