"""A job: what the client ordered, as a Python file or dotted path with ``build(settings) -> Job``.

The job is trusted by nobody and known to everybody: the digests of its file and of every module beside it that it
imports, its settings and its dataset digest stand in the run's specification, and trainer, auditor and judge all build it
from the same sources (``program``). A minimal job file::

    def build(settings):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Job(model=model, optimizer=optimizer, batch=my_batch, loss=my_loss, steps=100)
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, JobFailed, Nondeterminism, OtherProgram, StoreError
from tallystick.execution.draws import drawing_portably, portable_draws
from tallystick.execution.program import LocalProgram, locate

NAMED = (InvalidInput, JobFailed, KeyboardInterrupt, Nondeterminism, OtherProgram, StoreError)
"""What stays as it is where a job's own code raised it, or this package for it."""
Batch = Any  # a tensor, or tuples, lists and string-keyed dicts of tensors and plain values


@dataclass
class Job:
    """Everything one training run needs, random access to its data included.

    Attributes:
        model: any module; built in float32 (the policy converts it).
        optimizer: a ``torch.optim`` optimizer over ``model``'s parameters.
        batch: the whole batch of a step, as a pure function of the step number. With
            accumulation ``n`` every tensor is cut into ``n`` equal parts along dimension 0.
        loss: a scalar from the model and one (micro-)batch.
        steps: number of optimizer steps the client ordered.
        scheduler: stepped once after every step; None for a constant rate.
        accumulation: micro-batches per step; gradients are averaged over them.
        clip_norm: global norm at which gradients are clipped; None for no clipping.
        dataset_digest: SHA-256 of the data as hexadecimal; None if the job has none to give.
        extra: further modules whose tensors are part of the state (an averaged copy, say).
        after_step: called with the step number after the optimizer and scheduler.
        smooth: operators outside the table that this job declares continuous (``"mylib::op"``).
        evaluate: named scores of the model as it stands, for people; not part of any commitment.
        held_out: records of the same kind that no step visits, as one batch: what memorisation is measured against. They must
            be drawn like those of the steps (every fifth image, say; not another chapter).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    steps: int
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    accumulation: int = 1
    clip_norm: float | None = None
    dataset_digest: str | None = None
    extra: Mapping[str, nn.Module] = field(default_factory=dict)
    after_step: Callable[[int], None] | None = None
    smooth: tuple[str, ...] = ()
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    held_out: Callable[[], Batch] | None = None


@dataclass(frozen=True)
class JobSource:
    """Where a job comes from, and the digest of the source that says what it is.

    ``path`` is a dotted module name (``tallystick.jobs.digits``), or a file's path.
    """

    path: str
    source: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the source file's bytes, hexadecimal."""
        return hashlib.sha256(self.source).hexdigest()

    @property
    def name(self) -> str:
        """What documents call it: the file's name, or the dotted path."""
        return Path(self.path).name if self.path.endswith(".py") else self.path

    @property
    def program(self) -> LocalProgram:
        """The program that it is: one for each file and its bytes."""
        key = self.path, self.digest
        if key not in _PROGRAMS:
            _PROGRAMS[key] = _program_of(self)
        return _PROGRAMS[key]

    def build(self, settings: Mapping[str, str], seed: int = 0) -> Job:
        """Return the job that this source builds from ``settings``; it and its batches draw portably, of the run's ``seed``.

        Raises:
            InvalidInput: the source has no ``build``, it returns something else, or it imports what is not there.
            OtherProgram: it imports what the run that is repeated does not state.
            JobFailed: its code raised anything else.
        """
        self.program.read_anew()
        try:
            build = None
            if b"build" in self.source or b"import *" in self.source:  # or it is a script, which would train
                with _blaming(self, "its file", (ImportError,)):
                    build = getattr(_module_of(self), "build", None)
            if not callable(build):
                raise InvalidInput(
                    f"job {self.path}: a job needs a function build(settings) -> Job, found none; a training script is given as "
                    "-- python FILE ARGUMENTS"
                )
            with portable_draws(seed, "build"), _blaming(self, "build", (ImportError,)):
                job = build(dict(settings))
        except ImportError as problem:
            hint = "its own modules lie beside its file, all others are installed here"
            words = words_of(problem)
            if "relative import" in words:
                hint = "name a job that is part of a package by its dotted path, package.module, from the directory above"
            raise InvalidInput(f"job {self.path}: {words}; {hint}") from problem
        if not isinstance(job, Job):
            raise InvalidInput(f"job {self.path}: build returned {type(job).__name__}, a Job is needed")
        batch = drawing_portably(job.batch, seed)

        def blamed(step: int) -> Batch:
            with _blaming(self, f"batch({step})"):
                return batch(step)

        job.batch = blamed
        return job


