"""What an audit says: deviations, segments, and the verdict over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from tallystick.execution.noise.freedom import Freedom
from tallystick.roles.initial_state import Beginning
from tallystick.roles.run_writer import Phases
from tallystick.run.sample import SegmentDraw

VerdictName = Literal["match", "mismatch", "log_violation", "cannot_reproduce", "not_accepted"]
ACCUSING: tuple[VerdictName, ...] = ("mismatch", "log_violation")
UNDECIDED: tuple[VerdictName, ...] = ("cannot_reproduce", "not_accepted")
About = Literal[
    "data", "schedule", "loss", "state", "fingerprint", "log", "policy", "noise", "limit", "beginning", "program", "job",
    "committed state", "copied log", "copied state",
]  # fmt: skip

# What deviations are called where they are about no tensor and no site.
FINGERPRINT = "state fingerprint"
EVIDENCE = "evidence"
BATCH_DIGEST = "batch digest"
BEGINNING = "first state"
PROGRAM = "program"
EVERYTHING = "everything"

MOST_NOISE = 8.0
"""What noise above the bands may do to a tensor at most: so many times the way that training carried it."""
SCHEDULE_TOLERANCE = 2.0**-36
"""Libraries differ in the last bit of cos and pow; the recorded value is then taken."""


@dataclass(frozen=True)
class Deviation:
    """One thing that differs, or that honest arithmetic could not have written.

    Attributes:
        step: where it showed.
        kind: ``mismatch``, ``log_violation``, ``cannot_reproduce`` or ``not_accepted``.
        subject: tensor, record field or log site.
        element: flat index, or None.
        own, stated: both values as text.
        about: what kind of thing ``subject`` names. ``job`` is what this machine has otherwise, ``noise`` its own above
            the bands, ``limit`` what was accepted; what is ``copied`` is a file here that is not what was committed, whoever
            changed it; a ``committed state`` contradicts what was committed beside it.
    """

    step: int
    kind: VerdictName
    subject: str
    element: int | None
    own: str
    stated: str
    about: About

    @property
    def is_evidence(self) -> bool:
        """Whether a file is not what was committed to: bytes show it, and no noise explains it."""
        return self.about == "committed state" or self.is_of_copy

    @property
    def is_of_copy(self) -> bool:
        """Whether it is about the files that were audited, and says nothing of whoever committed."""
        return self.about in ("copied log", "copied state")

    def __str__(self) -> str:
        return self.of("trainer")

    def of(self, party: str) -> str:
        """Return it in words, of what ``party`` says."""
        where = "" if self.element is None else f" element {self.element}"
        if self.kind == "not_accepted":
            return f"step {self.step}: {self.subject}: {self.stated}; accepted is {self.own}"
        return f"step {self.step}: {self.subject}{where} is {self.own}, the {party} says {self.stated}"


@dataclass
class SegmentResult:
    """What repeating the steps from ``start`` up to ``end`` showed."""

    start: int
    end: int
    verdict: VerdictName = "match"
    deviations: list[Deviation] = field(default_factory=list[Deviation])
    differing_elements: int = 0
    elements: int = 0

    @property
    def first_step(self) -> int | None:
        """The first step with a deviation."""
        return min((deviation.step for deviation in self.deviations), default=None)


@dataclass
class AuditReport:
    """The auditor's findings over all segments; ``root``, in hexadecimal, is that of the run that was read."""

    directory: str
    profile: str
    root: str
    segments: list[SegmentResult] = field(default_factory=list[SegmentResult])
    freedom: Freedom = field(default_factory=Freedom)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    phases: Phases = field(default_factory=Phases)
    sample: SegmentDraw | None = None
    beginning: Beginning | None = None

    @property
    def verdict(self) -> VerdictName:
        """The verdict on the whole: of the first segment that accuses, else the worst of the others."""
        if not self.segments:
            return "cannot_reproduce"
        found = [segment.verdict for segment in self.segments]
        for verdict in found:
            if verdict in ACCUSING:
                return verdict
        for undecided in UNDECIDED:
            if undecided in found:
                return undecided
        return "match"

    @property
    def first(self) -> Deviation | None:
        """The deviation that decides the verdict."""
        for segment in self.segments:
            if segment.verdict == self.verdict:
                return min(segment.deviations, key=lambda deviation: deviation.step, default=None)
        return None

    @property
    def steps(self) -> int:
        """How many steps were repeated."""
        return sum(segment.end - segment.start for segment in self.segments)

    @property
    def differing_elements(self) -> int:
        """How many elements of the committed states differ, over all segments."""
        return sum(segment.differing_elements for segment in self.segments)

    def document(self) -> dict[str, Any]:
        """Return it as JSON for another process of the same party, of its freedom what is shown, without the ``sample``."""
        numbers = [each.name for each in fields(Freedom) if isinstance(each.default, (int, float))]
        return {
            **{name: getattr(self, name) for name in ("directory", "profile", "root", "environment")},
            "segments": [asdict(each) for each in self.segments],
            "freedom": {name: np.asarray(getattr(self.freedom, name)).item() for name in numbers},
            "seconds": self.phases.seconds,
            "beginning": None if self.beginning is None else asdict(self.beginning),
        }

    @classmethod
    def parse(cls, document: Mapping[str, Any], sample: SegmentDraw | None) -> AuditReport:
        """Return the report of a ``sample`` that ``document`` gave."""
        given, segments = {**document}, list[SegmentResult]()
        for each in given.pop("segments"):
            deviations = [Deviation(**one) for one in each.pop("deviations")]
            segments.append(SegmentResult(**each, deviations=deviations))
        beginning, phases = given.pop("beginning"), Phases(given.pop("seconds"))
        if beginning is not None:
            rounded, others = (tuple(beginning.pop(name)) for name in ("rounded", "others"))
            beginning = Beginning(**beginning, rounded=rounded, others=others)
        freedom = Freedom(**given.pop("freedom"))
        environment = {name: (own, stated) for name, (own, stated) in given.pop("environment").items()}
        return cls(
            **given, segments=segments, freedom=freedom, environment=environment, phases=phases, sample=sample,
            beginning=beginning,
        )  # fmt: skip


def near(own: float, stated: float) -> bool:
    """Return whether two scheduled values are the same one, as libraries compute it; an infinity is near nothing finite."""
    if not (math.isfinite(own) and math.isfinite(stated)):
        return own == stated or (math.isnan(own) and math.isnan(stated))
    return abs(own - stated) <= SCHEDULE_TOLERANCE * max(abs(own), abs(stated))
