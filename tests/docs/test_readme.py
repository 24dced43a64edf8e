"""The README fits on one screen, and every command that it or another page names is there, options and files included."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tallystick.cli.commands import load

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "bench/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr"),
]
COMMANDS: Any = typer.main.get_command(load())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands_in(text: str) -> set[str]:
    """Return the commands of a page: inline code, indented blocks and blocks of shell."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = {*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)}
    found |= {line for block in blocks for line in block.splitlines()}
    return {one.split("  #")[0].strip() for one in found}


def problem_of(line: str) -> str | None:
    """Return what is wrong with a command, or None; what is no command of this project is left alone."""
    if match := re.match(r"make ([a-z-]+)$", line):
        return None if match[1] in TARGETS else f"there is no target {match[1]}"
    if match := re.match(
        r"(?:python |pytest (?:-\S+ (?:slow )?)*)?((?:attacks|tests|bench|scripts|examples)/\S+\.py)", line
    ):
        return None if (ROOT / match[1]).is_file() else f"there is no file {match[1]}"
    line = re.sub(r"^(?:\S+/)?tally ", "tally ", line.replace("\\|", "|"))
    line = re.sub(r" -- python .*", "", line)  # a program's own arguments
    if not line.startswith("tally ") or "-- PROGRAM" in line:
        return None
    try:
        words = [word for word in shlex.split(line)[1:] if word not in {"..", "...", "|", ">"}]
    except ValueError:
        words = line.split()[1:]
    command = COMMANDS
    while words and getattr(command, "commands", None):
        if words[0] not in command.commands:
            if words[0].startswith("-") or words[0].isupper() or command.name == "dispute":
                break
            return f"there is no command {command.name} {words[0]}"
        command = command.commands[words.pop(0)]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    if getattr(command, "commands", None):
        known |= {
            option for below in command.commands.values() for each in below.params for option in each.opts
        }
    for word in words:
        option = word.partition("=")[0].rstrip(",;:")
        if option.startswith("--") and option != "--" and option not in known:
            return f"{command.name} has no option {option}"
    return None


def test_the_readme_fits_on_one_screen() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    rows = [line for line in lines if line.startswith("|")][2:]
    assert len(rows) == 5
    assert all("`" in row.rsplit("|", 2)[1] for row in rows), "a row without a command"


def test_every_figure_of_the_readme_stands_in_the_benchmarks() -> None:
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|")][2:]
    figures = [
        number
        for row in rows
        for number in re.findall(r"\d+(?:[,.]\d+)*", re.sub(r"`[^`]*`", "", row.rsplit("|", 3)[1]))
    ]
    assert len(figures) >= 7
    assert [
        number for number in figures if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d])", benchmarks)
    ] == []


def test_the_glossary_says_each_term_once_and_no_bare_log() -> None:
    rows = re.findall(
        r"^\| (?!term|---)([^|]+) \|",
        (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) > 80
    assert len(set(rows)) == len(rows)
    assert {"rounding log", "transparency log", "chip log"} <= set(rows)
    assert "log" not in rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_there(page: Path) -> None:
    wrong = {
        line: said for line in commands_in(page.read_text(encoding="utf-8")) if (said := problem_of(line))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tally audit R --profile sse4,threads=1", None),
        ("tally audit R --profil sse4", "audit has no option --profil"),
        ("tally chip enrol request CHIP --out FILE", None),
        ("tally chip enroll request CHIP", "there is no command chip enroll"),
        ("tally bench training overhead --job text", None),
        ("make demo", None),
        ("make dem", "there is no target dem"),
        ("pytest -s -m slow tests/e2e/test_honest_pairs.py", None),
        ("pytest -m slow tests/e2e/test_pairs.py", "there is no file tests/e2e/test_pairs.py"),
        ("attacks/spread_moves.py --policy bf16", None),
        ("git status", None),
    ],
)
def test_a_command_that_is_not_there_is_named(line: str, said: str | None) -> None:
    assert problem_of(line) == said
