"""What two processes do not agree on is nobody's doing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tallystick.commit.state import hold
from tallystick.execution import job
from tallystick.execution.job import JobSource
from tallystick.numerics.policy import find_policy
from tallystick.roles import elsewhen, panel
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.elsewhen import ELSEWHERE_SECONDS, calendar_of, has_calendars
from tallystick.roles.judge import dispute
from tallystick.roles.rebuilt import find_unsteady
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import TamperedSource

JOB = """
import os
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job

WORDS = "the quick brown fox jumps over a lazy dog and one cat sat down on its mat while rain fell".split()
VOCABULARY = {word: place for place, word in enumerate(ORDER(set(WORDS)))}
NUMBER = DRAWN
TOKENS = torch.tensor([VOCABULARY[word] for word in WORDS])

def build(settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(len(VOCABULARY), 4), torch.nn.Linear(4, len(VOCABULARY)))
    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), steps=2,
               batch=lambda step: (TOKENS[:-1], TOKENS[1:]), loss=loss)

def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1]) * NUMBER
"""


def recorded(place: Path, order: str, rate: str = "0.1", number: str = "1") -> tuple[RunDirectory, JobSource]:
    path = place / "words.py"
    path.write_text(JOB.replace("ORDER", order).replace("RATE", rate).replace("DRAWN", number))
    source = JobSource(str(path), path.read_bytes())
    run = RunDirectory(place / "run")
    record(Order(source, {}, find_policy("fp32"), steps=2, checkpoint_every=2), run)
    return run, source


def test_a_vocabulary_in_the_order_of_a_set_convicts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process's own order of the set is one of many; the trainer's is made another by hand."""
    run, source = recorded(tmp_path, "list")
    assert "do not agree on the data of the job" in str(find_unsteady(run.path, source, 0))

    shifted = JobSource(source.path, source.source)
    build = JobSource.build

    def other(self: JobSource, *given: object) -> object:
        built = build(self, *given)  # pyright: ignore[reportArgumentType]
        batch = built.batch
        built.batch = lambda step: tuple(reversed(batch(step)))
        return built

    monkeypatch.setattr(JobSource, "build", other)
    report = audit(run, shifted)
    assert report.verdict == "cannot_reproduce"
    claim = RunDirectory(tmp_path / "claim")
    write_claim(run, shifted, claim)
    ruling = dispute(run, claim, shifted)
    assert (ruling.loser, ruling.outcome) == ("none", "not_proven")
    assert "processes on one machine do not agree" in ruling.reason


def test_a_rate_that_hangs_on_the_process_convicts_nobody(tmp_path: Path) -> None:
    run, source = recorded(tmp_path, "sorted", "0.1 + hash('rate') % 1000 / 1000")
    assert "do not agree on optimizer and scheduler of the job" in str(find_unsteady(run.path, source, 0))


def test_a_job_in_a_stated_order_is_the_same_everywhere(tmp_path: Path) -> None:
    run, source = recorded(tmp_path, "sorted")
    assert find_unsteady(run.path, source, 1) is None


def test_what_cannot_be_built_elsewhere_accuses_nobody_and_what_is_no_file_is_not_asked(
    tmp_path: Path,
) -> None:
    run, source = recorded(tmp_path, "sorted")
    assert find_unsteady(run.path, None, 0) is None
    assert find_unsteady(run.path, TamperedSource(source.path, source.source, lambda job: None), 0) is None
    (run.path / "specification.json").unlink()
    assert find_unsteady(run.path, source, 0) == "another process cannot build the job"


