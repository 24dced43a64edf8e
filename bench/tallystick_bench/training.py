"""What the first working version must reach, measured: one row a number, with its verdict.

Needs no torch: whatever trains does so in a child process, started with the environment of its profile. A
part that fails becomes a row that says so; nothing that was asked for is missing from the result.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tallystick.cli.profiles import Child, run_child
from tallystick.errors import TallyError
from tallystick.execution.determinism import parse_profile
from tallystick.store.files import RunDirectory
from tallystick_bench import losses
from tallystick_bench.machine import machine
from tallystick_bench.rows import (
    MOST_BITS,
    MOST_MEMORY,
    Row,
    kernel_rows,
    leaf_correction_rows,
    leaf_entry_rows,
    leaf_form_rows,
    loss_rows,
    overhead_rows,
    scaling_rows,
)

if TYPE_CHECKING:
    import numpy.typing as npt

PARTS = ("exactness", "log", "overhead", "scaling", "memory", "loss", "leaf", "kernel")
POLICIES = ("fp64", "fp32", "bf16")
JOBS: Mapping[str, tuple[str, ...]] = {
    "exactness": ("digits", "text"),
    "log": ("digits", "text"),
    "overhead": ("text", "gpt2", "resnet50"),
    "scaling": ("text", "gpt2"),
    "memory": ("text", "gpt2"),
    "loss": ("text", "digits"),
    "leaf": ("digits", "text"),
    "kernel": ("cpu",),
}
ONLY: Mapping[str, tuple[str, ...]] = {
    "loss": ("fp64", "fp32", "bf16", "leaf"),
    "scaling": ("fp32",),
    "leaf": ("leaf",),
}  # instead of all
STEPS: Mapping[str, int] = {
    "exactness": 200,
    "log": 200,
    "overhead": 40,
    "scaling": 5,
    "memory": 4,
    "leaf": 100,
    "kernel": 15,
}
QUICK: Mapping[str, int] = {
    "exactness": 3,
    "log": 3,
    "overhead": 2,
    "scaling": 1,
    "memory": 3,
    "loss": 3,
    "leaf": 2,
    "kernel": 2,
}
SIZES: Mapping[str, tuple[Mapping[str, str], ...]] = {  # models of about 1, 10 and 124 million parameters
    "text": ({}, {"width": "384", "layers": "6"}),
    "gpt2": ({},),
}
BATCHES = (1, 4, 16)
ROUNDS: Mapping[str, int] = {"gpt2": 5, "resnet50": 9}  # of the overhead, where a step takes seconds
WARM_UP = 3
SETTINGS: Mapping[str, Mapping[str, str]] = {"resnet50": {"batch": "8"}}
ELEMENTS, FEW_ELEMENTS = 1 << 24, 1 << 18
SEEDS = (0, 1, 2)
LEAF_CHOICES = ((32, "layer"), (26, "layer"), (32, "0.25"), (26, "0.49609375"))  # b_r and tau


@dataclass
class Bench:
    """Measures the parts asked for, one child process after the other.

    Attributes:
        place: an empty directory for run directories.
        say: takes one line of progress.
        jobs: instead of each part's own.
        policies: instead of all (part leaf: of its own); by default scaling is measured under fp32 alone.
        steps: instead of each part's own number.
        quick: so few steps that every part is seen to work and no number means much.
        child: runs a command in a process of its own.
        show: takes each row as soon as it is measured; a part may take many minutes.
        seeds: of the trainings whose loss is measured.
        workers: how many of them run at a time.
        out: where they are kept, so that none is repeated; None for ``place``.
        curves: what they were, once measured.
    """

    place: Path
    say: Callable[[str], None]
    jobs: Sequence[str] | None = None
    policies: Sequence[str] | None = None
    steps: int | None = None
    quick: bool = False
    child: Child = run_child
    show: Callable[[Row], None] = lambda row: None
    seeds: Sequence[int] = SEEDS
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    out: Path | None = None
    curves: list[losses.Losses] = field(default_factory=list["losses.Losses"])
    _runs: dict[tuple[str, str, str, int], tuple[Path, dict[str, Any]] | TallyError] = field(
        default_factory=dict[Any, Any]
    )
    _counted: bool = False

    def run(self, parts: Iterable[str]) -> list[Row]:
        """Return the rows of ``parts``, in their own order."""
        measure: Mapping[str, Callable[[str, str], list[Row]]] = {
            "exactness": self.exactness,
            "log": self.log,
            "overhead": self.overhead,
            "scaling": self.scaling,
            "memory": self.memory,
            "loss": self.loss,
            "leaf": self.leaf,
            "kernel": self.kernel,
        }
        rows: list[Row] = []
        for part in [part for part in PARTS if part in parts]:
            for job in JOBS[part] if part == "kernel" else self.jobs or JOBS[part]:
                for policy in self.policies or ONLY.get(part, POLICIES):
                    self.say(f"{part}: {job}, {policy}")
                    try:
                        found = measure[part](job, policy)
                    except (TallyError, OSError) as problem:
                        found = [Row(part, job, policy, part, None, "times", error=str(problem))]
                    for row in found if part != "exactness" else ():
                        self.show(row)
                    rows += found
        return rows

    def _steps(self, part: str, job: str) -> int:
        if self.steps is not None:
            return self.steps
        if self.quick:
            return QUICK[part]
        return ROUNDS.get(job, STEPS[part]) if part == "overhead" else STEPS[part]

    def _directory(self, name: str) -> Path:
        return self.place / f"{len(list(self.place.iterdir())):03d}-{name}"

    def _measure(self, kind: str, profile: str = "native", **arguments: object) -> dict[str, Any]:
        return self.child(["bench", "measure", kind, json.dumps(arguments)], parse_profile(profile))

    # -- exactness -----------------------------------------------------------------------------

    def exactness(self, job: str, policy: str) -> list[Row]:
        """Record under one arithmetic and audit under another, both ways round, in one segment over all steps.

        Each pair of arithmetics has a control: the same training without log, whose weights must differ.
        """
        pairs = _profile_pairs()
        rows = [
            self._guarded(self._audited, job, policy, a, b, f"differing bytes, record {a}, audit {b}")
            for a, b in pairs
        ]
        for other in [b for a, b in pairs if a == "native"]:
            name = f"control without log, native and {other}"
            rows.append(self._guarded(self._without_log, job, policy, "native", other, name))
        return rows

    def _guarded(
        self,
        one: Callable[[str, str, str, str, str], Row],
        job: str,
        policy: str,
        first: str,
        second: str,
        measure: str,
    ) -> Row:
        """Return one row of the part, or a row that says why there is none: the others are still measured."""
        try:
            row = one(job, policy, first, second, measure)
        except (TallyError, OSError) as problem:
            row = Row("exactness", job, policy, measure, None, "bytes", error=str(problem))
        self.show(row)
        return row

    def _recorded(self, job: str, policy: str, profile: str, steps: int) -> tuple[Path, dict[str, Any]]:
        """Return a run and what recording it printed; recorded once, for all parts that need it."""
        key = (job, policy, profile, steps)
        if key not in self._runs:
            run = self._directory("run")
            self.say(f"  record under {profile}")
            arguments = ["record", job, "--run", str(run), "--policy", policy, "--steps", str(steps)]
            arguments += ["--checkpoint-every", str(steps), "--profile", profile]
            for name, value in SETTINGS.get(job, {}).items():
                arguments += ["--set", f"{name}={value}"]
            try:
                self._runs[key] = (run, self.child(arguments, parse_profile(profile)))
            except TallyError as problem:
                self._runs[key] = problem
        found = self._runs[key]
        if isinstance(found, TallyError):
            raise found
        return found

    def _audited(self, job: str, policy: str, trainer: str, auditor: str, measure: str) -> Row:
        steps = self._steps("exactness", job)
        run, _ = self._recorded(job, policy, trainer, steps)
        self.say(f"  audit under {auditor}")
        profile = parse_profile(auditor)
        audit = ["audit", str(run), "--job", job, "--profile", auditor]
        found = self.child(audit, profile)
        matches = found["verdict"] == "match"
        differing = 0
        if not matches:
            claim = self._directory("claim")
            self.child([*audit, "--claim", str(claim)], profile)
            differing = differing_bytes(RunDirectory(run), RunDirectory(claim), steps)
        return Row(
            "exactness", job, policy, measure, differing, "bytes", 0, sound=matches,
            detail={"steps": steps, "audit": found["verdict"], "first": found["first"], "freedom": found["freedom"]},
        )  # fmt: skip

    def _without_log(self, job: str, policy: str, first: str, second: str, measure: str) -> Row:
        steps = self._steps("exactness", job)
        a, b = (self._plain_weights(job, policy, profile, steps) for profile in (first, second))
        return Row(
            "exactness", job, policy, measure, int(np.count_nonzero(a != b)), "weights", 1, at_least=True,
            detail={"steps": steps, "weights": int(a.size)},
        )  # fmt: skip

    def _plain_weights(self, job: str, policy: str, profile: str, steps: int) -> npt.NDArray[Any]:
        """Return the bits of the weights that a plain loop has under ``profile`` after the steps of the native run."""
        run, _ = self._recorded(job, policy, "native", steps)
        out = run / f"plain-{profile}"
        if not out.exists():
            self.say(f"  control: plain loop under {profile}")
            jitter = parse_profile(profile).jitter
            self._measure("control", profile, directory=str(run), out=str(out), jitter=jitter, job=job)
        return np.frombuffer(out.read_bytes(), dtype="<u4" if policy in ("fp32", "bf16") else "<u8")

    # -- log -----------------------------------------------------------------------------------

    def log(self, job: str, policy: str) -> list[Row]:
        """Return the log's size over a whole run, changes of the grids included; the first grids are part of the state."""
        steps = self._steps("log", job)
        run, found = self._recorded(job, policy, "native", steps)
        grids = RunDirectory(run).load_checkpoint(0)["document/grids"]
        detail = {
            "steps": steps,
            "parameters": found["parameters"],
            "first_grids_bytes": memoryview(grids.data).nbytes,
        }
        bits, size = found["log_bits_per_parameter_step"], found["log_bytes_per_step"]
        most = MOST_BITS.get((job, policy))
        return [
            Row("log", job, policy, "log bits per parameter and step", bits, "bits", most, detail=detail),
            Row("log", job, policy, "log bytes per step", size, "bytes", detail=detail),
        ]

    # -- overhead ------------------------------------------------------------------------------

    def overhead(self, job: str, policy: str) -> list[Row]:
        """Return medians over plain, recorded and audited steps that took turns in one process."""
        warm_up = 1 if self.quick or job in ROUNDS else WARM_UP
        found = self._measure(
            "overhead", job=job, policy=policy, rounds=self._steps("overhead", job), warm_up=warm_up,
            settings=SETTINGS.get(job, {}),
        )  # fmt: skip
        return overhead_rows(job, policy, found)

    # -- scaling -------------------------------------------------------------------------------

    def scaling(self, job: str, policy: str) -> list[Row]:
        """Return what recording and auditing cost by size of model and of batch; both have no more to do for a larger batch.

        Each cell is a process of its own; one that fails leaves a row that says so, and the others are still measured.
        """
        rows: list[Row] = []
        rounds = self._steps("scaling", job)
        batches = BATCHES[:1] if self.quick else BATCHES
        cells = [(size, batch) for size in SIZES.get(job, ({},)) for batch in batches]
        for number, (size, batch) in enumerate(cells, 1):
            words = ", ".join(f"{k} {v}" for k, v in size.items()) or "size as it comes"
            self.say(f"  cell {number} of {len(cells)}: {job}, {words}, batch {batch}")
            settings = {**size, "batch": str(batch), "accumulation": "1"}
            try:
                found = self._measure(
                    "overhead", job=job, policy=policy, rounds=rounds, warm_up=1, settings=settings
                )
                cell = scaling_rows(job, policy, batch, found)
            except (TallyError, OSError) as problem:
                name = f"record / plain, {words}, batch {batch}"
                cell = [Row("scaling", job, policy, name, None, "times", error=str(problem))]
            rows += cell
        return rows

    # -- leaf ----------------------------------------------------------------------------------

    def leaf(self, job: str, policy: str) -> list[Row]:
        """Return the size of a step's activation log in both forms; once, how much the paper's jobs log and how it counts."""
        rows: list[Row] = []
        if not self._counted:
            self._counted = True
            rows += leaf_entry_rows(self._measure("entries"))
            self.say("  corrections")
            found = self._measure("corrections", steps=self._steps("leaf", job))
            rows += leaf_correction_rows(found["found"], found["score"])
        for b_r, tau in LEAF_CHOICES:
            self.say(f"  b_r {b_r}, tau {tau}")
            rows += leaf_form_rows(job, b_r, tau, self._measure("forms", job=job, b_r=b_r, tau=tau, steps=2))
        return rows

    # -- memory --------------------------------------------------------------------------------

    def memory(self, job: str, policy: str) -> list[Row]:
        """Return the peak resident memory of recording and of auditing over that of the plain loop, processes and all."""
        run = self._directory("memory")
        peaks: dict[str, dict[str, int]] = {}
        for role in ("plain", "record", "audit"):
            self.say(f"  {role}")
            steps = self._steps("memory", job)
            peaks[role] = self._measure(
                "memory", job=job, policy=policy, role=role, steps=steps, directory=str(run)
            )
        rows: list[Row] = []
        for role in ("record", "audit"):
            peak, plain = peaks[role]["peak"], peaks["plain"]["peak"]
            net = (peak - peaks[role]["before"]) / max(plain - peaks["plain"]["before"], 1)
            most = MOST_MEMORY if job in JOBS["memory"] else None
            detail = {"peak_bytes": peak, "plain_peak_bytes": plain}
            rows.append(
                Row(
                    "memory",
                    job,
                    policy,
                    f"peak memory, {role} / plain",
                    peak / plain,
                    "times",
                    most,
                    detail=detail,
                )
            )
            rows.append(
                Row("memory", job, policy, f"peak memory, {role} / plain, without libraries", net, "times")
            )
        return rows

    # -- loss ----------------------------------------------------------------------------------

    def loss(self, job: str, policy: str) -> list[Row]:
        """Return the final held-out losses, and how far each policy moves them against how far another seed does.

        All policies of a job are trained together, with the first of them: the plain loops serve them all.
        """
        policies = list(self.policies or ONLY["loss"])
        if policy != policies[0]:
            return []
        steps = self.steps or (QUICK["loss"] if self.quick else None)
        found = losses.train(
            job, policies, self.seeds, steps,
            lambda asked: self.child(["bench", "measure", "curve", json.dumps(asked)], parse_profile("native,threads=1")),
            keep=losses.keeping(self.out or self._directory("losses")), facts=machine(), workers=self.workers, say=self.say,
        )  # fmt: skip
        self.curves.append(found)
        return loss_rows(found, policies)

    # -- kernel --------------------------------------------------------------------------------

    def kernel(self, place: str, policy: str) -> list[Row]:
        """Return the kernels' throughput beside copying, and the optimizers' time beside torch's own."""
        elements = FEW_ELEMENTS if self.quick else ELEMENTS
        found = self._measure("kernel", policy=policy, elements=elements, rounds=self._steps("kernel", place))
        return kernel_rows(place, policy, found)


def _profile_pairs() -> list[tuple[str, str]]:
    """Return trainer's and auditor's profiles: instruction sets where this machine has them, else jitter."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return [("native", "sse4,threads=1"), ("sse4,threads=1", "native"), ("native", "avx2")]
    return [("native", "jitter,threads=1"), ("jitter,threads=1", "native")]


def differing_bytes(first: RunDirectory, second: RunDirectory, steps_done: int) -> int:
    """Return how many bytes differ between two states; a part that only one of them has differs wholly."""
    a, b = first.load_checkpoint(steps_done), second.load_checkpoint(steps_done)
    total = 0
    for name in a.keys() | b.keys():
        x, y = (np.frombuffer(side[name].data if name in side else b"", dtype=np.uint8) for side in (a, b))
        shared = min(x.size, y.size)
        total += int(np.count_nonzero(x[:shared] != y[:shared])) + abs(x.size - y.size)
    return total
