"""Folders in which a program is run again: whatever lies there, a copy is made, and what it lists is what is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tallystick.cli.run.workplace import DEEPEST, Workplace, list_folder


def make_deep(folder: Path) -> None:
    """Folders within each other, more than a path has room for."""
    here = Path.cwd()
    for _ in range(1400):
        os.chdir(folder)
        (folder := Path("a")).mkdir()
    os.chdir(here)


def remove_deep(folder: Path) -> None:
    while (folder / "a").exists():
        (folder / "a").rename(folder.parent / "last")
        for each in sorted((folder.parent / "last").glob("*")):
            each.rename(folder / each.name)
        (folder.parent / "last").rmdir()


LAYOUTS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "a link to itself": (lambda d: (d / "a").symlink_to("a"), {"a"}),
    "two links in a circle": (lambda d: ((d / "a").symlink_to("b"), (d / "b").symlink_to("a")), {"a", "b"}),
    "a link to the folder": (lambda d: (d / "a").symlink_to("."), {"a"}),
    "a link up": (lambda d: (d / "a").symlink_to(".."), {"a"}),
    "a link to nowhere": (lambda d: (d / "a").symlink_to("/nowhere"), {"a"}),
    "links out and back": (
        lambda d: (
            (d / "x").mkdir(),
            (d.parent / "back").symlink_to(d),
            (d / "x/o").symlink_to("../../back"),
        ),
        {"x", "x/o"},
    ),
    "a folder and a link to it": (
        lambda d: ((d / "r").mkdir(), (d / "r/x").write_text("1"), (d / "l").symlink_to("r")),
        {"r", "r/x", "l"},
    ),
    "a folder that only a link leads to": (
        lambda d: (
            (d.parent / "far").mkdir(),
            (d.parent / "far/x").write_text("1"),
            (d / "l").symlink_to("../far"),
        ),
        {"l", "l/x"},
    ),
    "caches, and what is called like them": (
        lambda d: [
            ((d / name).mkdir(), (d / name / "y.py").write_text("1"))
            for name in ("__pycache__", "x__pycache__")
        ],
        {"__pycache__", "x__pycache__", "x__pycache__/y.py"},
    ),
    "a pipe": (lambda d: os.mkfifo(d / "f"), {"f"}),
    "an environment of Python's": (
        lambda d: ((d / "v").mkdir(), (d / "v/pyvenv.cfg").write_text(""), (d / "v/x").write_text("")),
        {"v"},
    ),
    "more folders within each other than a path has room for": (
        make_deep,
        {"/".join("a" * (depth + 1)) for depth in range(DEEPEST + 1)},
    ),
}


@pytest.mark.skipif(os.name != "posix", reason="links and pipes are those of POSIX")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_lies_in_a_folder_a_copy_of_it_is_made(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads to itself turned an accusation into a crash: a trainer's repository can hold one."""
    make, names = LAYOUTS[layout]
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "s.py").write_text("print(1)")
    make(folder)
    monkeypatch.chdir(folder)
    try:
        place = Workplace.of(["python", "s.py"], "s.py")
        assert list_folder(folder).names == place.names == names | {"s.py"}
        with place.anew() as copy:
            there = copy.path
            assert (there / "s.py").read_text() == "print(1)" and not (there / "s.py").is_symlink()
            found = {each.name for each in there.iterdir()}
            assert found == {each.name for each in folder.iterdir()} - {"__pycache__"}
            assert all(os.path.lexists(there / name) for name in names if "/" in name)
        assert not there.exists()
        assert place.made() == []
        (folder / "new").write_text("")
        assert place.made() == ["new"]
    finally:
        monkeypatch.undo()
        if make is make_deep:  # which pytest could not remove
            remove_deep(folder)


def test_folders_of_ones_own_are_not_looked_into_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("run/steps", "data/raw"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    listing = list_folder(tmp_path, [tmp_path / "run"])
    assert listing.names == {"run", "data", "data/raw", "link"}
    (tmp_path / "run/more").write_text("")
    (tmp_path / "data/raw/more").write_text("")
    assert listing.made() == ["data/raw/more"]