def test_a_number_that_only_the_loss_uses_convicts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn when the module is loaded, it is another one for the trainer, the auditor and every judge."""
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    run, source = recorded(tmp_path, "sorted", number="1 + int(os.environ['PYTHONHASHSEED']) % 8 / 8")
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    monkeypatch.setattr(job, "_PROGRAMS", {})  # another process, which loads the module again
    report = audit(run, source)
    assert report.verdict == "cannot_reproduce"
    assert "do not agree on what a step computes of the job" in str(report.first)
    claim = RunDirectory(tmp_path / "claim")
    write_claim(run, source, claim)
    for level in ("steps", "operators"):
        monkeypatch.setattr(job, "_PROGRAMS", {})
        ruling = dispute(run, claim, source, level=level)
        assert (ruling.loser, ruling.outcome) == ("none", "not_proven"), ruling.reason


@pytest.mark.parametrize(
    "now",
    ["int(__import__('time').time())", "__import__('datetime').date.today().month", "int(__import__('time').strftime('%M'))",
     "__import__('datetime').datetime.now().year", "__import__('datetime').datetime.utcnow().minute"],
)  # fmt: skip
def test_a_calendar_is_another_one_in_another_process(now: str, tmp_path: Path) -> None:
    run, source = recorded(tmp_path, "sorted", number=f"1 + {now} % 1000 / 1000")
    state = hold(run.load_checkpoint(0).values())
    assert "do not agree on what a step computes" in str(find_unsteady(run.path, source, 0, state))


def test_what_a_job_prints_and_starts_stands_in_nobodys_way(tmp_path: Path) -> None:
    run, source = recorded(
        tmp_path,
        "sorted",
        number="(print('loading'), __import__('os').system('sleep 60 &'), 1)[2]",
    )
    assert find_unsteady(run.path, source, 0) is None
    for member in panel.same_arithmetic():
        member.close()


def test_an_hour_of_the_local_time_convicts_nobody(tmp_path: Path) -> None:
    """The time zone is the machine's: the same moment is another hour elsewhere."""
    hour = "__import__('datetime').datetime.fromtimestamp(1700000000).hour"
    run, source = recorded(tmp_path, "sorted", number=f"1 + {hour}")
    state = hold(run.load_checkpoint(0).values())
    assert "do not agree on what a step computes" in str(find_unsteady(run.path, source, 0, state))


