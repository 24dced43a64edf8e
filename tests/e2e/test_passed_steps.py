"""Scripts that are gone on with after a kill, and audited in parts: their other steps are passed over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.store.files import RunDirectory

PROGRAM = Path(__file__).parent / "programs" / "interrupted.py"
STEPS = 24
Tally = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def tally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tally:
    """Runs ``tally VERB OPTIONS -- python interrupted.py PROGRAM``: its exit code, its answer, what it said."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *options: object, program: tuple[object, ...] = ()) -> tuple[int, dict[str, Any], str]:
        if verb == "record":
            options = (*options, "--policy", "fp32", "--checkpoint-every", 4, "--recalibrate-every", 8)
        code = main([verb, *map(str, options), "--json", "--", "python", str(PROGRAM), *map(str, program)])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


def interrupt(tally: Tally, at: int, run: str, *, program: tuple[object, ...] = ()) -> str:
    Path("stop").write_text(str(at))
    code, _, said = tally("record", "--run", run, program=program)
    assert code == 130
    Path("stop").unlink()
    return said


def bytes_of(run: str) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(Path(run).rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("stops", "program"),
    [
        ((6, 15), ("--resumable", "--parts", 2)),
        pytest.param((17,), ("--stops",), marks=pytest.mark.slow),
        pytest.param((2,), (), marks=pytest.mark.slow),
        pytest.param((9,), ("--resumable",), marks=pytest.mark.slow),
        pytest.param((23,), ("--parts", 4), marks=pytest.mark.slow),
        pytest.param((13,), ("--remembers",), marks=pytest.mark.slow),
    ],
)
def test_a_script_that_is_gone_on_with_records_every_byte_that_it_would_have(
    stops: tuple[int, ...], program: tuple[object, ...], tally: Tally
) -> None:
    code, whole, _ = tally("record", "--run", "whole", program=program)
    assert code == 0 and (
        whole["steps"] == STEPS or ("--stops" in program and stops[0] < whole["steps"] < STEPS)
    )
    said = interrupt(tally, stops[0], "run", program=program)
    assert (
        f"the last committed state is after {(stops[0] - 1) // 4 * 4}; the same command with --resume" in said
    )
    for at in stops[1:]:
        Path("stop").write_text(str(at))
        assert tally("record", "--resume", "--run", "run", program=program)[0] == 130
        Path("stop").unlink()
    code, run, _ = tally("record", "--resume", "--run", "run", program=program)
    assert (code, run["steps"]) == (0, whole["steps"]), run
    assert bytes_of("run") == bytes_of("whole")
    code, report, _ = tally("audit", "run", "--profile", "jitter", program=program)
    assert (code, report["verdict"], report["steps"]) == (0, "match", run["steps"]), report["first"]


@pytest.mark.slow
def test_a_run_that_has_ended_ends_again_the_same_or_goes_on(tally: Tally) -> None:
    assert tally("record", "--run", "run")[0] == 0
    before = bytes_of("run")
    assert tally("record", "--resume", "--run", "run")[0] == 0
    assert bytes_of("run") == before
    code, answer, _ = tally("record", "--resume", "--run", "run", program=("--epochs", 3))
    assert (code, bytes_of("run")) == (2, before)
    assert (
        "settings of the run is {'arguments': ''}, this order has {'arguments': '--epochs 3'}"
        in answer["error"]
    )


def test_a_script_that_falsely_says_that_it_keeps_nothing_is_not_gone_on_with(tally: Tally) -> None:
    """What it keeps of a loss in a variable of its own is in no state: nobody could audit what it would record."""
    interrupt(tally, 13, "run", program=("--remembers", "--resumable"))
    before = bytes_of("run")
    code, answer, _ = tally("record", "--resume", "--run", "run", program=("--remembers", "--resumable"))
    assert (code, bytes_of("run")) == (2, before)
    assert "step 8: loss is" in answer["error"] and "takes another way than it did" in answer["error"]


@pytest.mark.slow
def test_there_must_be_something_to_go_on_with(tally: Tally) -> None:
    code, answer, _ = tally("record", "--resume", "--run", "nowhere")
    assert (code, answer["error"].partition("/nowhere")[2]) == (2, ": there is no run to resume")
    interrupt(tally, 6, "run")
    Path("stop").write_text("3")
    code, answer, _ = tally("record", "--resume", "--run", "run")
    assert code == 130
    Path("run/program/interrupted.py").write_text("pass\n")
    code, answer, _ = tally("record", "--resume", "--run", "run")
    assert code == 2 and "put the file back as it was recorded" in answer["error"]


@pytest.fixture
def recorded(tally: Tally) -> Path:
    assert tally("record", "--run", "run", program=("--parts", 2))[0] == 0
    return Path("run")


