"""Tracing a snapshot: every program's memory, the logged run first, and no run that cannot be read ends the search."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_record import TORN, Snapshot
from tallystick.fleet.agent.memory import Region, SnapshotOpening, page_hashes, reader_of
from tallystick.fleet.provenance.transcripts import Slice
from tallystick.integrations import tracing
from tallystick.integrations.tracing import SnapshotTrace, trace_snapshot
from tallystick.integrations.watching import TakenSnapshot, match_claimed

COUNT, PAGE, SALT, SEQ = 100, 64, b"\5" * 16, 5
WHOLE = (Slice("w", "w", 0, COUNT),)


def values(seed: int) -> bytes:
    return np.random.default_rng(seed).random(COUNT).astype("<f4").tobytes()


def taken(run: bytes, **memories: bytes) -> TakenSnapshot:
    """A snapshot of the regions ``w``, or ``w0``, ``w1``.. of several programs."""
    regions = [(f"{name[1:]}/w" if name != "w" else name, data) for name, data in memories.items()]
    leaves, first = list[bytes](), 0
    for _, data in regions:
        leaves += page_hashes(reader_of(data), len(data), page_size=PAGE, salt=SALT, first=first)[0]
        first = len(leaves)
    shown = tuple(Region(name, "F32", "weights", len(data)) for name, data in regions)
    opening = SnapshotOpening(bytes(17), SEQ, SALT, PAGE, shown, tuple(leaves), 1)
    event = Snapshot(PAGE, len(leaves), 4 * COUNT, bytes(32), bytes(32), run=run)
    return TakenSnapshot("aa", SEQ, opening, event, lambda start, size: b"")


class Run:
    """A declared run of ``states`` by steps done, whose pre-commitment has the digest ``logged``."""

    def __init__(
        self,
        name: str,
        states: Mapping[int, bytes],
        logged: bytes,
        claim: int | None = None,
        fails: Exception | None = None,
    ) -> None:
        precommit = SimpleNamespace(ranks=("aa",), digest=lambda: logged)
        claims = () if claim is None else (("aa", SEQ, claim),)
        self.name, self.opening = name, SimpleNamespace(shards=(WHOLE,))
        self.report = SimpleNamespace(run=name.upper(), precommit=precommit, snapshots=claims)
        self.transcript, self._states, self._fails = SimpleNamespace(num_steps=4), states, fails

    def states(self, wanted: Collection[int]) -> Iterator[tuple[int, Mapping[str, Entry]]]:
        if self._fails is not None:
            raise self._fails
        for step in sorted(set(wanted) & self._states.keys()):
            yield step, {"w": Entry("w", "F32", (COUNT,), self._states[step])}


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SnapshotTrace]:
    def open_run(run: Run, source_of: object, replayers: dict[str, Any], evidence: dict[str, Any]) -> None:
        replayers[run.name] = run

    def traced(item: TakenSnapshot, *runs: Run) -> SnapshotTrace:
        record = SimpleNamespace(record=SimpleNamespace(seq=SEQ, event=item.event))
        monkeypatch.setattr(tracing, "read_chip", lambda *given: ([record], [], None))
        monkeypatch.setattr(tracing, "openings_of", lambda *given: [item])
        monkeypatch.setattr(tracing, "open_run", open_run)
        return trace_snapshot(
            cast("Any", SimpleNamespace(runs=lambda: list(runs))),
            "aa",
            SEQ,
            cast("Any", None),
            cast("Any", None),
        )

    return traced


def test_two_programs_of_two_runs_are_both_traced(trace: Callable[..., SnapshotTrace]) -> None:
    found = trace(
        taken(b"A" * 32, w0=values(1), w1=values(2), w2=values(9)),
        Run("a", {1: values(1)}, b"A" * 32, claim=1),
        Run("b", {2: values(2)}, b"B" * 32),
    )
    assert [(part.program, part.run, part.match.steps_done) for part in found.parts] == [
        ("0/", "a", 1),
        ("1/", "b", 2),
    ]
    assert (found.unexplained, found.size) == (4 * COUNT, 12 * COUNT)


def test_the_run_that_the_chip_logged_comes_first_also_where_another_claims_the_same_state(
    trace: Callable[..., SnapshotTrace],
) -> None:
    item = taken(b"B" * 32, w=values(1))
    found = trace(item, Run("a", {1: values(1)}, b"A" * 32, claim=1), Run("b", {3: values(1)}, b"B" * 32))
    assert [(part.run, part.match.steps_done) for part in found.parts] == [("b", 3)]
    assert (found.unexplained, found.named, found.declared) == (0, 2, 2)


@pytest.mark.parametrize("claim", [None, 1])
def test_a_run_that_cannot_be_read_is_named_and_the_search_goes_on(
    claim: int | None, trace: Callable[..., SnapshotTrace]
) -> None:
    broken = Run("a", {}, b"A" * 32, claim=claim, fails=Mismatch("the copy fails here"))
    found = trace(taken(b"A" * 32, w=values(1)), broken, Run("b", {1: values(1)}, b"B" * 32))
    assert [part.run for part in found.parts] == ["b"]
    assert found.unread == (("a", "the copy fails here"),)


def test_memory_of_no_declared_run_is_unexplained(trace: Callable[..., SnapshotTrace]) -> None:
    found = trace(taken(b"A" * 32, w=values(9)), Run("a", {1: values(1)}, b"A" * 32, claim=1))
    assert (found.parts, found.unexplained, found.size) == ((), 4 * COUNT, 4 * COUNT)


def test_of_many_programs_the_first_are_looked_at_and_the_others_stay_unexplained(
    trace: Callable[..., SnapshotTrace],
) -> None:
    item = taken(b"A" * 32, **{f"w{number}": values(1) for number in range(70)})
    found = trace(item, Run("a", {1: values(1)}, b"A" * 32, claim=1))
    assert len(found.parts) == 64
    assert found.unexplained == 6 * 4 * COUNT


def test_another_record_is_no_snapshot(
    trace: Callable[..., SnapshotTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "read_chip", lambda *given: ([], [], None))
    with pytest.raises(InvalidInput, match="chip aa: record 5 of its log is no snapshot"):
        trace_snapshot(cast("Any", None), "aa", SEQ, cast("Any", None), cast("Any", None))


def test_a_snapshot_that_is_not_torn_is_no_mixture_of_two_states() -> None:
    """Between two states that alternate lies whatever one likes, in a page that is opened."""
    old, new = (np.full(COUNT, value, "<f4") for value in (-1.0, 1.0))
    hidden = np.where(np.random.default_rng(3).random(COUNT) < 0.5, old, new).astype("<f4").tobytes()
    claims = (("aa", SEQ, 1), ("aa", SEQ + 1, 2))
    for flags, status in ((0, None), (TORN, "torn")):
        item = taken(b"A" * 32, w=hidden)
        item.memory = lambda start, size: hidden[start : start + size]
        item.event = replace(item.event, flags=flags)
        other = replace(taken(b"A" * 32, w=new.tobytes()), seq=SEQ + 1)
        run = Run("a", {1: old.tobytes(), 2: new.tobytes()}, b"A" * 32)
        run.report.snapshots = claims
        match_claimed(cast("Any", run), cast("Any", run), [item, other])
        assert (item.found and item.found[1].status) == status
        assert other.is_done


def test_a_slice_of_nothing_explains_no_memory(trace: Callable[..., SnapshotTrace]) -> None:
    run = Run("a", {1: values(1)}, b"A" * 32, claim=1)
    run.opening = SimpleNamespace(shards=((Slice("w", "w", 0, 0),),))
    assert trace(taken(b"A" * 32, w=b""), run).parts == ()