@pytest.mark.parametrize(
    "found",
    ["[p.name for p in __import__('pathlib').Path(FOLDER).iterdir()][0] == 'a'",
     "[p.name for p in __import__('pathlib').Path(FOLDER).glob('*')][0] == 'a'",
     "os.listdir(FOLDER)[0] == 'a'", "next(os.walk(FOLDER))[2][0] == 'a'",
     "os.cpu_count()", "len(__import__('socket').gethostname()) % 7 + len(__import__('platform').node())"],
)  # fmt: skip
def test_the_order_of_a_directory_and_the_machine_convict_nobody(found: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(name)
    run, source = recorded(tmp_path, "sorted", number=f"1.0 + ({found.replace('FOLDER', repr(str(folder)))})")
    state = hold(run.load_checkpoint(0).values())
    assert "do not agree on what a step computes" in str(find_unsteady(run.path, source, 0, state))


def test_files_in_a_stated_order_are_the_same_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(name)
    run, source = recorded(tmp_path, "sorted", number=f"1 + (sorted(os.listdir({str(folder)!r}))[0] == 'a')")
    assert find_unsteady(run.path, source, 0, hold(run.load_checkpoint(0).values())) is None


COUNTED = """
import torch
from tallystick.execution.job import Job

def build(settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    def loss(model, batch):
        return model(batch).square().mean() * (1 + LOSS)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: seen.append(1) or 1.0 / (1 + RATE))
    return Job(model=model, optimizer=optimizer, batch=lambda step: torch.ones(5, 4) * (1 + step), loss=loss, steps=4,
               scheduler=rate, after_step=lambda step: seen.append(1))
"""


@pytest.mark.parametrize(("loss", "rate"), [("len(seen)", "step"), ("0", "len(seen)")])
def test_a_count_kept_beside_the_state_convicts_nobody(loss: str, rate: str, tmp_path: Path) -> None:
    """Who begins at a checkpoint counts from there: an auditor of a sample, a judge, a trainer that resumed."""
    path = tmp_path / "counted.py"
    path.write_text(COUNTED.replace("LOSS", loss).replace("RATE", rate))
    source = JobSource(str(path), path.read_bytes())
    run = RunDirectory(tmp_path / "run")
    record(Order(source, {}, find_policy("fp32"), checkpoint_every=2), run)
    assert audit(run, source).verdict == "match"
    report = audit(run, source, steps=(2, 4))
    assert report.verdict == "cannot_reproduce"
    assert "a count kept beside the state" in str(report.first)


def test_a_job_that_keeps_no_count_is_none_the_worse_for_other_steps(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(COUNTED.replace("LOSS", "0").replace("RATE", "step"))
    source = JobSource(str(path), path.read_bytes())
    run = RunDirectory(tmp_path / "run")
    record(Order(source, {}, find_policy("fp32"), checkpoint_every=2), run)
    assert find_unsteady(run.path, source, 2, hold(run.load_checkpoint(2).values())) is None


ELSEWHERE = """
import datetime, json, multiprocessing, pickle, queue, sqlite3, subprocess, sys, threading, time
import numpy as np
from tallystick.roles.rebuilt import shift_place
import os, platform, socket
shift_place(int(sys.argv[1]))

class Kept:  # a builtin function is no method where a class holds it
    clock, converter, listed, name = time.time, time.gmtime, os.listdir, socket.gethostname

class Named(datetime.date):
    pass

kept, day = Kept(), datetime.date.today()
assert kept.clock() > 0 and kept.converter(0).tm_year == 1970 and kept.listed(".") is not None and kept.name()
for value in (day, datetime.datetime.now(), time.time, os.listdir, socket.gethostname, platform.node):
    assert pickle.loads(pickle.dumps(value)) == value
assert type(day) is datetime.date and Named(2020, 1, 1) == eval(repr(datetime.date(2020, 1, 1)))
database = sqlite3.connect(":memory:", detect_types=0)
database.execute("create table days (day)")
database.execute("insert into days values (?)", (day.isoformat(),))

began = time.monotonic()
for waits in (
    lambda: queue.Queue().get(timeout=0.05), lambda: threading.Event().wait(0.05),
    lambda: multiprocessing.Semaphore(0).acquire(timeout=0.05), lambda: threading.Lock().acquire(timeout=0.05),
    lambda: subprocess.run(["sleep", "0.05"], timeout=60), lambda: time.sleep(0.05),
):
    try:
        waits()
    except queue.Empty:
        pass
assert time.monotonic() - began < 60, "whoever waits until a moment of the calendar waits no longer for that"
inside = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout
told = [time.time(), datetime.datetime.now().timestamp(), time.time_ns() / 1e9, float(inside),
        np.datetime64("now").astype("int64"), time.mktime(time.localtime())]
print(json.dumps([float(each) for each in told]))
"""


@pytest.mark.skipif(not has_calendars(), reason="another calendar needs Linux with glibc")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_all_of_a_process_has_another_calendar_and_stays_as_it_is(number: int) -> None:
    """Dates made in Python's own place were none that pickle, pandas or a database knew: who used them escaped conviction."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(number)], capture_output=True, text=True, check=False,
        env={**os.environ, **calendar_of(number)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for told in json.loads(done.stdout):
        assert abs(told - time.time() - number * ELSEWHERE_SECONDS) < 3600.0


def test_where_no_process_can_have_another_calendar_nobody_is_convicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, source = recorded(tmp_path, "sorted")
    monkeypatch.setattr(elsewhen, "CALENDAR", tmp_path / "absent.so")
    assert calendar_of(1) == {}
    assert "no other process can have another calendar" in str(find_unsteady(run.path, source, 0))


def test_a_path_with_a_space_is_led_to_by_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader takes it for two."""
    place = tmp_path / "a place"
    place.mkdir()
    (place / "libelsewhen.so").write_bytes(b"")
    monkeypatch.setattr(elsewhen, "CALENDAR", place / "libelsewhen.so")
    loadable: Any = vars(elsewhen)["_loadable"]
    monkeypatch.setattr(elsewhen, "_loadable", loadable.__wrapped__)
    monkeypatch.setenv("LD_PRELOAD", "/other.so")
    path, _, other = calendar_of(1)["LD_PRELOAD"].partition(":")
    assert " " not in path and Path(path).resolve() == (place / "libelsewhen.so").resolve()
    assert other == "/other.so"