@pytest.mark.parametrize(
    ("profile", "steps", "followed"),
    [
        ("native", "8:16", 8),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("jitter", "20:24", 4), ("jitter", "8:16", 8), ("native", "20:24", 4), ("native", "0:4", 4), ("jitter", "0:4", 4),
                ("native", "12:16", 4), ("jitter", "12:16", 4),
            )
        ),
    ],
)  # fmt: skip
def test_a_part_of_a_script_is_followed_from_its_committed_state(
    steps: str, followed: int, profile: str, recorded: Path, tally: Tally
) -> None:
    code, report, _ = tally("audit", recorded, "--steps", steps, "--profile", profile, program=("--parts", 2))
    assert (code, report["verdict"], report["steps"]) == (0, "match", followed), report["first"]
    assert report["beginning"]["changed"] is None


def test_a_sample_of_a_scripts_segments_is_followed(recorded: Path, tally: Tally) -> None:
    drawn = ("--sample", "--detect", "0.5", "--fraction", "0.2", "--round", "some/beacon:41:1600000000")
    code, report, _ = tally("audit", recorded, *drawn, "--beacon", "ab" * 48, program=("--parts", 2))
    assert (code, report["verdict"]) == (0, "match"), report
    assert report["steps"] == 4 * report["sample"]["samples"] < STEPS


@pytest.mark.slow
def test_a_part_that_differs_accuses_nobody_and_the_whole_run_does(tally: Tally) -> None:
    Path("cheat").write_text("13")
    assert tally("record", "--run", "run")[0] == 0
    Path("cheat").unlink()
    code, report, _ = tally("audit", "run", "--steps", "12:16")
    assert (code, report["verdict"], report["first"]["step"]) == (3, "cannot_reproduce", 13)
    assert report["first"]["own"].endswith("after steps passed over; audit all to accuse")
    assert tally("audit", "run", "--steps", "16:20")[1]["verdict"] == "match"
    code, report, _ = tally("audit", "run")
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 13)


@pytest.mark.slow
def test_a_state_that_is_not_what_was_committed_is_evidence_in_any_part(recorded: Path, tally: Tally) -> None:
    path = RunDirectory(recorded).checkpoint_path(16)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    code, report, _ = tally("audit", recorded, "--steps", "16:20", program=("--parts", 2))
    assert (code, report["verdict"], report["first"]["subject"]) == (1, "mismatch", "evidence")
    assert tally("audit", recorded, "--steps", "8:12", program=("--parts", 2))[1]["verdict"] == "match"


@pytest.mark.slow
def test_a_part_whose_first_state_is_another_programs_is_no_match(recorded: Path, tally: Tally) -> None:
    """The first state is compared whatever part is followed."""
    other = Path("other")
    shutil.copytree(recorded, other)
    code, report, _ = tally("audit", other, "--steps", "8:12", program=("--epochs", 1))
    assert (code, report["verdict"]) == (3, "cannot_reproduce")
    assert report["first"]["own"].startswith("settings")
    code, answer, _ = tally("audit", other, "--steps", "9:12", program=("--parts", 2))
    assert (code, answer["error"][:42]) == (2, "steps 9:12: 9 is no committed checkpoint; ")


@pytest.mark.slow
@pytest.mark.parametrize("cheat", [-1, 13])
def test_a_program_that_ends_before_its_run_accuses_of_what_differed_until_then(
    cheat: int, tally: Tally
) -> None:
    """One step more than the program takes bought off everything that differed in the segment that was open."""
    Path("cheat").write_text(str(cheat))
    assert tally("record", "--run", "run")[0] == 0
    Path("cheat").unlink()
    Path("leave").write_text("15")
    code, report, _ = tally("audit", "run")
    if cheat < 0:
        assert (code, report["verdict"], report["first"]["own"]) == (3, "cannot_reproduce", "15 steps")
        path = RunDirectory(Path("run")).checkpoint_path(STEPS)
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)  # a file that is not what was committed is evidence all the same
        assert tally("audit", "run")[1]["verdict"] == "mismatch"
    else:
        assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 13)


def test_a_model_that_casts_to_float32_is_evaluated_and_gone_on_with_under_fp64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within a step that is lifted; outside, float32 met weights of float64, and an audit of a part of the run died of it."""
    monkeypatch.chdir(tmp_path)
    program = ("--", "python", str(PROGRAM.with_name("pixels.py")))
    options = ("--policy", "fp64", "--checkpoint-every", "4", "--run", "run")
    assert main(["record", *options, *program]) == 0
    assert main(["audit", "run", "--steps", "4:8", "--profile", "sse4", *program]) == 0
    assert "1 of 1 match" in capfd.readouterr().out
