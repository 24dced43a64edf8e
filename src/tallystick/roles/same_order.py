"""Whether a run that is resumed is the one that was begun: its specification field by field, its program file by file.

One specification speaks of all steps. What the log makes up for, the processor and its threads, may be another; what was
ordered and the software that computes it may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tallystick.errors import InvalidInput, OtherProgram
from tallystick.execution.program import LocalProgram
from tallystick.run.documents import SiteRecord, Specification
from tallystick.run.program import Program, compare_programs, in_words

MACHINE = ("machine", "cpu_capability", "cuda_device", "threads")  # in ``versions``, and no software


def verify_same_order(stated: Specification, own: Specification) -> None:
    """Return if this order, begun here, would have the specification of the run: all but the machine and the program.

    Raises:
        InvalidInput: it would not; the message names the first field with both values.
    """
    for what, was, wanted in _differences(stated, own):
        raise InvalidInput(f"--resume: {what} of the run is {was}, this order has {wanted}")


def other_machine(stated: Specification, own: Specification) -> list[str]:
    """Return in words what of this machine is not what the specification says of the one that began the run."""
    pairs = ((name, stated.versions.get(name), own.versions.get(name)) for name in MACHINE)
    return [
        f"{name} of the run is {was or 'not stated'}, here it is {now or 'absent'}; the specification keeps the former"
        for name, was, now in pairs
        if was != now
    ]


def verify_same_program(program: LocalProgram, stated: Program, *, whole: bool = False) -> None:
    """Return if the program is the one stated: what is loaded by now, or with ``whole`` all that is stated too.

    Raises:
        OtherProgram: it is another; by file, distribution or variable.
    """
    found = (
        program.compare_before(stated)
        or program.compare_loaded(stated)
        or program.compare_environment(stated)
        or (compare_programs(program.collect()[0], stated) if whole else [])
    )
    if found:
        raise OtherProgram(f"--resume: the run's program is another one: {in_words(found)}")
    if program.name != stated.main:
        raise OtherProgram(
            f"--resume: the run's program is another one: its main file is {program.name}, stated is {stated.main}"
        )


def _differences(stated: Specification, own: Specification) -> Iterator[tuple[str, object, object]]:
    """Yield the name and both values of each field that differs."""
    pairs = (
        ("settings", dict(stated.job.settings), dict(own.job.settings)),
        ("dataset", stated.job.dataset_digest, own.job.dataset_digest),
        ("job path", stated.job.path, own.job.path),
        ("policy", _policy(stated), _policy(own)),
        ("seed", stated.seed, own.seed),
        ("steps", stated.steps, own.steps),
        ("checkpoint interval", stated.checkpoint_every, own.checkpoint_every),
        ("accumulation", stated.accumulation, own.accumulation),
        ("world size", stated.world_size, own.world_size),
        ("first state", stated.initial_state, own.initial_state),
        *_software(stated.versions, own.versions),
        *_sites(stated.sites, own.sites),
        ("list of lifted casts", list(stated.notes.lifted_casts), list(own.notes.lifted_casts)),
        ("list of densified gradients", list(stated.notes.densified), list(own.notes.densified)),
    )
    return (pair for pair in pairs if pair[1] != pair[2])


def _policy(specification: Specification) -> tuple[str, dict[str, int | str]]:
    return specification.policy.name, dict(specification.policy.parameters)


def _software(stated: Mapping[str, str], own: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted((stated.keys() | own.keys()) - set(MACHINE)):
        yield f"version of {name}", stated.get(name, "not stated"), own.get(name, "absent")


def _sites(
    stated: tuple[SiteRecord, ...], own: tuple[SiteRecord, ...]
) -> Iterator[tuple[str, object, object]]:
    yield "number of sites", len(stated), len(own)
    for position, (was, wanted) in enumerate(zip(stated, own, strict=False)):
        yield f"site {position}", _site(was), _site(wanted)


def _site(site: SiteRecord) -> str:
    return f"{site.kind} {site.name!r} {site.dtype}{list(site.shape)}"
