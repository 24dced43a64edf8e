"""Training runs of PyTorch models that somebody else can check, on other hardware, to the last bit.

Recorder, Follower, open_run   a training loop of one's own, recorded or followed (needs torch)
observe                        a training process registered with its machine's chip agent (needs torch)
audit                          a recorded job repeated and compared (needs torch)
verify                         documents, logs and states of a run checked without repeating it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tallystick.version import __version__

if TYPE_CHECKING:
    from tallystick.evidence.run_verifier import verify_run as verify
    from tallystick.integrations.observed import observe
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.auditor import audit
    from tallystick.roles.recorder import Follower, Recorder, open_run

__all__ = ["AuditReport", "Follower", "Recorder", "__version__", "audit", "observe", "open_run", "verify"]

# Loaded when first asked for: the bare package has no torch.
_HOMES = {
    "AuditReport": ("tallystick.roles.audit_report", "AuditReport"),
    "Follower": ("tallystick.roles.recorder", "Follower"),
    "Recorder": ("tallystick.roles.recorder", "Recorder"),
    "audit": ("tallystick.roles.auditor", "audit"),
    "observe": ("tallystick.integrations.observed", "observe"),
    "open_run": ("tallystick.roles.recorder", "open_run"),
    "verify": ("tallystick.evidence.run_verifier", "verify_run"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
