"""How far noise takes a state: what a state that noise is to explain is held against.

That some site is as loud as its band says that noise may be the cause of a difference, not that it is the cause of this one.
So the steps are repeated under the trainer's log with several times the noise that machines have. What noise did to the
trainer's state, a choice near a boundary or the branch of a near tie, it does to one of these too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from tallystick.commit.encoding import parse_hex_float
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, JobFailed, Nondeterminism
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.noise.passes import jittered
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.roles.audit_report import EVERYTHING, Deviation
from tallystick.roles.comparison import DOCUMENT, farther_than_trained, kind_of
from tallystick.roles.data_noise import FLOATS, square_distance
from tallystick.roles.replay import Replay
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript

State = Mapping[str, Entry]
UNITS = 8.0  # last places of each operator: machines differ by up to 2.1 times what one does (docs/adr/0025)
REPEATED, FEWEST = 16, 4
"""Repetitions of one step: of a near tie that honest noise turned, one of them turns it, but for one time in 3,000. Of more steps
there are fewer: what differs after the first of them goes on growing by itself."""
MOST_TIMES = 2.0  # what the farthest of them is away, this often, may an honest state be
LEAST_SHARE = 2.0**-10  # of the steps' own way, which a single element that fell otherwise stays within
SEED = 7919
WHOLE = {"I64": "<i8", "I32": "<i4", "I16": "<i2"}  # all others by bytes


def farther_than_noise(
    replay: Replay, transcript: Transcript, frames: Mapping[int, bytes], before: State, stated: State
) -> str | None:
    """Return the first kind of numbers of which ``stated`` is farther away than noise takes them in some steps; None if none is.

    Kinds are weights, buffers, and each of the optimizer's numbers; distances are roots of sums of squares over all tensors of
    one, from what the steps of ``frames`` make of ``before`` here. What training does bounds them too (``farther_than_trained``,
    which gives a tensor's name), and bounds them alone where the steps do not end under such noise. A whole number is at most
    twice as far away as such noise moves that very one. Everything else of a state (which entries it has, of which form,
    documents) is what it is here, unless such noise moves it.
    """
    own = _repeated(replay, transcript, frames, before, None)
    if own is None:
        return None
    if (far := farther_than_trained(before, own, stated)) is not None:
        return far
    fixed, known, led, whole = _fixed(own), set(own), dict[str, float](), dict[str, np.ndarray]()
    for repeat in range(max(FEWEST, REPEATED // len(frames))):
        jitter = Jitter(replay.session.seed * 1000003 + min(frames) * 101 + SEED + repeat, UNITS)
        moved = _repeated(replay, transcript, frames, before, jitter)
        if moved is None:
            continue
        known |= moved.keys()
        fixed = dict(fixed.items() & _fixed(moved).items())
        for kind, distance in _distances(own, moved).items():
            led[kind] = max(led.get(kind, 0.0), distance)
        for name, apart in _apart(own, moved):
            whole[name] = np.maximum(whole.get(name, 0.0), apart)
    if not led:
        return None
    theirs = _fixed(stated)
    other = {name for name, value in fixed.items() if theirs.get(name) != value} | (theirs.keys() - known)
    other |= {
        name for name, apart in _apart(own, stated) if (apart > MOST_TIMES * whole.get(name, 0.0)).any()
    }
    if other:
        return min(other)
    way = _distances(own, before)
    least = {kind: max(MOST_TIMES * led.get(kind, 0.0), LEAST_SHARE * way[kind]) for kind in way}
    return next((kind for kind, distance in _distances(own, stated).items() if distance > least[kind]), None)


def is_loss_farther(
    replay: Replay,
    record: StepRecord,
    frame: bytes,
    before: State,
    found: Iterable[Deviation],
    noisy: Iterable[Deviation],
) -> bool:
    """Whether the loss among what is ``found`` of a step is farther away than noise takes it; never where noise is unknown."""
    text = next((each.stated for each in found if each.about == "loss"), None)
    if text is None or any(site.subject == EVERYTHING for site in noisy):
        return False
    try:
        stated = parse_hex_float(text, what="loss")
    except InvalidInput:
        return True
    losses: list[float] = []
    for repeat in range(-1, REPEATED):
        seed = replay.session.seed * 1000003 + record.step * 101 + SEED + repeat
        load_state(replay.session, before)
        try:
            with jittered(
                replay.session, Jitter(seed, UNITS) if repeat >= 0 else replay.session.arithmetic.jitter
            ):
                losses.append(replay.follow(record, frame)[0].loss)
        except (InvalidInput, Nondeterminism, JobFailed):
            if repeat < 0:
                return False
    led = max((abs(each - losses[0]) for each in losses[1:]), default=math.inf)
    return abs(stated - losses[0]) > max(MOST_TIMES * led, LEAST_SHARE * abs(losses[0]))


def _fixed(state: State) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return what noise does not move of each entry: its form, and of documents all bytes."""
    return {
        name: (entry.dtype, entry.shape, bytes(entry.data) if name.startswith(DOCUMENT) else b"")
        for name, entry in state.items()
    }


def _apart(own: State, other: State) -> Iterator[tuple[str, np.ndarray]]:
    """Yield how far each whole number is another one in the other state, by the name of the tensor, where both have it."""
    for name, mine in own.items():
        theirs = other.get(name)
        is_whole = mine.dtype not in FLOATS and not name.startswith(DOCUMENT)
        if theirs is None or not is_whole or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            continue
        x, y = (np.frombuffer(each.data, WHOLE.get(mine.dtype, "u1")) for each in (mine, theirs))
        distance = np.abs(x.astype(np.float64) - y.astype(np.float64))
        # Of large ones a float has no last digit.
        yield name, np.where(x == y, 0.0, np.maximum(distance, 1.0))


def _repeated(
    replay: Replay, transcript: Transcript, frames: Mapping[int, bytes], before: State, jitter: Jitter | None
) -> State | None:
    """Return the state after the steps of ``frames``; None if one of them does not end."""
    session = replay.session
    try:
        load_state(session, before)
        with jittered(session, session.arithmetic.jitter if jitter is None else jitter):
            for step, frame in frames.items():
                replay.follow(transcript.record(step), frame)
    except (InvalidInput, Nondeterminism, JobFailed):
        return None
    return copied_state(session)


def _distances(own: State, other: State) -> dict[str, float]:
    """Return how far apart two states are, of each kind of numbers; what the other one does not have yet is zero there."""
    squares: dict[str, float] = {}
    for name, mine in own.items():
        if mine.dtype in FLOATS:
            theirs = other.get(name) or replace(mine, data=bytes(memoryview(mine.data).nbytes))
            squares[kind_of(name)] = squares.get(kind_of(name), 0.0) + square_distance(mine, theirs)
    return {kind: math.sqrt(square) for kind, square in squares.items()}
