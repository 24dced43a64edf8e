"""Memorisation of claimed data, on real runs: what was trained on is found, what was not is doubted, and what cannot be seen."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tallystick.cli.main import main
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.job import Batch, find_source
from tallystick.fleet.provenance.memorisation import (
    MemoryLosses,
    RunMemory,
    judge_memory,
    smallest_detectable,
)
from tallystick.fleet.provenance.transcripts import Lineage, Precommit, RunReport, Totals
from tallystick.fleet.provenance.verification import OwnerVerdict, RunEvidence, RunVerdict
from tallystick.integrations.memorising import measure_memory
from tallystick.integrations.run_replayer import RunReplayer
from tallystick.numerics.policy import find_policy
from tallystick.reports.layout import Page
from tallystick.reports.memorisation import MemoryReport
from tallystick.reports.monitoring import FleetReport, OwnerReport
from tallystick.reports.webpage import html
from tallystick.roles.trainer import Order
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import claim_other_data, forge
from tallystick.testing.noise_job import noise

BEACON = bytes(range(32))
# Segments long enough, and steps small enough, that a segment is learned well beyond what the bound asks for: training to
# memorise magnifies the last bit of the arithmetic, so a share near the threshold falls on another side on every processor.
SEGMENT, STEPS, RECORDS = 8, 48, 64
SETTINGS = {"steps": str(STEPS), "segment": str(SEGMENT), "batch": str(RECORDS), "learning_rate": "0.015"}
Trained = Callable[[Callable[[int], Batch], int], Batch]


def order() -> Order:
    source = find_source("tallystick.testing.noise_job")
    return Order(source, SETTINGS, find_policy("fp32"), steps=STEPS, checkpoint_every=SEGMENT)


def honest(batch: Callable[[int], Batch], step: int) -> Batch:
    return batch(step)


def nothing_of_it(batch: Callable[[int], Batch], step: int) -> Batch:
    """Data added to the claim: segment 2 was trained on other records."""
    return noise(RECORDS, 1, step) if step // SEGMENT == 2 else batch(step)


def half_of_it(batch: Callable[[int], Batch], step: int) -> Batch:
    """Half of the records of segment 2 were never used; the other half stands twice."""
    vectors, labels = batch(step)
    if step // SEGMENT != 2:
        return vectors, labels
    return torch.cat([vectors[::2]] * 2), torch.cat([labels[::2]] * 2)


def later(batch: Callable[[int], Batch], step: int) -> Batch:
    """Segments 2 and 4 were trained in each other's place."""
    places = {2: 4, 4: 2}
    return batch(places.get(step // SEGMENT, step // SEGMENT) * SEGMENT + step % SEGMENT)


def with_hidden(batch: Callable[[int], Batch], step: int) -> Batch:
    """Data subtracted from the claim: as many records again were trained on and are not claimed."""
    vectors, labels = batch(step)
    others = noise(RECORDS, 2, 1 + step // SEGMENT)
    return torch.cat([vectors, others[0]]), torch.cat([labels, others[1]])


@pytest.fixture(scope="module")
def remembered(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Trained], tuple[RunDirectory, RunMemory]]:
    @functools.cache
    def made(trained: Trained) -> tuple[RunDirectory, RunMemory]:
        directory = RunDirectory(tmp_path_factory.mktemp(trained.__name__) / "run")
        claim_other_data(order(), directory, trained)
        return directory, judge_memory(measure_memory(replayer(directory), beacon=BEACON))

    return made


def replayer(directory: RunDirectory) -> RunReplayer:
    return RunReplayer(directory, order().source)


Remembered = Callable[[Trained], tuple[RunDirectory, RunMemory]]


def test_data_that_were_trained_on_are_found_in_their_segment(remembered: Remembered) -> None:
    _, memory = remembered(honest)
    assert memory.has_power and memory.doubtful == ()
    for at, row in enumerate(memory.below):
        assert min(row) + 0.05 >= row[at]  # diagonal dominance
        assert all(0.25 < share < 0.75 for share in row[:at])  # before they are trained on, as unseen
    assert all(segment.most_unseen < 0.5 for segment in memory.segments)


def test_data_added_to_the_claim_are_doubted_and_only_they(remembered: Remembered) -> None:
    _, memory = remembered(nothing_of_it)
    assert memory.has_power
    assert [(s.start, s.end) for s in memory.doubtful] == [(16, 24)]
    (doubtful,) = memory.doubtful
    assert doubtful.most_unseen > 0.9 and doubtful.learned is None


def test_half_of_a_segments_data_is_doubted(remembered: Remembered) -> None:
    _, memory = remembered(half_of_it)
    assert [s.start for s in memory.doubtful] == [16]
    assert 0.25 <= memory.doubtful[0].below / RECORDS * 2 <= 0.75  # k p of it falls below: k is a half


def test_data_trained_in_another_place_are_found_there(remembered: Remembered) -> None:
    _, memory = remembered(later)
    assert {(s.start, s.learned) for s in memory.doubtful} == {(16, (32, 40)), (32, (16, 24))}


def test_data_subtracted_from_the_claim_do_not_show_but_repetition_shows_them(remembered: Remembered) -> None:
    """The limit of this test: twice the data were trained on. Exact repetition is what convicts."""
    directory, memory = remembered(with_hidden)
    assert all(
        row[at] < 0.3 for at, row in enumerate(memory.below)
    )  # what is claimed is remembered all the same
    assert replayer(directory).repeat(16, 24).verdict == "mismatch"


def test_the_doubted_segment_is_the_one_that_repetition_convicts(remembered: Remembered) -> None:
    directory, _ = remembered(nothing_of_it)
    again = replayer(directory)
    assert [again.repeat(at, at + SEGMENT).verdict for at in (0, 16)] == ["match", "mismatch"]


def test_data_with_much_in_common_give_no_power_and_accuse_nobody(tmp_path: Path) -> None:
    from tallystick.roles.trainer import record

    directory = RunDirectory(tmp_path / "run")
    source = find_source("digits")
    settings = {"width": "4", "batch": "16", "steps": "20"}
    record(Order(source, settings, find_policy("fp32"), steps=20, checkpoint_every=10), directory)
    memory = judge_memory(measure_memory(RunReplayer(directory, source), beacon=BEACON, records=32))
    assert not memory.has_power and memory.doubtful == ()


def test_other_data_than_the_records_name_are_refused(remembered: Remembered, tmp_path: Path) -> None:
    directory, _ = remembered(honest)
    copy = RunDirectory(tmp_path / "run")
    import shutil

    shutil.copytree(directory.path, copy.path)
    forge(copy, lambda r: r if r.step != 9 else type(r)(**{**vars(r), "batch": "0" * 64}))
    with pytest.raises(Mismatch, match="step 9: the job's data are"):
        measure_memory(replayer(copy), beacon=BEACON)


def test_the_command_tells_found_from_doubtful(
    remembered: Remembered, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beacon = ["--beacon", BEACON.hex(), "--job", "tallystick.testing.noise_job"]
    for trained, code, verdict in ((honest, 0, "confirmed"), (nothing_of_it, 3, "doubtful")):
        directory, _ = remembered(trained)
        picture = tmp_path / f"{verdict}.svg"
        assert (
            main(["monitor", "memory", str(directory.path), *beacon, "--json", "--svg", str(picture)]) == code
        )
        assert json.loads(capsys.readouterr().out)["verdict"] == verdict
        assert (
            picture.read_text().startswith("<svg ") and picture.read_text().count("<rect") == 1 + 36 + 5
        )  # paper, cells, scale
    assert main(["monitor", "memory", str(directory.path), "--beacon", "12"]) == 2
    assert main(["monitor", "memory", str(directory.path), *beacon, "--records", "4"]) == 2
    assert main(["monitor", "memory", str(tmp_path / "none"), *beacon]) == 2


def test_the_page_shows_the_matrix_its_scale_and_the_power() -> None:
    memory = judge_memory(learned_but_for_half_of_one(segments=6, doubted=2))
    assert [s.below for s in memory.segments] == [0, 0, 16, 0, 0, 0]
    assert [s.start for s in memory.doubtful] == [2 * SEGMENT]
    shown = section(memory)
    assert "The test has power on this data: 5 of 6 segments confirmed. With 64 records" in shown
    assert f"its bound is {100 * memory.least_bound:.3g} % at best" in shown
    assert "0.5-quantile of 256 records" in shown and "repeat those segments" in shown
    for segment in memory.segments:
        assert f"<td>{segment.below} of 64 ({100 * segment.below / 64:.3g} %)</td>" in shown
    cells = re.findall(r'text-anchor="middle" style="fill:#(?:222222|ffffff)">(\d+)</text>', shown)
    assert [int(cell) for cell in cells] == [round(100 * part) for row in memory.below for part in row]
    assert "50 and more: looks unseen" in shown and shown.count('class="s1"') == 6  # each segment's own place
    page = FleetReport([owner_report(memory)], 1.0, "here", {}).page().decode()
    assert shown in page
    assert "<script" not in page and "Was not asked for" not in page
    assert "Was not asked for" in FleetReport([owner_report(None)], 1.0, "here", {}).page().decode()


def test_a_test_without_power_says_so_on_the_page() -> None:
    memory = judge_memory(drawn(0.0, 1))
    assert not memory.has_power
    shown = section(memory)
    assert "No power on this data: 0 of 1 segment confirmed" in shown and 'class="good"' not in shown


def test_long_names_of_steps_stand_on_end_and_a_long_run_is_cut_openly() -> None:
    losses = drawn(1.0, 1)
    claimed, unseen = np.repeat(losses.claimed[0], 22, axis=0), np.repeat(losses.unseen, 22, axis=0)
    many = judge_memory(MemoryLosses(tuple(range(100_000, 100_044)), (claimed,) * 43, unseen))
    picture = MemoryReport("ab" * 32, many).svg()
    assert picture.count("rotate(-90") == 40 + 1 and "the first 40 of 43 segments" in picture


def section(memory: RunMemory) -> str:
    """Return the part of a page that speaks of one run's memory."""
    whole = html(Page("", "", MemoryReport("12" * 32, memory).parts()))
    return whole.partition("</header>\n")[2].partition("</body>")[0]


def owner_report(memory: RunMemory | None) -> OwnerReport:
    verdict = OwnerVerdict(
        "owner", "unknown", "pass", "unknown", 0, (RunVerdict("12" * 32, "unknown", ()),), (), ("memory",)
    )
    report = RunReport(
        "12" * 32,
        24,
        Precommit("0" * 64, None, (), "0" * 64, Lineage("initialised")),
        "0" * 64,
        (),
        Totals(1, 1, 1),
    )
    return OwnerReport(verdict, [], [RunEvidence(report, None, memory=memory)])


# -- the decision alone --------------------------------------------------------------------------------


def drawn(share_trained: float, seed: int, gain: float = 3.0, records: int = 64) -> MemoryLosses:
    """Losses of one segment, of whose records a share got better by ``gain`` deviations."""
    chance = np.random.default_rng(seed)
    before, unseen = chance.normal(size=records), chance.normal(size=(1, 256))
    change = chance.normal(size=records) - gain * (chance.random(records) < share_trained)
    return MemoryLosses(
        (0, 4),
        (np.stack([before, before + change]),),
        np.concatenate([unseen, unseen + chance.normal(size=(1, 256))]),
    )


def learned_but_for_half_of_one(segments: int, doubted: int) -> MemoryLosses:
    """Losses with a known answer: every segment learns all of its records, ``doubted`` every other one of them.

    What nobody learns is spread evenly around no change, and half of it lies below the unseen records' median.
    """
    even = np.linspace(-1.0, 1.0, RECORDS)
    unseen = np.outer(np.arange(segments + 1), np.linspace(-1.0, 1.0, 4 * RECORDS))
    claimed: list[np.ndarray] = []
    for own in range(segments):
        losses = np.outer(np.arange(segments + 1), even)
        learned = np.arange(RECORDS) % 4 < 2 if own == doubted else np.ones(RECORDS, dtype=bool)
        losses[own + 1 :, learned] -= 10.0
        claimed.append(losses)
    return MemoryLosses(tuple(SEGMENT * at for at in range(segments + 1)), tuple(claimed), unseen)


@pytest.mark.parametrize("unseen", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_bound_holds_as_often_as_it_says(unseen: float) -> None:
    wrong = sum(
        judge_memory(drawn(1 - unseen, seed), false_alarm=0.05).segments[0].most_unseen < unseen
        for seed in range(300)
    )
    assert wrong <= 0.05 * 300 + 3 * (300 * 0.05 * 0.95) ** 0.5


def test_no_bound_is_better_than_that_of_no_record_below() -> None:
    found = judge_memory(drawn(1.0, 1, gain=50.0)).segments[0]
    assert found.below == 0 and found.most_unseen == smallest_detectable(64, 1)
    assert smallest_detectable(256, 1) < smallest_detectable(64, 1) < smallest_detectable(64, 6) < 0.2


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (((0,), (), np.zeros((1, 9))), "1 states"),
        (((0, 1), (np.zeros((2, 7)),), np.zeros((2, 9))), "segment 0 have shape"),
        (((0, 1), (np.zeros((2, 9)),), np.zeros((3, 9))), "unseen have shape"),
        (((0, 1), (np.full((2, 9), np.nan),), np.zeros((2, 9))), "not finite"),
    ],
)
def test_losses_that_do_not_fit_are_refused(losses: tuple[object, ...], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        MemoryLosses(*losses)  # pyright: ignore[reportArgumentType]
