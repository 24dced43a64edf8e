"""tally record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tallystick.cli.fleet.chip_settings import load_chip
from tallystick.cli.fleet.chips import log_precommit
from tallystick.cli.options import (
    Arithmetic,
    AsJson,
    Device,
    JobOrProgram,
    ProfileName,
    RecalibrateEvery,
    Seed,
    Settings,
    find_job,
    flag,
    option,
    parse_settings,
)
from tallystick.cli.profiles import rerun_under
from tallystick.cli.run.calibrating import differences, load_choice
from tallystick.cli.run.programs import (
    Request,
    file_of,
    refuse_with_program,
    run_program,
)
from tallystick.cli.run.workplace import Workplace, load_made_files, write_made_files
from tallystick.cli.terminal import StepDisplay, answer, say
from tallystick.errors import InvalidInput, TallyError
from tallystick.execution.determinism import Profile, check_device, parse_profile
from tallystick.fleet.provenance.transcripts import Lineage
from tallystick.numerics.policy import Policy, find_policy
from tallystick.reports.run import read_run
from tallystick.run.calibration import CalibrationChoice
from tallystick.run.documents import UNANNOUNCED
from tallystick.store.files import RunDirectory

if TYPE_CHECKING:
    from tallystick.execution.session.session import Session
    from tallystick.roles.attached import Attached
    from tallystick.roles.run_writer import Phases
    from tallystick.roles.trainer import Order
    from tallystick.run.documents import Specification

Run = Annotated[Path, option("--run", "DIR", "Where to write the run: a new or empty directory.")]
PolicyName = Annotated[
    str | None,
    option("--policy", "fp64|fp32|bf16|leaf", "Precision and rounding; by default that of --bands."),
]
Bands = Annotated[
    Path | None, option("--bands", "FILE", "The numbers that tally calibrate --out chose for the policy.")
]
Steps = Annotated[int | None, option("--steps", "N", "Steps; by default the job's own.", least=1)]
CheckpointEvery = Annotated[
    int, option("--checkpoint-every", "K", "Steps between two committed states.", least=1)
]
RoundingBits = Annotated[
    int | None, option("--b-r", "26..32", "Policy leaf: bits that activations are rounded to; by default 32.")
]
Tau = Annotated[
    str | None,
    option(
        "--tau",
        "layer|kind|NUMBER",
        "Policy leaf: thresholds measured per layer (default) or per kind of layer, or one in quanta, as 0.25.",
    ),
]
Resume = Annotated[bool, flag("--resume", "Go on with an interrupted run; repeat its other options.")]
Chip = Annotated[
    Path | None,
    option("--chip", "DIR", "Commit to the run before step 0, and let this chip's agent observe it."),
]


def record(
    context: typer.Context,
    job: JobOrProgram,
    run: Run,
    policy: PolicyName = None,
    bands: Bands = None,
    steps: Steps = None,
    checkpoint_every: CheckpointEvery = 20,
    setting: Settings = None,
    seed: Seed = 0,
    recalibrate_every: RecalibrateEvery = None,
    optimizer_arithmetic: Arithmetic = "auto",
    b_r: RoundingBits = None,
    tau: Tau = None,
    profile: ProfileName = "native",
    device: Device = "cpu",
    resume: Resume = False,
    chip: Chip = None,
    as_json: AsJson = False,
) -> int:
    """Train a job, or run a program that attaches itself, and record every step, so that others can repeat it bit for bit."""
    chosen = parse_profile(profile)
    code = rerun_under(chosen, context.obj)
    if code is not None:
        return code
    rounding, choice = _policy_of(policy, bands, recalibrate_every, optimizer_arithmetic, b_r, tau)
    if len(job) > 1:
        refuse_with_program(
            set=setting, steps=steps, chip=chip, b_r=b_r, tau=tau, bands=bands,
            device=None if device == "cpu" else device,
        )  # fmt: skip
        return _record_program(
            job, context.obj, RunDirectory(run), rounding, seed, checkpoint_every, chosen,
            resume=resume, as_json=as_json,
        )  # fmt: skip
    settings = parse_settings(setting or [])
    check_device(device)

    from tallystick.roles import trainer

    order = trainer.Order(
        source=find_job(job[0]),
        settings=settings,
        policy=rounding,
        seed=seed,
        checkpoint_every=checkpoint_every,
        steps=steps,
        device=device,
        jitter=chosen.jitter,
    )
    for difference in [] if choice is None else differences(choice, order.source, settings):
        say(f"--bands {bands}: was measured on something else: {difference}", style="yellow")
    directory = RunDirectory(run)
    began = None if chip is None else _watched(chip, run, order)
    phases = trainer.Phases()
    with StepDisplay("record") as display, _telling_what_is_kept(directory):
        trainer.record(
            order, directory, resume=resume, progress=display, phases=phases, began=began, said=_warn
        )
    return _report(directory, display, phases, as_json=as_json)


@contextmanager
def _telling_what_is_kept(directory: RunDirectory) -> Generator[None]:
    """Inside, an interrupt says what is there of the run, and ends the command."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {_kept(directory)}")
        raise typer.Exit(130) from None


def _report(directory: RunDirectory, display: StepDisplay, phases: Phases, *, as_json: bool) -> int:
    report = read_run(directory, read_log=False, recorded_now=display.steps, seconds=phases.seconds)
    answer(report, as_json=as_json, page=report.summary())
    return 0


