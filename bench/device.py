"""All that needs a CUDA device, in one run: the device's tests, exactness against the CPU, kernels, what recording costs.

    python bench/device.py OUT [--parts NAME ...] [--only JOB-POLICY ...] [--steps N] [--jobs N] [--keep]

Parts: ``tests`` (tests/gpu), ``exact`` (each shipped job recorded on one device and audited on the other, both ways round,
under each policy, beside a control without log), ``kernels`` (bench/device_kernels.py), ``overhead`` (recorded and audited
steps beside plain ones). Those that are timed run alone. Each answer is a line of OUT/device.jsonl as soon as it is there;
what a command printed stands in OUT/NAME.txt where it failed. With ``--keep`` the runs that the device recorded stay in
OUT, to be audited elsewhere. Exit code 3: no device; 1: anything failed, did not match, or its control did not differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
PARTS = ("tests", "exact", "kernels", "overhead")
POLICIES = ("fp64", "fp32", "bf16")
JOBS: dict[str, list[str]] = {
    "digits": [],
    "text": [],
    "gpt2": ["layers=2", "width=128", "heads=4", "positions=128"],
    "resnet50": ["width=8", "blocks=1,1,1,1", "batch=16"],
}
OVERHEAD = {"text": {}, "gpt2": {"block": "1024"}}
WAYS = (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda"))


@dataclass
class Measuring:
    """Where answers go, and how many steps and processes are asked for."""

    out: Path
    steps: int
    jobs: int
    keep: bool
    only: Sequence[str]
    failed: bool = False

    @property
    def threads(self) -> int:
        """Of each process: the processor's, divided among those that run at a time."""
        return max(1, (os.cpu_count() or 1) // self.jobs)

    def wants(self, job: str, policy: str) -> bool:
        """Whether these were asked for."""
        return not self.only or f"{job}-{policy}" in self.only

    def tell(self, part: str, name: str, **facts: Any) -> None:
        """Append one answer."""
        line = json.dumps({"part": part, "name": name, **facts})
        print(line, flush=True)
        with (self.out / "device.jsonl").open("a") as file:
            file.write(line + "\n")

    def command(self, part: str, name: str, arguments: Sequence[str], ends: Sequence[int] = (0,)) -> Any:
        """Run one command of tally in a process of its own; return the JSON object that it printed, or None if it failed."""
        started = time.monotonic()
        variables = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        done = subprocess.run(
            [sys.executable, "-m", "tallystick", *arguments, "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=variables,
        )
        seconds = round(time.monotonic() - started, 1)
        if done.returncode in ends:
            return _last_object(done.stdout) | {"seconds": seconds}
        self.failed = True
        (self.out / f"{name.replace('/', '-')}.txt").write_text(done.stdout[-50_000:] + done.stderr[-50_000:])
        words = (done.stderr.strip() or done.stdout.strip())[-400:]
        self.tell(part, name, failed=done.returncode, seconds=seconds, said=words)
        return None

    # -- parts -------------------------------------------------------------------------------------

    def tests(self) -> None:
        """The tests that are skipped where no device is."""
        asked = ["-m", "pytest", str(HERE.parent / "tests" / "gpu"), "-q", "-rfE", "--tb=short", "-m", "gpu"]
        self._told("tests", "tests/gpu", [*asked, "-p", "no:cacheprovider"])

    def exact(self) -> None:
        """Every job and policy, as many at a time as were asked for."""
        with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(self.jobs) as pool:
            asked = [(job, policy) for job in JOBS for policy in POLICIES if self.wants(job, policy)]
            waited = [pool.submit(self._exact_one, Path(place), job, policy) for job, policy in asked]
            for each in waited:
                each.result()

    def _exact_one(self, place: Path, job: str, policy: str) -> None:
        settings = [word for setting in JOBS[job] for word in ("--set", setting)]
        for device in ("cuda", "cpu"):
            name = f"{job}-{policy}-{device}"
            run = (self.out / "runs" if self.keep and device == "cuda" else place) / name
            order = ["--run", str(run), "--policy", policy, "--steps", str(self.steps), "--device", device]
            order += ["--checkpoint-every", str(self.steps)]
            recorded = self.command("exact", name, ["record", job, *order, *settings])
            for other in [auditor for trainer, auditor in WAYS if trainer == device and recorded]:
                asked = ["audit", str(run), "--device", other, "--effort", "0"]
                found = self.command("exact", f"{name}-{other}", asked, ends=(0, 1, 2, 3, 4))
                if found:
                    self.failed |= found.get("verdict") != "match"
                    self.tell("exact", f"{name}-{other}", **found)
            if recorded and device == "cpu":
                self._control(job, policy, run)

    def _control(self, job: str, policy: str, run: Path) -> None:
        """The same training without log on both devices: its weights must differ, or exactness would show nothing."""
        weights: list[bytes] = []
        for device in ("cpu", "cuda"):
            out = run / f"plain-{device}"
            asked = {"directory": str(run), "out": str(out), "jitter": False, "job": job, "device": device}
            name = f"{job}-{policy}-control-{device}"
            if self.command("exact", name, ["bench", "measure", "control", json.dumps(asked)]) is None:
                return
            weights.append(out.read_bytes())
        a, b = (np.frombuffer(each, dtype="<u8" if policy == "fp64" else "<u4") for each in weights)
        differing = int(np.count_nonzero(a != b))
        self.failed |= not differing
        self.tell("exact", f"{job}-{policy}-control", differing=differing, weights=int(a.size))

    def kernels(self) -> None:
        """Rates of the rounding kernels."""
        self._told("kernels", "rounding", [str(HERE / "device_kernels.py")])

    def _told(self, part: str, name: str, arguments: Sequence[str]) -> None:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        self.failed |= bool(done.returncode)
        said = (done.stdout + done.stderr)[-20_000:].splitlines()
        self.tell(part, name, code=done.returncode, said=said)

    def overhead(self) -> None:
        """Medians of plain, recorded and audited steps that took turns."""
        for job, settings in OVERHEAD.items():
            for policy in [policy for policy in POLICIES if self.wants(job, policy)]:
                asked = {"job": job, "policy": policy, "rounds": 20, "warm_up": 5, "settings": settings}
                arguments = ["bench", "measure", "overhead", json.dumps({**asked, "device": "cuda"})]
                found = self.command("overhead", f"{job}-{policy}", arguments)
                if found:
                    self.tell("overhead", f"{job}-{policy}", **found)


def _last_object(text: str) -> dict[str, Any]:
    start = text.find("{")
    return json.loads(text[start:]) if start >= 0 else {}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="+", default=(), metavar="JOB-POLICY", help="of exact and overhead")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time (default 6)")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("device: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    measuring = Measuring(options.out, options.steps, options.jobs, options.keep, options.only)
    measuring.tell(
        "device", torch.cuda.get_device_name(), torch=str(torch.__version__), cuda=torch.version.cuda
    )
    parts: dict[str, Callable[[], None]] = {part: getattr(measuring, part) for part in PARTS}
    for part in options.parts:
        parts[part]()
    return int(measuring.failed)


if __name__ == "__main__":
    sys.exit(main())
