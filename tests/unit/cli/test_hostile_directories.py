"""Another party's run directory with something else than a file in each place: every command that reads it says so at once."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

PLACES = {
    "specification": "specification.json",
    "records": "steps.jsonl",
    "statement": "run.json",
    "log": "logs/000000.tlog",
    "checkpoint": "checkpoints/000000.safetensors",
    "final": "checkpoints/000006.safetensors",
    "program": "program/tiny.py",
    "objection": "objection.json",
    "verdict": "verdict.json",
    "record": "dispute.json",
    "provenance": "provenance.intoto.json",
    "signature": "model.sig",
    "audit": "audit.json",
    "bands": "bands.json",
}
DOCUMENTS = dict.fromkeys(("specification", "records", "statement"), 2)
REFUSED = ("regular file", "at most", "on the disk")
SECONDS = 60  # for one command: all of them end at once, on however slow a machine

# What is called (RUN is the stranger's directory, HONEST and CLAIM are whole ones, OUT is a new place), and the places that it
# reads with its exit code: where the rest can be shown, it is, and the page says what could not be read. Who writes a claim
# repeats a step without its log, and says that the step differs.
COMMANDS: dict[str, tuple[str, dict[str, int]]] = {
    "show": ("show RUN", {**DOCUMENTS, "log": 0}),
    "verify": ("verify RUN", {**DOCUMENTS, "log": 2, "checkpoint": 2, "final": 2, "program": 2}),
    "prove a step": ("prove RUN --step 1 --out OUT", DOCUMENTS),
    "prove a chunk": (
        "prove RUN --checkpoint 6 --entry model/0.weight --chunk 0 --out OUT",
        {**DOCUMENTS, "final": 2},
    ),
    "report": ("report RUN --out OUT", {**DOCUMENTS, "log": 0, "audit": 0, "verdict": 0, "bands": 0}),
    "sign": ("sign RUN --key KEY --out OUT", {**DOCUMENTS, "final": 2}),
    "export": ("export RUN --out OUT", {**DOCUMENTS, "final": 2}),
    "bundle": ("bundle RUN --out OUT", dict.fromkeys(("statement", "verdict", "record", "provenance", "signature"), 2)),
    "log": ("log add LOG RUN", {"statement": 2}),
    "audit": ("audit RUN", {**DOCUMENTS, "log": 2, "checkpoint": 2, "program": 2}),
    "audit of the end": ("audit RUN --steps 4:6 --effort 0", {"final": 2}),
    "claim": ("audit RUN --claim OUT", {**DOCUMENTS, "log": 1, "checkpoint": 2}),
    "announcement": (
        "audit RUN --sample --announce OUT --fraction 0.5 --detect 0.5 --round some/beacon:41:1800000000", DOCUMENTS
    ),
    "diff from": ("diff RUN OTHER --effort 0", {**DOCUMENTS, "final": 2}),
    "diff to": ("diff OTHER RUN --effort 0", {**DOCUMENTS, "final": 2}),
    "diff of states": ("diff RUN HONEST --after 6", {"final": 2}),
    "dispute with": ("dispute RUN HONEST", DOCUMENTS),
    "dispute by": ("dispute HONEST RUN", {**DOCUMENTS, "objection": 2}),
}  # fmt: skip


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's address is short
        try:
            opened.bind(path.name)
        finally:
            os.chdir(before)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "device": lambda path, honest: path.symlink_to("/dev/zero"),
    "pipe": lambda path, honest: os.mkfifo(path),
    "link": lambda path, honest: path.symlink_to(honest),
    "link to nothing": lambda path, honest: path.symlink_to(path.with_name("absent")),
    "directory": lambda path, honest: path.mkdir(),
    "socket": lambda path, honest: _socket(path),
    "sparse": lambda path, honest: _sparse(path),
}


@contextmanager
def instead(path: Path, kind: str, aside: Path) -> Generator[None]:
    """Inside, ``path`` is no file; the file that was there, if any, is the one that a link leads to."""
    aside.unlink(missing_ok=True)
    was_there = path.exists()
    if was_there:
        path.rename(aside)
    else:
        aside.write_bytes(b"{}")
    try:
        KINDS[kind](path, aside)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        if was_there:
            aside.rename(path)


@contextmanager
def ending(seconds: float) -> Generator[None]:
    """Inside, what takes longer fails: a pipe may be waited for as long as nobody writes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_only_regular_files_are_read_and_nothing_is_waited_for(
    command: str, tally, recorded: Path, copied: Path, edited: Path, tmp_path: Path
) -> None:
    line, places = COMMANDS[command]
    key, log = tmp_path / "key", tmp_path / "log"
    if "KEY" in line or "LOG" in line:
        assert tally("key", "generate", key).code == 0
    if "LOG" in line:
        assert tally("log", "init", log, "--origin", "log.example/a", "--key", key).code == 0
    for place, code in places.items():
        for number, kind in enumerate(KINDS):
            out = tmp_path / f"out-{place}-{number}"
            words = {"RUN": copied, "HONEST": recorded, "OTHER": edited, "OUT": out, "KEY": key, "LOG": log}
            arguments = [words.get(word, word) for word in line.split()]
            with instead(copied / PLACES[place], kind, tmp_path / "aside"), ending(SECONDS):
                found = tally(*arguments)
            said = " ".join((found.out + found.err).split())  # a table folds them
            assert found.code == code, (place, kind, said)
            assert code == 1 or any(part in said for part in REFUSED), (place, kind, said)
            shutil.rmtree(out, ignore_errors=True)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"link", "link to nothing"}))
def test_what_else_another_party_hands_over_is_read_as_files_only(
    kind: str, tally, recorded: Path, tmp_path: Path
) -> None:
    """A log's directory, a model's, documents of a watched run: links lead where the reader's own user put them."""
    log, key, model = tmp_path / "log", tmp_path / "key", tmp_path / "model"
    assert tally("key", "generate", key).code == 0
    assert tally("log", "init", log, "--origin", "log.example/a", "--key", key).code == 0
    assert tally("log", "add", log, recorded).code == 0
    assert tally("log", "checkpoint", log, "--key", key).code == 0
    assert tally("export", recorded, "--out", model).code == 0
    vkey = (log / "log.vkey").read_text().strip()
    (tmp_path / "report").write_bytes(b"{}")
    for path, arguments in (
        (log / "checkpoint", ("log", "verify", log, "--log-key", vkey)),
        (log / "tile" / "0" / "000.p" / "1", ("log", "verify", log, "--log-key", vkey)),
        (log / "tile" / "entries" / "000.p" / "1", ("log", "verify", log, "--log-key", vkey)),
        (model / "model.safetensors", ("sign", model, "--key", key, "--out", tmp_path / "signature")),
        (tmp_path / "report", ("rules", "records", recorded / "run.json", "--report", tmp_path / "report")),
    ):
        if kind == "sparse" and path.suffix == ".safetensors":
            continue  # whoever signs a terabyte of zeros reads them, piece by piece
        assert path.is_file()
        with instead(path, kind, tmp_path / "aside"), ending(SECONDS):
            found = tally(*arguments)
        said = found.out + found.err
        assert found.code == 2, (path, said)
        assert any(
            part in said for part in (*REFUSED, "neither a file nor", "symbolic link", "has no file")
        ), (
            path,
            said,
        )
