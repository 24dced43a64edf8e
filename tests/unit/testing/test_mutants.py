"""The table of scripts/mutants.py cannot rot: every line stands where it says, every test is there, every breach is one."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))
MUTANTS: list[Any] = SCRIPT["read_table"]()


def test_every_line_of_the_table_stands_once_and_every_test_is_there() -> None:
    assert SCRIPT["find_rot"](MUTANTS) == []
    assert len(MUTANTS) >= 60


def test_every_broken_source_is_still_a_program() -> None:
    """A mutant that cannot be imported would say nothing about the tests."""
    for mutant in MUTANTS:
        ast.parse(mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8")), mutant.name)


def mutant(**changes: Any) -> Any:
    made = {"name": "m", "file": "a.py", "line": "x = 1", "becomes": "x = 2", "tests": ("t.py",)}
    return SCRIPT["Mutant"](**(made | changes))


def test_a_line_is_broken_where_it_stands_and_nowhere_else() -> None:
    source = "def f():\n    x = 1\n    y = 3\n\ndef g(\n    a,\n):\n    x = 1\n    return a\n\nx = 3\n"
    assert mutant(within="def g(").apply(source) == source[::-1].replace("1 = x", "2 = x", 1)[::-1]
    assert mutant(within="def f(", becomes="").apply(source) == source.replace("x = 1", "pass", 1)
    for wrong, why in (
        ({}, "has the line 2 times, must once"),
        ({"line": "x = 9"}, "has the line 0 times"),
        ({"within": "def h("}, "has 0 lines that begin with 'def h"),
        ({"within": "def f(", "line": "return a"}, "has the line 0 times"),
    ):
        with pytest.raises(ValueError, match=why):
            mutant(**wrong).apply(source)


def test_rot_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "t.py").write_text("def test_x() -> None:\n    pass\n")
    find: Any = SCRIPT["find_rot"]
    assert find([mutant(), mutant(tests=("t.py::test_x",))], tmp_path) == []
    assert find([mutant(file="b.py")], tmp_path) == ["m: there is no b.py"]
    assert find([mutant(becomes="x = 1")], tmp_path) == ["m: a.py would stay as it is"]
    assert find([mutant(tests=("t.py::test_y", "u.py"))], tmp_path) == [
        "m: there is no test t.py::test_y",
        "m: there is no test u.py",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[mutant]]\nname = "a"\n', "an entry has"),
        (
            "\n".join(['[[mutant]]\nname = "a"\nfile = "f"\nline = "l"\nbecomes = ""\ntests = ["t"]'] * 2),
            "named twice: a",
        ),
    ],
)
def test_a_malformed_table_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "mutants.toml").write_text(text)
    with pytest.raises(ValueError, match=why):
        SCRIPT["read_table"](tmp_path / "mutants.toml")
