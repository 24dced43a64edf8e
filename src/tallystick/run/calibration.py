"""What a calibration chose, as a document: canonical JSON, versioned, read by ``tally record --bands``.

The choice is two or three numbers of the policy. They go into the specification of every run recorded with
them, where an auditor checks them against the policy's limits; nobody but the trainer needs this document.
The rest says where the numbers come from. Format: spec/policies.md 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES
from tallystick.commit.field_rules import At, Hex, Least, NotNegative, Size
from tallystick.errors import InvalidInput

FORMAT = "tallystick/calibration/1"
LIMIT = 1 << 22  # bytes: some thousands of sites with their numbers
MOST_SITES = 1 << 14
LONGEST_NAME = 512
MeasuredKind = Literal["buffer", "decision", "gradient", "loss", "state"]


@dataclass(frozen=True)
class SiteChoice(Document, what="calibration: site"):
    """One site: its band under the choice, and the largest deviation over its scale, by source.

    ``band`` is an exponent relative to the site's scale, ``floor`` that of its smallest quantum; both as of the last
    step measured, None where the policy gives the site none.
    """

    kind: MeasuredKind
    name: Annotated[str, Size(0, LONGEST_NAME)]
    band: int | None
    floor: int | None
    largest: Mapping[str, NotNegative]


@dataclass(frozen=True)
class CalibrationChoice(Document, form=FORMAT, what="calibration", limit=LIMIT):
    """The numbers chosen for ``policy``, and what they rest on.

    Attributes:
        policy: its name.
        parameters: chosen numbers of the policy, by name.
        job, source_digest, settings, seed: what was measured.
        steps: at which steps.
        repeats: jittered repetitions at each.
        profiles: other arithmetic compared with.
        log_bits, freedom: expected under the choice: bits of log per parameter and step, share of roundings that
            a dishonest log could choose.
        sites: every site.
    """

    policy: str
    parameters: Mapping[str, int]
    job: Annotated[str, At("job", "path")]
    source_digest: Annotated[str, At("job", "source_digest"), Hex(HASH_BYTES)]
    settings: Annotated[Mapping[str, str], At("job", "settings")]
    seed: Annotated[int, At("job", "seed"), Least(0)]
    steps: Annotated[tuple[int, ...], At("measured", "steps")]
    repeats: Annotated[int, At("measured", "repeats"), Least(1)]
    profiles: Annotated[tuple[str, ...], At("measured", "profiles")]
    log_bits: Annotated[float, At("expected", "log_bits"), Least(0)]
    freedom: Annotated[float, At("expected", "freedom"), Least(0)]
    sites: Annotated[tuple[SiteChoice, ...], Size(0, MOST_SITES)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.steps) != sorted(set(self.steps)) or not self.steps or self.steps[0] < 0:
            raise InvalidInput(
                f"calibration: steps must be ascending whole numbers, are {list(self.steps)[:8]}"
            )


parse_calibration = CalibrationChoice.parse
