"""Write every test vector again, from scratch; `make test` compares the result with what is committed."""

from __future__ import annotations

import shutil
from pathlib import Path

import vectors_chip
import vectors_commit
import vectors_device
import vectors_dispute
import vectors_evidence
import vectors_monitor
import vectors_numerics
import vectors_registry
import vectors_rules

ROOT = Path(__file__).resolve().parent.parent / "vectors"


def main() -> None:
    for folder in ROOT.iterdir() if ROOT.exists() else ():
        if folder.is_dir():
            shutil.rmtree(folder)
    vectors_chip.write(ROOT)
    vectors_commit.write(ROOT)
    vectors_device.write(ROOT)
    vectors_dispute.write(ROOT)
    vectors_numerics.write(ROOT)
    vectors_monitor.write(ROOT)
    vectors_registry.write(ROOT)
    vectors_rules.write(ROOT)
    vectors_evidence.write(ROOT)
    print(f"{sum(1 for _ in ROOT.rglob('input.json'))} cases in {ROOT.name}/")


if __name__ == "__main__":
    main()
