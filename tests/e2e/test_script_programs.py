"""Scripts and loops of one's own: what they read of the environment and execute is committed, or refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.errors import OtherProgram
from tallystick.execution.program import LocalProgram
from tallystick.execution.program_source import variables_named_in
from tallystick.execution.program_watch import ProgramJournal
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path) -> Iterator[None]:
    """What a script here imports of its own is not another test's module of that name."""
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


SCRIPT = """
BEFORE
import torch, tallystick
model = torch.nn.Linear(4, 2)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
factor = 1.0
AFTER
tallystick.attach(model, optimizer)
for step in range(3):
    x = torch.arange(12.0).reshape(3, 4) * factor / 16 + step
    STEP
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
END
"""
LOOP = """
BEFORE
import torch, tallystick
model = torch.nn.Linear(4, 2)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
factor = 1.0
AFTER
with tallystick.open_run("run", policy="fp64", steps=3) as run:
    run.prepare(model, optimizer)
    for step in range(3):
        with run.step(torch.arange(12.0).reshape(3, 4) * factor / 16 + step) as x:
            STEP
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    END
print(getattr(run.result, "verdict", "recorded"), getattr(run.result, "environment", ""), getattr(run.result, "first", ""))
"""
HELPER = "import os\n\ndef rate():\n    return float(os.environ.get('RATE', '1'))\n"


