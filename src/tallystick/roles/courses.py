"""What a program comes to under several arithmetics where its run states something else: whether that hangs on the arithmetic.

Between its steps, and within them, a program is Python: a number that it reads of a tie, or of what is chaotic, is another one on
another machine, and may choose data and rates, weigh a loss or a gradient. Nobody is accused of what other arithmetics of one
machine do not have in common; nor is anybody excused of what they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tallystick.commit.encoding import parse_hex_float
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput
from tallystick.roles.audit_report import ACCUSING, MOST_NOISE, AuditReport, Deviation, SegmentResult
from tallystick.roles.comparison import may_follow_from_data

Moved = Mapping[str, Mapping[str, float]]
MOST_LOOKED_AT = 256  # elements of a tensor
FEW = 16  # elements that moved: of tensors with fewer all count as one
OTHERS = 1 / 8  # so large a share of what moved is no matter of single roundings
QUIET, QUIET_UNDER_AUTOCAST = 2.0**-15, 2.0**-5  # of other gradients: what is hardly more than noise
LARGE = 2.0**-8  # losses so far apart, of themselves, may lead Python to any other rate
AS_STATED = "as stated"
COMPUTED = ("data", "schedule", "beginning")  # what a program computes itself, beside its steps


@dataclass(frozen=True)
class ProgramCourse:
    """What differs in one segment from what its run states, under one arithmetic.

    Attributes:
        deviations: those that accuse.
        moved: where the first step that differs has moved tensors to, by name and index, as far as it is looked at.
    """

    start: int
    deviations: Sequence[Deviation]
    moved: Moved

    @classmethod
    def of(cls, segment: SegmentResult, moved: Moved) -> ProgramCourse:
        """Return that of a segment that was followed."""
        return cls(segment.start, [d for d in segment.deviations if d.kind in ACCUSING], moved)

    @property
    def first(self) -> float:
        """The first step that differs, or infinity."""
        return min((each.step for each in self.deviations), default=math.inf)

    def is_as(self, other: ProgramCourse) -> bool:
        """Whether another course of the same arithmetic is this one, up to the first step that differs."""
        mine, theirs = ([d for d in each.deviations if d.step == each.first] for each in (self, other))
        return (self.start, self.moved, mine) == (other.start, other.moved, theirs)

    def own(self, deviation: Deviation) -> str:
        """Return what is here of that in which another course deviates."""
        found = (own_of(each) for each in self.deviations if _place(each) == _place(deviation))
        return next(found, AS_STATED)


def moved_between(before: Mapping[str, Entry], after: Mapping[str, Entry], *, quiet: float) -> Moved:
    """Return where a step has moved tensors to, of which the optimizer's own are not in ``before``.

    Left out are parameters of which something is at most ``quiet`` of what it is for others, as where a gradient is nothing but
    noise: no two arithmetics have that in common, and an optimizer that divides by it takes whole steps.
    """
    found: dict[str, dict[str, float]] = {}
    ways: dict[str, dict[str, float]] = {}  # by kind of tensor and parameter
    for name, entry in after.items():
        if entry.dtype != "F32":
            continue
        now = np.frombuffer(entry.data, dtype="<f4")
        was = np.frombuffer(before[name].data, dtype="<f4") if name in before else np.zeros_like(now)
        if was.size != now.size or not now.size:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            way = float(np.abs(now.astype(np.float64) - was).mean())
        folder, _, parameter = name.partition("/")
        parameter, _, kind = parameter.rpartition("/") if folder == "optimizer" else (parameter, "", folder)
        ways.setdefault(kind, {})[parameter] = way
        at = range(0, now.size, max(1, now.size // MOST_LOOKED_AT))
        found[name] = {str(k): float(now[k]) for k in at if now[k] != was[k]}
    most = {kind: max(each.values()) for kind, each in ways.items()}
    silent = {p for kind, each in ways.items() for p, way in each.items() if way <= quiet * most[kind] > 0}
    return {name: at for name, at in found.items() if not _is_of(name, silent)}


def _is_of(name: str, parameters: Collection[str]) -> bool:
    folder, _, rest = name.partition("/")
    return (rest.rpartition("/")[0] if folder == "optimizer" else rest) in parameters


Doubts = Callable[[ProgramCourse, int], Deviation | ProgramCourse]


def excuse_doubts(report: AuditReport, moved: Mapping[int, Moved], doubts: Doubts) -> None:
    """Accuse nobody of what may be this machine's own: what a program computes of ties and chaos is another thing elsewhere.

    Bytes that contradict what was committed, and what the policy does not allow, are nobody's arithmetic. ``doubts`` is asked
    with what differs in a segment, and the end of the last segment that it is asked about; it gives why nobody is accused, or
    the course that accuses.
    """
    accused = [
        segment
        for segment in report.segments
        if segment.verdict in ACCUSING
        and not any(each.is_evidence or each.about == "policy" for each in segment.deviations)
    ]
    for segment in accused:
        course = ProgramCourse.of(segment, moved.get(segment.start, {}))
        found = doubts(course, accused[-1].end)
        if isinstance(found, Deviation):
            segment.verdict = "cannot_reproduce"
            segment.deviations.insert(0, found)
        elif found is not course:
            segment.deviations = [*found.deviations]
            of_log = any(d.kind == "log_violation" for d in found.deviations if d.step == found.first)
            segment.verdict = "log_violation" if of_log else "mismatch"


def excuse_what_was_passed(segment: SegmentResult) -> None:
    """Accuse nobody of what follows steps that were passed over, unless a file alone shows it: the program may remember them."""
    if segment.verdict in ACCUSING and not any(each.is_evidence for each in segment.deviations):
        first = min(segment.deviations, key=lambda each: each.step)
        why = f"{first.own[:20]}, after steps passed over; audit all to accuse"
        segment.verdict = "cannot_reproduce"
        segment.deviations.insert(0, replace(first, kind="cannot_reproduce", own=why))


def one_arithmetic(course: ProgramCourse, _: int) -> Deviation | ProgramCourse:
    """Return the first of what a program computes itself beside its steps, and or the course: all else accuses."""
    said = "here, under one arithmetic; `tally audit RUN -- python ..` asks others before it accuses"
    at_first = (d for d in course.deviations if d.step == course.first and d.about in COMPUTED)
    each = next(at_first, None)
    return (
        course if each is None else replace(each, kind="cannot_reproduce", own=f"{own_of(each)[:20]} {said}")
    )


def find_doubt(
    own: ProgramCourse, others: Mapping[str, ProgramCourse], *, is_whole: bool = True
) -> Deviation | None:
    """Return what differs first in this machine's ``own`` course by another arithmetic, saying so; None if nothing does.

    Not ``is_whole`` says that further ones can still be asked. Where courses part from the run at several steps, those that
    followed it farthest are asked.
    """
    for name, other in others.items():
        if not other.deviations:
            return _doubted(own, AS_STATED, name)
    farthest = max(course.first for course in (own, *others.values()))
    front = {name: course for name, course in others.items() if course.first == farthest}
    if own.first == farthest:
        judged = own
    elif is_whole:
        name, judged = front.popitem()
    else:
        return None
    if not front:
        nearest = next(iter(others), "")
        return _doubted(own, "another step's first", nearest) if is_whole and others else None
    found = next(_doubts_at_first(judged, front), None)
    if found is None:
        return None
    unexplained = (d for d in judged.deviations if not may_follow_from_data(d))
    if all(_is_apart(each, judged, others) for each in unexplained):
        return found
    return None


def _doubts_at_first(course: ProgramCourse, others: Mapping[str, ProgramCourse]) -> Iterator[Deviation]:
    at_first = [each for each in course.deviations if each.step == course.first]
    for name, other in others.items():
        for each in at_first:
            is_text = each.about in ("data", "beginning") and other.own(each) != own_of(each)
            if is_text or (each.about in ("schedule", "loss") and _is_apart(each, course, {name: other})):
                yield _doubted(course, other.own(each), name, each)
        if have_moved_otherwise(course.moved, other.moved):
            yield _doubted(course, "another step", name)


def _doubted(course: ProgramCourse, other: str, name: str, first: Deviation | None = None) -> Deviation:
    first = first or min(course.deviations, key=lambda each: each.step)
    text = f"{own_of(first)[:20]} here, {other[:20]} under {name}: it depends on the arithmetic"
    return replace(first, kind="cannot_reproduce", own=text)


def _place(deviation: Deviation) -> tuple[int, str, str]:
    return deviation.step, deviation.about, deviation.subject  # a log may deviate of a loss, too


def own_of(deviation: Deviation) -> str:
    """Return what a deviation says of this machine; a setting of the first state in one text with the stated one."""
    return deviation.stated if deviation.about == "beginning" else deviation.own


def _is_apart(deviation: Deviation, course: ProgramCourse, others: Mapping[str, ProgramCourse]) -> bool:
    """Whether arithmetics lie as far apart in what deviates, there or before, as noise may carry it to what is stated.

    A rate may follow from losses far apart, too.
    """
    if deviation.about == "policy":
        return False
    stated = _distance(own_of(deviation), deviation.stated)
    until = deviation.step
    apart = _spread(deviation.about, deviation.subject, course, others, until)
    if deviation.about == "schedule" and _spread("loss", "loss", course, others, until) >= LARGE:
        return True
    return apart > 0 and MOST_NOISE * apart >= stated


def _spread(
    about: str, subject: str, course: ProgramCourse, others: Mapping[str, ProgramCourse], until: int
) -> float:
    """Return how far other courses are from this one in a number of the steps up to ``until``, of itself, at most."""
    return max(
        (
            _distance(own_of(each), each.stated if (theirs := other.own(each)) == AS_STATED else theirs)
            for each in course.deviations
            if (each.about, each.subject) == (about, subject) and each.step <= until
            for other in others.values()
        ),
        default=0.0,
    )


def _distance(x: str, y: str) -> float:
    """Return how far two numbers as text lie apart, of the larger; infinite where they are other texts and no finite numbers."""
    if x == y:
        return 0.0
    numbers = [_number(text) for text in (x, y)]
    largest = max(map(abs, numbers))
    return abs(numbers[0] - numbers[1]) / largest if math.isfinite(sum(numbers)) and largest else math.inf


def _number(text: str) -> float:
    try:
        return parse_hex_float(text, what="number")
    except InvalidInput:
        try:
            return float(text)
        except ValueError:
            return math.nan


def have_moved_otherwise(one: Moved, other: Moved) -> bool:
    """Whether a step has led tensors elsewhere, in more of their elements than single roundings do."""
    few = [0, 0]
    for name in one.keys() & other.keys():
        x, y = one[name], other[name]
        places = x.keys() | y.keys()
        differing = sum(1 for place in places if x.get(place) != y.get(place))
        if len(places) < FEW:
            few = [few[0] + differing, few[1] + len(places)]
        elif differing > OTHERS * len(places):
            return True
    return few[0] > max(1, OTHERS * few[1])
