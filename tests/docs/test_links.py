"""No relative link in any Markdown page of the repository is dead, headings included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {".venv", ".git", "build", "node_modules", ".pytest_cache", ".hypothesis", "target"}
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def prose_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """Return the names of a page's headings, as repositories and the site make them."""
    names: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(prose_of(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{name}-{names[name]}" if name in names else name)
        names[name] = names.get(name, 0) + 1
    return found


def dead_links(page: Path) -> Iterator[str]:
    """Yield each relative link of a page that leads to no file, folder or heading."""
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors_of(there)):
            yield target


def pages() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.md"))
        if not ELSEWHERE.intersection(path.relative_to(ROOT).parts)
    ]


def test_no_link_of_a_page_is_dead() -> None:
    found = pages()
    assert len(found) > 80
    dead = {str(page.relative_to(ROOT)): links for page in found if (links := list(dead_links(page)))}
    assert not dead


@pytest.mark.parametrize(
    "target", ["other.md#a-heading-with-code", "#own", "folder", "picture.svg", "https://example.org/x"]
)
def test_a_link_that_leads_somewhere_is_found(target: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "picture.svg").touch()
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Own\n\n[text]({target}) `[no](link.md)`\n\n```\n[no](link.md)\n```\n")
    assert list(dead_links(page)) == []


@pytest.mark.parametrize(
    "target", ["other.md#a-heading", "#another", "missing", "pictures.svg", "other.md#code"]
)
def test_a_link_that_leads_nowhere_is_found_dead(target: str, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, with `code`\n\n```\n# code\n```\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Own\n\n[text]({target})\n")
    assert list(dead_links(page)) == [target]
