"""tally bench chip: what a snapshot costs the program that is observed, and how fast memory is hashed."""

from __future__ import annotations

import hashlib
import json
import random
import secrets
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

from tallystick.cli.options import AsJson, argument, option
from tallystick.cli.profiles import python
from tallystick.errors import TallyError
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings
from tallystick.fleet.agent.chip_record import TORN, Firmware, Genesis, Snapshot
from tallystick.fleet.agent.memory import page_hashes, reader_of
from tallystick.fleet.agent.probes import ProcessMemory
from tallystick.signing.keys import generate_key
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import write_whole
from tallystick_bench.table import PartRow, measure_parts

BUFFER = 500_000_000  # bytes
PAGE = 1 << 20
LEAST_HASH_SHARE = 0.9  # of SHA-256 over the same bytes
MOST_LOSS = 0.01  # of throughput, at the paper's rate on one chip: what operators are said to accept
RATE = 0.1  # snapshots per chip-day (Shavit 2023, section 3.2)
FLEETS = (1, 1024, 16384)  # chips that stall each other: loss is chips * rate * stall / 86400
OBSERVED_JOB = Path(__file__).with_name("observed_job.py")  # run as a file: its package need not be installed
STEPS = {"text": 40, "gpt2": 10}

Parts = Annotated[list[str] | None, argument("[PART]...", "Any of hash, text, gpt2; by default all.")]
Bytes = Annotated[int, option("--bytes", "N", "Size of the buffer that is hashed.", least=PAGE)]
Steps = Annotated[int | None, option("--steps", "N", "Observed steps of each job.", least=4)]


def chip(part: Parts = None, n_bytes: Bytes = BUFFER, steps: Steps = None, as_json: AsJson = False) -> int:
    """Measure hashing, and the stall and loss that snapshots cost the jobs text and gpt2; 1 if anything is missed."""
    measures: dict[str, Callable[[], Iterable[PartRow]]] = {
        "hash": lambda: hash_rows(n_bytes),
        **{job: partial(job_rows, job, steps or count) for job, count in STEPS.items()},
    }
    return measure_parts("tally bench chip", measures, part, as_json=as_json)


