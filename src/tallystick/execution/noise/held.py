"""What an auditor takes of its own measurement where a trainer's grids are held: only where grids are chosen is all of it new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tallystick.execution.noise.measured import Calibration
from tallystick.execution.noise.yardstick import KERNEL_OCTAVES, octaves_allowed
from tallystick.execution.rounding.grids import (
    CLEAR,
    DOUBT,
    Site,
    is_loud,
    is_new,
    is_noise_only,
    keeps_hearing,
    may_be_lifted,
    site_grid,
    still_heard,
)
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import Policy


def with_larger(policy: Policy, measured: Calibration, before: Calibration) -> Calibration:
    """Return ``measured`` with the noise of all but most gradients where it was larger when ``before`` was measured.

    Where grids are not chosen anew, those of buffers, states, losses and loud gradients only become coarser. A loud gradient's
    stays so however quiet it was in between: its trainer goes by the grid alone. And who records a loop of another's writing
    measures in the middle of a step, when decisions have been taken as measured before.
    """
    noise, sites = {**measured.noise}, {**measured.table.sites}
    for place, old in before.noise.items():
        site, now = (Kind(place[0]), place[1]), noise.get(place)
        grid, held = (each.table.sites.get(site) for each in (measured, before))
        # Over a scale of its own noise is as large a share of that as before, however much it has grown or gone (docs/adr/0050).
        is_lifted = all(each is not None and may_be_lifted(policy, site[0], each) for each in (grid, held))
        if now is None or is_lifted:
            continue
        is_less = now.relative < old.relative
        if not (is_less or _is_finer(site, grid, held)) or not _only_widens(policy, site, measured, before):
            continue
        if is_less:
            noise[place] = old
        if held is not None:
            sites[site] = held
    return replace(measured, noise=noise, table=GridTable(sites))


def _is_finer(site: tuple[Kind, int], grid: SiteGrid | None, held: SiteGrid | None) -> bool:
    """Whether a gradient's ``grid`` has a narrower band than the one ``held``, which was measured once.

    What stands there of one that had no value yet is no measurement, and wider (attacks/unseen_wide.py).
    """
    if site[0] != Kind.GRADIENT or grid is None or held is None:
        return False
    return not is_new(held) and grid.band < held.band


def as_held(
    policy: Policy, measured: Calibration, before: Calibration, changes: Callable[[Site], bool]
) -> Calibration:
    """Return ``measured`` with the gradients that stay heard or silent, as ``before``, where grids are not chosen anew.

    Those that the log ``changes`` are what they are now.
    """
    sites = {**measured.table.sites}
    for at, grid in measured.table.sites.items():
        site, old = (Kind(at[0]), at[1]), before.table.sites.get(at)
        if site[0] != Kind.GRADIENT or old is None:
            continue
        if keeps_hearing(policy, old, grid, CLEAR - DOUBT) and not changes(site):
            now = measured.noise.get(site)
            sites[site] = (still_heard(policy, old, now.largest) if now is not None else None) or old
    return replace(measured, table=GridTable(sites))


def _only_widens(policy: Policy, site: tuple[Kind, int], measured: Calibration, before: Calibration) -> bool:
    """Whether a site's band only widens where grids are not chosen: of a gradient, one that its trainer may find loud."""
    if site[0] != Kind.GRADIENT:
        return True
    old, now = before.table.sites.get(site), measured.table.sites.get(site)
    if old is None or now is None or is_noise_only(old) or is_noise_only(now) or old.residue_bits:
        return False
    doubt = octaves_allowed(before.noise[site].elements) + KERNEL_OCTAVES
    loudest = site_grid(policy, Kind.GRADIENT, min(old.band + doubt, policy.gradient_band[1]), old.scales)
    return is_loud(policy, loudest, now.band)
