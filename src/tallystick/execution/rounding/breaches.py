"""What honest arithmetic cannot have written into a log, and grids that a policy does not allow (spec/policies.md 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tallystick.execution.noise.freedom import Excess
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.grids import (
    ACTIVATIONS,
    STILL,
    Site,
    expected_form,
    floor_exponent,
    is_new,
    is_noise_only,
    lowest_floor,
    residue_bits_of,
)
from tallystick.numerics.budget import chosen_floor, coarsest_quantum
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind, SparseEntries
from tallystick.numerics.policy import SMALL_FINER, SMALL_SITE, SPARSEST, Policy, entry_budget
from tallystick.numerics.rounded_sites import Key, is_dense, may_rest
from tallystick.numerics.rounding import round_followed


@dataclass(frozen=True)
class Violation:
    """A log entry, or a header, that honest arithmetic could not have written; ``is_of_policy`` on no data whatever."""

    site: str
    element: int
    rule: str
    is_of_policy: bool = False


def unmoved(x: Tensor, grid: SiteGrid, key: Key, name: str) -> Tensor:
    """Return ``x`` as rounding without a log gives it."""
    out = torch.empty_like(x)
    round_followed(x, grid, SparseEntries.none(x.numel(), 1), out=out, key=key, name=name)
    return out


def find_excess_of_entries(
    x: Tensor, grid: SiteGrid, entries: SparseEntries, key: Key, name: str
) -> Violation | None:
    """Return that a site's entries exceed its budget, if they do.

    On a grid without dither values that lie together are near a boundary all at once: the variances of a batch norm that are
    next to nothing beside the first one, one, which all of them still hold a share of. An honest log lists them all. So there
    only those count that take an element from its own rounding: no log may move more than the budget.
    """
    budget, at = entry_budget(grid, entries.n), entries.indexes
    if not is_dense(x, grid, at, budget):
        return None
    if may_rest(grid):
        out = torch.empty_like(x)
        found = round_followed(x, grid, entries, out=out, key=key, name=name)
        turned = (out != unmoved(x, grid, key, name)).reshape(-1).cpu().numpy()
        if not found.violations and not is_dense(x, grid, at[turned[at]], budget):
            return None
    return Violation(name, -1, f"{len(entries)} entries exceed the budget of {budget}")


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
            breaches.append(
                Violation(f"{Kind(key[0]).name.lower()} site {key[1]}", -1, rule, is_of_policy=True)
            )
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
    # Where none are chosen a floor stays although its band widens; where they are, ``find_other_floors`` says which it is.
    if kind == Kind.GRADIENT and bits:
        finest -= SMALL_FINER
    elif kind == Kind.GRADIENT:
        finest = grid.band + SPARSEST
    if not min(finest, wanted) <= grid.floor <= wanted:
        return f"floor 2**{grid.floor}, the policy has 2**{wanted} for band 2**{grid.band}"
    return None


def find_other_floors(
    policy: Policy,
    table: GridTable,
    yardstick: Yardstick,
    name: Callable[[Site], str],
    before: GridTable | None = None,
) -> list[tuple[Site | None, Excess]]:
    """Return which floors of a step whose noise was measured do not follow from the gradients' sizes and bands.

    Where an optimizer divides by the root of squares, whoever chooses a quantum chooses the rate of what is smaller. So
    none may lie farther below that of the auditor's own band, measured as the trainer does, than bands may lie above.

    Args:
        policy: the run's.
        table: the step's grids.
        yardstick: the auditor's measurement of this step.
        name: says what a site is called.
        before: None where grids are chosen; else the grids before the step, of which what was nothing but noise is heard anew.
    """
    noise, usual = yardstick.noise, yardstick.measured.usual
    heard = _heard(table, yardstick)
    if before is None:
        # Where noise decides between two scales of a large gradient, either may be the trainer's.
        own = [(noise[place].elements, noise[place].scales) for place in heard]
        stated = [(noise[place].elements, grid.scales) for place, grid in heard.items()]
        chosen, sizes = heard, [own, stated]
    else:  # what is held keeps scales that say nothing of this step's, here as there
        chosen = {place: grid for place, grid in heard.items() if is_new(before.sites.get(place))}
        asked = noise if usual is None else usual.sites
        own = [
            (noise[place].elements, asked[place].scales)
            for place in _heard(table if usual is None else usual, yardstick)
        ]
        sizes = [own] if chosen else []
    coarsest = [coarsest_quantum(policy, each) for each in sizes]
    found: list[tuple[Site | None, Excess]] = []
    for place, grid in chosen.items():
        elements, mine = noise[place].elements, None if usual is None else usual.sites.get(place)
        floors = [chosen_floor(policy, grid, each, elements) for each in coarsest]
        if grid.residue_bits:
            wanted = floor_exponent(
                grid.band, policy.gradient_floor, residue_bits_of(policy, Kind.GRADIENT, grid.band)
            )
            floors = [wanted, wanted - SMALL_FINER] if elements < SMALL_SITE else [wanted]
        elif mine is not None and not is_noise_only(mine):
            usually = chosen_floor(policy, replace(grid, band=mine.band), coarsest[0], elements)
            finer, most = usually - grid.floor, yardstick.octaves_of_gradient(noise[place])
            floors = floors if finer <= most else [usually]
        if grid.floor not in floors:
            words = f"floor 2**{floors[0]} for its band 2**{grid.band} and size"
            found.append((place, Excess(name(place), words, f"2**{grid.floor}")))
    return found


def _heard(table: GridTable, yardstick: Yardstick) -> dict[Site, SiteGrid]:
    """Return the grids of the gradients that the step has, and that are more than noise."""
    return {
        place: grid
        for place, grid in table.sites.items()
        if place[0] == Kind.GRADIENT
        and place in yardstick.fresh
        and yardstick.noise[place].rms > 0.0
        and not is_noise_only(grid)
    }
