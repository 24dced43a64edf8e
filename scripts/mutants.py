"""Break chosen lines of src one at a time, each in a copy of the sources, and see that the tests named for it fail.

    .venv/bin/python scripts/mutants.py                  # all of scripts/mutants.toml
    .venv/bin/python scripts/mutants.py --only freedom   # those with "freedom" in name or file

A mutant is killed when its tests run to their end and one of them fails. Before that all the tests named must pass on the
unbroken copy. What survives, does not even import, or runs too long is listed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
KEYS = {"name", "file", "line", "becomes", "tests"}
LONGEST = 300  # seconds for one mutant's tests
LONGEST_WHOLE = 3600  # seconds for all tests on the unbroken sources
FAILED = 1  # pytest: tests ran, and some failed; from 2 on nothing is said about the mutant


@dataclass(frozen=True)
class Mutant:
    """One line and what it becomes.

    Attributes:
        name: what breaks, in words.
        file: from the repository's root.
        line, becomes: without their indentation; ``becomes`` may be empty, then the line is ``pass``.
        tests: pytest's arguments: files or single tests of which one must fail.
        within: a line's beginning, as of a function, from which on to the next line that is not indented more the line
            stands; empty for the whole file.
    """

    name: str
    file: str
    line: str
    becomes: str
    tests: tuple[str, ...]
    within: str = ""

    def apply(self, source: str) -> str:
        """Return ``source`` with the line broken.

        Raises:
            ValueError: the line does not stand there exactly once.
        """
        lines = source.split("\n")
        found = [at for at in self._range(lines) if lines[at].strip() == self.line]
        if len(found) != 1:
            place = f"{self.file}, {self.within}" if self.within else self.file
            raise ValueError(f"{self.name}: {place} has the line {len(found)} times, must once: {self.line}")
        (at,) = found
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        return "\n".join([*lines[:at], indent + (self.becomes or "pass"), *lines[at + 1 :]])

    def _range(self, lines: Sequence[str]) -> range:
        if not self.within:
            return range(len(lines))
        starts = [at for at, text in enumerate(lines) if text.strip().startswith(self.within)]
        if len(starts) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {len(starts)} lines that begin with {self.within!r}"
            )
        (start,) = starts
        depth = len(lines[start]) - len(lines[start].lstrip())
        for at in range(start + 1, len(lines)):
            text = lines[at]
            if text.strip() and len(text) - len(text.lstrip()) <= depth and not text.lstrip().startswith(")"):
                return range(start, at)
        return range(start, len(lines))


def read_table(path: Path = TABLE) -> list[Mutant]:
    """Return the mutants of the table.

    Raises:
        ValueError: an entry has other keys than it must, or a name stands twice.
    """
    found: list[Mutant] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        if not entry.keys() >= KEYS or entry.keys() - KEYS - {"within"}:
            raise ValueError(f"{path.name}: an entry has {sorted(entry)}, must have {sorted(KEYS)}")
        tests = tuple(map(str, entry["tests"]))
        name, file, line, becomes = (str(entry[key]) for key in ("name", "file", "line", "becomes"))
        found.append(Mutant(name, file, line, becomes, tests, str(entry.get("within", ""))))
    names = [mutant.name for mutant in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name}: named twice: {', '.join(sorted(twice))}")
    return found


def find_rot(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Return what no longer stands: lines of the table that are not in their file, and tests that are not there."""
    problems: list[str] = []
    for mutant in mutants:
        path = root / mutant.file
        if not path.is_file():
            problems.append(f"{mutant.name}: there is no {mutant.file}")
            continue
        source = path.read_text(encoding="utf-8")
        try:
            if mutant.apply(source) == source:
                problems.append(f"{mutant.name}: {mutant.file} would stay as it is")
        except ValueError as problem:
            problems.append(str(problem))
        for test in mutant.tests:
            file, _, case = test.partition("::")
            function = case.partition("[")[0]
            if not (root / file).is_file() or f"def {function}" not in (root / file).read_text(
                encoding="utf-8"
            ):
                problems.append(f"{mutant.name}: there is no test {test}")
    return problems


@dataclass(frozen=True)
class Copy:
    """A copy of src, in which one mutant at a time stands."""

    place: Path

    def run(self, tests: Sequence[str], limit: float = LONGEST) -> tuple[int | None, str]:
        """Return pytest's exit status on ``tests`` with this copy as the package, None if it took too long, and its words."""
        environment: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": str(self.place / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "CI": "1",  # hypothesis repeats itself
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"more than {limit:.0f} seconds"
        return done.returncode, "\n".join((done.stdout + done.stderr).strip().split("\n")[-12:])

    def try_out(self, mutant: Mutant) -> tuple[int | None, str]:
        """Break the line, run its tests, mend the line."""
        path = self.place / mutant.file
        whole = path.read_text(encoding="utf-8")
        path.write_text(mutant.apply(whole), encoding="utf-8")
        try:
            return self.run(mutant.tests)
        finally:
            path.write_text(whole, encoding="utf-8")


def copied(place: Path) -> Copy:
    """Return a copy of src under ``place``, which the tests import in place of the installed package."""
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    # Compiled code that goes by the source's digest: one that goes by its time would hide a mutant of the same second.
    compileall.compile_dir(
        place / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )
    found = subprocess.run(
        [sys.executable, "-c", "import tallystick; print(tallystick.__file__)"],
        env={**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not Path(found.stdout.strip()).is_relative_to(place):
        raise SystemExit(f"the tests would import {found.stdout.strip()}, not the copy in {place}")
    return Copy(place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try out every mutant; 1 if one survives or cannot be tried."""
    parser = argparse.ArgumentParser(prog="scripts/mutants.py", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="those with PATTERN in name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time")
    given = parser.parse_args(arguments)
    chosen = [m for m in read_table() if given.only in m.name or given.only in m.file]
    if not chosen:
        raise SystemExit(f"no mutant has {given.only!r} in its name or file")
    if problems := find_rot(chosen):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    left: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tallystick-mutants-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(given.jobs):
            copies.put(copied(Path(folder) / str(number)))
        whole = copies.get()
        status, words = whole.run(sorted({test for mutant in chosen for test in mutant.tests}), LONGEST_WHOLE)
        copies.put(whole)
        if status != 0:
            print(f"the tests fail on the unbroken sources:\n{words}", file=sys.stderr)
            return 1
        print(f"the tests pass on the unbroken sources ({time.monotonic() - started:.0f} s)", flush=True)

        def tried(mutant: Mutant) -> tuple[Mutant, int | None, str, float]:
            copy, begun = copies.get(), time.monotonic()
            try:
                return mutant, *copy.try_out(mutant), time.monotonic() - begun
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(given.jobs) as pool:
            for number, (mutant, found, said, seconds) in enumerate(pool.map(tried, chosen), start=1):
                word = {FAILED: "killed", 0: "SURVIVED"}.get(-1 if found is None else found, "BROKEN")
                print(f"{number:3}/{len(chosen)}  {word:8}  {seconds:5.1f} s  {mutant.name}", flush=True)
                if word != "killed":
                    left.append(f"{word}: {mutant.name}: {mutant.file}: {mutant.line}")
                if word == "BROKEN":
                    print(said, flush=True)
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants killed, {time.monotonic() - started:.0f} s")
    print(*left, sep="\n", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
