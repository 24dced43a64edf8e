"""Factors over measured noise, as powers of two: how far bands lie above what one calibration saw."""

from __future__ import annotations

from tallystick.execution.noise.measured import SiteNoise, exponent_above
from tallystick.execution.rounding.grids import (
    is_noise_only,
)
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.policy import SMALL_SITE, Policy

SMALL_SITE_SAFETY = 6


def decision_safety(policy: Policy) -> int:
    """Return how many octaves the band of a decision lies above the noise of its input."""
    return policy.safety if policy.decision_safety is None else policy.decision_safety


def decision_band(policy: Policy, relative: float) -> int:
    """Return the band exponent of a decision whose input moves by ``relative`` of its rms; it may lie above the policy's.

    Where the policy's largest band leaves no room for the factor over the noise it is given up: down to an octave, and with
    residues altogether, as jitter is above what machines differ by there (docs/adr/0006).
    """
    lowest, highest = policy.decision_band
    noise = exponent_above(relative)
    band = noise + decision_safety(policy)
    return max(lowest, min(band, max(highest, noise + (0 if policy.residue_bits else 1))))


def safety_for(policy: Policy, measured: SiteNoise) -> int:
    """Return how many octaves the policy puts over the noise of a site: with residues more where it has few elements."""
    return safety_of(policy.safety, measured.elements) if policy.residue_bits else policy.safety


def safety_of(octaves: int, elements: int) -> int:
    """Return the factor over the measured noise, as a power of two, for a site of so many elements.

    The largest of few deviations says less about the next one than the largest of many: below 256 elements there is an
    octave more for each two octaves less, up to 2**6 in all.
    """
    more = -(-max(0, 9 - max(elements, 1).bit_length()) // 2)
    return max(octaves, min(SMALL_SITE_SAFETY, octaves + more))


def within_room(band: int, noise: int, highest: int, previous: SiteGrid | None, elements: int) -> int:
    """Return the band where it must stay far below the quantum: as much safety as there is room for, an octave at least.

    A site of few elements keeps a wider band that it once needed: its next deviation may be that large again.
    """
    if previous is not None and elements < SMALL_SITE and not is_noise_only(previous):
        band = max(band, previous.band)
    return min(band, max(highest, noise + 1))
