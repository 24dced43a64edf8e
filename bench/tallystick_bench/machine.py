"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from tallystick.store.files import storing


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
