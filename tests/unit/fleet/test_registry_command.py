from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cbor2
import pytest

from tallystick.cli.main import main
from tallystick.fleet.registry.facts import REGISTRY
from tallystick.fleet.registry.industry import START, Industry, chip_name, key_of
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.store.keys import write_key

CHIPS = sorted(chip_name(at) for at in range(4))
Tally = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, industry = tmp_path_factory.mktemp("registry") / "reg", Industry()
    sale = industry.sell(CHIPS[:3], "fab", "north")
    with RegistryLedger(place) as ledger:
        ledger.append(
            [*industry.beginning(), *industry.make(CHIPS), sale], industry.keys[REGISTRY], now=START
        )
    write_key(place.parent / "key", key_of(REGISTRY))
    return place


@pytest.fixture
def registry(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "reg"))


@pytest.fixture
def tally(capfd: pytest.CaptureFixture[str]) -> Tally:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        caught = capfd.readouterr()
        return code, caught.out, caught.err

    return call


def test_a_list_of_somebody_else_is_held_against_the_registry(
    tally: Tally, registry: Path, tmp_path: Path
) -> None:
    names, stream = tmp_path / "names", tmp_path / "stream.json"
    names.write_text("\n".join(CHIPS[:2]) + "\n")
    about = ("--party", "north", "--source", "hall 3", "--out", stream, "--chips", names)
    assert tally("registry", "stream", "inventory", *about)[0] == 0
    assert tally("registry", "reconcile", registry, stream)[0] == 0
    assert tally("registry", "stream", "inventory", *about, "--complete", "--units", "gx1=2")[0] == 0
    code, out, _ = tally("registry", "reconcile", registry, stream, "--json")
    assert code == 1
    assert [(f["rule"], f["chip"]) for f in json.loads(out)["findings"]] == [("missing", CHIPS[2])]
    code, out, _ = tally("registry", "reconcile", registry, stream)
    assert "1 finding to be explained" in out


def test_pages_show_head_chip_and_history(tally: Tally, registry: Path) -> None:
    code, out, _ = tally("registry", "show", registry)
    assert code == 0
    assert "4 active" in out
    code, out, _ = tally("registry", "show", registry, CHIPS[0], "--history")
    assert code == 0
    assert [word in out for word in ("north", "fab,", "package,", "transfer,")] == [True] * 4


def test_an_export_is_deterministic_cbor(tally: Tally, registry: Path, tmp_path: Path) -> None:
    assert tally("registry", "export", registry, "--out", tmp_path / "a.corim", "--owner", "north")[0] == 0
    data = (tmp_path / "a.corim").read_bytes()
    assert cbor2.loads(data).tag == 501
    assert cbor2.dumps(cbor2.loads(data), canonical=True) == data


def test_a_changed_log_is_a_mismatch_that_names_the_entry(tally: Tally, registry: Path) -> None:
    log = registry / "entries.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"gx1"', b'"gx2"', 1))
    code, _, err = tally("registry", "rebuild", registry)
    assert code == 1
    assert "registry log: entry 5" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("show", "REG", "ff" * 8), "is not registered"),
        (("show", "REG/nowhere"), "there is no registry"),
        (("open", "REG", "--key", "KEY", "--name", "again"), "holds a registry already"),
        (("prove", "REG", "owner/north", "--out", "x"), "must begin with one of chip, serial"),
        (("stream", "rumour", "--party", "a", "--source", "b", "--out", "x"), "must be one of"),
        (
            ("stream", "maker", "--party", "a", "--source", "b", "--out", "x", "--units", "gx1"),
            "the form MODEL=N",
        ),
        (("export", "REG", "--out", "x", "--owner", "south"), "there is nothing to export"),
        (("sign", "REG/entries.jsonl", "--out", "x"), "must hold one event"),
        (("append", "REG", "REG/head.json", "--key", "KEY"), "its last line has no end"),
        ((), "which command is missing"),
    ],
)
def test_wrong_arguments_are_one_line(
    tally: Tally,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [a.replace("REG", str(made)).replace("KEY", str(made.parent / "key")) for a in arguments]
    code, _, err = tally("registry", *named)
    assert code == 2
    assert reason in err


def test_the_bench_measures_every_must_line_of_the_registry(tally: Tally) -> None:
    _, out, _ = tally("bench", "monitor", "registry", "--events", "400", "--lot", "50", "--json")
    rows = {row["measure"]: row for row in json.loads(out)["rows"]}
    assert {"a look-up", "a proof", "first look-up after opening"} <= rows.keys()
    assert rows["a look-up"]["must"] == 10.0
    taken = next(row for name, row in rows.items() if name.startswith("100 chips, 14 deeds"))
    assert taken["must"] == 60.0
    assert taken["met"]
    code, _, err = tally("bench", "monitor", "nothing")
    assert code == 2
    assert "part nothing: unknown; known are plan, draw, simulate, registry" in err
