"""The specification names every format that the code writes, and its index every page."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SPEC = REPOSITORY / "spec"
SOURCE = REPOSITORY / "src" / "tallystick"
FORMAT = re.compile(
    r"(?<![\w/.])(?:tallystick/[a-z-]+/[0-9]+|https://tallystick/[a-z-]+/v[0-9.]*[0-9]|application/vnd\.tallystick\.[a-z-]+\+[a-z]+)"
)


def named_in(text: str) -> set[str]:
    return set(FORMAT.findall(text))


def in_the_code() -> dict[str, Path]:
    """Each format that a string of the package names, with a file that does."""
    found: dict[str, Path] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if "testing" in path.relative_to(SOURCE).parts:
            continue
        for text in re.findall(r"\"([^\"\n]*)\"", path.read_text(encoding="utf-8")):
            found |= dict.fromkeys(FORMAT.findall(text), path)
    return found


def test_every_format_of_the_code_stands_on_a_page() -> None:
    pages = {page.name: named_in(page.read_text(encoding="utf-8")) for page in SPEC.glob("*.md")}
    private = named_in(
        (SPEC / "README.md").read_text("utf-8").partition("These are of one machine")[2].partition("\n\n")[0]
    )
    example = {"tallystick/example/1", "tallystick/visit/1"}  # of docstrings
    found = in_the_code()
    assert len(found) > 80
    elsewhere = set[str]().union(*(names for name, names in pages.items() if name != "README.md"))
    missing = {
        name: str(path.relative_to(SOURCE))
        for name, path in found.items()
        if name not in elsewhere | private | example
    }
    assert missing == {}
    assert private <= found.keys()


def test_the_index_has_every_page_and_speaks_of_no_other() -> None:
    index = (SPEC / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([a-z-]+\.md)\)", index))
    assert linked == {page.name for page in SPEC.glob("*.md")} - {"README.md"}
    listed = index.partition("## 1.")[2].partition("These are of one machine")[0]
    for row in listed.splitlines():
        if row.startswith("| ["):
            page = (SPEC / re.findall(r"\(([a-z-]+\.md)\)", row)[0]).read_text(encoding="utf-8")
            absent = {name for name in named_in(row) if name not in page}
            assert absent == set(), row