def hash_rows(n_bytes: int, rounds: int = 5) -> list[PartRow]:
    """Return the rate of hashing pages beside that of SHA-256 over the same bytes, both taking turns."""
    data = bytearray(random.Random(1).randbytes(PAGE)) * -(-n_bytes // PAGE)
    view = memoryview(data)[:n_bytes]
    plain, paged = list[float](), list[float]()
    for _ in range(rounds):
        plain.append(_seconds(lambda: hashlib.sha256(view).digest()))
        paged.append(
            _seconds(lambda: page_hashes(reader_of(view), n_bytes, page_size=PAGE, salt=bytes(16), first=0))
        )
    rates = [n_bytes / statistics.median(times) / 1e9 for times in (plain, paged)]
    return [
        PartRow("hash", f"SHA-256 over {n_bytes:,} bytes", rates[0], "GB/s"),
        PartRow("hash", "salted pages of 1 MiB", rates[1], "GB/s"),
        PartRow(
            "hash", "share of the SHA-256 rate", rates[1] / rates[0], "", LEAST_HASH_SHARE, at_least=True
        ),
    ]


def job_rows(job: str, steps: int) -> Iterator[PartRow]:
    """Yield what snapshots of a training process cost it: stall, loss of throughput, and the hook on its optimizer."""
    plain = [step["seconds"] for step in _Child(job, None, steps).finish()]
    yield PartRow(job, "a step, plain", 1000 * statistics.median(plain), "ms")
    with tempfile.TemporaryDirectory(prefix="tallystick-bench-") as place:
        quiet = [step["seconds"] for step in _Child(job, _made(Path(place) / "q")[0], steps).finish()]
        # One number for both: a hook that costs nothing measures as the noise between two processes.
        hook = statistics.median(quiet) / statistics.median(plain) - 1
        yield PartRow(job, "a step, registered and never stopped, more than plain", 100 * hook, "%")
        for frozen in (False, True):
            directory, settings = _made(Path(place) / f"c{frozen}", hash_frozen=frozen)
            how = "hashed while frozen" if frozen else "copied, hashed afterwards"
            yield from _observed(job, steps, directory, settings, how)


def _observed(
    job: str, steps: int, directory: ChipDirectory, settings: ChipSettings, how: str
) -> list[PartRow]:
    probe = ProcessMemory(directory.observed_path)
    agent = ChipAgent(directory, generate_key(), probe, settings)
    agent.start()
    try:
        child = _Child(job, directory, 2 * steps)
        pause = 2 * child.typical()
        while not child.is_over and len(agent.stalls) < steps // 2 + 1:
            time.sleep(pause * random.random())
            if child.is_over:
                break
            agent.snapshot()
        times = child.finish()
    finally:
        agent.stop()
        probe.close()
    events = [r.record.event for r in agent.log if isinstance(r.record.event, Snapshot)]
    # The first one pays for a buffer of the memory's size.
    taken = [(stall, event) for stall, event in zip(agent.stalls, events, strict=True) if event.size][1:]
    if not taken:
        raise TallyError(f"bench: {job} ended before a second snapshot; give more --steps")
    stalls = [stall.frozen for stall, _ in taken]
    stall, size = statistics.median(stalls), taken[0][0].hashed
    rows = [
        PartRow(job, f"{how}: memory", size / 1e6, "MB"),
        PartRow(job, f"{how}: stall, median of {len(stalls)}", 1000 * stall, "ms"),
        PartRow(job, f"{how}: stall, longest", 1000 * max(stalls), "ms"),
        PartRow(job, f"{how}: torn", 100 * sum(bool(e.flags & TORN) for _, e in taken) / len(taken), "%"),
        PartRow(
            job, f"{how}: a step meanwhile, mean", 1000 * statistics.mean(t["seconds"] for t in times), "ms"
        ),
    ]
    for chips in FLEETS:
        loss = chips * RATE * stall / 86400
        must = MOST_LOSS if chips == 1 else None
        rows.append(PartRow(job, f"{how}: loss, {chips:,} chips that wait for each other", 100 * loss, "%",
                            None if must is None else 100 * must))  # fmt: skip
    return rows


class _Child:
    """A training process and what it says."""

    def __init__(self, job: str, chip_directory: ChipDirectory | None, steps: int) -> None:
        registered = [] if chip_directory is None else ["--chip", str(chip_directory.path)]
        arguments = [str(OBSERVED_JOB), job, "--steps", str(steps), *registered]
        self._process = subprocess.Popen(
            python(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self._ready = threading.Event()
        self.steps: list[dict[str, Any]] = []
        self.is_over = False
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()
        self._ready.wait()

    def typical(self) -> float:
        """Return the seconds of a step, after three of them."""
        while len(self.steps) < 3 and not self.is_over:
            time.sleep(0.01)
        return statistics.median(step["seconds"] for step in self.steps) if self.steps else 0.0

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end and return every step but the first two."""
        self._reader.join()
        if self._process.wait():
            raise TallyError(f"bench: the training process ended with exit code {self._process.returncode}")
        return self.steps[2:]

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                said = json.loads(line)
                if "step" in said:
                    self.steps.append(said)
                self.is_over = "done" in said
                self._ready.set()
        self.is_over = True
        self._ready.set()


def _made(path: Path, *, hash_frozen: bool = False) -> tuple[ChipDirectory, ChipSettings]:
    directory = ChipDirectory(path)
    write_whole(directory.settings_path, b"{}")
    settings = ChipSettings(
        b"\x01" + secrets.token_bytes(16), Firmware(bytes(32), 1),
        Genesis("tallystick", "bench", "software", bytes(32), "local"),
        page_size=PAGE, retention_days=0.0, hash_frozen=hash_frozen,
    )  # fmt: skip
    return directory, settings


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
