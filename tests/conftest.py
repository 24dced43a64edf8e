"""What holds for every test: gpu, TPM and sandbox tests skip where the machine cannot, hypothesis repeats itself in CI.

TALLYSTICK_MUST_RUN=tpm,sandbox,node (set in CI) makes a test fail that would be skipped for want of a software TPM, of a
sandbox or of Node.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MUST_RUN = os.environ.get("TALLYSTICK_MUST_RUN", "").split(",")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: two cores, several processes, no spinning
# Before triton: where there is no NVIDIA device its kernels are interpreted, on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A borrowed GPU machine may have no more than torch and pytest: enough for tests/gpu.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No deadline: on a shared core the time of one example says nothing about the code.
    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


EVERY_POLICY = {"test_foreign.py"}  # of tests/e2e, in CI
OTHER_POLICIES = re.compile("fp64|bf16|leaf")
LEFT = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where torch sees no device, torch being loaded only for them; marked sandbox, see below.

    Tests of whole runs under another policy, which run under fp32 too, are slow ones; so are those of ``slow.txt``.
    """
    _mark_slow(items, is_all=not config.option.file_or_dir)
    there = {item.nodeid for item in items}
    for item in items:
        if item.path.parent.name == "e2e" and item.path.name not in EVERY_POLICY:
            name, bracket, case = item.nodeid.partition("[")
            sibling = name + bracket + OTHER_POLICIES.sub("fp32", case)
            if sibling != item.nodeid and sibling in there:
                item.add_marker(pytest.mark.slow)
    _skip_without_sandbox([item for item in items if item.get_closest_marker("sandbox") is not None])
    on_device = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_device:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def _mark_slow(items: list[pytest.Item], *, is_all: bool) -> None:
    left = {line for line in LEFT.read_text().splitlines() if line and not line.startswith("#")}
    found = set[str]()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if here := left & {name, name.partition("[")[0]}:
            found |= here
            item.add_marker(pytest.mark.slow)
    if is_all and left - found:
        raise pytest.UsageError(f"{LEFT}: no such test: {', '.join(sorted(left - found))}")


@pytest.fixture
def tcti() -> Iterator[str]:
    """How a software TPM is reached that lives as long as the test."""
    from tallystick.testing.software_tpm import missing_for_tpm, software_tpm

    if missing := missing_for_tpm():
        if "tpm" in MUST_RUN:
            pytest.fail(f"TALLYSTICK_MUST_RUN asks for the TPM tests, and {missing}")
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="tpm-") as folder, software_tpm(Path(folder)) as found:
        yield found


def _skip_without_sandbox(items: list[pytest.Item]) -> None:
    """Tests marked sandbox are skipped where programs cannot be isolated; where that is required, they run and fail."""
    if not items or "sandbox" in MUST_RUN:
        return
    from tallystick.fleet.enclave.sandbox import find_problem

    if (problem := find_problem()) is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"no sandbox: {problem}"))