def words_of(problem: BaseException) -> str:
    """Return what an exception says; a job's own may be unable to, or say what nobody can print."""
    try:
        return str(problem).encode("utf-8", "backslashreplace").decode()
    except Exception as other:  # noqa: BLE001 (whatever its __str__ raises)
        return f"(its words cannot be had: {type(other).__name__})"


@contextmanager
def _blaming(source: JobSource, what: str, passing: tuple[type[Exception], ...] = ()) -> Generator[None]:
    """Inside, an exception of the job's own is said to be that, with the last line of the job that led to it."""
    try:
        yield
    except (*NAMED, *passing):
        raise
    except BaseException as problem:
        lines = [each for each in traceback.extract_tb(problem.__traceback__) if each.filename == source.path]
        where = f" (line {lines[-1].lineno} of {source.name})" if lines else ""
        hint = ""
        if isinstance(problem, OSError):
            hint = f"; a relative path is read from {Path.cwd()}"
        raise JobFailed(
            f"job {source.path}: {what} raised {type(problem).__name__}: {words_of(problem)}{where}{hint}"
        ) from problem


_PROGRAMS: dict[tuple[str, str], LocalProgram] = {}
SHIPPED = ("digits", "text", "gpt2", "resnet50")  # short names for tallystick.jobs.<name>


def find_source(path: str) -> JobSource:
    """Return the source of a shipped job's name, a dotted path or a ``.py`` file.

    Raises:
        InvalidInput: nothing importable or readable stands there.
    """
    name = f"tallystick.jobs.{path}" if path in SHIPPED else path
    if name.endswith(".py"):
        file = Path(name)
        if not file.is_file():
            raise InvalidInput(f"job {path}: no such file")
        return JobSource(str(file.resolve()), file.read_bytes())
    file = locate(name)
    if file is None:
        raise InvalidInput(
            f"job {path}: neither a shipped job ({', '.join(SHIPPED)}), an importable module nor a .py file"
        )
    return JobSource(name, file.read_bytes())


def find_shipped(stated: str) -> JobSource:
    """Return the source of the shipped job that a specification names.

    Somebody else may have written the specification: nothing else that it names is looked for, wherever it points. Running
    what was carried in the run directory, or any other file, is the caller's own decision (``find_source``).

    Raises:
        InvalidInput: it names no shipped job.
    """
    if stated not in (f"tallystick.jobs.{name}" for name in SHIPPED):
        raise InvalidInput(
            f"job {stated[:80]!r}: is no shipped job, and no code is run because a specification names it; read the files in "
            "the run directory's program/ and give --job FILE, or -- python FILE ARGUMENTS, your own or the copy there"
        )
    return find_source(stated)


def _program_of(source: JobSource) -> LocalProgram:
    if source.path.endswith(".py"):
        file = Path(source.path).resolve()
        return LocalProgram(file.name, file, source.source, file.parent)
    file, parts = locate(source.path), source.path.split(".")
    assert file is not None
    parts = parts if file.stem == "__init__" else parts[:-1]
    root = file.parents[len(parts)]
    return LocalProgram(file.relative_to(root).as_posix(), file, source.source, root)


def _module_of(source: JobSource) -> Any:
    program = source.program
    if program.module is not None and program.is_stale():
        program.forget()
    program.activate()
    if program.module is None and not source.path.endswith(".py"):
        program.module = importlib.import_module(source.path)
    return program.module or _executed(source, program)


def _executed(source: JobSource, program: LocalProgram) -> ModuleType:
    """Execute the bytes of a job's file as a module of its own."""
    name = f"tallystick_job_{hashlib.sha256(source.path.encode() + source.source).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__, module.__package__ = source.path, ""
    sys.modules[name] = program.module = module
    try:
        exec(
            compile(source.source, source.path, "exec"), module.__dict__
        )  # the job's own code, asked for by name
    except BaseException:
        program.forget()
        del sys.modules[name]
        raise
    return module
