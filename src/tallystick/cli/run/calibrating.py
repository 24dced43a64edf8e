"""tally calibrate: measures a job's noise and proposes grid, floor and band."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.cli.options import (
    Arithmetic,
    AsJson,
    Device,
    Job,
    RecalibrateEvery,
    Seed,
    Settings,
    find_job,
    option,
    parse_settings,
)
from tallystick.cli.profiles import run_child
from tallystick.cli.terminal import TaskDisplay, answer, print_json, say
from tallystick.errors import InvalidInput, StoreError
from tallystick.execution.determinism import check_device, parse_profile
from tallystick.numerics.policy import CHOICES, find_policy
from tallystick.run.calibration import LIMIT, CalibrationChoice, parse_calibration
from tallystick.store.files import read_whole, write_whole

if TYPE_CHECKING:
    from tallystick.execution.job import JobSource

MOST_STEPS = 64  # that one calibration measures at
PolicyName = Annotated[str, option("--policy", "fp64|fp32", "The policy whose numbers are to be chosen.")]
At = Annotated[
    str,
    option("--at", "N,N", "Before which steps to measure; the steps before them are trained as recorded."),
]
Repeats = Annotated[int, option("--repeats", "N", "Jittered repetitions at each step.", least=1, most=1000)]
Profiles = Annotated[
    list[str] | None, option("--profile", "NAME", "Other arithmetic to compare with; may be repeated.")
]
LogBits = Annotated[
    float | None, option("--log-bits", "B", "Wanted: at most so many bits of log per parameter and step.")
]
Freedom = Annotated[
    float | None, option("--freedom", "F", "Wanted: at most this share of roundings that a log could choose.")
]
Out = Annotated[Path | None, option("--out", "FILE", "Where to write the choice, for tally record --bands.")]
PlotFile = Annotated[Path | None, option("--plot", "FILE.svg", "Where to draw ambiguity against band.")]


def register(app: typer.Typer) -> None:
    """Add ``tally calibrate`` to ``app``."""
    app.command()(calibrate)
    app.command("noise-pass", hidden=True)(noise_pass)


def calibrate(
    job: Job,
    policy: PolicyName,
    at: At = "0",
    repeats: Repeats = 2,
    profile: Profiles = None,
    log_bits: LogBits = None,
    freedom: Freedom = None,
    setting: Settings = None,
    seed: Seed = 0,
    recalibrate_every: RecalibrateEvery = None,
    optimizer_arithmetic: Arithmetic = "auto",
    device: Device = "cpu",
    out: Out = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> int:
    """Measure a job's noise and choose grid and safety for a wanted size of log or a wanted freedom."""
    rounding = find_policy(
        policy, recalibrate_every=recalibrate_every, optimizer_arithmetic=optimizer_arithmetic
    )
    if policy not in CHOICES:
        raise InvalidInput(
            f"policy {policy}: has no number that a calibration could choose; its bands are measured in every run"
        )
    profiles = tuple(parse_profile(text) for text in profile or [])
    steps, settings = parse_steps_at(at), parse_settings(setting or [])
    _must_be_share("--log-bits", log_bits, 64.0)
    _must_be_share("--freedom", freedom, 1.0)
    if plot is not None and plot.suffix.lower() != ".svg":
        raise InvalidInput(f"--plot {plot}: only .svg files are drawn")
    for name, path in (("--out", out), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise StoreError(f"{name} {path}: there is no directory {path.parent}")
    check_device(device)

    from tallystick.reports.calibration import CalibrationReport
    from tallystick.roles import calibrator

    source = find_job(job)
    order = calibrator.CalibrationOrder(source, settings, rounding, seed, steps, repeats, profiles, device)
    started = time.perf_counter()
    with TaskDisplay("calibrate") as display:
        surveys = calibrator.measure(order, run_child, display)
    measured = time.perf_counter()
    proposal = calibrator.propose(rounding, surveys, calibrator.CalibrationLimits(log_bits, freedom))
    report = CalibrationReport(order, surveys, proposal)
    if out is not None and not proposal.problems:
        write_whole(out, calibrator.choice_of(order, surveys, proposal).encode())
        report.out = str(out)
    if plot is not None:
        write_whole(plot, report.svg().encode())
        report.plot_file = str(plot)
    report.seconds = {"measure": measured - started, "propose": time.perf_counter() - measured}
    answer(report, as_json=as_json)
    if proposal.problems:
        say(f"tally: {'; '.join(proposal.problems)}; no choice is written", style="red")
        return 2
    return 0


def noise_pass(directory: Path, as_json: AsJson = False) -> int:
    """Make one pass as DIRECTORY asks; what ``tally calibrate`` starts under each profile."""
    from tallystick.roles.calibrator import answer_request

    answer_request(directory, find_job)
    print_json({"done": str(directory)})
    return 0


def parse_steps_at(text: str) -> tuple[int, ...]:
    """Return the steps written as ``0,8,32``.

    Raises:
        InvalidInput: another form, not ascending, or too many.
    """
    if re.fullmatch(r"[0-9]{1,12}(,[0-9]{1,12})*", text, re.ASCII) is None:
        raise InvalidInput(f"--at {text[:80]}: must be steps with commas between, such as 0,32")
    steps = tuple(map(int, text.split(",")))
    if list(steps) != sorted(set(steps)):
        raise InvalidInput(f"--at {text[:80]}: steps must ascend, each once")
    if len(steps) > MOST_STEPS:
        raise InvalidInput(f"--at: {len(steps)} steps, at most {MOST_STEPS} are measured")
    return steps


def load_choice(path: Path, order_policy: str | None) -> CalibrationChoice:
    """Return the choice in the file ``path``, which must be for ``order_policy`` if that is given.

    Raises:
        StoreError: the file cannot be read.
        InvalidInput: it is malformed, too long, or for another policy.
    """
    try:
        choice = parse_calibration(read_whole(path, limit=LIMIT, what="a choice of bands"))
    except InvalidInput as problem:
        raise InvalidInput(f"--bands {path}: {problem}") from None
    if order_policy is not None and choice.policy != order_policy:
        raise InvalidInput(
            f"--bands {path}: is for policy {choice.policy[:40]}, the order says --policy {order_policy}"
        )
    return choice


def differences(choice: CalibrationChoice, source: JobSource, settings: Mapping[str, str]) -> list[str]:
    """Return in what the job measured is not the one to be recorded; the numbers may then not fit."""
    pairs = (
        ("job source", choice.source_digest[:16], source.digest[:16]),
        ("settings", dict(choice.settings), dict(settings)),
    )
    return [f"{what} measured {was}, recorded {now}" for what, was, now in pairs if was != now]


def _must_be_share(name: str, value: float | None, greatest: float) -> None:
    if value is not None and not (math.isfinite(value) and 0.0 < value <= greatest):
        raise InvalidInput(f"{name} {value:g}: must be above 0 and at most {greatest:g}")
