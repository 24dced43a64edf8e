"""What a script takes from the machine, and what it leaves there: nobody is accused of it, and no lie hides behind it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.roles import panel
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge

SCRIPT = """
import os
import torch
import tallystick
{before}
torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed({seed})
tallystick.attach(model, optimizer)
for _ in range(8):
    x = torch.randint(-128, 128, (6, 5), generator=draw) / 64
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{after}
"""


def some_of(cases: Iterable[str], *quick: str) -> list[Any]:
    """All cases, of which those that are not ``quick`` are slow tests."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in cases]


@pytest.fixture(autouse=True)
def only_noise_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of other arithmetics."""
    monkeypatch.setattr(panel, "panel_profiles", lambda: ())
    monkeypatch.chdir(tmp_path)


def write(before: str = "", seed: str = "1", after: str = "", name: str = "train.py") -> None:
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text(SCRIPT.format(before=before, seed=seed, after=after))


def record(*command: str) -> list[str]:
    program = ["--", *(command or ("python", "train.py"))]
    assert main(["record", "--policy", "fp32", "--run", "run", *program]) == 0
    return program


def lie() -> None:
    other = (0.5).hex()
    forge(
        RunDirectory(Path("run")),
        lambda each: replace(each, schedule=((0, "lr", other),)) if each.step == 3 else each,
    )


def audit(program: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
    capfd.readouterr()
    code = main(["audit", "run", "--json", *program])
    report = json.loads(capfd.readouterr().out)
    return code, report["verdict"], report["first"] or {}


def check_without(files: str, program: list[str], capfd: pytest.CaptureFixture[str], *, lies: bool) -> None:
    """That nobody is accused of what some files lead a script to, and that a lie is found at its own step all the same."""
    if lies:
        lie()
    code, verdict, first = audit(program, capfd)
    if lies:
        assert (code, verdict, first["step"]) == (1, "mismatch", 3)
        return
    assert (code, verdict) == (3, "cannot_reproduce"), first
    assert f"as stated without {files}" in first["own"]


ZONE = "import time\nfrom datetime import datetime\ntime.tzset()\n"
HANGING = {
    "processors": ("len(os.sched_getaffinity(0))", {}),
    "half of the processors": ("max(1, os.cpu_count() // 2)", {}),
    "few processors": ("min(4, os.cpu_count())", {}),
    "folder": ("int(next(iter(os.scandir('data'))).name)", {}),
    "glob": ("int(os.path.basename(__import__('glob').glob('data/*')[0]))", {}),
    "hash": ("hash('a') % 1000", {"PYTHONHASHSEED": "7"}),
    "zone": ("datetime.fromtimestamp(0).hour", {"TZ": "Asia/Tokyo"}),
    "clock": ("time.localtime().tm_year", {}),
    "host": ("len(__import__('socket').gethostname())", {}),
}


@pytest.mark.parametrize("what", some_of(HANGING, "hash"))
def test_what_a_script_takes_from_the_machine_accuses_nobody(
    what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trainer's machine has other processors, another file system, another hash seed or time zone."""
    Path("data").mkdir()
    for name in ("10", "11", "12"):
        Path("data", name).touch()
    seed, variables = HANGING[what]
    # What another machine would say, where no variable says so: committed to, as another file would be.
    there = {
        "processors": "64",
        "half of the processors": "64",
        "few processors": "1",
        "folder": "99",
        "glob": "99",
        "clock": "99",
        "host": "99",
    }.get(what)
    write(before=ZONE, seed=seed)
    with monkeypatch.context() as trainers:
        for name, value in variables.items():
            trainers.setenv(name, value)
        if there is not None:
            trainers.setenv("PYTHONPATH", str(Path("other").absolute()))
            Path("other").mkdir()
            told = {
                "half of the processors": f"os.cpu_count = lambda: {there}\n",
                "few processors": f"os.cpu_count = lambda: {there}\n",
                "processors": f"os.sched_getaffinity = lambda _: range({there})\n",
                "folder": (
                    "real = os.scandir\n"
                    f"other = [type('Entry', (), {{'name': '{there}'}})]\n"
                    "os.scandir = lambda path='.': iter(other) if path == 'data' else real(path)\n"
                ),
                "clock": f"import time\ntime.localtime = lambda *_: time.struct_time(({there},) + (1,) * 8)\n",
                "host": f"import socket\nsocket.gethostname = lambda: 'h' * {there}\n",
                "glob": f"import glob\nglob.glob = lambda *_: ['data/{there}']\n",
            }[what]
            Path("other", "sitecustomize.py").write_text("import os\n" + told)
        if what == "hash":  # by its environment alone, where no variable of Python's is noted
            trainers.setenv("TALLYSTICK_RECORD", "run")
            assert subprocess.run([sys.executable, "train.py"], check=False).returncode == 0
        program = ["--", "python", "train.py"] if what == "hash" else record()
    code, verdict, first = audit(program, capfd)
    assert (code, verdict) == (3, "cannot_reproduce"), first
    assert "it depends on the clock, the host, the number of processors" in first["own"]


