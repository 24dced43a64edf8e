"""tally diff: where two runs, or two states, part, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tallystick.cli.options import (
    DEFAULT_EFFORT,
    AsJson,
    Device,
    Effort,
    FindingsOut,
    JobName,
    argument,
    choose_source,
    option,
)
from tallystick.cli.terminal import TrialDisplay, answer, json_bytes, say
from tallystick.diagnosis.causes import explain_states
from tallystick.errors import InvalidInput, StoreError
from tallystick.execution.determinism import check_device
from tallystick.reports.divergence import divergence_page
from tallystick.store.files import RunDirectory
from tallystick.store.tensor_files import load_state_file

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence
    from tallystick.execution.job import JobSource

First = Annotated[Path, argument("A", "A run directory, or a state as a safetensors file.")]
Second = Annotated[Path, argument("B", "Another of the same sort.")]
After = Annotated[
    int | None, option("--after", "N", "Compare the two runs' states after N steps; repeat nothing.", least=0)
]


def diff(
    first: First,
    second: Second,
    after: After = None,
    job: JobName = None,
    device: Device = "cpu",
    out: FindingsOut = None,
    effort: Effort = DEFAULT_EFFORT,
    as_json: AsJson = False,
) -> int:
    """Say where two runs or two states part: step, operator, tensor, element, distance in ulp, and the likely cause."""
    check_device(device)
    for path in (first, second):
        if not path.exists():
            raise StoreError(f"{path}: there is no such run directory or file")
    if first.is_dir() != second.is_dir():
        raise InvalidInput(f"{first} and {second}: give two run directories or two files, not one of each")
    try:
        found = _compare(first, second, after, job, device, effort)
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return 130
    page = divergence_page(found)
    if out is not None:
        RunDirectory(out.parent).write_document(out, json_bytes(page.fields()))
    answer(page, as_json=as_json)
    same = found.step is None and not found.findings and (found.state is None or found.state.is_empty)
    return 0 if same else 1


def _compare(
    first: Path, second: Path, after: int | None, job: str | None, device: str, effort: float
) -> Divergence:
    names = str(first), str(second)
    if not first.is_dir():
        if after is not None or job is not None:
            raise InvalidInput("--after and --job are for run directories; these are files")
        return explain_states(load_state_file(first), load_state_file(second), names)
    own, stated = RunDirectory(first), RunDirectory(second)
    if after is not None:
        found = explain_states(own.load_checkpoint(after), stated.load_checkpoint(after), names)
        found.notes.append(
            f"the states after {after} steps alone were compared: no other state, no record and no log"
        )
        return found
    from tallystick.diagnosis.run_comparison import explain_runs

    source, unasked = (
        _source(job, own) if effort > 0 else (None, "--effort 0 asks for nothing to be repeated")
    )
    with TrialDisplay("looking for the cause") as display:
        return explain_runs(own, stated, source, device=device, seconds=effort, tell=display, unasked=unasked)


def _source(job: str | None, own: RunDirectory) -> tuple[JobSource | None, str]:
    """Return the source of a job that the caller names, or of a shipped one; else None and why nothing is run."""
    try:
        return choose_source(job, own.load_specification().job.path), ""
    except InvalidInput as problem:
        if job is not None:
            raise
        return None, str(problem)
