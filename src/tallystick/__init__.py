"""Training runs of PyTorch models that somebody else can check, on other hardware, to the last bit.

record                         a job trained into a run directory (needs torch)
audit                          a recorded job repeated and compared (needs torch)
verify                         a run, a bundle of evidence or a proof checked without repeating it
attach                         a training script with two lines more, recorded or followed by ``tally`` (needs torch)
validate                       what of a model and its optimizer a recording would refuse, all at once (needs torch)
Recorder, Follower, open_run   a training loop of one's own, recorded or followed (needs torch)
observe                        a training process registered with its machine's chip agent (needs torch)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tallystick.execution.program_watch import watch
from tallystick.version import __version__

if TYPE_CHECKING:
    from tallystick.api import audit, record, verify
    from tallystick.evidence.verification import Verification
    from tallystick.integrations.observed import observe
    from tallystick.roles.acceptance import Limits
    from tallystick.roles.attached import attach
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.follower import Follower, open_run
    from tallystick.roles.recorder import Recorder
    from tallystick.roles.validation import validate
    from tallystick.run.documents import RunStatement

# Loaded when first asked for: the bare package has no torch.
_HOMES = {
    "AuditReport": "tallystick.roles.audit_report",
    "Follower": "tallystick.roles.follower",
    "Limits": "tallystick.roles.acceptance",
    "Recorder": "tallystick.roles.recorder",
    "RunStatement": "tallystick.run.documents",
    "Verification": "tallystick.evidence.verification",
    "attach": "tallystick.roles.attached",
    "audit": "tallystick.api",
    "observe": "tallystick.integrations.observed",
    "open_run": "tallystick.roles.follower",
    "record": "tallystick.api",
    "validate": "tallystick.roles.validation",
    "verify": "tallystick.api",
}
__all__ = [
    "AuditReport",
    "Follower",
    "Limits",
    "Recorder",
    "RunStatement",
    "Verification",
    "__version__",
    "attach",
    "audit",
    "observe",
    "open_run",
    "record",
    "validate",
    "verify",
]


watch()  # here, so that what a script reads and executes after its imports is seen


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
