"""What a user types to record a job, audit a run, and verify what was published. Starts without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, StoreError
from tallystick.evidence.files import verify_bundle_file, verify_proof_file
from tallystick.evidence.recognition import RUN, recognise
from tallystick.evidence.run_verifier import verify_run
from tallystick.evidence.verification import Verification
from tallystick.store.files import RunDirectory

if TYPE_CHECKING:
    from tallystick.roles.acceptance import Limits
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.run_writer import Progress
    from tallystick.run.documents import RunStatement
    from tallystick.run.sample import SegmentDraw


def record(
    job: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    policy: str = "fp32",
    settings: Mapping[str, str] | None = None,
    steps: int | None = None,
    seed: int = 0,
    checkpoint_every: int = 20,
    recalibrate_every: int | None = None,
    optimizer_arithmetic: str = "auto",
    device: str = "cpu",
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> RunStatement:
    """Train a job, record every step into a run directory, and return the run's statement: its ``root`` commits to all of it.

    Args:
        job: a shipped job's name, a dotted path, or a ``.py`` file with ``build(settings)``.
        path: the run directory; absent or empty, unless ``resume``.
        policy: ``fp64``, ``fp32``, ``bf16`` or ``leaf``.
        settings: of the job, as text.
        steps: number of optimizer steps; None for the job's own.
        seed: of the portable random streams.
        checkpoint_every: steps between two committed states.
        recalibrate_every: steps between two measurements of the noise; None for the policy's own, which is the most.
        optimizer_arithmetic: ``portable`` or ``general``; ``auto`` takes the first where the optimizer has it.
        device: ``cpu`` or ``cuda``.
        resume: go on with an interrupted run of the same order.
        progress: called after each step.

    Raises:
        InvalidInput: there is no such job, policy or device, or the job is malformed.
        Nondeterminism: the job cannot be repeated elsewhere; the message names the part.
        JobFailed: the job's own code raised.
        StoreError: the directory holds something, or the disk refuses.
    """
    from tallystick.execution.determinism import check_device
    from tallystick.execution.job import find_source
    from tallystick.numerics.policy import find_policy
    from tallystick.roles import trainer

    rounding = find_policy(
        policy, recalibrate_every=recalibrate_every, optimizer_arithmetic=optimizer_arithmetic
    )
    check_device(device)
    order = trainer.Order(
        find_source(os.fspath(job)), dict(settings or {}), rounding, seed, checkpoint_every, steps, device
    )
    return trainer.record(order, RunDirectory(Path(path)), resume=resume, progress=progress)


def audit(
    path: str | os.PathLike[str],
    job: str | os.PathLike[str] | None = None,
    *,
    steps: tuple[int, int] | None = None,
    sample: SegmentDraw | None = None,
    device: str = "cpu",
    limits: Limits | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> AuditReport:
    """Repeat a recorded run on this machine, compare everything that it committed to, and return the report.

    Args:
        path: the run directory.
        job: what is run here: a shipped job's name, a dotted path or a ``.py`` file. None for the shipped job that the run
            names; no other code is run because a run names it.
        steps: two committed states between which to repeat; None for the whole run.
        sample: drawn segments instead.
        device: ``cpu`` or ``cuda``.
        limits: what is accepted of a rounding log's freedom at most.
        progress: called after each step.

    Raises:
        InvalidInput: there is no such run, job or device, a document is malformed, or ``steps`` are not two committed states.
        Mismatch: the documents contradict each other.
        StoreError: a file cannot be read.
    """
    from tallystick.execution.determinism import check_device
    from tallystick.execution.job import find_shipped, find_source
    from tallystick.roles import auditor

    check_device(device)
    directory = RunDirectory(Path(path))
    stated = directory.load_specification().job.path
    source = find_shipped(stated) if job is None else find_source(os.fspath(job))
    return auditor.audit(
        directory, source, steps=steps, sample=sample, device=device, limits=limits, progress=progress
    )


def verify(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    policy: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
) -> Verification:
    """Check a run directory, a bundle of evidence or a proof without repeating a step, and return the checks.

    Args:
        path: what is checked.
        root: of a run: the root that it must have, hexadecimal. A proof needs the root that it is checked against.
        policy: of a bundle: the file that says whose keys count and what is asked. Without one nothing is accepted.
        model: of a bundle: the folder of weights that must be its result.

    Raises:
        InvalidInput: nothing of these lies there, it cannot be read, or an argument is for another of them.
    """
    place = Path(path)
    expected = None if root is None else parse_hex(root.lower(), n_bytes=32, what="root")
    try:
        kind = recognise(place)
        if not kind.is_bundle and not (policy is model is None):
            raise InvalidInput(f"policy, model: for bundles; {place} is {kind.what}")
        if kind.is_bundle:
            if expected is not None:
                raise InvalidInput("root: for runs and proofs; a bundle has policy and model")
            return verify_bundle_file(place, *(None if one is None else Path(one) for one in (policy, model)))
        if kind.what == RUN:
            return verify_run(RunDirectory(place), root=expected)
        if not kind.is_proof:
            raise InvalidInput(f"{place}: {kind}")
        if expected is None:
            raise InvalidInput("root: a proof is checked against a root that is known from elsewhere")
        return verify_proof_file(place, expected)
    except StoreError as problem:
        raise InvalidInput(str(problem)) from problem
