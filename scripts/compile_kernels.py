#!/usr/bin/env python3
"""Compile the kernels of tallystick.numerics into one shared library beside their Python module.

On Linux with glibc so is what a judge's processes have for a calendar of their own (tallystick.roles.elsewhen); without it
nobody is convicted by data, and everything else is there.

Run by the build (hatch_build.py) and by hand after an edit of the C sources. ``CC`` names another compiler than
``cc``; it may hold arguments, such as ``python -m ziglang cc``. Exit code 3: no compiler was found.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).resolve().parent.parent / "src" / "tallystick" / "numerics"
SOURCES = (
    "entries.c",
    "kernels.c",
    "measures.c",
    "nearest.c",
    "optimizers.c",
    "philox.c",
    "rows.c",
    "sha256.c",
)
LIBRARY = {"win32": "libkernels.dll", "darwin": "libkernels.dylib"}.get(sys.platform, "libkernels.so")
# No contraction and no fast-math: the bits must not depend on the compiler. The two -fno flags change no value.
FLAGS = "-O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -fPIC -shared"
CALENDAR = ROOM.parent / "roles" / "elsewhen.c"
CALENDAR_FLAGS = "-O2 -std=gnu11 -fPIC -shared"


def find_compiler() -> list[str] | None:
    """Return the compiler's command, or None."""
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return [found] if found else None


def main() -> int:
    """Compile; of what fails nothing is replaced."""
    compiler = find_compiler()
    if compiler is None:
        print(
            "compile_kernels: no C compiler: install one (Debian: gcc and libc6-dev), or name it in CC",
            file=sys.stderr,
        )
        return 3
    kernels = [ROOM / name for name in SOURCES]
    if not built(compiler, ROOM / LIBRARY, [*FLAGS.split()], [*map(str, kernels), "-lm"]):
        print(f"compile_kernels: {shlex.join(compiler)} failed", file=sys.stderr)
        return 1
    is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    library = CALENDAR.with_name("libelsewhen.so")
    if is_glibc and not built(compiler, library, [*CALENDAR_FLAGS.split()], [str(CALENDAR), "-ldl"]):
        print("compile_kernels: second runs of a judge's have no other calendar here", file=sys.stderr)
    return 0


def built(compiler: list[str], target: Path, flags: list[str], rest: list[str]) -> bool:
    """Return whether a library could be compiled; only then the one before is replaced."""
    fresh = target.with_suffix(".new")
    if subprocess.run([*compiler, *flags, "-o", str(fresh), *rest], check=False).returncode:
        return False
    fresh.replace(target)
    return True


if __name__ == "__main__":
    sys.exit(main())
