"""What honest arithmetic cannot have written into a log, and grids that a policy does not allow (spec/policies.md 4)."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.execution.rounding.grids import (
    ACTIVATIONS,
    SMALL_FINER,
    STILL,
    Site,
    expected_form,
    floor_exponent,
    is_noise_only,
    lowest_floor,
    residue_bits_of,
)
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Kind,
)
from tallystick.numerics.policy import SPARSEST, Policy


@dataclass(frozen=True)
class Violation:
    """A log entry, or a header, that honest arithmetic could not have written."""

    site: str
    element: int
    rule: str


def find_policy_breaches(
    policy: Policy, table: GridTable, sites: frozenset[Site] | None = None
) -> list[Violation]:
    """Return the grids of ``table`` that the policy does not allow, or that belong to none of ``sites``."""
    breaches: list[Violation] = []
    for key, grid in table.sites.items():
        # The number of decisions and activations shows in the step alone.
        counted = key[0] == Kind.DECISION or (key[0] in ACTIVATIONS and policy.activation is not None)
        stray = sites is not None and not counted and key not in sites
        rule = "the run has no such site" if stray else _breach(policy, Kind(key[0]), grid)
        if rule:
            breaches.append(Violation(f"{Kind(key[0]).name.lower()} site {key[1]}", -1, rule))
    return breaches


def _breach(policy: Policy, kind: Kind, grid: SiteGrid) -> str | None:
    expected = expected_form(policy, kind)
    if expected is None:
        return f"policy {policy.name} has no such sites"
    precision, dithered, (lowest, highest) = expected
    if kind == Kind.DECISION:
        if grid.floor not in (0, STILL):
            return f"floor {grid.floor}, a decision has 0 or {STILL}"
        return (
            None
            if lowest <= grid.band <= highest
            else f"band 2**{grid.band} outside 2**{lowest}..2**{highest}"
        )
    dithered = dithered and not is_noise_only(grid)
    if (grid.precision, grid.dithered) != (precision, dithered):
        return f"precision {grid.precision}, dither {grid.dithered}; the policy has {precision}, {dithered}"
    bits = residue_bits_of(policy, kind, grid.band)
    if grid.residue_bits < bits or (grid.residue_bits > bits and (kind != Kind.GRADIENT or not bits)):
        return f"residues of {grid.residue_bits} bits, the policy has {bits} for band 2**{grid.band}"
    if kind in ACTIVATIONS and grid.scales.size != 1:
        return f"{grid.scales.size} scales, an activation has one"
    if (grid.scales.size == 0) != (kind == Kind.STATE):
        return "a state site has a relative band, every other site has scales"
    if not is_noise_only(grid) and not lowest <= grid.band <= highest:
        return f"band 2**{grid.band} outside 2**{lowest}..2**{highest}"
    finest = wanted = floor_exponent(grid.band, lowest_floor(policy, kind, grid.band), bits)
    # A finer gradient grid leaves less to choose, and where none are chosen a floor stays although its band widens.
    if kind == Kind.GRADIENT and bits:
        finest -= SMALL_FINER
    elif kind == Kind.GRADIENT:
        finest = grid.band + SPARSEST
    if not min(finest, wanted) <= grid.floor <= wanted:
        return f"floor 2**{grid.floor}, the policy has 2**{wanted} for band 2**{grid.band}"
    return None
