"""Every script in attacks/ catches its cheat, under both policies where the policy matters."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.numerics.policy import find_policy
from tallystick.testing.attacks import NotCaught

FOLDER = Path(__file__).resolve().parents[2] / "attacks"
SHARED = {
    "stage",
    "court",
    "forgery",
    "steering",
    "backdoor",
    "gated_job",
    "layer_drop_job",
    "lender_job",
    "own_labels_job",
    "preference_job",
    "framed_job",
    "margin_job",
    "scanner_job",
    "wide_job",
    "dropped_job",
    "phase_job",
    "silencing",
    "table_job",
    "saddle_job",
    "reference_job",
    "unused_expert_job",
    "adamw_job",
    "masked_samples_job",
    "tied_signs_job",
    "harder_half_job",
    "near_job",
    "zero_head_job",
    "resting_job",
}  # what the scripts have in common
STEERED = {  # minutes each, and of their own form: run by hand
    "wide_bands_backdoor", "backdoor_by_moves", "flipped_gates", "lifted_scales", "inflated_output",
    "silenced_parameters", "combined_steering", "spread_moves", "steered_statistics", "unmeasured_layer",
}  # fmt: skip
ATTACKS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in SHARED | STEERED | {"led_buffer"})
ALSO_FP64 = {
    "always_silent",
    "coarse_quanta",
    "edited_weights",
    "forged_entry",
    "heard_noise",
    "other_form",
    "own_labels",
    "saddle",
    "steered_log",
    "wide_band",
    "wide_scale",
}
CASES = [(path, "fp32") for path in ATTACKS] + [(path, "fp64") for path in ATTACKS if path.stem in ALSO_FP64]
CASES += [
    (FOLDER / name, "bf16")
    for name in ("steered_log.py", "chosen_grids.py", "led_buffer.py", "own_labels.py")
]
# Whose other policy, or siblings, run in CI: only `make test-slow` runs these.
SLOW = {
    ("own_labels", "fp64"), ("own_labels", "bf16"), ("coarse_quanta", "fp64"), ("led_buffer", "bf16"), ("always_silent", "fp64"),
    *((name, "fp32") for name in (  # minutes each
        "chosen_quanta", "chosen_silence", "coarse_quanta", "last_silence", "late_silence", "lucky_measurement", "moved_once",
        "own_labels", "silence_by_size", "table_silence", "turned_in_loops", "turned_ties", "zero_when_measured",
    )),
    *((name, "fp32") for name in (  # in CI among the cheats
        "edited_weights", "forged_entry", "lying_auditor", "other_data", "other_rate", "poisoned_label", "skipped_steps",
    )),
    *((name, "fp32") for name in (  # ten seconds each, whose limits unit tests hold
        "forged_list", "invented_list", "replayed_moves", "second_list", "unopened_state",
        "always_silent", "bought_off_as_noise", "chosen_floors", "heard_noise", "other_form", "saddle", "turned_zeros",
        "zeroed_buffer",
    )),
}  # fmt: skip
# Who notices, or loses, in the words of each script; of all others it is the trainer that loses.
LED = {
    "always_silent",
    "chosen_silence",
    "late_silence",
    "saddle",
    "silence_by_size",
    "table_silence",
    "turned_ties",
}
"""Not accepted for where the log's choices led either, whatever was noticed first."""
BY = {
    "altered_proofs": "the verifier", "back_dated_log": "the reader", "clock_games": "the rules of the game",
    "chosen_floors": "by notes: led by", "heard_noise": "the audit",
    "always_silent": "not_accepted: step ",
    "moved_once": "quality.weight: way that the log's choices led it", "chosen_silence": "not_accepted: step ",
    "zero_when_measured": "of the patched images win, not_accepted: step",
    "silence_by_size": "not_accepted: step ", "late_silence": "not_accepted: step ",
    "last_silence": "not_accepted: step 500: gradient right.0: nothing but noise, and silenced",
    "lucky_measurement": "the policy's own schedule", "coarse_quanta": "the auditor's own bands",
    "chosen_quanta": "the floors that follow from the gradients' sizes",
    "turned_in_loops": "mined: not_accepted: step 0: decisions moved that a repetition of the step does not come to",
    "turned_ties": "way that the log's choices led it, over the way trained",
    "turned_zeros": "that lie exactly on their switching point for what they are",
    "table_silence": "not_accepted: step ", "saddle": "not_accepted: step ",
    "unseen_wide": "the audit: not_accepted: step 1: gradient right.0: 2**-10; accepted is a band of",
    "chosen_rows": "the audit: not_accepted: step 0: step 0: gradient of first: 100; accepted is 1 scales",
    "chosen_grids": "the audit: for_each_element: log_violation",
    "own_labels": "plain: the audit: not_accepted: step",
    "led_buffer": "the audit: not_accepted: step 1: model/buffer/mean",
    "delivered_file": "audit: checkpoint after", "invented_rank": "audit, which repeats one rank",
    "other_beginning": "audit, which says no match: model/buffer/importance",
    "frozen_between_samples": "model/1.weight: the job does not train it",
    "false_objection": "judge: auditor loses", "flooding_auditor": "auditor loses", "forged_record": "the reader of the record",
    "invented_list": "to whom nothing shows that the trainer made the list", "replayed_moves": "the reader of the bundle",
    "lying_auditor": "judge: auditor loses", "other_chunk_size": "the verifier", "proof_of_another_run": "the verifier",
    "rewritten_log": "witness", "steered_log": "the audit, which accepts no such log", "swapped_statements": "the reader",
    "zeroed_buffer": "of one that does not move there, not_accepted: step 0: buffer model/buffer/gone, of no values",
    "two_answers": "the reader of the bundle", "unopened_state": "the judge, who takes no state",
}  # fmt: skip


