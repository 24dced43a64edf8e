"""Recorded here and followed on another device, and the other way round, on machines that have one device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AVERAGED = str(HERE / "models" / "averaged_weights.py")


@pytest.mark.slow
@pytest.mark.parametrize(("job", "steps", "moves"), [("digits", 10, 1), (AVERAGED, 12, 0)])
def test_a_run_and_its_audit_need_not_be_on_one_device(job: str, steps: int, moves: int) -> None:
    """Under jitter, so that the log moves roundings and all that follows of a move happens there too.

    Before, audits on a CUDA device ended in *not accepted* with the first move: an index was made on the processor.
    """
    program = [sys.executable, str(HERE / "pretended_device.py"), job, "fp32", str(steps)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    control, *found = map(json.loads, done.stdout.splitlines())

    assert control == {"refuses_both": True}
    assert [each["auditor"] for each in found] == ["elsewhere", "cpu"]
    for each in found:
        assert (each["verdict"], each["differing"]) == ("match", 0), each
        assert each["moved"] >= moves, (
            each
        )  # a dozen of digits; of the other job two, which a processor may not have
