"""Write completions/tally.bash and completions/tally.fish: commands and options as the code has them.

    python scripts/make_completions.py            # writes both
    python scripts/make_completions.py --check    # exit code 1 if they are not what this would write

The files are static: a tab starts no Python. zsh reads the one of bash. Loads the command line, and no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from tallystick.cli.commands import load

FOLDER = Path(__file__).resolve().parents[1] / "completions"
NOTE = "# Made by scripts/make_completions.py from the command line itself: edit nothing here.\n"


def rooms_of(command: Any, path: str = "tally") -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each group and command: its whole name, what may follow, and its options."""
    shown = {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}
    options = [
        option
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden
        for option in parameter.opts
        if option.startswith("--")
    ]
    yield path, sorted(shown), sorted({*options, "--help"})
    for name in sorted(shown):
        yield from rooms_of(shown[name], f"{path} {name}")


def bash_of(rooms: list[tuple[str, list[str], list[str]]]) -> str:
    """Return the file that bash reads, and zsh after ``bashcompinit``."""
    names = " | ".join(f'"{path}"' for path, following, _ in rooms if following and path != "tally")
    following = "\n".join(
        f'        "{path}") words="{" ".join(after)}" ;;' for path, after, _ in rooms if after
    )
    options = "\n".join(f'        "{path}") words="{" ".join(flags)}" ;;' for path, _, flags in rooms)
    return f"""{NOTE}_tally() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" path="tally" words="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        [[ ${{COMP_WORDS[index]}} == -* ]] && break
        path="$path ${{COMP_WORDS[index]}}"
        case "$path" in
        {names}) ;;
        *) break ;;
        esac
    done
    COMPREPLY=()
    if [[ $current == -* ]]; then
        case "$path" in
{options}
        esac
    else
        case "$path" in
{following}
        esac
    fi
    local word
    if [[ -n $words ]]; then
        while read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$words" -- "$current")
    else
        while read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$current")
    fi
}}
complete -o filenames -F _tally tally
"""


def fish_of(rooms: list[tuple[str, list[str], list[str]]]) -> str:
    """Return the file that fish reads."""
    lines = [NOTE.rstrip("\n")]
    for path, following, flags in rooms:
        words = path.split()[1:]
        here = "; and ".join(
            ["__fish_use_subcommand"]
            if not words
            else [f"__fish_seen_subcommand_from {word}" for word in words]
        )
        if following:
            inside = (
                here if not words else f"{here}; and not __fish_seen_subcommand_from {' '.join(following)}"
            )
            lines.append(f"complete -c tally -f -n '{inside}' -a '{' '.join(following)}'")
        lines += [f"complete -c tally -n '{here}' -l {flag.removeprefix('--')}" for flag in flags]
    return "\n".join(lines) + "\n"


def make() -> dict[str, str]:
    """Return both files by name."""
    rooms = list(rooms_of(typer.main.get_command(load())))
    return {"tally.bash": bash_of(rooms), "tally.fish": fish_of(rooms)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the completions of bash, zsh and fish.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file would change")
    check = parser.parse_args().check
    for name, text in make().items():
        file = FOLDER / name
        if not check:
            FOLDER.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{name} is not up to date: run python scripts/make_completions.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