@pytest.mark.slow
def test_another_hash_seed_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two labels have one order under half of all seeds: asking for others is no proof."""
    write(seed="1 + list({'pos', 'neg'}).index('pos')")
    found = set[tuple[int, str]]()
    for seed in (1, 7):  # of 0, and of 1, the one order; of 7 the other
        with monkeypatch.context() as trainers:
            trainers.setenv("PYTHONHASHSEED", str(seed))
            program = record()
        code, _, first = audit(program, capfd)
        found.add((code, first.get("subject", "")))
        shutil.rmtree("run")
    assert found == {(0, ""), (3, "environment variable PYTHONHASHSEED")}


LEAVING = {
    "watchdog": ("threading.Thread(target=lambda: (time.sleep(1), os._exit(3))).start()\ntime.sleep(240)", 2),
    "thread": (
        "threading.Thread(target=lambda: (time.sleep(240), open('outlived', 'w').close())).start()\nos._exit(0)",
        0,
    ),
    "forked": (
        "child = os.fork()\nif child == 0:\n    sys.exit(5)\nassert os.waitpid(child, 0)[1] == 5 << 8",
        0,
    ),
    "fallen off": (
        "child = os.fork()\nif child == 0:\n    pass\nelse:\n    assert os.waitpid(child, 0)[1] == 0",
        0,
    ),
    "raising": (
        "child = os.fork()\nif child == 0:\n    raise ValueError\nassert os.waitpid(child, 0)[1] == 1 << 8",
        0,
    ),
}


@pytest.mark.parametrize("how", some_of(LEAVING, "watchdog", "forked", "thread"))
def test_a_program_ends_as_it_does_alone(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It hung, or its end was somebody else's."""
    after, code = LEAVING[how]
    write(before="import sys, threading, time", after=after)
    program = ["--", "python", "train.py"]
    assert main(["record", "--policy", "fp32", "--run", "run", *program]) == code
    assert code == 0 or "ended with exit code 3 before anything" in capfd.readouterr().err
    assert not Path("outlived").exists()


