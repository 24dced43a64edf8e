"""Commitments that hide, exact matches, segment selection, and what follows from them: without torch."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tallystick.commit.encoding import digest
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead, NumberedFinding
from tallystick.fleet.agent.chip_record import (
    DAY_MS,
    NO_RECORD,
    Boot,
    Clocks,
    Event,
    Firmware,
    Genesis,
    LoggedPrecommit,
    LoggedRecord,
    Record,
    Snapshot,
    sign_record,
)
from tallystick.fleet.agent.memory import (
    Observation,
    Region,
    SnapshotOpening,
    hash_memory,
    reader_of,
    verify_opening,
)
from tallystick.fleet.attestation.assurance import Assurance, Attestation
from tallystick.fleet.provenance.matcher import SnapshotMatch, match_snapshot
from tallystick.fleet.provenance.memorisation import RunMemory, SegmentMemory
from tallystick.fleet.provenance.observation import ObservationPlan, seconds_used
from tallystick.fleet.provenance.transcripts import (
    COMMITMENT_TAG,
    Lineage,
    Precommit,
    ReportOpening,
    RunReport,
    Slice,
    Totals,
    even_shards,
    make_precommit,
    make_report,
    verify_report,
)
from tallystick.fleet.provenance.verification import (
    ChipView,
    Plausibility,
    RunEvidence,
    SegmentOutcome,
    choose_segments,
    judge_owner,
    judge_ratio,
    judge_run,
)
from tallystick.run.documents import JobRecord, PolicyRecord, SiteRecord, Specification, StepRecord
from tallystick.run.transcript import Transcript
from tallystick.signing.keys import ed25519_key

KEY = ed25519_key(b"\3" * 32)
UEID = b"\1" * 17
STEPS = 6


def hexed(*parts: object) -> str:
    return digest("test/1", *(str(part).encode() for part in parts)).hex()


def transcript(run: str = "a", source: str = "job") -> Transcript:
    specification = Specification(
        job=JobRecord("job", hexed(source), {"init_seed": run}, None), policy=PolicyRecord("fp32", {}), seed=1,
        steps=STEPS, checkpoint_every=2, accumulation=1, world_size=1, initial_state=hexed(run, "state", 0),
        versions={}, sites=(SiteRecord("loss", "loss", (), "F32"),),
    )  # fmt: skip
    records = tuple(
        StepRecord(
            step=step, rank=0, micro_batches=1, batch=hexed("batch", step), log=hexed(run, "log", step), log_bytes=10,
            loss="0x1.0p+0".replace("1.0p", "1.0000000000000p"), schedule=(), skipped=False, fingerprint="0" * 16,
            state_root=hexed(run, "state", step + 1) if step % 2 else None,
        )
        for step in range(STEPS)
    )  # fmt: skip
    return Transcript(specification, records)


def made(
    name: str = "a", lineage: Lineage | None = None, **more: object
) -> tuple[RunReport, ReportOpening, Transcript]:
    documents = transcript(name)
    opening = ReportOpening(b"\7" * 32, even_shards({"model/w": 1000}, 1))
    batches = [record.batch for record in documents.records]
    precommit = make_precommit(
        documents.specification, opening, ranks=[UEID.hex()], lineage=lineage or Lineage("initialised"), batches=batches
    )  # fmt: skip
    report = make_report(documents, opening, precommit, Totals(1000, 10, 10), [(UEID.hex(), 3, 2)])
    return replace(report, **more), opening, documents  # pyright: ignore[reportArgumentType]


# -- documents --------------------------------------------------------------------------------------


def test_documents_have_one_encoding_and_bind_the_run() -> None:
    report, opening, documents = made()
    assert RunReport.parse(report.encode()) == report
    with pytest.raises(InvalidInput, match="steps must be 1 to"):
        RunReport.parse(replace(report, steps=0).encode())
    assert ReportOpening.parse(opening.encode()) == opening
    assert Precommit.parse(report.precommit.encode()) == report.precommit
    verify_report(report, opening, documents)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"run": "0" * 64}, "run root"),
        ({"data": "0" * 64}, "data"),
        ({"checkpoints": ((0, "0" * 64),)}, "checkpoints"),
        ({"steps": 5}, "number of steps"),
    ],
)
def test_a_report_of_something_else_is_refused(change: Mapping[str, object], what: str) -> None:
    report, opening, documents = made(**change)
    with pytest.raises(Mismatch, match=what):
        verify_report(report, opening, documents)


def test_hyper_parameters_stated_before_and_after_must_agree() -> None:
    report, opening, _ = made("a")
    other = transcript("a", source="another job")
    forged = make_report(other, opening, report.precommit, report.totals)
    with pytest.raises(Mismatch, match="metadata"):
        verify_report(forged, opening, other)


def test_reordered_or_replaced_data_are_refused() -> None:
    report, opening, documents = made()
    swapped = list(documents.records)
    swapped[0], swapped[1] = (
        replace(swapped[0], batch=swapped[1].batch), replace(swapped[1], batch=swapped[0].batch),
    )  # fmt: skip
    other = Transcript(documents.specification, tuple(swapped))
    forged = make_report(other, opening, report.precommit, report.totals)
    with pytest.raises(Mismatch, match="data committed beforehand"):
        verify_report(forged, opening, other)


def test_guessing_does_not_open_a_commitment() -> None:
    """The dictionary attack: without the salt, the right guess looks like every wrong one."""
    batches = [hexed("batch", step) for step in range(STEPS)]
    report, opening, documents = made()
    plain = {digest(COMMITMENT_TAG, bytes.fromhex(batch)).hex() for batch in batches}
    plain |= {digest(COMMITMENT_TAG, b"", documents.specification.encode()).hex()}
    text = report.encode().decode()
    assert not any(guess in text for guess in plain)
    assert documents.checkpoints()[1].state_root not in text
    again = replace(opening, secret=secrets.token_bytes(32))
    assert again.commit("meta", b"x") != opening.commit("meta", b"x")
    assert opening.salt("data/0") != opening.salt("data/1")  # one thing is opened without the others


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"format":1}', b"\xff"])
def test_malformed_documents_are_refused(text: bytes) -> None:
    for parse in (RunReport.parse, ReportOpening.parse, Precommit.parse, SnapshotOpening.parse):
        with pytest.raises(InvalidInput):
            parse(text)


# -- matching ---------------------------------------------------------------------------------------

NAMES = {"model/a": 700, "model/b": 50, "optimizer/a/m": 700}


def state(step: int, seed: int = 0) -> dict[str, Entry]:
    values = np.random.default_rng([seed, step])
    return {
        name: Entry(name, "F32", (count,), values.standard_normal(count).astype("<f4").tobytes())
        for name, count in NAMES.items()
    }


def snapshot(memory: list[tuple[Region, bytes]], salt: bytes = b"\5" * 16) -> SnapshotOpening:
    seen = Observation(tuple(r for r, _ in memory), tuple(reader_of(data) for _, data in memory))
    return hash_memory(seen, page_size=256, salt=salt, ueid=UEID, seq=3)[0]


def held(
    entries: Mapping[str, Entry], pieces: tuple[Slice, ...], dtype: str = "F32"
) -> list[tuple[Region, bytes]]:
    found: list[tuple[Region, bytes]] = []
    for piece in pieces:
        values = np.frombuffer(entries[piece.entry].data, dtype="<f4")[
            piece.start : piece.start + piece.count
        ]
        data = values.astype("<f8").tobytes() if dtype == "F64" else values.tobytes()
        found.append((Region(piece.region, dtype, "weights", len(data)), data))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_every_rank_of_every_step_is_recognised_exactly(ranks: int, dtype: str) -> None:
    shards = even_shards(NAMES, ranks)
    assert sum(piece.count for rank in shards for piece in rank) == sum(NAMES.values())
    states = [(step, state(step)) for step in range(6)]
    for rank, pieces in enumerate(shards):
        for step in (0, 3, 5):
            opening = snapshot(held(state(step), pieces, dtype))
            match = match_snapshot(opening, pieces, states)
            assert (match.status, match.steps_done, match.unexplained_bytes) == ("exact", step, 0)
            other = shards[(rank + 1) % ranks]
            if ranks > 1:
                assert match_snapshot(opening, other, states).status == "unexplained"


def test_one_turned_bit_is_not_a_match() -> None:
    (pieces,) = even_shards(NAMES, 1)
    memory = held(state(2), pieces)
    region, data = memory[0]
    turned = bytes([data[0] ^ 1]) + data[1:]
    match = match_snapshot(snapshot([(region, turned), *memory[1:]]), pieces, [(2, state(2))])
    assert (match.status, match.differing, match.unexplained_bytes) == ("unexplained", ("model/a",), 256)


def test_another_salt_hides_the_same_memory() -> None:
    (pieces,) = even_shards(NAMES, 1)
    one, two = (snapshot(held(state(2), pieces), salt) for salt in (b"\5" * 16, b"\6" * 16))
    assert not set(one.leaves) & set(two.leaves)
    with pytest.raises(Mismatch):
        verify_opening(one, root=two.root(), layout=two.layout_digest())
    forged = replace(one, salt=two.salt)
    assert match_snapshot(forged, pieces, [(2, state(2))]).status == "unexplained"


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.77])
def test_a_torn_snapshot_is_matched_page_by_page(cut: float) -> None:
    (pieces,) = even_shards(NAMES, 1)
    old, new = held(state(4), pieces), held(state(5), pieces)
    left = 4 * int(cut * sum(len(data) for _, data in old) / 4) + 8
    mixed: list[tuple[Region, bytes]] = []
    for (region, a), (_, b) in zip(old, new, strict=True):
        at = min(left, len(b))
        mixed.append((region, b[:at] + a[at:]))
        left -= at
    memory = b"".join(data for _, data in mixed)
    opening = snapshot(mixed)
    states = [(step, state(step)) for step in range(7)]
    match = match_snapshot(opening, pieces, states, lambda start, size: memory[start : start + size])
    assert (match.status, match.steps_done, match.mixed_pages) == ("torn", 4, 1)
    assert match_snapshot(opening, pieces, states).status == "unexplained"  # the mixed page is not opened
    lied = match_snapshot(opening, pieces, states, lambda _, size: bytes(size))
    assert lied.status == "unexplained"  # other bytes than the chip signed
    apart = [(4, state(4)), (6, state(6))]
    assert match_snapshot(opening, pieces, apart).status == "unexplained"


def test_decoy_weights_leave_the_real_ones_unexplained() -> None:
    """Claimed weights in their place, another model beside them: all memory is hashed, so it shows."""
    (pieces,) = even_shards(NAMES, 1)
    decoy = held(state(2), pieces)
    real = (Region("workspace", "RAW", "other", 2800), state(9, seed=1)["model/a"].data)
    match = match_snapshot(snapshot([*decoy, (real[0], bytes(real[1]))]), pieces, [(2, state(2))])
    assert (match.status, match.unexplained_bytes) == ("exact", 2800)
    chip = chip_view({3: ("0" * 64, match)})
    assert [f.rule for f in judge_owner("o", [chip], [], plan=PLAN).findings] == [111]
    generous = judge_owner("o", [chip], [], plan=PLAN, unexplained_limit=0.5)
    assert (
        generous.findings == ()
    )  # the limit: what a reader tolerates as workspace can hide a model of that size


# -- selection --------------------------------------------------------------------------------------

BORDERS = list(range(0, 101, 10))


def test_segments_are_chosen_at_random_next_to_snapshots_and_by_size() -> None:
    changes = {(a, a + 10): float(a == 70) for a in range(0, 100, 10)}
    chosen = choose_segments(
        BORDERS, run=hexed("run"), beacon=b"\1" * 32, random_segments=2, snapshots=[25, 40], changes=changes, largest=1
    )  # fmt: skip
    why = {segment.start: segment.reasons for segment in chosen}
    assert "snapshot" in why[20] and "snapshot" in why[30] and "snapshot" in why[40]
    assert "largest" in why[70]
    assert sum("random" in reasons for reasons in why.values()) == 2


def test_nobody_can_have_the_largest_updates_alone() -> None:
    with pytest.raises(InvalidInput, match="must be random"):
        choose_segments(BORDERS, run=hexed("run"), beacon=b"\1" * 32, random_segments=0, largest=3)


def test_the_random_segments_follow_from_run_and_beacon_alone() -> None:
    picks = {
        tuple(
            s.start for s in choose_segments(BORDERS, run=hexed(r), beacon=bytes([b]) * 32, random_segments=3)
        )
        for r in range(8)
        for b in range(8)
    }
    assert len(picks) > 20
    again = choose_segments(BORDERS, run=hexed("x"), beacon=b"\2" * 32, random_segments=3)
    assert again == choose_segments(BORDERS, run=hexed("x"), beacon=b"\2" * 32, random_segments=3)


def test_segments_whose_data_look_unseen_are_chosen_and_accuse_nobody_once_repeated() -> None:
    def memory(doubtful: bool, power: bool = True) -> RunMemory:
        segments = (
            SegmentMemory(0, 2, 64, 1 if power else 32, 0.2 if power else 1.0, None),
            SegmentMemory(2, 4, 64, 32, 1.0 if doubtful or not power else 0.2, None),
        )
        return RunMemory(segments, ((0.0, 0.5), (0.5, 0.5)), 256)

    chosen = choose_segments(
        [0, 2, 4], run=hexed("run"), beacon=b"\1" * 32, random_segments=1, doubtful=[(2, 4), (0, 4)]
    )
    assert "memory" in {s.start: s.reasons for s in chosen}[2]
    report = made()[0]
    assert judged(report, memory=memory(False)) == ("pass", set())
    assert judged(report, memory=memory(True)) == ("pass", set())  # repeated exactly: the doubt is answered
    ratio = [SegmentOutcome(0, 2, "exact", "match"), SegmentOutcome(2, 4, "ratio", "match")]
    assert judged(report, memory=memory(True), outcomes=ratio) == ("unknown", {113})
    assert judged(report, memory=memory(True, power=False), outcomes=ratio) == ("pass", set())


def test_every_segment_is_chosen_as_often_as_the_others() -> None:
    counts = dict.fromkeys(BORDERS[:-1], 0)
    for number in range(2000):
        beacon = number.to_bytes(32, "big")
        for segment in choose_segments(BORDERS, run=hexed("run"), beacon=beacon, random_segments=1):
            counts[segment.start] += 1
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 30  # chi-square, 9 degrees: 1 in 2000


# -- decisions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "change", "verdict"),
    [
        (0.0, 1.0, "match"),
        (0.09, 1.0, "match"),
        (0.1, 1.0, "match"),
        (0.11, 1.0, "mismatch"),
        (0.0, 0.0, "match"),
        (1e-12, 0.0, "mismatch"),
    ],
)
def test_the_ratio_test_is_relative_to_the_claimed_update(
    distance: float, change: float, verdict: str
) -> None:
    assert judge_ratio(SegmentOutcome(0, 1, "ratio", "", "", distance, change)).verdict == verdict


def test_interpolated_checkpoints_and_infinitesimal_updates_fail_by_their_ratio() -> None:
    """A forger's replay goes its own way: the distance is as large as the claimed update, however small that is."""
    draw = np.random.default_rng(4)
    start, end = draw.standard_normal(1000), draw.standard_normal(1000)
    for pieces in (2, 100, 10**6):
        claimed = (end - start) / pieces
        replayed = np.zeros(1000)  # the logged learning rate is next to nothing
        distance, change = float(np.linalg.norm(claimed - replayed)), float(np.linalg.norm(claimed))
        outcome = judge_ratio(SegmentOutcome(0, 1, "ratio", "", "", distance, change))
        assert outcome.verdict == "mismatch"
        assert distance < 100 / pieces  # an absolute threshold would let enough pieces pass


