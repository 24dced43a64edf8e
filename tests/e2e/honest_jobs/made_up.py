"""Data of rings.py."""

import numpy as np

SEED = 20
RINGS = 3


def rings(rng, count):
    """Return points (count, 2) on rings about the origin, and the number of each one's ring."""
    which = rng.integers(0, RINGS, count)
    angle = rng.uniform(0, 2 * np.pi, count)
    radius = which + 1 + rng.gamma(2.0, 0.05, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), which
