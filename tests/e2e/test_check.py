"""``tally check``: what of a script is refused, all at once and before anything is recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.cli.run.checking import _Trial  # pyright: ignore[reportPrivateUsage]
from tallystick.cli.run.workplace import Workplace
from tallystick.execution.determinism import Profile
from tallystick.roles.audit_report import AuditReport, Deviation, SegmentResult

Check = Callable[..., tuple[int, dict[str, Any]]]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs, in which tally is called."""
    place = tmp_path / "work"
    place.mkdir()
    for name in ("spirals.py", "refused.py", "counted.py", "stubborn.py"):
        shutil.copy(PROGRAMS / name, place / name)
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Check:
    """The exit code and the answer of ``tally check``."""

    def checked(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = main(["check", "--json", *map(str, arguments)])
        return code, json.loads(capfd.readouterr().out)

    return checked


def test_a_script_that_can_be_recorded_is_followed_elsewhere_and_leaves_nothing(
    folder: Path, check: Check
) -> None:
    before = sorted(folder.iterdir())
    code, found = check("--steps", 2, "--", "python", "spirals.py")
    assert (code, found["verdict"], found["refused"]) == (0, "match", [])
    assert (found["steps_recorded"], found["steps_followed"], found["profile"]) == (3, 2, "sse4")
    assert sorted(folder.iterdir()) == before


def test_everything_that_is_refused_is_named_once_and_with_what_to_do(
    folder: Path, check: Check, capfd: pytest.CaptureFixture[str]
) -> None:
    code, found = check("--", "python", "refused.py")
    assert (code, found["verdict"], found["ended"]) == (3, None, False)
    named = ("ReduceLROnPlateau", "rrelu_with_noise.default", "cummax", "rrelu_with_noise_backward")
    assert len(found["refused"]) == len(named), found["refused"]
    for text, name in zip(found["refused"], named, strict=True):
        assert name in text
        assert "; take" in text or "; instead: " in text
    # The control: a recording ends with the first.
    assert main(["record", "--policy", "fp32", "--run", "run", "--", "python", "refused.py"]) == 3
    ended = capfd.readouterr().err
    assert named[0] in ended and named[1] not in ended


@pytest.mark.slow
def test_what_is_not_the_same_twice_is_no_match(folder: Path, tmp_path: Path, check: Check) -> None:
    code, found = check("--", "python", "counted.py", tmp_path / "counter")
    assert (code, found["verdict"], found["refused"]) == (3, "mismatch", [])
    assert found["verdict_here"] == "mismatch"
    assert found["why"].startswith("step 0: batch digest is ")


def test_what_ends_the_trial_is_said_to(folder: Path, tmp_path: Path, check: Check) -> None:
    code, found = check("--", "python", "counted.py", tmp_path / "counter", "--tensor")
    assert (code, found["ended"], found["steps_recorded"]) == (3, True, 0)
    assert ["is a tensor" in found["refused"][0], "cannot be committed" in found["refused"][1]] == [True] * 2


def test_a_script_that_goes_on_whatever_ends_it_is_ended(folder: Path, check: Check) -> None:
    """Python's name may be left out."""
    code, found = check("--steps", 2, "stubborn.py")
    assert (code, found["verdict"], found["steps_recorded"], found["steps_followed"]) == (0, "match", 3, 2)


def test_what_is_no_program_or_attaches_nothing_is_a_wrong_argument(folder: Path, check: Check) -> None:
    code, found = check("digits")
    assert code == 2
    assert "a job is tried out by tally record digits --steps 3" in found["error"]
    Path("empty.py").write_text("")
    code, found = check("--", "python", "empty.py")
    assert code == 2
    assert found["error"].startswith("empty.py: ended without tallystick.attach")


def trial(policy: str, *refused: str) -> _Trial:
    return _Trial(Workplace(("train.py",), 0), ["python", "train.py"], policy, 3, 4, list(refused))


@pytest.mark.parametrize(("policy", "is_told"), [("fp32", True), ("bf16", True), ("fp64", False)])
def test_what_noise_alone_stands_against_is_to_be_tried_under_fp64(policy: str, *, is_told: bool) -> None:
    """Of 154 tiny models of torchvision, timm and diffusers fp32 takes 132, and fp64 19 of the 22 others."""
    found = Deviation(2, "not_accepted", "weight", None, "0.0625", "0.3", "noise")
    report = AuditReport("run", "sse4", "00", [SegmentResult(0, 3, "not_accepted", [found])])
    rows = dict(trial(policy).page(report, Profile()).rows or ())
    assert rows["why"] == "step 2: weight: 0.3; accepted is 0.0625"
    told = "tally check --policy fp64 -- python train.py"
    assert rows.get("next") == (told if is_told else None)
    loud, other = f"decision 3: its input moves; policy {policy} allows 2**-7", "operator cummax; take sort"
    for refused, is_noise in (((loud,), True), ((loud, other), False), ((other,), False)):
        rows = dict(trial(policy, *refused).page(None, Profile()).rows or ())
        assert rows.get("next") == (told if is_told and is_noise else None)
