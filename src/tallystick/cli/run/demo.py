"""tally demo: a run recorded, audited under other arithmetic, and three cheats caught, in child processes."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tallystick.cli.options import option
from tallystick.cli.profiles import python
from tallystick.cli.terminal import console, say
from tallystick.errors import StoreError, TallyError
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.reports.layout import BAD, GOOD, UNSURE, Row, page, share
from tallystick.store.files import storing

T = TypeVar("T")

JOB, POLICY = "digits", "fp32"
CHEAT_STEPS = 60
WORDS = {0: "match", 1: "mismatch or violation", 2: "bad usage or malformed input", 3: "cannot reproduce"}


@dataclass(frozen=True)
class Staged:
    """A cheat of the show: its name in the kit, the step asked for, who lies, and what happens in words."""

    name: str
    at: int
    liar: str
    words: str


APART = 10  # steps between two in which a cheat is staged, until the judge can tell
CHEATS = (
    Staged("poisoned_label", 27, "trainer", "one label is changed"),
    Staged("forged_entry", 33, "trainer", "a forged log entry steers"),
    Staged("lying_auditor", 36, "auditor", "the auditor lies"),
)


@dataclass(frozen=True)
class Caught:
    """How a staged cheat ended."""

    cheat: Staged
    step: int
    verdict: Mapping[str, Any]

    @property
    def is_right(self) -> bool:
        """Whether the right party lost at the right step."""
        return (self.verdict["loser"], self.verdict["step"]) == (self.cheat.liar, self.step)


@dataclass
class Show:
    """Everything the demo learned; what its summary is made of."""

    place: Path
    profile: str
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    audit: dict[str, Any] = field(default_factory=dict[str, Any])
    plain_seconds: float = 0.0
    weights: int = 0
    differing: int = 0
    caught: list[Caught] = field(default_factory=list[Caught])
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the audit matched and every cheat was caught where it happened."""
        return self.audit["verdict"] == "match" and all(caught.is_right for caught in self.caught)

    def __rich__(self) -> RenderableType:
        """Return the summary."""
        rule = Rule(style="dim")
        place = Text(f"everything lies in {self.place}, took {self.seconds:.0f} s")
        return Group(
            rule, self._run_page(), self._cheats_table(), place, Text(f"try: tally show {self.place}/honest")
        )

    def _run_page(self) -> RenderableType:
        run, audit = self.run, self.audit
        good = audit["verdict"] == "match"
        part = share(self.differing / max(self.weights, 1))
        bytes_step, bits = run["log_bytes_per_step"], run["log_bits_per_parameter_step"]
        plain, recording, auditing = self.plain_seconds, _working(run["seconds"]), _working(audit["seconds"])
        without = Text(f"{self.differing:,} of {self.weights:,} weights differ ({part})")
        without.stylize(BAD if self.differing else UNSURE)
        rows: list[Row] = [
            ("trained", f"{JOB}, {run['steps']} steps, {run['parameters']:,} parameters, policy {POLICY}"),
            ("audited", f"under profile {self.profile}"),
            ("without log", without),
            ("with log", Text(f"{audit['differing_elements']:,} differ", style=GOOD if good else BAD)),
            ("log", f"{bytes_step:,.1f} bytes/step, {bits:.3g} bits/parameter/step"),
            (
                "freedom",
                f"{share(audit['freedom']['fraction'])} of roundings were a dishonest log's to choose",
            ),
            ("time", f"plain loop {plain:.1f} s, recording {recording:.1f} s, auditing {auditing:.1f} s"),
            (
                "overhead",
                f"recording {recording / plain:.1f}, auditing {auditing / plain:.1f} times the plain loop",
            ),
            ("root", run["root"]),
        ]
        if not self.differing:
            rows.insert(
                3, ("", "this processor shows no difference between the two; nothing was put to the test")
            )
        headline = (
            "honest run: found identical to the last bit" if good else f"honest run: {audit['verdict']}"
        )
        return page(headline, GOOD if good else BAD, rows)

    def _cheats_table(self) -> RenderableType:
        table = Table(
            box=None,
            padding=(0, 1),
            title="cheats, each with its auditor and judge",
            title_justify="left",
            title_style="bold",
        )
        for heading in ("  what happens", "in step", "loser", "at step", "rounds", ""):
            table.add_column(heading)
        for caught in self.caught:
            verdict = caught.verdict
            table.add_row(
                f"  {caught.cheat.words}",
                str(caught.step),
                str(verdict["loser"]),
                str(verdict["step"]),
                str(verdict["rounds"]),
                Text("caught", style=GOOD) if caught.is_right else Text("NOT CAUGHT", style=BAD),
            )
        return table


Keep = Annotated[
    Path | None,
    option(
        "--keep",
        "DIR",
        "A new or empty directory for the run directories; by default a temporary one, which stays.",
    ),
]


