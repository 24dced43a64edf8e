#!/usr/bin/env python3
"""Compile the kernels of tallystick.numerics into one shared library beside their Python module.

Run by the build (hatch_build.py) and by hand after an edit of the C sources. ``CC`` names another compiler than
``cc``; it may hold arguments, such as ``python -m ziglang cc``. Exit code 3: no compiler was found.
"""

from __future__ import annotations

import os
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


def find_compiler() -> list[str] | None:
    """Return the compiler's command, or None."""
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return [found] if found else None


def main() -> int:
    """Compile; nothing is replaced if that fails."""
    compiler = find_compiler()
    if compiler is None:
        print(
            "compile_kernels: no C compiler: install one (Debian: gcc and libc6-dev), or name it in CC",
            file=sys.stderr,
        )
        return 3
    target = ROOM / LIBRARY
    fresh = target.with_suffix(".new")
    sources = [str(ROOM / name) for name in SOURCES]
    done = subprocess.run([*compiler, *FLAGS.split(), "-o", str(fresh), *sources, "-lm"], check=False)
    if done.returncode:
        print(f"compile_kernels: {shlex.join(compiler)} failed", file=sys.stderr)
        return 1
    fresh.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
