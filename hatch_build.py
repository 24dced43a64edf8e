"""Build hook: compiles the kernels (scripts/compile_kernels.py) for wheels and for editable installations.

Without a C compiler the package installs all the same: what verifies needs no kernels, and what trains says that they
are missing.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NO_COMPILER = 3


class Kernels(BuildHookInterface):
    """Compiles, and marks the wheel as one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run before the files are collected."""
        if self.target_name != "wheel":
            return
        script = Path(self.root) / "scripts" / "compile_kernels.py"
        done = subprocess.run([sys.executable, str(script)], check=False)
        if done.returncode == NO_COMPILER:
            self.app.display_warning("tallystick is built without its kernels")
            return
        if done.returncode:
            raise RuntimeError("the kernels could not be compiled")
        build_data["artifacts"] += [
            "src/tallystick/roles/libelsewhen.so",
            *(f"src/tallystick/numerics/libkernels.{kind}" for kind in ("so", "dylib", "dll")),
        ]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
