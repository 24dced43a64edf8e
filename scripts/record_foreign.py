"""Record the runs of tests/foreign on this machine: what every other machine's `make test` then audits.

    .venv/bin/python scripts/record_foreign.py

writes tests/foreign/PROCESSOR/POLICY, replacing what is there, and PROCESSOR/processor.json. Commit them. Under the variables of
another profile (`make foreign` sets those of SSE4.2 and AVX2 too) the same processor counts as one more.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tallystick.execution.determinism import environment_versions
from tallystick.execution.job import find_source
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

FOREIGN = Path(__file__).resolve().parents[1] / "tests" / "foreign"
POLICIES = ("fp64", "fp32", "bf16")
STEPS = 24
FEATURES = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def processor() -> Mapping[str, object]:
    """Return the processor's vendor, family, model, name and the features that arithmetic depends on, as Linux names them."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        found[name.strip().lower()] = value.strip()
    features = set(found.get("flags", found.get("features", "")).split())
    wanted = ("vendor_id", "cpu family", "model", "model name", "cpu implementer", "cpu part")
    return {
        **{name: found[name] for name in wanted if name in found},
        "features": [name for name in FEATURES if name in features],
    }


def folder_name(facts: Mapping[str, object], capability: str) -> str:
    """Return a folder's name for a processor: vendor, family, model and the instructions that torch uses."""
    known = ("vendor_id", "cpu implementer", "cpu family", "model", "cpu part")
    parts = [*(str(facts[name]) for name in known if name in facts), capability]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def main() -> int:
    """Record every policy's run."""
    facts, environment = processor(), environment_versions()
    place = FOREIGN / folder_name(facts, environment["cpu_capability"])
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    source = find_source(str(FOREIGN / "tiny.py"))
    for name in POLICIES:
        record(
            Order(source, {}, find_policy(name), steps=STEPS, checkpoint_every=STEPS),
            RunDirectory(place / name),
        )
        print(f"{place.name}/{name}: {STEPS} steps")
    told = {**facts, "environment": environment}
    (place / "processor.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