def _record_program(
    command: list[str],
    arguments: list[str],
    directory: RunDirectory,
    policy: Policy,
    seed: int,
    checkpoint_every: int,
    profile: Profile,
    *,
    resume: bool,
    as_json: bool,
) -> int:
    """Have a program recorded by a process of its own."""
    from tallystick.cli.run.second_runs import run_first

    if (request := Request.take()) is not None:
        with request.answering() as answered:
            order = _ProgramOrder(policy, seed, checkpoint_every, profile.jitter, resume)
            _record_attached(command, directory, order, request, answered)
        return 0  # who asked says what was raised
    workplace, place = Workplace.of(command, file_of(command), [directory.path.absolute()]), directory
    made = load_made_files(directory) if resume else []
    try:
        answered = run_first(arguments, command, quiet=as_json)
    except KeyboardInterrupt:
        return 130
    except InvalidInput as problem:
        if not (there := sorted(workplace.names.intersection(made))):
            raise
        named = ", ".join(there)[:200]
        raise InvalidInput(
            f"{problem}. If the program does something else where there is what it made itself, remove that: {named}"
        ) from problem
    finally:
        if place.specification_path.exists():
            _note_made_files(place, workplace)
    report = read_run(directory, read_log=False, recorded_now=answered["steps"], seconds=answered["seconds"])
    answer(report, as_json=as_json, page=report.summary())
    return 0


def _note_made_files(directory: RunDirectory, workplace: Workplace) -> None:
    """Write what the program has made, which is advice: a run that is whole does not fail for want of it."""
    try:
        write_made_files(directory, workplace)
    except (TallyError, OSError) as problem:
        _warn(f"what the program made is not noted: {problem}")


@dataclass(frozen=True)
class _ProgramOrder:
    """How a program is to be recorded."""

    policy: Policy
    seed: int
    checkpoint_every: int
    has_jitter: bool
    resume: bool


def _record_attached(
    command: list[str],
    directory: RunDirectory,
    order: _ProgramOrder,
    request: Request,
    answered: dict[str, Any],
) -> None:
    """Record what a program attaches, here, for the process that asked."""
    from tallystick.roles.attached import ARGUMENTS, ProgramRun, arguments_of
    from tallystick.roles.recorder import Recorder

    place = directory.path.absolute()  # a program may go elsewhere

    def begin() -> Recorder:
        recorder = Recorder(
            place, policy=order.policy, steps=None, seed=order.seed, checkpoint_every=order.checkpoint_every,
            settings={ARGUMENTS: arguments_of([*request.arguments])}, resume=order.resume,
        )  # fmt: skip
        for text in recorder.notices:
            _warn(f"--resume: {text}")
        recorder.has_jitter = order.has_jitter
        if request.trial:
            recorder.refused = answered["refused"] = []
        return recorder

    def done(attached: Attached) -> None:
        answered.update(steps=display.steps, seconds=attached.phases.seconds)

    with StepDisplay("record") as display, _telling_what_is_kept(directory):
        leave = functools.partial(request.leave_with, answered, done=done)
        done(run_program(command, ProgramRun(begin, display, request.trial or None, leave)))


def _warn(text: str) -> None:
    say(text, style="yellow")


def _watched(chip: Path, run: Path, order: Order) -> Callable[[Session, Specification], None]:
    """Return what commits to the run and registers this process with a chip's agent."""
    from tallystick.integrations.committing import commit_run

    directory, settings, _ = load_chip(chip)
    return commit_run(
        run, directory, settings.ueid.hex(), order.source, order.settings, Lineage("initialised"),
        functools.partial(log_precommit, chip),
    )  # fmt: skip


def _policy_of(
    name: str | None,
    bands: Path | None,
    recalibrate_every: int | None,
    optimizer_arithmetic: str,
    b_r: int | None,
    tau: str | None,
) -> tuple[Policy, CalibrationChoice | None]:
    """Return the policy asked for, with the numbers that ``bands`` chose; ``--recalibrate-every`` has the last word."""
    if bands is None:
        if name is None:
            raise InvalidInput("--policy: is missing, and no --bands says which")
        policy = find_policy(
            name,
            recalibrate_every=recalibrate_every,
            optimizer_arithmetic=optimizer_arithmetic,
            b_r=b_r,
            tau=tau,
        )
        return policy, None
    choice = load_choice(bands, name)
    chosen = dict(choice.parameters)
    every = chosen.pop("recalibrate_every", None)
    policy = find_policy(
        choice.policy,
        recalibrate_every=every if recalibrate_every is None else recalibrate_every,
        optimizer_arithmetic=optimizer_arithmetic,
        chosen=chosen,
        b_r=b_r,
        tau=tau,
    )
    return policy, choice


def _kept(directory: RunDirectory) -> str:
    """What an interrupted recording left behind, and how to go on."""
    try:
        transcript = directory.load_partial()
    except TallyError:
        return f"{directory.path} holds no step yet; the same command with --resume starts over in it"
    done = transcript.checkpoints()[-1].steps_done
    announced = transcript.specification.steps
    of_all = f" of {announced}" if announced < UNANNOUNCED else ""
    return (
        f"{directory.path} holds {transcript.num_steps}{of_all} steps, "
        f"the last committed state is after {done}; the same command with --resume goes on from there"
    )
