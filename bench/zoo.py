"""Record tiny models of the architectures of other people's packages, and follow each run under other instructions.

    python bench/zoo.py OUT [--only PATTERN] [--policy fp32] [--then fp64] [--steps 10] [--profile sse4]

Each model is recorded by a ``Recorder`` in a loop as its user would write it, and followed by a ``Follower`` in a process of
its own profile. The models are those of transformers, torchvision, timm and diffusers; a package that is not there is named, and
its models are left out. ``OUT/record.jsonl`` and ``OUT/audit.jsonl`` have a line for each model; what is there already is not
done again. What does not match is tried once more under another policy (``--then``), in ``OUT/then``, as its user is told to.
Prints a table by family, then what was refused, with how often each reason was given, and whatever did not match. What does not
train without a recorder either (no loss, another package wanted, a configuration that cannot be so small) is *untrained*.
Exit code 0: every model that trains was matched or refused before its first step. 1: some was not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

SECONDS = 600  # for one model
HERE = Path(__file__).resolve()
MODULES = {
    "transformers": ("zoo_models", ("transformers",)),
    "torchvision": ("zoo_vision", ("torchvision", "PIL")),
    "timm": ("zoo_timm", ("torchvision", "PIL", "timm")),
    "diffusers": ("zoo_diffusers", ("diffusers", "PIL")),
}
"""Each package, the module beside this one that builds its models, and what must be installed for that."""
KEPT: list[Any] = []  # what torch forgets when nobody holds it


def lacking(package: str) -> list[str]:
    """Return what is not installed for the models of a package."""
    return [name for name in MODULES[package][1] if importlib.util.find_spec(name) is None]


def load_torchvision() -> None:
    """Load it also where its operators do not load, as those of its wheels for CUDA without CUDA: it is content with their names.

    Then there are no detectors by regions: see ``zoo_vision``.
    """
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        names = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for loaded in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[loaded]
        importlib.import_module("torchvision")
        KEPT.append(names)
        print(
            "zoo: no detectors by regions: torchvision's operators do not load here; its wheels for processors alone have them"
        )


def all_models() -> list[Any]:
    """Return the tiny models of every package that is there."""
    found: list[Any] = []
    if not lacking("torchvision"):
        load_torchvision()
    for package, (module, _) in MODULES.items():
        if not lacking(package):
            found += importlib.import_module(module).tiny_models()
    return found


def say_lacking() -> None:
    """Name the packages whose models are left out, and what installs them."""
    for package in filter(lacking, MODULES):
        print(f"zoo: no models of {package}: {', '.join(lacking(package))} not installed")
    if any(map(lacking, MODULES)):
        print("zoo: pip install -c constraints.txt --group zoo installs them, and leaves torch as it is")


def trained(run: Any, tiny: Any, steps: int) -> Any:
    """Train a tiny model inside a recorder or follower, and return what came of it."""
    import torch

    torch.manual_seed(0)
    model, batch = tiny.build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with run:
        run.prepare(model, optimizer)
        for step in range(steps):
            with run.step(batch(step)) as data:
                loss = model(**data).loss
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return run.result


def trains_by_itself(tiny: Any) -> bool:
    """Whether a model has a loss and its gradients where nobody records: where not, its tiny configuration is to blame."""
    try:
        model, batch = tiny.build()
        model(**batch(0)).loss.backward()
    except Exception:  # noqa: BLE001 # of the model, or of torch
        return False
    return True


def done_with(phase: str, path: Path, tiny: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Record or follow one model and return its line."""
    import tallystick
    from tallystick.errors import TallyError

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        if phase == "record":
            run: Any = tallystick.Recorder(path, policy=given.policy, steps=given.steps, program=HERE)
            trained(run, tiny, given.steps)
            return {"state": "recorded"}
        report = trained(tallystick.Follower(path, program=HERE), tiny, given.steps)
        moved = report.freedom.moved + report.freedom.decisions_moved
        return {
            "state": report.verdict,
            "moved": moved,
            "why": None if report.first is None else str(report.first)[:400],
        }
    except TallyError as problem:
        begun = phase == "audit" or (path / "steps.jsonl").exists()
        return {
            "state": "stopped" if begun else "refused",
            "why": f"{type(problem).__name__}: {problem}"[:400],
        }
    except Exception as problem:  # noqa: BLE001 # of the model, or of torch
        state = "failed" if phase == "audit" or trains_by_itself(tiny) else "untrained"
        return {"state": state, "why": f"{type(problem).__name__}: {problem}"[:400]}
    finally:
        signal.alarm(0)