def written(file: Path, text: str = SCRIPT, **parts: str) -> Path:
    for name in ("BEFORE", "AFTER", "STEP", "END"):
        text = text.replace(name, parts.get(name.lower(), "pass"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def tally(
    capfd: pytest.CaptureFixture[str], what: str, run: Path, script: Path
) -> tuple[int, dict[str, Any]]:
    given = ["record", "--policy", "fp64", "--run", str(run)] if what == "record" else ["audit", str(run)]
    code = main([*given, "--json", "--", "python", str(script)])
    return code, json.loads(capfd.readouterr().out)


def started(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, in its own directory, tally not around it."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RATE", "PYTHONHASHSEED")
    }
    return subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent, env={**environment, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def hexed(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


SEED = {"PYTHONHASHSEED": hexed("0")}  # which tally has a program run with


READS = {
    "before the import": {"before": "import os; rate = os.environ['RATE']", "after": "factor = float(rate)"},
    "before attaching": {"after": "import os; factor = float(os.getenv('RATE', '1'))"},
    "by a name made up": {"after": "import os; factor = float(os.environ['RA' + 'TE'])"},
    "by the standard library": {"after": "import os; factor = float(os.path.expandvars('$RATE'))"},
    "as text": {"after": 'factor = eval(\'float(__import__("os").environ["RATE"])\')'},
    "in a helper": {"before": "import helper", "after": "factor = helper.rate()"},
    "in a step": {"step": "import os; x = x * float(os.environ.get('RATE', '1'))"},
}
QUICK = ("as text",)


@pytest.mark.parametrize(
    "how", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in READS]
)
def test_a_variable_that_a_script_reads_is_committed_and_accuses_nobody(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, two people with other values had the same program, and the honest one was accused."""
    script, run = written(tmp_path / "mine" / "train.py", **READS[how]), tmp_path / "run"
    (tmp_path / "mine" / "helper.py").write_text(HELPER)
    monkeypatch.setenv("RATE", "0.75")
    assert tally(capfd, "record", run, script)[0] == 0
    assert RunDirectory(run).load_specification().job.program.environment == SEED | {"RATE": hexed("0.75")}
    assert not [p for p in run.rglob("*") if p.is_file() and str(tmp_path).encode() in p.read_bytes()]
    code, report = tally(capfd, "audit", run, script)
    assert (code, report["verdict"], "environment variable RATE" in report["environment"]) == (
        0,
        "match",
        False,
    )
    monkeypatch.setenv("RATE", "0.5")
    code, report = tally(capfd, "audit", run, script)
    assert (code, report["verdict"]) == (3, "cannot_reproduce")
    first = report["first"]
    assert (first["subject"], first["own"], first["stated"]) == (
        "environment variable RATE", hexed("0.5"), hexed("0.75"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (SCRIPT, "before the import"),
        pytest.param(LOOP, "in a helper", marks=pytest.mark.slow),
        pytest.param(LOOP, "by a name made up", marks=pytest.mark.slow),
    ],
    ids=["script", "loop, in a helper", "loop, by a name made up"],
)
def test_so_is_one_that_is_read_before_anybody_watches(text: str, how: str, tmp_path: Path) -> None:
    """No tally around it: what a source names counts as read, as nobody saw its first lines."""
    script = written(tmp_path / "mine" / "train.py", text, **READS[how])
    (tmp_path / "mine" / "helper.py").write_text(HELPER)
    run = tmp_path / "mine" / "run"
    done = started(script, RATE="0.75", TALLYSTICK_RECORD=str(run) if text is SCRIPT else "")
    assert done.returncode == 0, done.stderr
    assert RunDirectory(run).load_specification().job.program.environment == {"RATE": hexed("0.75")}
    same = started(script, RATE="0.75", TALLYSTICK_FOLLOW=str(run))
    other = started(script, RATE="0.5", TALLYSTICK_FOLLOW=str(run))
    for done, verdict in ((same, "match"), (other, "cannot_reproduce")):
        assert verdict in done.stdout + done.stderr, done.stderr
        assert "mismatch" not in done.stdout + done.stderr
    if text is LOOP:
        assert f"'environment variable RATE': ('{hexed('0.5')[:32]}', '{hexed('0.75')[:32]}')" in other.stdout


RUNS = {
    "runpy": "import runpy; factor = runpy.run_path(HIDDEN)['FACTOR']",
    "a loader": "import importlib.util as u; s = u.spec_from_file_location('h', HIDDEN); m = u.module_from_spec(s); "
    "s.loader.exec_module(m); factor = m.FACTOR",
    "an executor": "import runpy; from concurrent.futures import ThreadPoolExecutor as T; "
    "factor = T(1).submit(runpy.run_path, HIDDEN).result()['FACTOR']",
    "text of a file": "exec(compile(Path(HIDDEN).read_text(), HIDDEN, 'exec')); factor = FACTOR",
}  # fmt: skip
HIDDEN = "from pathlib import Path; HIDDEN = str(Path(__file__).parent / 'hidden.py'); "


@pytest.mark.parametrize("how", RUNS)
def test_a_file_that_a_script_executes_is_refused_by_name(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = written(tmp_path / "train.py", after=HIDDEN + RUNS[how])
    (tmp_path / "hidden.py").write_text("FACTOR = 0.5\n")
    code, answer = tally(capfd, "record", tmp_path / "run", script)
    assert code == 3
    assert "hidden.py was executed by the program, and no import in it says so" in answer["error"]
    if how != "a loader":
        return
    loop = written(tmp_path / "loop.py", LOOP, after=HIDDEN + RUNS[how])
    done = started(loop)
    assert done.returncode == 1 and "hidden.py was executed by the program" in done.stderr


@pytest.mark.slow
def test_a_module_that_is_imported_by_a_name_made_up_is_committed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As registries of models do; nothing in the script holds it."""
    way = "import importlib; factor = [importlib.import_module('plug_' + name).FACTOR for name in 'a'][0]"
    mine, other = (written(tmp_path / who / "train.py", after=way) for who in ("mine", "other"))
    mine.with_name("plug_a.py").write_text("FACTOR = 0.5\n")
    other.with_name("plug_a.py").write_text("FACTOR = 0.25\n")
    assert tally(capfd, "record", tmp_path / "run", mine)[0] == 0
    files = RunDirectory(tmp_path / "run").load_specification().job.program.files
    assert [file.name for file in files] == ["plug_a.py", "train.py"]
    code, report = tally(capfd, "audit", tmp_path / "run", other)
    assert code == 3 and "program file plug_a.py" in json.dumps(report)
    assert tally(capfd, "audit", tmp_path / "run", mine)[1]["verdict"] == "match"


LATE = (
    "import os, runpy, tempfile; from pathlib import Path\nos.environ.get('SA' + 'VE'); Path.home(); "
    "runpy.run_path(str(Path(__file__).parent / 'hidden.py')); import report"
)


@pytest.mark.parametrize("text", [SCRIPT, LOOP], ids=["script", "loop"])
def test_what_a_program_does_after_its_last_step_costs_it_nothing(text: str, tmp_path: Path) -> None:
    """Where it saves its weights, say: a run that took hours must not end with an error there."""
    script = written(tmp_path / "train.py", text, end=LATE.replace("\n", "\n    " if text is LOOP else "\n"))
    (tmp_path / "hidden.py").write_text("")
    (tmp_path / "report.py").write_text("")
    done = started(script, TALLYSTICK_RECORD=str(tmp_path / "run") if text is SCRIPT else "")
    assert done.returncode == 0, done.stderr
    assert RunDirectory(tmp_path / "run").load_specification().job.program.environment == {}
    done = started(script, TALLYSTICK_FOLLOW=str(tmp_path / "run"), SAVE="here")
    assert "match" in done.stdout + done.stderr and "mismatch" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_variable_read_late_is_refused_unless_the_source_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = "import os\n    if step == 2: os.environ.get('RANK')"
    script = written(tmp_path / "named.py", step=named)
    assert tally(capfd, "record", tmp_path / "named", script)[0] == 0
    assert RunDirectory(tmp_path / "named").load_specification().job.program.environment == SEED | {
        "RANK": "absent"
    }
    script = written(tmp_path / "made.py", step=named.replace("'RANK'", "'RA' + 'NK'"))
    code, answer = tally(capfd, "record", tmp_path / "made", script)
    assert code == 3 and "step 2: environment variable RANK was read after" in answer["error"]


@pytest.mark.slow
def test_a_place_may_be_another_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A match stays one and says so: ranks, devices and homes differ between honest people."""
    lines = "import os; from pathlib import Path; Path.home(); os.environ.get('CUDA_VISIBLE_DEVICES', ''); os.environ.get('RANK')"
    script = written(tmp_path / "train.py", after=lines)
    monkeypatch.setenv("HOME", "/home/trainer")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert tally(capfd, "record", tmp_path / "run", script)[0] == 0
    stated = RunDirectory(tmp_path / "run").load_specification().job.program.environment
    assert stated == SEED | {
        "CUDA_VISIBLE_DEVICES": "absent", "HOME": hexed("/home/trainer"), "RANK": "absent",
    }  # fmt: skip
    monkeypatch.setenv("HOME", "/home/auditor")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, report = tally(capfd, "audit", tmp_path / "run", script)
    assert (code, report["verdict"]) == (0, "match")
    assert {name for name in report["environment"] if "variable" in name} == {
        "environment variable CUDA_VISIBLE_DEVICES", "environment variable HOME",
    }  # fmt: skip


def test_what_a_parser_of_arguments_or_a_child_process_reads_is_nobodys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The language of messages, the width of a terminal, proxies, PATH: every script would depend on them."""
    lines = (
        "import argparse, subprocess, sys, urllib.request; argparse.ArgumentParser(description='a').format_help(); "
        "subprocess.run(['true']); urllib.request.getproxies()"
    )
    script = written(tmp_path / "train.py", after=lines)
    assert tally(capfd, "record", tmp_path / "run", script)[0] == 0
    assert RunDirectory(tmp_path / "run").load_specification().job.program.environment == SEED


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("os.environ['A'] + os.environ.get('B') + os.getenv('C') + environ.pop('D')", "ABCD"),
        ("x = 'E' in os.environ or os.environ.setdefault('F', '1')", "EF"),
        ("NAME = 'G'\nos.environ[NAME]", "G"),
        ("os.environ['H'] = '1'\ndel os.environ['I']\nos.environ.get(name)\nother['J'].get('K')", ""),
        ("os.environ['not a name'] + os.environ['1']", ""),
        ("this is no program: os.environ['A']", ""),
    ],
)
def test_variables_that_a_source_names(line: str, names: str) -> None:
    assert sorted(variables_named_in(line.encode())) == list(names)


def test_a_later_reading_is_not_the_runs(tmp_path: Path) -> None:
    program = LocalProgram(
        "a.py", tmp_path / "a.py", b"", tmp_path, journal=ProgramJournal(is_whole=True), is_main=True
    )
    program.file.write_bytes(b"")
    program.journal.note_variable(str(program.file), "FIRST", "1")
    program.pause()
    program.journal.note_variable(str(program.file), "LATER", "1")
    assert list(program.environment) == ["FIRST"]
    program.verify_committed(Program(), 1)
    program.go_on()
    assert list(program.environment) == ["FIRST", "LATER"]
    with pytest.raises(OtherProgram, match="step 1: environment variable FIRST was read after"):
        program.verify_committed(Program("a.py", program.collect()[0].files), 1)