@pytest.mark.slow
def test_a_program_that_removes_temporary_files_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (place := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    removing = "import shutil\nfor name in os.scandir(os.environ['TMPDIR']):\n    shutil.rmtree(name)"
    write(after=removing)
    program = record()
    assert audit(program, capfd)[0] == 0


@pytest.mark.parametrize("what", some_of(["processors", "glob", "fails on one"]))
def test_what_no_step_hangs_on_hides_no_lie(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    for name in ("10", "11", "12"):
        Path("data", name).touch()
    asked = "1 // (os.cpu_count() // 2) or 1" if what == "fails on one" else HANGING[what][0]
    write(before=f"asked = {asked}")
    program = record()
    lie()
    code, verdict, first = audit(program, capfd)
    assert (code, verdict, first["step"]) == (1, "mismatch", 3)


@pytest.mark.parametrize("how", some_of(["absolute", "variable", "linked"]))
@pytest.mark.parametrize("lies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cache_is_left_out_however_a_script_comes_to_it(
    how: str, lies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = {"absolute": "__import__('sys').argv[1]", "variable": "os.environ['CACHE']", "linked": "'data/c'"}
    keeping = f"name = {name[how]}\nseed = 2 if os.path.exists(name) else 1\nopen(name, 'w').close()"
    (Path("..") / f"{tmp_path.name}-disk").mkdir()
    Path("data").symlink_to(f"../{tmp_path.name}-disk")
    monkeypatch.setenv("CACHE", str(tmp_path / "cache"))
    write(before=keeping, seed="seed")
    program = record("python", "train.py", *([str(tmp_path / "cache")] if how == "absolute" else []))
    made = "data/c" if how == "linked" else "cache"
    assert json.loads(Path("run/made-files.json").read_text()) == {"files": [made]}
    check_without(made, program, capfd, lies=lies)


@pytest.mark.slow
@pytest.mark.parametrize("lies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_what_a_script_made_it_keeps_what_it_cannot_do_without(
    lies: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A download whose source is gone, and a checkpoint that it goes on from."""
    getting = "from pathlib import Path\nif not Path('data').exists():\n    Path('source').rename('data')\n"
    going_on = (
        "seed = 2 if Path('a').exists() or Path('b').exists() else 1\nPath('a').touch(), Path('b').touch()"
    )
    write(before=getting + going_on, seed="seed")
    Path("source").touch()
    program = record()
    assert json.loads(Path("run/made-files.json").read_text()) == {"files": ["a", "b", "data"]}
    check_without("a, b", program, capfd, lies=lies)


@pytest.mark.slow
def test_what_an_audit_before_made_accuses_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """A new number, and a new seed, for each run in a folder: the names are others each time."""
    lines = "seed = len([name for name in os.listdir('runs') if name.isdigit()])\nos.mkdir(f'runs/{seed}')"
    Path("runs").mkdir()
    Path("runs/.gitkeep").touch()
    write(before=lines, seed="seed")
    program = record()
    assert json.loads(Path("run/made-files.json").read_text()) == {"files": ["runs/0"]}
    Path("runs/0").rmdir()
    for code in (0, 3, 3, 3):
        assert audit(program, capfd)[0] == code
    lie()
    assert audit(program, capfd)[0] == 1


@pytest.mark.slow
def test_many_files_and_names_that_are_no_text_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    making = (
        "for n in range(1200):\n    open(f'features/{n:04}', 'w').close()\nopen(b'caf\\xe9', 'w').close()"
    )
    there = "seed = 1 + len(os.listdir('features'))"
    Path("features").mkdir()
    write(before=there, seed="seed", after=making)
    program = record()
    made = json.loads(Path("run/made-files.json").read_text())["files"]
    assert made == [f"features/{n:04}" for n in range(1200)]
    code, verdict, first = audit(program, capfd)
    assert (code, verdict) == (3, "cannot_reproduce")
    assert "as stated without features/0000" in first["own"]


@pytest.mark.slow
def test_a_second_run_writes_into_no_file_of_the_auditors(capfd: pytest.CaptureFixture[str]) -> None:
    """What its first run left there is what the auditor's own program wrote."""
    write(after="open('train.log', 'a').write('one run\\n')")
    Path("train.log").touch()
    program = record()
    lie()
    Path("train.log").write_text("")
    assert audit(program, capfd)[:2] == (1, "mismatch")
    assert Path("train.log").read_text() == "one run\n"


@pytest.mark.parametrize("name", some_of(["bin/train", "../bin/train"]))
def test_a_program_of_any_name_and_place_is_asked_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write(name=name)
    program = record("python", name)
    lie()
    code, verdict, first = audit(program, capfd)
    assert (code, verdict, first["step"]) == (1, "mismatch", 3)


SPLIT = "from hashlib import sha256\nseed = int.from_bytes(sha256(str(ROOT).encode()).digest()[:4])"
NAMED = "seed = len(__import__('pathlib').Path.cwd().name)"
NEWEST = "seed = int(max(os.listdir('data'), key=lambda name: os.path.getmtime('data/' + name)))"


@pytest.mark.parametrize("before", some_of([SPLIT.replace("ROOT", "__file__"), NAMED, NEWEST]))
def test_a_script_that_hangs_on_where_it_lies_accuses_nobody(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one does that splits its data by a hash of the files' paths."""
    for who in ("trainer", "an-auditor"):
        Path(who, "data").mkdir(parents=True)
        for time, name in enumerate(("1", "2") if who == "trainer" else ("2", "1")):
            (file := Path(who, "data", name)).touch()
            os.utime(file, (time, time))
        write(before=before, seed="seed", name=f"{who}/train.py")
    monkeypatch.chdir(tmp_path / "trainer")
    program = record()
    monkeypatch.chdir(tmp_path / "an-auditor")
    Path("run").symlink_to("../trainer/run")
    code, verdict, first = audit(program, capfd)
    assert (code, verdict) == (3, "cannot_reproduce"), first
    assert "it depends on where it lies or on times" in first["own"]


@pytest.mark.slow
def test_what_lies_around_a_folder_lies_around_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that reads `../data`, or what lies beside its folder's folder, is asked again in a copy."""
    (tmp_path / "a" / "work").mkdir(parents=True)
    (tmp_path / "seed").write_text("1")
    (tmp_path / "a" / "data").write_text("1")
    monkeypatch.chdir(tmp_path / "a" / "work")
    write(
        before="seed = int(open('../data').read()) * int(open('../../seed').read())",
        seed="seed",
        after="open('../work/log', 'w')",
    )
    program = record()
    lie()
    Path("log").unlink()
    capfd.readouterr()
    assert main(["audit", "run", "--json", *program]) == 1
    assert "in the folder itself" not in capfd.readouterr().err


@pytest.mark.slow
def test_what_lies_too_deep_for_a_copy_is_found_in_the_folder_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A walk goes into no link, and would find other data in the copy: that is no reason to accuse nobody."""
    monkeypatch.setattr("tallystick.cli.run.workplace.MOST_ENTRIES", 12)
    for n in range(20):
        Path("data/a").mkdir(parents=True, exist_ok=True)
        Path(f"data/a/{n}").touch()
    write(before="seed = sum(len(files) for _, _, files in os.walk('data'))", seed="seed")
    program = record()
    lie()
    capfd.readouterr()
    code = main(["audit", "run", "--json", *program])
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert "it is run again in the folder itself" in printed.err
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 3)


@pytest.mark.slow
def test_resuming_names_what_the_script_made_when_it_began(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "seed = 2 if os.path.exists('cache') else 1\nopen('cache', 'w').close()"
    write(before=lines, seed="seed", after="assert os.path.exists('../whole')")
    command = ["record", "--policy", "fp32", "--run", "run", "--checkpoint-every", "4"]
    program = ["--", "python", "train.py"]
    assert main([*command, *program]) == 2
    (whole := tmp_path.parent / "whole").touch()
    assert main([*command, "--resume", *program]) == 2
    assert "where there is what it made itself, remove that: cache" in capfd.readouterr().err.replace(
        "\n", " "
    )
    Path("cache").unlink()
    assert main([*command, "--resume", *program]) == 0
    whole.unlink()
