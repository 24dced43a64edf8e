"""scripts/check_site.py finds what a page loads from elsewhere, and links inside the site that lead nowhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "scripts" / "check_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def faults(folder: Path, text: str) -> list[str]:
    (folder / "there.html").write_text('<h1 id="here">Here</h1>', encoding="utf-8")
    (folder / "page.html").write_text(text, encoding="utf-8")
    return load().faults_of(folder)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="there.html#here">a page</a>',
        '<p id="own"></p><a href="#own">itself</a>',
        '<a href="https://example.org/">elsewhere, when followed</a>',
        '<script src="own.js"></script><link rel="stylesheet" href="own.css">',
    ],
)
def test_a_page_that_keeps_to_itself_passes(text: str, tmp_path: Path) -> None:
    assert faults(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<a href="nowhere.html">a page</a>', "link nowhere.html leads to no file"),
        ('<a href="there.html#there">a page</a>', "link there.html#there leads to no anchor"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js from elsewhere"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "loads //example.org/x.css from elsewhere"),
        (
            "<style>@import 'https://example.org/x.css';</style>",
            "loads https://example.org/x.css from elsewhere",
        ),
        ('<img src="http://example.org/x.png">', "loads http://example.org/x.png from elsewhere"),
    ],
)
def test_a_fault_is_named_with_its_page(text: str, fault: str, tmp_path: Path) -> None:
    assert faults(tmp_path, text) == [f"page.html: {fault}"]
