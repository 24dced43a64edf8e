"""docs/api.md is what scripts/make_api.py makes of the source, and names everything that the package exports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import tallystick

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "scripts" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load()


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == MAKER.make(), (
        "run python scripts/make_api.py"
    )


def test_every_exported_name_has_a_heading_and_a_sentence() -> None:
    parts = MAKER.make().split("\n### ")[1:]
    sections = {part.partition("\n")[0]: part for part in parts}
    for name in set(tallystick.__all__) - {"__version__"}:
        text = [line for line in sections[name].splitlines()[1:] if line and line[0].isupper()]
        assert text, name


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(LookupError, match=r"tallystick\.errors has no class or function Whim"):
        MAKER.found_in("tallystick.errors", "Whim")
