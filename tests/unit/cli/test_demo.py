from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tallystick.cli.demo import CHEATS, Caught, Show
from tallystick.cli.plain import main as plain_main

RUN = {
    "steps": 300, "parameters": 48_202, "policy": "fp32", "root": "ab" * 32, "seconds": {"step": 9.0},
    "log_bytes_per_step": 712.5, "log_bits_per_parameter_step": 0.0302,
}  # fmt: skip
AUDIT = {
    "verdict": "match",
    "differing_elements": 0,
    "freedom": {"fraction": 0.002},
    "seconds": {"step": 10.0, "total": 12.0},
}


def show(**changes: object) -> Show:
    caught = [
        Caught(cheat, cheat.at, {"loser": cheat.liar, "step": cheat.at, "rounds": 7, "reason": "r"})
        for cheat in CHEATS
    ]
    fields = {
        "run": RUN, "audit": AUDIT, "plain_seconds": 3.0, "weights": 48_202, "differing": 43_333, "caught": caught,
        **changes,
    }  # fmt: skip
    return Show(Path("/somewhere/that/is/long"), "sse4,threads=1", **fields)


def printed(page: Show) -> str:
    file = io.StringIO()
    Console(file=file, width=80, markup=False, highlight=False).print(page)
    return file.getvalue()


def test_the_summary_fits_80_columns_and_says_everything_that_was_found() -> None:
    text = printed(show())

    assert max(map(len, text.splitlines())) <= 80
    for part in ("found identical to the last bit", "43,333 of 48,202 weights differ (89.9 %)", "0 differ"):
        assert part in text
    assert text.count("caught") == 3
    assert "recording 3.0, auditing 3.3 times the plain loop" in text


def test_a_cheat_found_at_another_step_is_not_caught() -> None:
    right = show()
    wrong = show(caught=[Caught(CHEATS[0], 27, {"loser": "trainer", "step": 28, "rounds": 7, "reason": "r"})])

    assert right.is_right
    assert not wrong.is_right
    assert "NOT CAUGHT" in printed(wrong)


def test_an_audit_that_does_not_match_is_no_success() -> None:
    page = show(audit={**AUDIT, "verdict": "cannot_reproduce"})

    assert not page.is_right
    assert "honest run: cannot_reproduce" in printed(page)


def test_a_control_without_difference_is_named() -> None:
    assert "nothing was put to the test" in " ".join(printed(show(differing=0)).split())


def test_every_staged_cheat_is_in_the_kit_with_the_same_liar() -> None:
    from tallystick.testing import cheats

    for staged in CHEATS:
        assert cheats.CHEATS[staged.name](staged.at).liar == staged.liar


def test_the_demo_does_not_write_into_a_directory_that_holds_something(tally, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")

    answer = tally("demo", "--keep", tmp_path)

    assert answer.code == 2
    assert "exists and is not empty" in answer.err
    assert tally("demo", "digits").code == 2


def test_the_plain_loop_begins_with_the_committed_weights_and_ends_elsewhere(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from tallystick.store.files import RunDirectory

    assert plain_main([str(recorded), str(tmp_path / "out")]) == 0
    assert float(capsys.readouterr().out) > 0.0
    weights = np.fromfile(tmp_path / "out", dtype="<f4")
    state = RunDirectory(recorded).load_checkpoint(6)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    recorded_weights = np.concatenate([np.frombuffer(state[f"model/{n}"].data, dtype="<f4") for n in names])
    assert weights.shape == recorded_weights.shape
    # Rounding the gradients moves the run a little, and no more than that.
    np.testing.assert_allclose(weights, recorded_weights, atol=0.02)
    assert not np.array_equal(weights, recorded_weights)


@pytest.mark.slow
def test_the_demo_succeeds(tally, tmp_path: Path) -> None:
    answer = tally("demo", "--keep", tmp_path / "demo")

    assert answer.code == 0, answer.out + answer.err
