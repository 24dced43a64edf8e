"""What every script of test vectors does with its cases: one directory each, with a README that says why.

A case whose name ends in ``_fail`` must be refused, and says with which reason. Nothing here imports the package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Case = dict[str, Any]


def write_cases(room: Path, cases: Mapping[str, tuple[str, Case]]) -> None:
    """Write every case below ``room``; what stood there goes."""
    shutil.rmtree(room, ignore_errors=True)
    for name, (why, case) in cases.items():
        assert name.endswith("_fail") == ("reason" in case), name
        folder = room / name
        folder.mkdir(parents=True)
        (folder / "README.md").write_text(f"{why}\n", encoding="utf-8")
        (folder / "input.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")


def canonical(value: Any) -> bytes:
    """Return canonical JSON, spec/state-commitment.md 2."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
