"""What the source of a program says without running it: what it imports, and which environment variables it names."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType


def _names_in(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (name for name in (base,) if name)
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


@functools.lru_cache(maxsize=1024)
def imports_in(source: bytes, package: str) -> tuple[str, ...]:
    """Return the dotted names that a source imports anywhere in it, or might: of ``from a import b`` also ``a.b``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(dict.fromkeys(_names_in(tree, package)))


def names_held_by(module: ModuleType | None) -> list[str]:
    """Return the names of the modules that a module's names stand for, or whose functions and classes it holds."""
    found: list[object] = []
    for value in () if module is None else list(vars(module).values()):
        if isinstance(value, ModuleType):
            found.append(value.__name__)
        elif isinstance(value, (FunctionType, type)):
            found.append(value.__module__)
    return [name for name in found if isinstance(name, str)]


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
READING = ("get", "pop", "setdefault", "__getitem__")


@functools.lru_cache(maxsize=1024)
def variables_named_in(source: bytes) -> tuple[str, ...]:
    """Return the environment variables that a source reads by a literal name, or by a name that it gives one text."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    texts = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        key = _key_read(node)
        name = texts.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
        if isinstance(name, str) and _NAME.fullmatch(name):
            found[name] = None
    return tuple(found)


def _key_read(node: ast.AST) -> ast.expr | None:
    """Return by what a node reads a variable; None if it reads none."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and _last_name(node.value) == "environ"
    ):
        return node.slice
    if isinstance(node, ast.Compare) and any(_last_name(each) == "environ" for each in node.comparators):
        return node.left
    if isinstance(node, ast.Call) and node.args:
        called, where = _last_name(node.func), getattr(node.func, "value", None)
        if called == "getenv" or (called in READING and _last_name(where) == "environ"):
            return node.args[0]
    return None


def _last_name(node: ast.AST | None) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
