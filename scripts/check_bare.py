"""Proves that the bare package works: what verifies without re-execution imports none of the extras.

A client, inspector or regulator installs Tallystick without torch. A child process in which the extras
cannot be imported imports every module that such a user needs, and runs ``tally --help``.
"""

from __future__ import annotations

import subprocess
import sys

# The import names of everything that pyproject.toml lists as an extra, and the benchmarks, which no wheel carries.
EXTRAS = ("torch", "sklearn", "transformers", "tallystick_bench")

# A package stands for all of its modules.
BARE = (
    "tallystick",
    "tallystick.api",
    "tallystick.errors",
    "tallystick.cli.main",
    "tallystick.commit",
    "tallystick.signing",
    "tallystick.run",
    "tallystick.tlog",
    "tallystick.dispute",
    "tallystick.numerics.grid_table",
    "tallystick.numerics.log",
    "tallystick.numerics.log_bytes",
    "tallystick.numerics.random",
    "tallystick.numerics.reference",
    "tallystick.numerics.ulps",
    "tallystick.reports.document",
    "tallystick.diagnosis.causes",
    "tallystick.diagnosis.divergence",
    "tallystick.evidence.bundle_verifier",
    "tallystick.roles.statements",
    "tallystick.evidence.run_verifier",
    "tallystick.store.keys",
    "tallystick.store.models",
    "tallystick.store.tlog",
    "tallystick.fleet.compliance.compliance",
    "tallystick.fleet.sampling.draw",
    "tallystick.fleet.inspection.extraction",
    "tallystick.fleet.provenance.submission",
    "tallystick.fleet.enclave.neutral",
    "tallystick.fleet.sampling.planner",
    "tallystick.fleet.compliance.rules",
    "tallystick.fleet.enclave.sealed_job",
    "tallystick.fleet.sampling.workload",
    "tallystick.fleet.registry.claims",
    "tallystick.fleet.registry.corim",
    "tallystick.fleet.sampling.fleet_year",
    "tallystick.fleet.sampling.scenarios",
    "tallystick.fleet.inspection.package",
)

CHILD = """
import importlib, pkgutil, sys

extras, bare = {extras!r}, {bare!r}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in extras:
            raise ModuleNotFoundError(f"{{name}} is not part of the bare package", name=name)

sys.meta_path.insert(0, Absent())

names = []
for name in bare:
    module = importlib.import_module(name)
    names.append(name)
    if name != "tallystick" and hasattr(module, "__path__"):
        for found in pkgutil.walk_packages(module.__path__, name + "."):
            importlib.import_module(found.name)
            names.append(found.name)
print(f"bare: {{len(names)}} modules import without {{', '.join(extras)}}", file=sys.stderr)

from tallystick.cli.main import main
sys.argv = ["tally", "--help"]
main()
"""


def main() -> int:
    """Exit status 0 if every module was imported and ``tally --help`` printed its usage, else 1."""
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD.format(extras=EXTRAS, bare=BARE)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(child.stderr)
    if child.returncode != 0:
        print(f"bare: the child process ended with status {child.returncode}", file=sys.stderr)
        return 1
    if "Usage" not in child.stdout:
        print(f"bare: tally --help printed no usage, but {child.stdout!r}", file=sys.stderr)
        return 1
    print("bare: tally --help works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