def demo(keep: Keep = None) -> int:
    """Watch a run being recorded, audited under other arithmetic, and three cheats being caught."""
    started = time.perf_counter()
    show = Show(_prepared(keep), _other_arithmetic())
    say(f"the same machine, two ways of doing arithmetic: native and {show.profile}", style="bold")
    _record(show)
    _audit(show)
    _control(show)
    _heading(f"{len(CHEATS)} cheats, each with its auditor and judge")
    show.caught = _side_by_side([functools.partial(_catch, show, cheat) for cheat in CHEATS])
    show.seconds = time.perf_counter() - started
    console().print(show)
    return 0 if show.is_right else 1


def _prepared(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="tallystick-demo-"))
    with storing(f"{keep}: cannot be created"):
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise StoreError(f"{keep}: exists and is not empty; choose another directory")
        keep.mkdir(parents=True, exist_ok=True)
    return keep


def _other_arithmetic() -> str:
    return "sse4,threads=1" if platform.machine().lower() in ("x86_64", "amd64") else "jitter"


def _record(show: Show) -> None:
    _heading(f"recording {JOB} under policy {POLICY}")
    show.run = _tally("record", JOB, "--run", str(show.place / "honest"), "--policy", POLICY)


def _audit(show: Show) -> None:
    _heading(f"auditing it in another process under profile {show.profile}")
    show.audit = _tally("audit", str(show.place / "honest"), "--profile", show.profile, allowed=(0, 1, 3))


def _control(show: Show) -> None:
    """Train the job plainly in both arithmetics, from the same weights and with the same random numbers."""
    _heading("training it without a log, in each arithmetic")
    run = str(show.place / "honest")
    show.plain_seconds = float(_run(["-m", "tallystick.cli.run.plain", run], {}))
    profiles = (parse_profile("native"), parse_profile(show.profile))
    native, other = _side_by_side([functools.partial(_weights, show, profile) for profile in profiles])
    show.weights = int(native.size)
    show.differing = int(np.count_nonzero(native != other))


def _weights(show: Show, profile: Profile) -> npt.NDArray[np.uint32]:
    """The bits of the final weights of the plain loop under ``profile``."""
    out = show.place / f"plain-{profile}.f32"
    what = json.dumps({"directory": str(show.place / "honest"), "out": str(out), "jitter": profile.jitter})
    _run(["-m", "tallystick", "bench", "measure", "control", what], profile.environment(), quiet=True)
    return np.frombuffer(out.read_bytes(), dtype="<u4")


def _catch(show: Show, cheat: Staged) -> Caught:
    """Stage one cheat, let the auditor claim, and the judge rule; an earlier step where the judge cannot tell.

    On some processors its own noise comes near a band in the step asked for, and then it rules for nobody.
    """
    caught = _catch_at(show, cheat)
    while caught.verdict["outcome"] == "cannot_reproduce" and caught.cheat.at > APART:
        caught = _catch_at(show, replace(cheat, at=caught.cheat.at - APART))
    return caught


def _catch_at(show: Show, cheat: Staged) -> Caught:
    run, claim = show.place / f"{cheat.name}-{cheat.at}", show.place / f"{cheat.name}-{cheat.at}-claim"
    said = _run(
        ["-m", "tallystick.testing.cheats", cheat.name, "--run", str(run), "--job", JOB, "--policy", POLICY,
         "--steps", str(CHEAT_STEPS), "--at", str(cheat.at)],
        {}, quiet=True,
    )  # fmt: skip
    if cheat.liar == "trainer":
        _tally(
            "audit", str(run), "--claim", str(claim), "--profile", show.profile, allowed=(0, 1), quiet=True
        )
    ruling = _tally("dispute", str(run), str(claim), allowed=(0, 1, 3), quiet=True)
    return Caught(cheat, int(said), ruling)


def _side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the tasks return, in their order; two at a time, since each waits for processes of its own."""
    pool = ThreadPoolExecutor(max_workers=2)
    futures = [pool.submit(task) for task in tasks]
    try:
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _heading(text: str) -> None:
    say(f"- {text}")


def _working(seconds: Mapping[str, float]) -> float:
    """The time spent on the run itself: everything but loading the job and looking for differences."""
    return sum(value for phase, value in seconds.items() if phase != "total")


def _tally(*arguments: str, allowed: tuple[int, ...] = (0,), quiet: bool = False) -> dict[str, Any]:
    """Return the JSON answer of a tally command in a child process."""
    text = _run(["-m", "tallystick", *arguments, "--json"], {}, allowed, quiet=quiet)
    return json.loads(text)


def _run(
    arguments: list[str],
    environment: Mapping[str, str],
    allowed: tuple[int, ...] = (0,),
    *,
    quiet: bool = False,
) -> str:
    """Return what a child process prints; its progress is shown, or with ``quiet`` kept for the error message."""
    child = subprocess.run(
        python(*arguments),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    if child.returncode == 130 or child.returncode < 0:
        raise KeyboardInterrupt
    if child.returncode not in allowed:
        meaning = WORDS.get(child.returncode, "a defect")
        said = (child.stderr or "").strip().rpartition("\n")[2]
        command = " ".join(arguments[1:])
        raise TallyError(
            f"demo: {command} ended with exit code {child.returncode} ({meaning}) {said}".rstrip()
        )
    return child.stdout
