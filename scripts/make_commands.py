"""Write docs/commands.md: the prose of docs/commands.in.md with every command, argument and option as the code has them.

    python scripts/make_commands.py            # writes the page
    python scripts/make_commands.py --check    # exit code 1 if the page is not what this would write

A section of the prose begins with a heading, as ``## tally record``. A comment in it stands for what the code says:

    <!-- options
    --policy: a text in place of the code's own
    exit 1: what this exit code means here
    -->

The page is refused if a command has no section or two, or if a text is for an option that the command lacks.
Loads the command line, and no torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from tallystick.cli.commands import load

DOCS = Path(__file__).resolve().parents[1] / "docs"
PROSE, PAGE = DOCS / "commands.in.md", DOCS / "commands.md"
NOTE = "<!-- Made by scripts/make_commands.py from docs/commands.in.md and the code: edit those. -->\n\n"
HEADING = re.compile(r"^#+ (tally [a-z -]+)$")


class Unwritable(Exception):
    """The prose does not fit the commands; the message names both."""


def commands_of(group: Any, path: str = "tally") -> Iterator[tuple[str, Any]]:
    """Yield every command that is not hidden, with its whole name."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if getattr(command, "commands", None):
            yield from commands_of(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def plain(text: str | None) -> str:
    """Return a help text as one line of a table."""
    return " ".join((text or "").replace("``", "`").split()).replace("|", "\\|")


def value_of(parameter: Any) -> str:
    """Return what stands behind an option: nothing for a switch, else its metavar."""
    if parameter.is_flag:
        return ""
    return f" {parameter.metavar or parameter.name.upper()}"


def default_of(parameter: Any) -> str:
    """Return the cell that says what holds without the option."""
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default is False or callable(default) or default in ((), []):
        return ""
    if isinstance(default, (list, tuple)):
        return ", ".join(f"`{one}`" for one in default)
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"`{default}`"


def usage_of(name: str, command: Any) -> str:
    """Return the line that somebody types: name, required options, arguments."""
    words = [name]
    arguments = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            shown = parameter.metavar or parameter.name.upper()
            if parameter.nargs != 1 and not shown.endswith("..."):
                shown += "..."
            arguments.append(shown if parameter.required or shown.startswith("[") else f"[{shown}]")
        elif parameter.required:
            words.append(parameter.opts[0] + value_of(parameter))
    words += arguments
    if any(each.param_type_name == "option" and not each.required for each in command.params):
        words.append("[OPTION]...")
    return " ".join(words)


def table_of(name: str, command: Any, texts: dict[str, str]) -> str:
    """Return usage and table of a command, ``texts`` standing in for the code's own; each must be for something there."""
    lines = [f"    {usage_of(name, command)}", ""]
    rows, left = [], {key: text for key, text in texts.items() if not key.startswith("exit ")}
    for parameter in command.params:
        if parameter.hidden:
            continue
        if parameter.param_type_name == "argument":
            key = shown = re.sub(r"^\[(\w+)\]\.*$", r"\1", parameter.metavar or parameter.name.upper())
            if not parameter.help and key not in left:
                continue
        else:
            key = parameter.opts[0]
            shown = ", ".join(parameter.opts) + value_of(parameter)
            if parameter.multiple:
                shown += " .."
        text = left.pop(key, plain(parameter.help))
        cell = shown.replace("|", "\\|")
        rows.append(f"| `{cell}` | {default_of(parameter)} | {text} |")
    if left:
        raise Unwritable(f"{name}: the prose has a text for {', '.join(left)}, which the command lacks")
    if rows:
        lines += ["| argument or option | default | meaning |", "|---|---|---|", *rows, ""]
    codes = [
        f"{key.removeprefix('exit ')}, {text}; " for key, text in texts.items() if key.startswith("exit ")
    ]
    lines += [f"Exit codes: {''.join(codes)}[those of every command](#exit-codes).", ""]
    return "\n".join(lines)


def texts_of(lines: list[str]) -> dict[str, str]:
    """Read the texts inside a comment: ``--option: text``, one a line."""
    texts = {}
    for line in filter(None, lines):
        key, mark, text = line.partition(": ")
        if not mark:
            raise Unwritable(f"a line of texts must read `--option: text`, and one reads {line!r}")
        texts[key] = text if key.startswith("exit ") else text[0].upper() + text[1:].rstrip(".") + "."
    return texts


def page_of(prose: str, commands: dict[str, Any]) -> str:
    """Return the whole page; every command stands in it once."""
    written: list[str] = []
    seen: list[str] = []
    name, spoken = "", False
    lines = iter(prose.splitlines())
    for line in lines:
        if found := HEADING.match(line):
            name, spoken = found[1], False
        if not line.startswith("<!-- options"):
            spoken = spoken or bool(line.strip() and not found)
            written.append(line)
            continue
        inside: list[str] = []
        if not line.endswith("-->"):
            for each in lines:
                if each == "-->":
                    break
                inside.append(each)
        if name not in commands:
            raise Unwritable(f"the prose has options under {name!r}, which is no command")
        if not spoken:
            written += [plain((commands[name].help or "").split("\n\n")[0]), ""]
        seen.append(name)
        written.append(table_of(name, commands[name], texts_of(inside)).rstrip("\n"))
    if missing := [each for each in commands if each not in seen]:
        raise Unwritable(f"the prose has no options for {', '.join(missing)}")
    if twice := {each for each in seen if seen.count(each) > 1}:
        raise Unwritable(f"the prose has options twice for {', '.join(sorted(twice))}")
    return NOTE + "\n".join(written) + "\n"


def make() -> str:
    """Return the page that belongs to today's prose and code."""
    root: Any = typer.main.get_command(load())
    return page_of(PROSE.read_text(encoding="utf-8"), dict(commands_of(root)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/commands.md from the prose and the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page would change")
    check = parser.parse_args().check
    try:
        page = make()
    except Unwritable as problem:
        print(f"make_commands: {problem}", file=sys.stderr)
        return 2
    if check:
        if PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PAGE.name} is not up to date: run python scripts/make_commands.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
