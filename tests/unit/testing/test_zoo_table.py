"""What the benchmark of other people's models says of one that two policies were tried on."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest

ZOO = Path(__file__).parents[3] / "bench" / "zoo.py"


def test_a_refusal_hides_nothing_of_what_another_policy_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("zoo_of_a_test", ZOO)
    assert spec is not None and spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    then = tmp_path / "then"
    then.mkdir()

    def write(folder: Path, **states: str) -> None:
        lines = [json.dumps({"name": n, "family": "f", "state": s, "why": s}) for n, s in states.items()]
        (folder / "record.jsonl").write_text("\n".join(lines) + "\n")

    given = Namespace(out=tmp_path, only="", then="fp64")
    write(tmp_path, a="match", b="refused", c="not_accepted", d="refused")
    write(then, b="match", c="match", d="refused")
    assert zoo.table(given) == 0
    assert "| all | 4 | 1 | 2 | 1 |" in capsys.readouterr().out
    for first, second in (("refused", "not_accepted"), ("not_accepted", "refused")):
        write(tmp_path, a="match", b=first)
        write(then, b=second)
        assert zoo.table(given) == 1, "neither policy matches, and one does not refuse"
        assert "b: not_accepted" in capsys.readouterr().out