def phase_of(given: argparse.Namespace) -> None:
    """Do one phase in this process."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(HERE.parent))
    import torch

    torch.set_num_threads(1)
    lines = given.out / f"{given.phase}.jsonl"
    done = {each["name"] for each in read(lines)}
    recorded = {each["name"] for each in read(given.out / "record.jsonl") if each["state"] == "recorded"}
    for tiny in all_models():
        wanted = given.phase == "record" or tiny.name in recorded
        if not wanted or tiny.name in done or not re.search(given.only, tiny.name):
            continue
        begun, began = given.out / "begun", time.perf_counter()
        begun.write_text(tiny.name)
        said = done_with(given.phase, given.out / tiny.name, tiny, given)
        line = {
            "name": tiny.name,
            "family": tiny.family,
            **said,
            "seconds": round(time.perf_counter() - began, 2),
        }
        with lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        begun.unlink()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a phase, none if it has not begun."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_phase(phase: str, given: argparse.Namespace, environment: dict[str, str]) -> None:
    """Do a phase in processes of their own, the next one where one dies of a model."""
    begun = given.out / "begun"
    arguments = [
        sys.executable, str(HERE), str(given.out), "--only", given.only, "--policy", given.policy, "--steps", str(given.steps),
        "--phase", phase,
    ]  # fmt: skip
    while subprocess.run(
        arguments, env={**os.environ, **environment}, stderr=subprocess.DEVNULL, check=False
    ).returncode:
        if not begun.exists():
            raise SystemExit(f"zoo: {phase} does not begin; run it with --phase {phase} to see why")
        name = begun.read_text()
        with (given.out / f"{phase}.jsonl").open("a") as file:
            line = {
                "name": name,
                "family": name.partition("/")[0],
                "state": "failed",
                "why": "the process died",
            }
            file.write(json.dumps(line) + "\n")
        begun.unlink()


def run_both(given: argparse.Namespace, profile: dict[str, str]) -> None:
    """Record what is asked for, and follow it."""
    given.out.mkdir(parents=True, exist_ok=True)
    run_phase("record", given, {})
    run_phase("audit", given, profile)


def outcomes(out: Path, only: str) -> list[dict[str, Any]]:
    """Return the last line of each model."""
    audits = {each["name"]: each for each in read(out / "audit.jsonl")}
    lines = [audits.get(each["name"], each) for each in read(out / "record.jsonl")]
    return [each for each in lines if re.search(only, each["name"])]


def table(given: argparse.Namespace) -> int:
    """Print what came of all models, and return the exit code."""
    lines = outcomes(given.out, given.only)
    then = {each["name"]: each for each in outcomes(given.out / "then", given.only)}
    for at, each in enumerate(lines):
        again = then.get(each["name"], each)
        if each["state"] != "match" and again["state"] == "match":
            lines[at] = {**each, "state": f"match under {given.then}"}
        elif each["state"] == "refused":  # what the other policy made of it
            lines[at] = again
    states = sorted(
        {each["state"] for each in lines} | {"match"}, key=lambda state: (state != "match", state)
    )
    print(f"| family | models | {' | '.join(states)} |\n|---|---|{'---|' * len(states)}")
    for family in [*dict.fromkeys(each["family"] for each in lines), "all"]:
        here = [each for each in lines if family in (each["family"], "all")]
        counts = Counter(each["state"] for each in here)
        print(f"| {family} | {len(here)} | {' | '.join(str(counts[state]) for state in states)} |")
    reasons = Counter(
        str(each.get("why")).partition(";")[0][:160] for each in lines if each["state"] == "refused"
    )
    print("\nrefused:", *(f"{count:4} {why}" for why, count in reasons.most_common()), sep="\n")
    others = [
        each for each in lines if each["state"] not in ("match", f"match under {given.then}", "refused")
    ]
    print("\nothers:", *(f"{each['name']}: {each['state']}: {each.get('why')}" for each in others), sep="\n")
    return 1 if any(each["state"] != "untrained" for each in others) else 0


def main() -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="a regular expression over names (causal_lm/Llama)")
    parser.add_argument("--policy", default="fp32")
    parser.add_argument("--then", help="a policy for what does not match under the first")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", default="sse4", help="of the audit: native, avx2, sse4")
    parser.add_argument("--phase", choices=("record", "audit"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.phase is not None:
        phase_of(given)
        return 0
    from tallystick.execution.determinism import parse_profile

    say_lacking()
    run_both(given, profile := parse_profile(given.profile).environment())
    left = [line["name"] for line in outcomes(given.out, given.only) if line["state"] != "match"]
    if given.then is not None and left:
        again = {
            "out": given.out / "then",
            "policy": given.then,
            "only": f"^({'|'.join(map(re.escape, left))})$",
        }
        run_both(argparse.Namespace(**{**vars(given), **again}), profile)
    return table(given)


if __name__ == "__main__":
    sys.exit(main())
