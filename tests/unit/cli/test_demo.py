from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tallystick.cli.run import demo as demo_module
from tallystick.cli.run.demo import CHEATS, Caught, Show
from tallystick.cli.run.plain import main as plain_main

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


def test_the_plain_loop_of_a_run_is_timed(
    recorded: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plain_main([str(recorded), str(job)]) == 0
    assert 0.0 < float(capsys.readouterr().out) < 60.0


@pytest.mark.slow
def test_the_demo_succeeds(tally, tmp_path: Path) -> None:
    answer = tally("demo", "--keep", tmp_path / "demo")

    assert answer.code == 0, answer.out + answer.err


@pytest.mark.parametrize(("told_from", "tried"), [(36, [36]), (16, [36, 26, 16]), (0, [36, 26, 16, 6])])
def test_a_cheat_is_staged_in_another_step_where_the_judge_cannot_tell(
    told_from: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some processors its own noise comes near a band; a cheat that no step shows is said not to be caught."""
    staged: list[int] = []

    def catch_at(_: object, cheat: demo_module.Staged) -> Caught:
        staged.append(cheat.at)
        is_told = cheat.at <= told_from
        outcome, loser = ("fault", cheat.liar) if is_told else ("cannot_reproduce", "none")
        return Caught(cheat, cheat.at, {"loser": loser, "step": cheat.at, "rounds": 7, "outcome": outcome})

    monkeypatch.setattr(demo_module, "_catch_at", catch_at)
    caught = demo_module._catch(show(), CHEATS[2])
    assert staged == tried
    assert caught.is_right == (told_from > 0)
