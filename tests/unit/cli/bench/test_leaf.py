"""The bench's part leaf: entries are counted from shapes, both forms of a log are measured, misses are seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tallystick.execution.determinism import Profile
from tallystick_bench.leaf import entries, halving_score, log_forms
from tallystick_bench.rows import leaf_correction_rows, leaf_entry_rows, leaf_form_rows
from tallystick_bench.training import Bench


def test_the_paper_s_jobs_log_as_many_entries_as_derived() -> None:
    """GPT-2: the attention's dropout is a function in today's transformers; counted as the module that it was."""
    found = entries()
    assert found["resnet50"] == {"forward": 523_240_064, "backward": 523_371_136}
    pytest.importorskip("transformers")
    gpt2 = found["gpt2"]
    assert gpt2["backward"] + gpt2["attention_dropout"] // 2 == 100_735_992
    assert sum(gpt2.values()) == pytest.approx(2.110e8, rel=1e-3)


def test_an_entry_count_that_is_not_the_derived_one_is_not_met() -> None:
    rows = leaf_entry_rows({"resnet50": {"forward": 523_240_064, "backward": 523_371_136}})
    assert rows[-1].verdict == "met"
    less = leaf_entry_rows({"resnet50": {"forward": 523_240_064, "backward": 0}})
    assert less[-1].verdict == "not met"


def test_both_forms_of_a_log_are_measured_forward_and_backward_apart() -> None:
    found = log_forms("digits", 32, "0.25", steps=1, settings={"width": "4", "batch": "8"})
    for way in ("forward", "backward"):
        sizes = found["sizes"][way]
        assert sizes["dense"] >= sizes["elements"] / 5
        assert sizes["entries"] > 0.1 * sizes["elements"], (
            "a quarter of a quantum on either side of each boundary"
        )
        assert 0 < sizes["dense_zlib"] <= 1.01 * sizes["dense"] + 64
    rows = leaf_form_rows("digits", 32, "0.25", found)
    assert len(rows) == 8
    dense = {row.measure: row.value for row in rows}["b_r 32, tau 0.25, forward: dense"]
    assert dense == pytest.approx(1.6, abs=0.01)


def test_counts_that_do_not_halve_are_not_met() -> None:
    good = [400, 195, 103, 50, 26, 12, 5]
    assert halving_score(good) < 4.0
    bad = [400, 390, 380, 370, 360, 350, 340]
    for counts, verdict in ((good, "met"), (bad, "not met")):
        found = [{"b_r": 32 - i, "corrections": count} for i, count in enumerate(counts)]
        assert leaf_correction_rows(found, halving_score(counts))[-1].verdict == verdict


def test_the_part_counts_entries_and_corrections_once_and_forms_for_each_job(tmp_path: Path) -> None:
    forms = {way: {"elements": 10, "entries": 1, "sparse": 2, "sparse_zlib": 3, "dense": 2, "dense_zlib": 4}
             for way in ("forward", "backward")}  # fmt: skip
    answers = {
        "entries": {"resnet50": {"forward": 523_240_064, "backward": 523_371_136}},
        "corrections": {"found": [{"b_r": 32, "corrections": 9}], "score": 0.0},
        "forms": {"sizes": forms, "thresholds": {}},
    }
    asked: list[str] = []

    def child(arguments: Sequence[str], profile: Profile) -> dict[str, Any]:
        asked.append(arguments[2])
        return answers[arguments[2]]

    rows = Bench(tmp_path, lambda _: None, jobs=["digits", "text"], child=child).run(["leaf"])
    assert asked == ["entries", "corrections", *["forms"] * 8]
    assert {row.policy for row in rows} == {"leaf"}
    assert len(rows) == 3 + 2 + 2 * 4 * 8
    assert all(row.passes for row in rows)
