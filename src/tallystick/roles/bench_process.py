"""The processes of the benchmark: a tally command in a process of its own, and the machine that it ran on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tallystick.errors import TallyError
from tallystick.execution.determinism import INSTRUCTION_SETS, Profile
from tallystick.store.files import storing

Child = Callable[[Sequence[str], Profile], dict[str, Any]]


def run_child(
    arguments: Sequence[str], profile: Profile, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the JSON answer of a tally command that runs in a process of its own under ``profile``.

    ``environment`` holds further variables. What it says to people passes through. An audit's verdict is an answer,
    whatever its exit code.

    Raises:
        TallyError: it gave no answer; the message has its own words.
    """
    chosen = {name for variables in INSTRUCTION_SETS.values() for name in variables}
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    child = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "tallystick",
            *arguments,
            *(() if "--json" in arguments else ("--json",)),
        ],
        env={**inherited, "OMP_WAIT_POLICY": "PASSIVE", **profile.environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode == 130:
        raise KeyboardInterrupt
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        answer = {"error": f"ended with exit code {child.returncode} and no answer"}
    if not isinstance(answer, dict) or "error" in answer:
        said = answer.get("error") if isinstance(answer, dict) else answer
        raise TallyError(f"tally {' '.join(arguments[:3])}: {said}")
    return answer


def machine() -> dict[str, Any]:
    """Return what a reader needs to place the numbers: processor, cores and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("tallystick", "torch", "numpy", "transformers")},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        with storing(str(info)):
            for line in info.read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
