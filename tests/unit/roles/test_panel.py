"""A member of a judge's panel that hangs, or whose job leaves a process behind, is ended and convicts nobody."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tallystick.execution.determinism import Profile
from tallystick.roles import panel
from tallystick.roles.panel import Opinion, PanelMember

HANGS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
ANSWERS = """import sys; sys.stdin.readline(); sys.stdin.readline(); print('{"answer": "trainer", "reason": "so"}', flush=True)"""


@pytest.mark.parametrize(("program", "said"), [(HANGS, None), (ANSWERS, Opinion("trainer", "so"))])
def test_a_member_has_so_long_and_no_longer(
    program: str, said: Opinion | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = panel.subprocess.Popen

    def started(command: list[str], **more: Any) -> Any:
        return plain([sys.executable, "-c", program], **more)

    monkeypatch.setattr(panel.subprocess, "Popen", started)
    monkeypatch.setattr(panel, "PATIENCE_S", 1.0 if said is None else 600.0)
    member = PanelMember(Profile(threads=1))
    try:
        assert member.ask(b"{}\n") == said
    finally:
        member.close()
