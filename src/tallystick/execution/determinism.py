"""Profiles of one machine that really differ in their arithmetic, and the flags every run sets.

A profile is a set of environment variables that libraries read once, when they are loaded:
it therefore needs a child process. ``threads=N`` and ``jitter`` work inside a process too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tallystick.errors import InvalidInput

# Instruction sets are chosen by ATen, MKL, oneDNN, numpy (names since 2.4), its OpenBLAS and the C library each for itself.
INSTRUCTION_SETS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "OPENBLAS_CORETYPE": "Haswell",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F",
    },
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "OPENBLAS_CORETYPE": "Nehalem",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F",
    },
}
X86_ONLY = ("avx2", "sse4")


@dataclass(frozen=True)
class Profile:
    """One way this machine can do arithmetic.

    Attributes:
        instructions: ``native``, ``avx2`` or ``sse4``.
        threads: intra-operator threads, or None for the default.
        jitter: whether last-bit noise is added to every operator's output.
    """

    instructions: str = "native"
    threads: int | None = None
    jitter: bool = False

    def environment(self) -> dict[str, str]:
        """Return the variables to set before torch is loaded."""
        variables = dict(INSTRUCTION_SETS[self.instructions])
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = variables["MKL_NUM_THREADS"] = str(self.threads)
        return variables

    @property
    def needs_process(self) -> bool:
        """Whether the variables are not all set already, so that a child process is needed."""
        return any(os.environ.get(name) != value for name, value in self.environment().items())

    def __str__(self) -> str:
        parts = [self.instructions]
        if self.threads is not None:
            parts.append(f"threads={self.threads}")
        if self.jitter:
            parts.append("jitter")
        return ",".join(parts)


def parse_profile(text: str) -> Profile:
    """Return the profile written as ``native``, ``sse4,threads=1``, ``jitter`` and so on.

    Raises:
        InvalidInput: an unknown word, a bad thread count, or an instruction set this processor family lacks.
    """
    instructions, threads, jitter = "native", None, False
    for word in text.split(","):
        if word in INSTRUCTION_SETS:
            instructions = word
        elif word == "jitter":
            jitter = True
        elif word.startswith("threads="):
            count = word.removeprefix("threads=")
            if not count.isascii() or not count.isdigit() or not 1 <= int(count) <= 1024:
                raise InvalidInput(
                    f"profile {text}: threads must be a whole number from 1 to 1024, got {count!r}"
                )
            threads = int(count)
        else:
            raise InvalidInput(
                f"profile {text}: unknown word {word!r}; known are {', '.join(INSTRUCTION_SETS)}, threads=N, jitter"
            )
    if instructions in X86_ONLY and platform.machine().lower() not in ("x86_64", "amd64"):
        raise InvalidInput(
            f"profile {text}: {instructions} needs an x86-64 processor, this one is {platform.machine()}; use jitter"
        )
    return Profile(instructions, threads, jitter)


@contextmanager
def repeatable(compute: str) -> Generator[None]:
    """Set, for the length of a step, every switch that makes torch repeat itself on one machine.

    ``compute`` is the dtype of parameters during the step, by name. Restores what it found. The caller's generators are put
    back too: inside, the default generator only counts the calls to random operators.
    """
    import torch

    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_rng_state(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS: one workspace per stream, repeatable
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(getattr(torch, compute))
    torch.backends.cudnn.benchmark = False  # the algorithm must not depend on a timing
    torch.backends.cudnn.allow_tf32 = False  # ten mantissa bits are not float32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # partial sums stay float32
    try:
        # Filled by torch before it is written, every operator's output costs a tenth of a convolution's time. What a
        # model itself leaves unset is filled in capture.
        with filling_results(False):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_default_dtype(before[2])
        torch.backends.cudnn.benchmark = before[3]
        torch.backends.cudnn.allow_tf32 = before[4]
        torch.backends.cuda.matmul.allow_tf32 = before[5]
        torch.set_rng_state(before[6])
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before[7]


@contextmanager
def filling_results(fill: bool) -> Generator[None]:
    """Inside ``repeatable``, say whether torch fills memory that it allocates with NaN before anything is written to it."""
    import torch

    switch: Any = torch.utils.deterministic
    before = switch.fill_uninitialized_memory
    switch.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        switch.fill_uninitialized_memory = before


def environment_versions() -> dict[str, str]:
    """Return the versions and the hardware that a specification states; compared by people, not by rules."""
    import numpy
    import torch

    from tallystick.version import __version__

    versions = {
        "tallystick": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        versions["cuda_device"] = torch.cuda.get_device_name()
    return versions


def check_device(device: str) -> None:
    """Return if torch can compute on ``device``.

    Raises:
        InvalidInput: another word than cpu or cuda, or no such device here.
    """
    if device == "cpu":
        return
    if device != "cuda":
        raise InvalidInput(f"device {device}: unknown; known are cpu, cuda")
    import torch

    if not torch.cuda.is_available():
        raise InvalidInput("device cuda: torch sees no CUDA device on this machine")
