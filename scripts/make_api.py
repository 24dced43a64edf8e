"""Write docs/api.md: every name that ``import tallystick`` gives, with its signature and docstring, read from the source.

    python scripts/make_api.py            # writes the page
    python scripts/make_api.py --check    # exit code 1 if the page is not what this would write

Reads the sources as text: nothing of the package is imported, so no torch is needed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tallystick"
PAGE = ROOT / "docs" / "api.md"
BEYOND = (
    ("Job", "tallystick.execution.job", "Job"),
    ("Check", "tallystick.evidence.verification", "Check"),
    ("Stated", "tallystick.evidence.verification", "Stated"),
    ("Deviation", "tallystick.roles.audit_report", "Deviation"),
    ("SegmentResult", "tallystick.roles.audit_report", "SegmentResult"),
    ("Progress", "tallystick.roles.run_writer", "Progress"),
    ("TallyError", "tallystick.errors", "TallyError"),
    ("InvalidInput", "tallystick.errors", "InvalidInput"),
    ("Mismatch", "tallystick.errors", "Mismatch"),
    ("Nondeterminism", "tallystick.errors", "Nondeterminism"),
    ("OtherProgram", "tallystick.errors", "OtherProgram"),
    ("JobFailed", "tallystick.errors", "JobFailed"),
    ("ProtocolViolation", "tallystick.errors", "ProtocolViolation"),
    ("StoreError", "tallystick.errors", "StoreError"),
)
HEAD = """<!-- Made by scripts/make_api.py from the source: edit the docstrings. -->

# Python API

`import tallystick` gives the names of the first part and loads torch only when one of them needs it.
What is stable: [stability](stability.md). A job is a file with a function that returns a [`Job`](#job): [writing a job](jobs.md).
The three calls that most programs need: [examples/record_audit_verify.py](../examples/record_audit_verify.py).
A loop of your own: [examples/own_loop.py](../examples/own_loop.py).

"""

Documented = ast.ClassDef | ast.FunctionDef


def exported() -> Iterator[tuple[str, str, str]]:
    """Yield each public name of the package with the module and the name it comes from."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        (alias.asname or alias.name): (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tallystick")
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            for name in ast.literal_eval(node.value):
                if not name.startswith("__"):
                    yield name, *homes[name]


def source_of(module: str) -> Path:
    """Return the file of a module of the package."""
    path = ROOT / "src" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def found_in(module: str, name: str) -> Documented:
    """Return a class or function of a module."""
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    there = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if name not in there:
        raise LookupError(f"{module} has no class or function {name}")
    return there[name]


def signature_of(name: str, function: ast.FunctionDef, *, method: bool = False) -> str:
    """Return the line that a caller reads: name, arguments, what comes back; broken where it is long."""
    arguments = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if method and arguments.args.args:
        arguments.args.args = arguments.args.args[1:]
    inside = re.sub(r"(?<=[\w\]])=(?=\S)", " = ", ast.unparse(arguments.args))
    back = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    if len(name) + len(inside) + len(back) > 100:
        inside = "\n    " + re.sub(r", (?=\*|\w+: )", ",\n    ", inside) + ",\n"
    return f"{name}({inside}){back}"


def text_of(node: Documented) -> str:
    """Return a docstring as Markdown: sections of Google's form become lists, double backquotes single ones."""
    doc = inspect.cleandoc(ast.get_docstring(node) or "").replace("``", "`")
    lines: list[str] = []
    listed = False
    for line in doc.splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines += ["", f"**{line.rstrip(':')}**", ""]
            listed = True
        elif listed and line and not line.startswith(" "):
            listed = False
            lines += ["", line]
        elif listed and (entry := re.fullmatch(r"    (\w+(?:, \w+)*)(?: \(.*?\))?: (.*)", line)):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}".rstrip() if listed else line)
    text = "\n".join(lines).replace("::\n", ":\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def fields_of(node: ast.ClassDef) -> list[str]:
    """Return the rows of a class's public fields, each with its type."""
    return [
        f"{ast.unparse(each.target)}: {ast.unparse(each.annotation)}"
        for each in node.body
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
    ]


def bases_of(node: ast.ClassDef, module: str) -> Iterator[ast.ClassDef]:
    """Yield the bases of a class that the same room of the package has, with what the class puts for their type variables."""
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    homes = {
        alias.name: each.module or ""
        for each in ast.walk(tree)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    room = module.rpartition(".")[0]
    for base in node.bases:
        name, _, given = ast.unparse(base).removesuffix("]").partition("[")
        if homes.get(name, "").rpartition(".")[0] == room:
            found = found_in(homes[name], name)
            text = ast.unparse(found)
            if variable := re.search(r"\bGeneric\[(\w+)\]", text):
                text = re.sub(rf"\b{variable[1]}\b", given, text)
            filled = ast.parse(text).body[0]
            assert isinstance(filled, ast.ClassDef)
            yield filled


def methods_of(node: ast.ClassDef, module: str) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of a class and of its bases, each once."""
    seen: set[str] = set()
    for each in (node, *bases_of(node, module)):
        for method in each.body:
            if (
                isinstance(method, ast.FunctionDef)
                and not method.name.startswith("_")
                and method.name not in seen
            ):
                seen.add(method.name)
                yield method


def section_of(name: str, module: str, original: str) -> str:
    """Return the part of the page about one name."""
    node = found_in(module, original)
    parts = [f"### {name}\n"]
    if isinstance(node, ast.FunctionDef):
        parts.append(f"```python\n{signature_of(f'tallystick.{name}', node)}\n```\n")
        parts.append(text_of(node) + "\n")
        return "\n".join(parts)
    parts.append(
        "" if name in dict.fromkeys(public for public, _, _ in exported()) else f"From `{module}`.\n"
    )
    begin = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if begin:
        parts.append(
            f"```python\n{signature_of(f'tallystick.{name}', begin[0], method=True).removesuffix(' -> None')}\n```\n"
        )
    parts.append(text_of(node) + "\n")
    if fields := fields_of(node):
        body = "\n".join(fields)
        parts.append(f"```python\n{body}\n```\n")
    for method in methods_of(node, module):
        as_property = any(ast.unparse(each) == "property" for each in method.decorator_list)
        line = (
            f"{method.name}: {ast.unparse(method.returns)}"
            if as_property and method.returns
            else signature_of(method.name, method, method=True)
        )
        parts.append(f"```python\n{line}\n```\n")
        parts.append(text_of(method) + "\n")
    return "\n".join(part for part in parts if part)


def make() -> str:
    """Return the page that belongs to today's source."""
    first = "\n".join(section_of(*each) for each in exported())
    second = "\n".join(section_of(*each) for each in BEYOND)
    return (
        f"{HEAD}## Names of the package\n\n{first}\n## Jobs, findings and errors\n\n{second}".rstrip("\n")
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/api.md from the source.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page would change")
    check = parser.parse_args().check
    page = make()
    if check:
        if PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PAGE.name} is not up to date: run python scripts/make_api.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
