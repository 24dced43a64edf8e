"""Commands in processes of their own: which arithmetic they have, and when they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tallystick.cli import profiles
from tallystick.cli.profiles import OutOfTime, run_aside
from tallystick.execution.determinism import Profile

VARIABLE = "ATEN_CPU_CAPABILITY"


@pytest.mark.parametrize(("profile", "has"), [(Profile(), "asked"), (Profile("avx2", 1), "avx2")])
def test_a_second_run_has_the_arithmetic_of_who_asks(
    profile: Profile, has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its profile names another one."""
    telling = "import json, os\njson.dump(dict(os.environ), open('seen', 'w'))\nraise SystemExit(3)"
    monkeypatch.setenv(VARIABLE, "asked")
    monkeypatch.setattr(profiles, "python", lambda *_: [sys.executable, "-c", telling])
    assert run_aside(["version"], profile, {"TOLD": "here"}, tmp_path, 60.0) == 3
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen[VARIABLE], seen["TOLD"]) == (has, "here")


def test_a_second_run_that_does_not_end_is_killed_and_said(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime, match="it has not ended in 0 seconds"):
        run_aside(["version"], Profile(), {}, tmp_path, 0.0)


def test_a_terminal_that_closes_does_not_end_what_nohup_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run hangs up on who asked for it."""
    hang_up = f"import os\nos.kill({os.getpid()}, {int(signal.SIGHUP)})\nraise SystemExit(5)"
    monkeypatch.setattr(profiles, "python", lambda *_: [sys.executable, "-c", hang_up])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_aside(["version"], Profile(), {}, tmp_path, 60.0) == 5
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


ASKING = """
import signal, sys, tempfile
from pathlib import Path
from tallystick.cli import profiles
from tallystick.execution.determinism import Profile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs in the background ignore it
after = "import time; time.sleep(200); open('OUTLIVED', 'w').close()"
sleeping = f"[sys.executable, '-c', {after!r}]"
starting = f"import subprocess, sys; print(subprocess.Popen({sleeping}).pid, flush=True)"
profiles.python = lambda *_: [sys.executable, "-c", starting + "; import time; time.sleep(LASTS)"]
with tempfile.TemporaryDirectory() as place:
    print(place, file=sys.stderr, flush=True)
    profiles.run_aside([], Profile(), {}, Path(place), 600.0)
"""


@pytest.mark.parametrize(
    ("number", "lasts"), [(signal.SIGTERM, 200), (signal.SIGHUP, 200), (signal.SIGINT, 200), (None, 0)]
)
def test_what_a_second_run_starts_ends_with_it(
    number: signal.Signals | None, lasts: int, tmp_path: Path
) -> None:
    """And with who asked for it, whose files are gone."""
    outlived = tmp_path / "outlived"
    text = ASKING.replace("LASTS", str(lasts)).replace("OUTLIVED", str(outlived))
    asking = [sys.executable, "-c", text]
    with subprocess.Popen(asking, stderr=subprocess.PIPE, text=True) as asked:
        assert asked.stderr is not None
        place, child = asked.stderr.readline().strip(), int(asked.stderr.readline())
        if number is not None:
            asked.send_signal(number)
        asked.stderr.read()
    assert (asked.returncode == 0) is (number is None)
    assert not Path(place).exists()
    for _ in range(600):
        state = Path(f"/proc/{child}/stat")
        try:
            if state.read_text().rpartition(")")[2].split()[0] in "ZX":
                break
        except OSError:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("it lives on")
    assert not outlived.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_is_killed_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    """A recording went on without its command, and wrote where another one was to go on."""
    child = (
        "import os, time; from pathlib import Path; from tallystick.cli.profiles import PARENT, end_with_parent; "
        "end_with_parent(); assert PARENT not in os.environ; Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    )
    parent = (
        "import sys; from tallystick.cli import profiles; "
        f"profiles.python = lambda *_: [sys.executable, '-c', {child!r}]; profiles.run_to_its_end([], {{}})"
    )
    waiting = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert waiting.poll() is None
        time.sleep(0.02)
    waiting.kill()
    waiting.wait()
    status = Path("/proc", pid.read_text(), "stat")
    deadline = time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it has not ended"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_whose_parent_has_died_before_it_asks_ends() -> None:
    variables = {**os.environ, profiles.PARENT: "1"}
    done = subprocess.run([sys.executable, "-m", "tallystick", "--version"], env=variables, check=False)
    assert done.returncode == -signal.SIGKILL