def logged(events: list[tuple[Event, float]]) -> list[LoggedRecord]:
    log: list[LoggedRecord] = []
    active = 0
    genesis = Genesis("maker", "model", "simulated", bytes(32), "local")
    for event, days in [(genesis, 0.0), *events]:
        active += int(days * DAY_MS)
        clocks = Clocks(
            sum(isinstance(r.record.event, Boot) for r in log) + isinstance(event, Boot),
            active,
            active,
            active,
        )
        previous = log[-1].digest if log else NO_RECORD
        log.append(
            sign_record(Record(len(log), previous, UEID, Firmware(bytes(32), 1), clocks, 100, event), KEY)
        )
    return log


def attested(log: list[LoggedRecord]) -> Attestation:
    last = log[-1]
    head = ChipHead(last.record.seq, last.digest)
    clocks = last.record.clocks
    return Attestation(UEID, b"", head, clocks.boots, clocks.uptime // 1000, False, "simulated")


def chip_view(
    matches: Mapping[int, tuple[str, SnapshotMatch] | None], *, run: bytes = b"", findings: tuple[NumberedFinding, ...] = (),
    precommit: bytes | None = None,
) -> ChipView:  # fmt: skip
    taken = Snapshot(256, 23, 5800, bytes(32), bytes(32), run)
    first: Event = LoggedPrecommit(precommit) if precommit is not None else LoggedPrecommit(b"\1" * 32)
    log = logged([(Boot(bytes(16)), 0.0), (first, 0.0), (taken, 1.0)])
    return ChipView(UEID.hex(), log, findings, Assurance(0, ()), matches, attested=attested(log))


GOOD = SnapshotMatch("exact", 2, (), 0, 0, 5800)
PLAN = ObservationPlan(100, 0, DAY_MS)


def evidence(report: RunReport, **more: object) -> RunEvidence:
    outcomes = [SegmentOutcome(0, 2, "exact", "match"), SegmentOutcome(2, 4, "exact", "match")]
    usual: dict[str, object] = {"problem": None, "outcomes": outcomes, "initial": 0.0, "flop_counted": 1000}
    return RunEvidence(report, **(usual | more))  # pyright: ignore[reportArgumentType]


def judged(report: RunReport, chip: ChipView | None = None, **more: object) -> tuple[str, set[int]]:
    shown = chip or chip_view(
        {3: (report.run, GOOD)}, precommit=report.precommit.digest(), run=report.precommit.digest()
    )
    verdict = judge_run(evidence(report, **more), {shown.ueid: shown}, Plausibility(1e3))
    return verdict.correct, {f.rule for f in verdict.findings if f.severity != "note"}


def test_an_honest_run_passes() -> None:
    assert judged(made()[0]) == ("pass", set())


def test_a_pre_commitment_behind_the_runs_own_snapshot_was_made_afterwards() -> None:
    """Everything that it commits to could be chosen then; it passed with a note."""
    report, _, _ = made()
    digest = report.precommit.digest()
    taken = Snapshot(256, 23, 5800, bytes(32), bytes(32), b"")
    log = logged([(Boot(bytes(16)), 0.0), (taken, 1.0), (LoggedPrecommit(digest), 1.0)])
    late = ChipView(UEID.hex(), log, (), Assurance(0, ()), {2: (report.run, GOOD)}, attested=attested(log))
    assert 102 in judged(report, late)[1]
    first = replace(GOOD, steps_done=0)  # of the first weights nothing is said
    assert 102 not in judged(report, replace(late, matches={2: (report.run, first)}))[1]


def test_another_run_announced_meanwhile_takes_no_time_from_a_run() -> None:
    report, _, _ = made()
    digest, other = report.precommit.digest(), LoggedPrecommit(b"\2" * 32)
    taken = Snapshot(256, 23, 5800, bytes(32), bytes(32), digest)
    events: list[tuple[Event, float]] = [
        (Boot(bytes(16)), 0.0),
        (LoggedPrecommit(digest), 0.0),
        (other, 1.0),
        (taken, 2.0),
        (other, 1.0),
        (taken, 4.0),
    ]
    log = logged(events)
    day = DAY_MS / 1000.0
    assert seconds_used(log, digest, {4}) == pytest.approx((day, 4 * day))
    assert seconds_used(log, digest, set()) == pytest.approx((day, day))
    assert seconds_used(log, b"\3" * 32, {4}) == (0.0, 0.0)


def test_hours_by_a_meter_bound_what_a_run_must_have_used() -> None:
    report, _, _ = made()
    chip = chip_view({}, precommit=report.precommit.digest())
    limit = Plausibility(1e3, least_utilisation=0.2)
    for hours, severities in ((None, {"unknown"}), (24.0, {"violation"}), (0.0, set())):
        plan = replace(PLAN, use={} if hours is None else {chip.ueid: hours})
        found = judge_run(evidence(report), {chip.ueid: chip}, limit, plan).findings
        assert {f.severity for f in found if f.rule == 109} == severities


def test_one_chip_in_two_ranks_has_its_time_once() -> None:
    report, _, _ = made()
    twice = replace(report, precommit=replace(report.precommit, ranks=(UEID.hex(), UEID.hex())))
    chip = chip_view({}, precommit=twice.precommit.digest())
    limit = Plausibility(1000.0 / (1.5 * 86400.0))
    assert 109 in {f.rule for f in judge_run(evidence(twice), {chip.ueid: chip}, limit).findings}


def test_a_chip_of_the_run_that_was_not_shown_leaves_the_run_unknown() -> None:
    found = judge_run(evidence(made()[0]), {})
    assert (found.correct, [(each.rule, each.severity) for each in found.findings]) == (
        "unknown",
        [(102, "unknown")],
    )


def test_each_false_statement_has_its_rule() -> None:
    report, _, _ = made()
    late = chip_view({}, precommit=b"\2" * 32)
    assert judged(report, late) == ("fail", {102, 109})
    assert judged(report, problem="commits to another run") == ("fail", {101})
    assert judged(report, outcomes=[]) == ("unknown", {105})
    assert judged(report, outcomes=[SegmentOutcome(0, 2, "exact", "mismatch", "x")]) == ("fail", {105})
    assert judged(report, outcomes=[SegmentOutcome(0, 2, "exact", "cannot_reproduce")]) == ("unknown", {105})
    assert judged(report, initial=0.3) == ("fail", {107})  # false initialisation; also "it is only the init"
    assert judged(report, initial=None) == ("unknown", {107})
    assert judged(report, flop_counted=2000) == ("fail", {108})
    assert judged(report, other_setting="lr is 0.08, the job's own is 0.02") == ("fail", {114})
    assert judged(report, initial=1e-6) == ("fail", {107})  # one weight of a million
    seconds = 86_400  # of the chip, which does a thousand FLOP in each: as many may be stated, and no more
    for flop, found in ((seconds * 1000, set[int]()), (seconds * 1000 + 1, {109})):
        stated = replace(report, totals=Totals(flop, 1, 1))
        assert judged(stated, flop_counted=flop)[1] == found
    much = replace(report, totals=Totals(10**12, 1, 1))
    assert judged(much, flop_counted=10**12) == ("fail", {109})  # more than the chips can have done
    online = replace(report, precommit=replace(report.precommit, data=None))
    assert 104 in judged(online)[1]


def test_time_on_chips_that_the_declared_run_does_not_need_is_noticed() -> None:
    report, _, _ = made()
    chip = chip_view({}, precommit=report.precommit.digest())
    idle = judge_run(evidence(report), {chip.ueid: chip}, Plausibility(1e3, least_utilisation=0.2))
    assert {f.rule for f in idle.findings} >= {109}


def test_many_short_runs_must_lead_back_to_an_initialisation() -> None:
    parent = made("a")[0]
    second = made("b", lineage=Lineage("continued", parent.run, STEPS))[0]
    assert judged(second, initial=None, parent_state=True) == ("pass", set())
    assert judged(second, initial=None, parent_state=False) == ("fail", {106})
    assert judged(second, initial=None, parent_state=None) == ("unknown", {106})
    with pytest.raises(InvalidInput, match="names its parent"):
        Lineage("continued")


def test_unexplained_and_hidden_snapshots_are_found() -> None:
    run = made()[0].run
    assert judge_owner("o", [chip_view({3: (run, GOOD)})], [], plan=PLAN).complete == "pass"
    silent = judge_owner("o", [chip_view({3: None})], [], plan=PLAN)
    assert (silent.complete, silent.verdict, {f.rule for f in silent.findings}) == ("fail", "fail", {110})
    doubtful = replace(chip_view({3: None}), doubtful=frozenset({3}))
    assert judge_owner("o", [doubtful], [], plan=PLAN).complete == "unknown"
    cut = chip_view({3: (run, GOOD)}, findings=(NumberedFinding(11, "truncated", 9, "x"),))
    assert judge_owner("o", [cut], [], plan=PLAN).complete == "fail"
    assert judge_owner("o", [], []).verdict == judge_owner("o", [], []).complete == "unknown"
    for unexplained, complete in ((0, "pass"), (1, "fail")):
        some = replace(GOOD, unexplained_bytes=unexplained)
        assert judge_owner("o", [chip_view({3: (run, some)})], [], plan=PLAN).complete == complete
    assert (
        judge_owner("o", [chip_view({3: (run, GOOD)})], [], plan=PLAN).fleet == "unknown"
    )  # never a transcript's to say


def test_a_swap_before_a_scheduled_snapshot_is_a_gamble() -> None:
    """Weights swapped for a share of the time are seen in that share of the snapshots: the times cannot be foreseen."""
    draw = random.Random(9)
    hidden_share, caught, fleets, snapshots = 0.25, 0, 2000, 8
    for _ in range(fleets):
        caught += any(draw.random() < hidden_share for _ in range(snapshots))
    expected = 1 - (1 - hidden_share) ** snapshots
    assert abs(caught / fleets - expected) < 5 * math.sqrt(expected * (1 - expected) / fleets)


def test_an_empty_snapshot_counts_in_the_middle_of_a_run_only() -> None:
    empty = Snapshot(256, 0, 0, bytes(32), bytes(32), b"\1" * 32)
    full = replace(empty, pages=23, size=5800)
    first: list[tuple[Event, float]] = [(Boot(bytes(16)), 0.0), (LoggedPrecommit(b"\1" * 32), 0.0)]

    def severity(taken: list[Snapshot], hours: float = 48.0) -> set[tuple[int, str]]:
        log = logged([*first, *((event, 1.0) for event in taken)])
        matches = {3 + at: (("0" * 64, GOOD) if event.size else None) for at, event in enumerate(taken)}
        chip = ChipView(UEID.hex(), log, (), Assurance(0, ()), matches, attested=attested(log))
        plan = ObservationPlan(100, 0, len(taken) * DAY_MS, {UEID.hex(): hours})
        return {(f.rule, f.severity) for f in judge_owner("o", [chip], [], plan=plan).findings}

    assert severity([empty, full, full, empty]) == {(112, "note")}
    assert severity([full, empty, full]) == {(112, "unknown")}
