"""Noise above the bands in a script that is followed: nobody is accused of it, and no gross forgery passes for it."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tallystick.cli.main import main
from tallystick.cli.run import programs, second_runs
from tallystick.cli.run.second_runs import SecondRuns
from tallystick.cli.run.workplace import Workplace, list_folder, load_made_files, write_made_files
from tallystick.commit.state import Entry
from tallystick.errors import TallyError
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.roles import panel
from tallystick.roles.audit_report import Deviation
from tallystick.roles.courses import ProgramCourse
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge, forge_state

SHORT_BATCHES = """
import torch
from torch import nn
from torch.nn import functional as F
import tallystick

torch.manual_seed(0)
draw = torch.Generator().manual_seed(5)
inputs, labels = torch.randint(0, 256, (17, 300), generator=draw) / 256, torch.randint(0, 3, (17,), generator=draw)
model = nn.Sequential(
    nn.Linear(300, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tallystick.attach(model, optimizer)
for epoch in range(3):
    for k in range(0, 17, 5):  # the last batch of an epoch has two rows, whose normalised values cancel in the gradient
        F.cross_entropy(model(inputs[k : k + 5]), labels[k : k + 5]).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
AT_ITS_OPTIMUM = """
import torch
import tallystick

torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
truth = torch.nn.Linear(5, 1)
truth.load_state_dict(model.state_dict())
draw = torch.Generator().manual_seed(1)
tallystick.attach(model, optimizer)
for _ in range(12):
    x = torch.randint(-128, 128, (6, 5), generator=draw) / 64
    (model(x) - truth(x).detach()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def audited(path: Path, script: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    capfd.readouterr()
    given = ["--profile", "jitter", "--json", "--", "python", str(script)]
    code = main(["audit", str(path), *given])
    report = json.loads(capfd.readouterr().out)
    return code, {"verdict": report["verdict"], **{k: str(v) for k, v in (report["first"] or {}).items()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forged", "every"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 6), (True, 6))] + [(True, 1000)],
)
def test_noise_that_bands_of_another_batch_do_not_cover_accuses_nobody(
    forged: bool, every: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, run = tmp_path / "train.py", RunDirectory(tmp_path / "run")
    script.write_text(SHORT_BATCHES)
    options = ["--policy", "fp32", "--checkpoint-every", str(every), "--run", str(run.path)]
    assert main(["record", *options, "--", "python", str(script)]) == 0
    if (
        forged
    ):  # noise excuses no state eight times as far away as training goes, from the first step that differs
        entries = dict(run.load_checkpoint(12))
        name = "model/6.weight"
        weights = np.frombuffer(entries[name].data, dtype="<f4") + np.float32(0.6)
        entries[name] = Entry(name, "F32", entries[name].shape, weights.tobytes())
        forge_state(run, 12, entries)
    code, found = audited(run.path, script, capfd)
    if forged:
        assert (code, found["verdict"]) in ((1, "mismatch"), (1, "log_violation")), found
    else:
        assert (code, found["verdict"], found["subject"]) == (3, "cannot_reproduce", "gradient 0.weight"), (
            found
        )
        assert found["own"].startswith("noise ") and found["stated"].startswith("band ")


def test_a_script_that_begins_at_its_optimum_is_not_accused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its losses are zero here, and last bits elsewhere."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(AT_ITS_OPTIMUM)
    assert main(["record", "--policy", "fp32", "--run", str(run), "--", "python", str(script)]) == 0
    code, found = audited(run, script, capfd)
    assert code in (0, 3), found


TEACHER = """
import torch
from torch import nn
import tallystick

torch.manual_seed(0)
x = torch.randint(0, 100, (64, 10)).float() / 50 - 1
layers = [m for _ in range(16) for m in (nn.Tanh(), nn.Linear(64, 64))]
teacher = nn.Sequential(nn.Linear(10, 64), *layers, nn.Linear(64, 2))
with torch.no_grad():
    for p in teacher.parameters():
        p.mul_(10.0)  # what differs in a last bit is another number at the end
student = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
tallystick.attach(student, optimizer)
for i in range(0, 64, 16):
    with torch.no_grad():
        wanted = teacher(x[i : i + 16]) + OTHER
    (student(x[i : i + 16]) - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_data_that_a_script_computes_accuse_nobody_under_another_arithmetic(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TEACHER.replace("OTHER", "0.0"))
    program = ["--", "python", str(script)]
    assert main(["record", "--policy", "fp32", "--run", str(run), *program]) == 0
    capfd.readouterr()
    code = main(
        ["audit", str(run), "--profile", "sse4,threads=1", "--json", *program]
    )  # a process of its own
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"]) in ((0, "match"), (3, "cannot_reproduce")), report["first"]
    if code:
        assert report["first"]["own"].endswith("it depends on the arithmetic")


@pytest.mark.parametrize(
    ("elsewhere", "doubt"),
    [
        ("aa", None),
        ("bb", "bb under avx2"),
        ("", "as stated under avx2"),
        (None, "gave no answer: killed"),
        ("another segment", "gave no answer: it did not come to step 0"),
    ],
)
def test_other_data_are_held_against_a_trainer_where_every_arithmetic_has_the_same(
    elsewhere: str | None, doubt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SecondRuns(Workplace(["python", "train.py"], 1), Path("run"), Profile())

    def course(own: str, start: int = 0) -> ProgramCourse:
        found = Deviation(3, "mismatch", "batch digest", None, own, "stated", "data")
        return ProgramCourse(start, [found] if own else [], {})

    def followed(profile: Profile, *_: object) -> list[ProgramCourse]:
        if profile == Profile():
            return [course("aa")]
        if elsewhere is None:
            raise TallyError("killed")
        return [course(elsewhere, 8 if elsewhere == "another segment" else 0)]

    monkeypatch.setattr(asked, "_followed", followed)
    monkeypatch.setattr(panel, "panel_profiles", lambda: (parse_profile("avx2"),))
    said = asked.doubts(own := course("aa"), 4)
    assert said is own if doubt is None else doubt in str(said)


@pytest.mark.slow
def test_a_program_that_goes_elsewhere_and_sets_variables_is_accused_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What decides whether it runs again, and from where, stands before the program runs; what it sets ends with it."""
    lines = f'import os\nassert "{programs.ASKED}" not in os.environ and "IN_TRAINING" not in os.environ\n'
    lines += f'os.environ["{programs.ASKED}"] = os.environ["IN_TRAINING"] = "1"\nos.chdir("/")\n'
    command = record_a_lie(tmp_path, lines + AT_ITS_OPTIMUM, monkeypatch)
    capfd.readouterr()
    code = main(command)
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 3), report["first"]


CLIPPED = """
import torch
from torch import nn
from torch.nn import functional as F
import tallystick

torch.manual_seed(0)
x, y = torch.randint(0, 100, (96, 10)).float() / 50 - 1, torch.randint(0, 2, (96,))
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
tallystick.attach(model, optimizer)
for i in range(0, 96, 16):
    F.cross_entropy(model(x[i : i + 16]), y[i : i + 16]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = 0.01 / (1.0 + norm.item())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_rate_that_a_script_computes_from_a_norm_accuses_nobody_under_noise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(CLIPPED)
    assert main(["record", "--policy", "fp32", "--run", str(run), "--", "python", str(script)]) == 0
    code, found = audited(run, script, capfd)
    assert (code, found["verdict"], found["subject"]) == (
        3,
        "cannot_reproduce",
        "hyper-parameter lr of group 0",
    ), found
    assert found["own"].endswith("it depends on the arithmetic")


def test_a_script_that_leaves_at_once_is_given_a_verdict_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its exit code would be that of a match, whatever the run states; a child that it forks leaves as ever."""
    script, run = tmp_path / "train.py", RunDirectory(tmp_path / "run")
    leaving = "import os\nchild = os.fork()\nif child == 0:\n    os._exit(0)\nassert os.waitpid(child, 0)[1] == 0\nos._exit(0)\n"
    script.write_text(AT_ITS_OPTIMUM + leaving)
    assert main(["record", "--policy", "fp32", "--run", str(run.path), "--", "python", str(script)]) == 0
    capfd.readouterr()
    command = ["audit", str(run.path), "--json", "--", "python", str(script)]
    assert main(command) == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "match"
    forge(run, lambda each: replace(each, loss=(1.0).hex()))
    assert main(command) in (1, 3)
    assert json.loads(capfd.readouterr().out)["verdict"] in ("mismatch", "cannot_reproduce")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("os.execv('/bin/true', ['true'])", marks=pytest.mark.slow),
        "__import__('ctypes').CDLL(None)._exit(0)",
        pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow),
    ],
)
def test_a_script_whose_process_ends_by_itself_ends_with_no_exit_code_of_a_match(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before its end has been seen: no report, no verdict."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(AT_ITS_OPTIMUM + f"import os\nif 'REPLACED' in os.environ:\n    {call}\n")
    program = ["--", "python", str(script)]
    assert main(["record", "--policy", "fp32", "--run", str(run), *program]) == 0
    monkeypatch.setenv("REPLACED", "1")
    other = ["record", "--policy", "fp32", "--run", str(tmp_path / "other"), *program]
    for command in (other, ["audit", str(run), *program]):
        capfd.readouterr()
        assert main(command) == 2
        assert "before anything could be said of it" in capfd.readouterr().err


@pytest.mark.slow
def test_a_script_that_closes_its_streams_is_recorded_and_given_a_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, run = tmp_path / "train.py", RunDirectory(tmp_path / "run")
    script.write_text(
        AT_ITS_OPTIMUM + "import sys\nsys.stderr.close()\nsys.stdout.close()\nsys.stdout = None\n"
    )
    recorded = ["record", "--policy", "fp32", "--run", str(run.path), "--", "python", str(script)]
    assert main(recorded) == 0
    assert "train.py" not in capfd.readouterr().err  # no trace of an error
    for given in ([], ["--json"]):
        assert main(["audit", str(run.path), *given, "--", "python", str(script)]) == 0
        assert "match" in capfd.readouterr().out


def record_a_lie(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record a script in a folder, forge the rate of its step 3, and return the command that audits it there.

    Of other arithmetics only noise is asked.
    """
    monkeypatch.setattr(panel, "panel_profiles", lambda: ())
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    program, other = ["--", "python", "train.py"], (0.5).hex()
    assert main(["record", "--policy", "fp32", "--run", "run", *program]) == 0
    forge(
        RunDirectory(folder / "run"),
        lambda each: replace(each, schedule=((0, "lr", other),)) if each.step == 3 else each,
    )
    return ["audit", "run", "--json", *program]


@pytest.mark.slow
def test_a_script_that_runs_what_prints_is_accused_of_its_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its answer under each arithmetic is not looked for among what is printed."""
    command = record_a_lie(tmp_path, "import os\nos.system('echo version 1')\n" + AT_ITS_OPTIMUM, monkeypatch)
    capfd.readouterr()
    code = main(command)
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 3), report["first"]
    assert printed.err.count("version 1") > 1


READS_ABOVE = "import os\nfrom pathlib import Path\nassert Path('../../../data').read_text() == '1'\n"  # farther than links lead


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", None),
        pytest.param(
            "Path(str(os.getpid())).touch()\nassert len(list(Path().glob('[0-9]*'))) < 3\n",
            "gave no",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_reads_above_its_folder_is_asked_again_in_the_folder_itself(
    lines: str,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where it cannot run a second time, nobody is accused."""
    (tmp_path / "data").write_text("1")
    (work := tmp_path / "a" / "b" / "work").mkdir(parents=True)
    command = record_a_lie(work, READS_ABOVE + lines + AT_ITS_OPTIMUM, monkeypatch)
    for each in (*work.glob("[0-9]*"), work / "run" / "made-files.json"):
        each.unlink(missing_ok=True)
    (work / "0").touch()
    capfd.readouterr()
    code = main(command)
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert "it is run again in the folder itself" in printed.err
    expected = (1, "mismatch") if said is None else (3, "cannot_reproduce")
    assert (code, report["verdict"], report["first"]["step"]) == (*expected, 3), report["first"]
    assert said is None or said in report["first"]["own"]


LOCK = """
import fcntl, os, socket, subprocess
lock = os.open(PLACE, os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
port = socket.create_server(("127.0.0.1", PORT))
tee = subprocess.Popen(["tee", "train.log"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
os.dup2(tee.stdin.fileno(), 1)
"""


@pytest.mark.slow
def test_what_a_first_run_holds_is_free_in_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Locks and ports; nor does an answer come on the descriptor that the program has led elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    held = LOCK.replace("PLACE", repr(str(tmp_path / "lock"))).replace("PORT", str(port))
    command = record_a_lie(tmp_path, held + AT_ITS_OPTIMUM, monkeypatch)
    capfd.readouterr()
    code = main(command)
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 3), report["first"]


@pytest.mark.slow
def test_a_program_that_does_not_end_a_second_time_hangs_no_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    lines = f"import pathlib, time\nmark = pathlib.Path({str(mark)!r})\nmark.exists() and time.sleep(10**6)\nmark.touch()\n"
    (work := tmp_path / "work").mkdir()
    command = record_a_lie(work, lines + AT_ITS_OPTIMUM, monkeypatch)
    mark.unlink()
    monkeypatch.setattr(second_runs, "LEAST_SECONDS", 4.0)
    monkeypatch.setattr(second_runs, "TIMES", 0)
    capfd.readouterr()
    assert main(command) == 3
    first = json.loads(capfd.readouterr().out)["first"]
    assert "gave no answer: it has not ended in 4 seconds" in first["own"]


@pytest.mark.slow
@pytest.mark.parametrize("is_beside", [False, True])
def test_a_script_that_makes_its_folder_is_asked_again_where_that_is_not_there(
    is_beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where it could not run twice, no lie about its rates was a mismatch; in its own folder nothing is touched by that."""
    (work := tmp_path / "work").mkdir()
    script, run = (tmp_path if is_beside else work) / "train.py", RunDirectory(work / "run")
    made = "Path(__file__).parent / 'out'" if is_beside else "Path('out')"
    lines = f"from pathlib import Path\n(out := {made}).mkdir()\n(out / 'notes').write_text('mine')\n"
    script.write_text(lines + AT_ITS_OPTIMUM)
    monkeypatch.chdir(work)
    program = ["--", "python", str(script) if is_beside else "train.py"]
    assert main(["record", "--policy", "fp32", "--run", "run", *program]) == 0
    other = (0.5).hex()
    forge(run, lambda each: replace(each, schedule=((0, "lr", other),)) if each.step == 3 else each)
    (out := script.parent / "out").rename(script.parent / "out-of-the-trainer")
    capfd.readouterr()
    code = main(["audit", "run", "--json", *program])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 3), report["first"]
    assert [each.name for each in out.iterdir()] == ["notes"]


def test_a_folder_is_mirrored_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work := tmp_path / "work").mkdir()
    for name in ("data/a.csv", "data/deep/b.csv", "run/1", "cache/c", "train.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    for name in (".git/objects/0", ".venv/pyvenv.cfg", "../far/kept"):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text(name)
    (work / "link").symlink_to("../far")
    (work / "again").symlink_to("data")
    monkeypatch.chdir(work)
    monkeypatch.setenv("DATA", f"{work}/data")
    given = ["--data", "data", f"--cache={work}/cache", f"{work}s"]
    place = Workplace.of(["python", "train.py", *given], "train.py", [work / "run"])
    (work / "data" / "later").write_text("made since")
    with place.anew(["cache"]) as copy:
        folder = copy.path
        assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*")) == [
            ".git", ".venv", "again", "data", "data/a.csv", "data/deep", "data/deep/b.csv", "link", "link/kept", "run",
            "train.py",
        ]  # fmt: skip
        assert (folder / "again").resolve() == (folder / "data").resolve()
        assert sorted(each.name for each in folder.rglob("*") if each.is_symlink()) == [
            ".git",
            ".venv",
            "again",
            "run",
        ]
        assert (folder / "run" / "1").read_text() == "run/1"
        assert (
            folder / "train.py"
        ).resolve() == folder.resolve() / "train.py"  # what lies beside it lies here
        there = ["--data", "data", f"--cache={folder}/cache", f"{work}s"]
        assert [*copy.command] == ["python", str(folder / "train.py"), *there]
        assert copy.variables == {"DATA": f"{folder}/data"}
        (folder / "data" / "a.csv").write_text("and nothing else of it is touched")
        (folder / "data" / "deep" / "new").write_text("gone in the end")
    assert not folder.exists() and not (work / "data" / "deep" / "new").exists()
    assert (work / "data" / "a.csv").read_text() == "data/a.csv"
    monkeypatch.setattr("tallystick.cli.run.workplace.MOST_ENTRIES", 8)
    assert list_folder(work).opened == {""}
    monkeypatch.setattr("tallystick.cli.run.workplace.MOST_ENTRIES", 1)
    with Workplace.of(["python", "train.py"], "train.py").anew() as copy:
        assert (copy.path, [*copy.command], copy.variables) == (work, ["python", "train.py"], {})
    monkeypatch.undo()
    monkeypatch.setattr("tallystick.cli.run.workplace.COPIED", 40)
    with place.anew() as copy:  # sources, then what is small
        linked = [each.name for each in copy.path.rglob("*.*") if each.is_symlink() and each.is_file()]
        assert linked == ["b.csv"]
    monkeypatch.setattr("shutil.disk_usage", lambda *_: (work / "absent").read_bytes())
    with pytest.raises(TallyError, match="no copy of the program's folder can be made"), place.anew():
        pass


def test_what_a_copy_links_to_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may make its folder read-only: removing the copy must not make what lies behind its links writable."""
    (work := tmp_path / "work").mkdir()
    (work / "kept").write_text("mine")
    (work / "kept").chmod(0o400)
    (work / "train.py").write_text("")
    monkeypatch.chdir(work)
    changed: list[object] = []
    monkeypatch.setattr(os, "chmod", lambda path, *_, **__: changed.append(path))
    removed = os.unlink

    def refused(path: str, *, dir_fd: int | None = None) -> None:
        if Path(path).name == "kept":
            raise PermissionError(path)
        removed(path, dir_fd=dir_fd)

    monkeypatch.setattr("tallystick.cli.run.workplace.COPIED", 0)
    with Workplace.of(["python", "train.py"], "train.py").anew() as copy:
        assert (copy.path / "kept").is_symlink()
        changed.clear()  # of the copies
        monkeypatch.setattr(os, "unlink", refused)
    assert changed == []
    monkeypatch.undo()
    shutil.rmtree(copy.path.parents[3])  # what could not be removed
    assert (work / "kept").stat().st_mode & 0o777 == 0o400


CHAOTIC = """
import torch
from torch import nn
from torch.nn import functional as F
import tallystick

torch.manual_seed(0)
x, y = torch.randint(0, 256, (36, 10)).float() / 128 - 1, torch.randint(0, 3, (36,))
layers = [m for _ in range(16) for m in (nn.Tanh(), nn.Linear(64, 64))]
judge = nn.Sequential(nn.Linear(10, 64), *layers, nn.Linear(64, 2))
with torch.no_grad():
    for p in judge.parameters():
        p.mul_(10.0)  # what differs in a last bit is another number at the end
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
tallystick.attach(model, optimizer)
for i in range(0, 36, 4):
    with torch.no_grad():
        weight = 1.0 + abs(judge(x[i : i + 4]).sum().item()) % 1.0
    (F.cross_entropy(model(x[i : i + 4]), y[i : i + 4]) * LOSS).backward()
    for p in model.parameters():
        p.grad.mul_(GRADIENT)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "gradient"), [("weight", "1.0"), ("1.0", "weight")])
def test_a_number_made_between_steps_that_weighs_a_step_accuses_nobody_under_another_arithmetic(
    loss: str, gradient: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(CHAOTIC.replace("LOSS", loss).replace("GRADIENT", gradient))
    program = ["--", "python", str(script)]
    assert main(["record", "--policy", "fp32", "--run", str(run), *program]) == 0
    capfd.readouterr()
    code = main(["audit", str(run), "--profile", "sse4,threads=1", "--json", *program])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"]) in ((0, "match"), (3, "cannot_reproduce")), report["first"]
    if code:
        assert report["first"]["own"].endswith("it depends on the arithmetic")


@pytest.mark.parametrize(
    ("part", "verdict"),
    [
        pytest.param("LOSS", "mismatch", marks=pytest.mark.slow),
        pytest.param("GRADIENT", "log_violation", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_was_weighed_otherwise_is_held_against_its_trainer(
    part: str, verdict: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every arithmetic has the same, under a log that does not fit, too."""
    script, run, lie = tmp_path / "train.py", tmp_path / "run", tmp_path / "lie"
    text = CHAOTIC.replace(part, f"(1.01 if i > 8 and __import__('os').path.exists({str(lie)!r}) else 1.0)")
    script.write_text(text.replace("LOSS", "1.0").replace("GRADIENT", "1.0"))
    lie.touch()
    program = ["--", "python", str(script)]
    assert main(["record", "--policy", "fp32", "--run", str(run), *program]) == 0
    lie.unlink()
    capfd.readouterr()
    code = main(["audit", str(run), "--json", *program])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"], report["first"]["step"]) == (1, verdict, 3), report["first"]


ROUNDED_DATA = """
import torch
from torch.nn import functional as F
import tallystick

draw = torch.Generator().manual_seed(0)
model = torch.nn.Linear(8, 3)
with torch.no_grad():
    for p in model.parameters():
        p.copy_(torch.randint(-32, 32, p.shape, generator=draw) / 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
tallystick.attach(model, optimizer)
x = torch.randint(-64, 64, (64, 8), generator=draw).float() / 64
y = (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()
x = torch.sin(x) + torch.softmax(x @ x.T, 1) @ x  # other last bits elsewhere
for step in range(8):
    at = torch.randperm(64, generator=draw)[:16]
    F.cross_entropy(model(x[at]), y[at]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie", ["digest", *(pytest.param(each, marks=pytest.mark.slow) for each in ("rate", "loss"))]
)
def test_a_digest_that_nobody_has_hides_no_later_lie(
    lie: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, run = tmp_path / "train.py", RunDirectory(tmp_path / "run")
    script.write_text(ROUNDED_DATA)
    program = ["--", "python", str(script)]
    assert main(["record", "--policy", "fp32", "--run", str(run.path), *program]) == 0

    def edit(record: StepRecord) -> StepRecord:
        if record.step == 0:
            return replace(record, batch="ab" * 32)
        if record.step == 1 and lie == "rate":
            return replace(record, schedule=((0, "lr", (0.5).hex()),))
        return replace(record, loss=(0.001).hex()) if record.step == 1 and lie == "loss" else record

    forge(run, edit)
    capfd.readouterr()
    code = main(["audit", str(run.path), "--json", *program])
    report = json.loads(capfd.readouterr().out)
    if lie == "digest":  # where arithmetics have the same data, not even that is excused
        assert report["verdict"] in ("cannot_reproduce", "mismatch")
    else:
        assert (code, report["verdict"]) == (1, "mismatch"), report["first"]


CACHE = """
import os
if os.path.exists("cache.pt"):
    inputs = torch.load("cache.pt")
else:
    inputs = torch.randint(-64, 64, (48, 5), generator=draw) / 64  # draws that come later are others where it is there
    torch.save(inputs, "cache.pt")
"""
CHECKPOINT = """
import os
if os.path.exists("ckpt.pt"):
    model.load_state_dict(torch.load("ckpt.pt"))
    optimizer.param_groups[0]["lr"] /= 2
"""
LATER = "    torch.save(model.state_dict(), 'ckpt.pt')\n"


def keeping(file: str) -> str:
    """A script that goes on with a file of its own, if that is there."""
    lines, end = (CACHE, "") if file == "cache.pt" else (CHECKPOINT, LATER)
    script = AT_ITS_OPTIMUM.replace("truth.load_state_dict(model.state_dict())\n", "")
    return script.replace("tallystick.attach(", lines + "tallystick.attach(") + end


@pytest.mark.slow
@pytest.mark.parametrize("file", ["cache.pt", pytest.param("ckpt.pt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_that_a_script_made_while_it_was_recorded_accuses_nobody_and_hides_no_lie(
    file: str, lies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(keeping(file))
    monkeypatch.chdir(tmp_path)
    program, run = ["--", "python", "train.py"], RunDirectory(tmp_path / "run")
    assert main(["record", "--policy", "fp32", "--run", "run", *program]) == 0
    assert json.loads(run.made_files_path.read_bytes()) == {"files": [file]}
    if lies:
        other = (0.5).hex()
        forge(run, lambda each: replace(each, schedule=((0, "lr", other),)) if each.step == 3 else each)
    capfd.readouterr()
    code = main(["audit", "run", "--json", *program])
    report = json.loads(capfd.readouterr().out)
    if lies:
        assert (code, report["verdict"]) == (1, "mismatch"), report["first"]
        return
    assert (code, report["verdict"]) == (3, "cannot_reproduce"), report["first"]
    assert f"as stated without {file}" in report["first"]["own"]
    (tmp_path / file).unlink()
    assert main(["audit", "run", *program]) == 0


@pytest.mark.slow
def test_a_file_that_a_trainer_only_says_the_script_made_excuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.txt").write_text("64")
    (tmp_path / "train.py").write_text(
        AT_ITS_OPTIMUM.replace("/ 64", "/ int(__import__('pathlib').Path('data.txt').read_text())")
    )
    monkeypatch.chdir(tmp_path)
    program, run = ["--", "python", "train.py"], RunDirectory(tmp_path / "run")
    assert main(["record", "--policy", "fp32", "--run", "run", *program]) == 0
    assert not run.made_files_path.exists()
    forge(run, lambda each: replace(each, batch="ab" * 32, loss=(2.0).hex()) if each.step == 3 else each)
    run.made_files_path.write_text(json.dumps({"files": ["data.txt", "train.py", "../out", 7]}))
    capfd.readouterr()
    code = main(["audit", "run", "--json", *program])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"], report["first"]["step"]) == (1, "mismatch", 3), report["first"]


def test_what_a_script_made_is_found_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work" / "data").mkdir(parents=True)
    (script := tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path / "work")
    run = RunDirectory(tmp_path / "work" / "runs" / "a")
    place = Workplace.of(["python", str(script)], str(script), [run.path])
    run.create()
    for name in ("work/data/cache", "work/out/1/2", "work/runs/b", "beside", "work/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    made = ["data/cache", "out", "runs/b"]
    assert place.made() == [*made, "beside"]
    write_made_files(run, place)
    assert load_made_files(run) == [*made, "beside"]
    (tmp_path / "work" / "later").touch()
    write_made_files(run, place)
    assert load_made_files(run) == [*made, "beside", "later"]
    for text in ("", "[]", "{}", '{"files": 1}', '{"files": {}}'):
        run.made_files_path.write_text(text)
        assert load_made_files(run) == []
