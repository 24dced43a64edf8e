"""Where a program's files lie and what they are called: installed or its own; by which name, of which version."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from tallystick.errors import InvalidInput
from tallystick.run.program import FILE_LIMIT
from tallystick.version import __version__

OWN = "tallystick"  # compared by version: a job that it ships is a file all the same
HERE = Path(__file__).resolve().parent.parent  # of what OWN's version says


def read_file(file: Path) -> bytes:
    """Return the bytes of a program's file.

    Raises:
        InvalidInput: it is gone, no regular file, or longer than a program's file may be.
    """
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise InvalidInput(f"{file}: is no regular file, and a program's files are")
            data = opened.read(FILE_LIMIT + 1)
    except OSError as problem:
        raise InvalidInput(
            f"{file}: the program imports it, and it cannot be read ({problem.strerror})"
        ) from None
    if len(data) > FILE_LIMIT:
        raise InvalidInput(
            f"{file}: a program's file must have at most {FILE_LIMIT} bytes; install it as a distribution"
        )
    return data


def document_name(module: str, file: Path) -> str:
    """Return what documents call a module's file."""
    parts = module.split(".")
    if file.name.partition(".")[0] == "__init__":
        return "/".join([*parts, file.name])
    suffix = next((s for s in (".py", *EXTENSION_SUFFIXES, ".pyc") if file.name.endswith(s)), file.suffix)
    return "/".join(parts) + suffix


@functools.cache
def places() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The directories of installed distributions, and those of the standard library."""
    paths = sysconfig.get_paths()
    sites = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
    # PYTHONPATH and .pth files add more; a distribution with an egg-info may lie in its own sources, under work.
    found = importlib.metadata.distributions()
    others = {each.locate_file("") for each in found if each.read_text("METADATA") is not None}
    # What lies beside the main program, or below where it runs, is no distribution because a file there says so.
    main = vars(sys.modules["__main__"]).get("__file__")
    beside = {Path.cwd().resolve(), *([Path(main).resolve().parent] if isinstance(main, str) else [])}
    sites |= {
        str(each)
        for each in others
        if beside.isdisjoint((place := Path(str(each)).resolve(), *place.parents))
    }
    return (
        tuple({Path(place).resolve() for place in sites}),
        tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")}),
    )


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the module names that they bring."""
    return importlib.metadata.packages_distributions()


def is_installed(name: str, file: Path) -> bool:
    """Whether a module is a distribution's or the standard library's; what lies among them unowned is neither's."""
    sites, standard = places()
    if any(file.is_relative_to(place) for place in sites):
        return name.partition(".")[0] in distributions()
    return any(file.is_relative_to(place) for place in standard)


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    if distribution == OWN:
        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions_of(tops: set[str]) -> dict[str, str]:
    """Return the version of every installed distribution that brings one of these modules."""
    names = {distribution for top in tops for distribution in distributions().get(top, ())}
    names |= {OWN} & tops
    return {name: found for name in sorted(names) if (found := version_of(name)) is not None}
