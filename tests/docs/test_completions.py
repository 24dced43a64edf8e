"""completions/ is what scripts/make_completions.py makes, and bash completes with it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASK = (
    'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tally; printf "%s\\n" "${COMPREPLY[@]}"'
)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_completions", ROOT / "scripts" / "make_completions.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_up_to_date() -> None:
    for name, text in load().make().items():
        assert (ROOT / "completions" / name).read_text(encoding="utf-8") == text, "run make docs-pages"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["rec"], ["record"]),
        (["chip", "enrol", "c"], ["challenge"]),
        (["record", "digits", "--pol"], ["--policy"]),
        (["dispute", ""], ["answer", "open", "rule", "run"]),
        (["noise"], []),  # hidden
    ],
)
def test_bash_completes_commands_and_options(words: list[str], offered: list[str], tmp_path: Path) -> None:
    file = ROOT / "completions" / "tally.bash"
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "_", str(file), "tally", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == offered