@pytest.fixture(autouse=True)
def beside_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    # A job beside them that is repeated refuses whatever its run does not state, of modules imported after it.
    for path, _ in CASES:
        importlib.import_module(path.stem)


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if (case[0].stem, case[1]) in SLOW else case
        for case in CASES
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_an_attack_is_caught(path: Path, policy: str, tmp_path: Path) -> None:
    attack = importlib.import_module(path.stem).attack
    stage = importlib.import_module("stage").Stage(tmp_path, policy)

    quiet = (path.stem, policy) == ("steered_log", "fp64")  # there is next to nothing to choose
    said = attack(stage)
    assert ("the bound, not a verdict" if quiet else BY.get(path.stem, "trainer loses")) in said
    if path.stem in LED:
        assert float(said.rpartition("; led ")[2]) > find_policy(policy).most_path


@pytest.mark.slow
def test_noise_that_is_heard_where_it_suits_leads_where_the_auditor_does_not(tmp_path: Path) -> None:
    script, stage = importlib.import_module("chosen_silence"), importlib.import_module("stage")

    said = script.attack(stage.Stage(tmp_path, "fp32"), apart=script.NEARER, hears=True)

    assert "not_accepted: step " in said
    assert float(said.rpartition("; led ")[2]) > 2.0**-4


@pytest.mark.slow
def test_a_gradient_that_is_zero_where_noise_is_measured_may_not_stay_silent_in_the_whole_run(
    tmp_path: Path,
) -> None:
    script, stage = importlib.import_module("zero_when_measured"), importlib.import_module("stage")

    assert "not_accepted: step " in script.attack(stage.Stage(tmp_path, "fp32"), script.LIKED)


@pytest.mark.slow
def test_a_row_of_a_large_table_may_not_be_led_by_all_of_its_way(tmp_path: Path) -> None:
    script, stage = importlib.import_module("table_silence"), importlib.import_module("stage")

    said = script.attack(stage.Stage(tmp_path, "fp32"), script.SETTINGS["row"])
    assert "not_accepted: step " in said
    assert float(said.rpartition("; led ")[2]) > 2.0**-4


def test_an_attack_that_nobody_notices_is_told_apart(tmp_path: Path) -> None:
    """The control: the same honest parties, and nothing to notice."""
    stage = importlib.import_module("stage")
    here = stage.Stage(tmp_path, "fp32")

    with pytest.raises(NotCaught, match="the audit says match"):
        here.caught_by_audit_and_dispute(here.honest_run(), step=7, verdicts={"mismatch"})


@pytest.mark.parametrize(
    ("script", "arguments", "code", "said"),
    [
        ("clock_games.py", [], 0, "caught by: "),
        ("clock_games.py", ["--policy", "fp16"], 2, ""),
        ("clock_games.py", ["--keep", "/"], 2, ""),
    ],
)
def test_a_script_says_how_it_ended(script: str, arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(said)
