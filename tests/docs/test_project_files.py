"""What the project's own files say of each other is true: version, inputs of the action, targets, the image; no file is long."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

import tallystick

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == tallystick.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_page_on_pipelines_names_every_input_and_output_of_the_action() -> None:
    action, page = yaml.safe_load(read("action.yml")), read("docs/howto/ci.md")
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))
    assert rows == set(action["inputs"])
    assert all(f"`{name}`" in page for name in action["outputs"])


def test_no_input_of_the_action_is_pasted_into_a_script() -> None:
    for step in yaml.safe_load(read("action.yml"))["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_the_image_is_given_what_a_wheel_is_made_of() -> None:
    given = re.findall(r"^!(\S+)$", read(".dockerignore"), re.MULTILINE)
    assert all((ROOT / name).exists() for name in given)
    assert {
        "src",
        "hatch_build.py",
        "scripts/compile_kernels.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "completions",
    } <= set(given)


def test_pre_commit_runs_tests_that_are_there() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    named = [word for hook in hooks for word in hook["entry"].split() if word.startswith("tests/")]
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_contributing_names_targets_that_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", read("CONTRIBUTING.md") + read("README.md")))
    assert named <= targets


def test_no_file_is_longer_than_500_lines_and_no_function_than_60() -> None:
    long: list[str] = []
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        long += [path.name] if len(text.splitlines()) > 500 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{path.name}: {node.name}, {lines} lines"] if lines > 60 else []
    assert not long


def test_no_two_classes_of_the_package_have_one_name() -> None:
    """A word with two senses costs every reader a look; what stands behind an underscore is its module's own."""
    named: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in named.items() if len(files) > 1} == {}
