"""Fuzzes every parser of other parties' bytes, guided by coverage.

`make fuzz` gives each ten minutes; one parser alone, for an hour::

    python fuzz/fuzz.py --seconds 3600 specification log-frame

Each parser runs in a process of its own under Atheris (libFuzzer), from the vectors' documents on. A
crash, a hang over 10 s, memory over 1 GiB, or accepted bytes that are not canonical end that parser's run;
the input lies in the folder given by --findings, and the exit status is 1. What a run learned is kept
beside it and is where the next one starts.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LONGEST = 16384  # bytes of an input; every declared length can be a lie within it
MEMORY_MB = 1024
HANG_S = 10
SLICE_S = 150  # of one process


def fuzz_here(name: str, options: list[str]) -> None:
    """Fuzz one parser in this process until libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["tallystick"]):
        from tallystick.testing.parsers import accepts, find_target

        target = find_target(name)
        accepts(target, b"")  # what it imports when it is first called is traced too

    def one(data: bytes) -> None:
        accepts(target, data)

    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def fuzz_in_child(name: str, seconds: int, findings: Path) -> dict[str, object]:
    """Fuzz one parser for so many seconds and return what came of it.

    In processes of a few minutes each, the next one starting from what the last one learned: Atheris keeps some 170 bytes of
    every comparison of two arrays that it traces, which would pass for the parser's own memory.
    """
    began = time.monotonic()
    total, peak, covered, status = 0, 0, 0, 0
    artefacts: list[str] = []
    (findings / f"{name}.log").write_text("")
    while status == 0 and not artefacts and (left := seconds - (time.monotonic() - began)) > 1:
        status, numbers = _one_process(name, max(1, round(min(left, SLICE_S))), findings)
        # Not what another parser left whose name begins with this one's.
        kinds = ("crash", "leak", "oom", "timeout")
        artefacts = sorted(str(path) for kind in kinds for path in findings.glob(f"{name}-{kind}-*"))
        if not numbers["inputs"]:
            status = status or 1
        total += numbers["inputs"]
        peak, covered = max(peak, numbers["peak_mb"]), max(covered, numbers["covered"])
    return {
        "parser": name, "clean": status == 0 and not artefacts, "seconds": round(time.monotonic() - began),
        "inputs": total, "peak_mb": peak, "covered": covered, "status": status, "findings": artefacts,
    }  # fmt: skip


def _one_process(name: str, seconds: int, findings: Path) -> tuple[int, dict[str, int]]:
    corpus = findings / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={HANG_S}",
        f"-artifact_prefix={findings}/{name}-",
        "-print_final_stats=1",
        "-verbosity=1",
        str(corpus),
        str(own if (own := findings / f"seeds-{name}").is_dir() else findings / "seeds"),
    ]
    child = subprocess.run(
        [sys.executable, __file__, "--child", name, *options],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds + 300,
    )
    with (findings / f"{name}.log").open("a") as log:
        log.write(child.stdout + child.stderr)
    return child.returncode, {
        word: int(found[-1]) if (found := re.findall(pattern, child.stderr)) else 0
        for word, pattern in (
            ("inputs", r"stat::number_of_executed_units:\s+(\d+)"),
            ("peak_mb", r"stat::peak_rss_mb:\s+(\d+)"),
            ("covered", r"\bcov: (\d+)"),
        )
    }


def write_seeds(findings: Path, names: list[str]) -> int:
    """Write every document of the vectors, and every seed of a parser that has its own, as a file of its own."""
    from tallystick.testing.parser_seeds import seeds
    from tallystick.testing.parsers import find_target

    own = {name: make for name in names if (make := find_target(name).own_seeds) is not None}
    groups = {f"seeds-{name}": list(make()) for name, make in own.items()}
    if len(own) < len(names):
        groups["seeds"] = seeds(REPOSITORY / "vectors")
    count = 0
    for folder, every in groups.items():
        (findings / folder).mkdir(parents=True, exist_ok=True)
        for data in every:
            if len(data) <= LONGEST:
                (findings / folder / sha256(data).hexdigest()[:16]).write_bytes(data)
                count += 1
    return count


def main() -> int:
    """Exit status 0 if every parser ran clean, 1 if one did not, 2 for arguments that make no sense."""
    if sys.argv[1:2] == ["--child"]:
        fuzz_here(sys.argv[2], sys.argv[3:])
        return 0
    from tallystick.testing.parsers import TARGETS

    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--seconds", type=int, default=600, help="for each parser (default 600)")
    parser.add_argument("--jobs", type=int, default=2, help="parsers at a time (default 2)")
    parser.add_argument("--findings", type=Path, default=REPOSITORY / "fuzz" / "findings")
    parser.add_argument("--json", action="store_true", help="print one JSON object a parser")
    given = parser.parse_args()
    if unknown := sorted(set(given.parsers) - set(names)):
        parser.error(f"no parser is called {', '.join(unknown)}; there are {', '.join(names)}")
    if given.seconds < 1 or given.jobs < 1:
        parser.error(f"--seconds and --jobs must be at least 1, are {given.seconds} and {given.jobs}")
    chosen, folder = given.parsers or names, given.findings.resolve()
    count = write_seeds(folder, chosen)
    wall = -(-len(chosen) // given.jobs) * given.seconds
    print(
        f"fuzz: {len(chosen)} parsers, {count} seeds, {given.seconds} s each, about {wall} s", file=sys.stderr
    )
    clean = True
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(fuzz_in_child, name, given.seconds, folder) for name in chosen]
        for run in runs:
            found = run.result()
            clean = clean and bool(found["clean"])
            if given.json:
                print(json.dumps(found), flush=True)
            else:
                verdict = "clean" if found["clean"] else f"NOT CLEAN: {found['findings'] or 'see the log'}"
                numbers = f"{found['inputs']:>10,} inputs  cov {found['covered']}  {found['peak_mb']} MB"
                print(f"{found['parser']:<22} {numbers}  {verdict}", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
