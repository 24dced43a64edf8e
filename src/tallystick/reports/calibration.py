"""What a calibration found: the noise of every site, what the policy would log, and the numbers proposed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from tallystick.execution.noise.survey import JITTER, Measured, Survey
from tallystick.execution.rounding.grids import floor_exponent, is_noise_only
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.noise import Distribution, ambiguous_share
from tallystick.numerics.policy import Policy
from tallystick.reports.chart import figure
from tallystick.reports.layout import (
    BAD,
    GOOD,
    UNSURE,
    Page,
    Row,
    Table,
    counted,
    duration,
    page,
    picked,
    share,
)
from tallystick.reports.plot import Curve, Marked, Plot
from tallystick.roles.calibrator import CalibrationOrder, Expectation, Proposal, grid_of

LOUDEST = 5  # sites that the page lists by name
LOWEST_SHARES = (-12, -6)  # powers of ten between which the plot ends, three below the least mark
EXPECTED = "log_bits freedom ambiguous band"
AROUND = (10, 10)  # octaves that the plot shows below and above the policy's band, at least


@dataclass
class CalibrationReport:
    """One calibration, for people and as JSON."""

    order: CalibrationOrder
    surveys: Sequence[Survey]
    proposal: Proposal
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    out: str | None = None
    plot_file: str | None = None

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        made = self.proposal
        return {
            **picked(self, "out plot_file seconds"),
            "job": self.order.source.name,
            "policy": self.order.policy.name,
            "steps": self.order.at,
            "repeats": self.order.repeats,
            "profiles": [str(profile) for profile in self.order.profiles],
            "reached": not made.problems,
            "parameters": made.chosen(),
            "expected": picked(made.expected, EXPECTED),
            "expected_of_policy": picked(made.own, EXPECTED),
            "needed_safety": made.needed,
            "needed_by": made.decisive,
            "problems": list(made.problems),
            "warnings": list(made.warnings),
            "sites": [
                self._site(survey, measured) for survey in self.surveys for measured in survey.sites.values()
            ],
            "plot": self.plot().fields(),
        }

    def _site(self, survey: Survey, measured: Measured) -> dict[str, object]:
        grid = grid_of(self.proposal.policy, measured, survey)
        kind = Kind(measured.place[0])
        return {
            "step": survey.step,
            "kind": kind.name.lower(),
            "name": measured.name,
            "elements": measured.numel,
            "noise_only": grid is not None and kind == Kind.GRADIENT and is_noise_only(grid),
            "band": None if grid is None else grid.band,
            "floor": None if grid is None or kind in (Kind.STATE, Kind.DECISION) else grid.floor,
            "largest_in_scale": dict(measured.relative),
            "in_rms": {source: spread.fields() for source, spread in measured.in_rms.items()},
            "in_ulp": {source: spread.fields() for source, spread in measured.in_ulp.items()} or None,
        }

    def __rich__(self) -> Page:
        """Return the page that ``tally calibrate`` prints."""
        made, policy = self.proposal, self.order.policy
        numbers = ", ".join(f"{name} {value}" for name, value in made.chosen().items())
        if made.problems:
            headline, style = "what is wanted cannot be had; the nearest is " + numbers, BAD
        elif made.policy == policy:
            headline, style = f"policy {policy.name} as it is: {numbers}", GOOD
        else:
            headline, style = f"proposed for policy {policy.name}: {numbers}", GOOD
        steps = ", ".join(map(str, self.order.at))
        profiles = "".join(f", {profile}" for profile in self.order.profiles)
        rows: list[Row] = [
            (
                "measured",
                f"before step {steps}: {counted(self.order.repeats, 'jittered pass').replace('passs', 'passes')}{profiles}",
            ),
            ("proposed", _in_words(made.expected)),
            ("the policy's", _in_words(made.own)),
        ]
        if made.needed is not None:
            least = "any safety" if made.needed < 0 else f"a safety of 2^{made.needed}"
            rows.append(("profiles ask", f"for {least} at least ({made.decisive})"))
        rows += [("missed", Text(text, style=BAD)) for text in made.problems]
        rows += [("note", Text(text, style=UNSURE)) for text in made.warnings]
        rows += [(label, path) for label, path in (("written", self.out), ("plot", self.plot_file)) if path]
        rows.append(("time", duration(self.seconds)))
        lines = "\n".join(self.plot().lines())
        return page(headline, style, rows, self._noise_table(), self._loudest(), Text(lines, no_wrap=True))

    def svg(self) -> str:
        """Return the plot as an SVG document of its own."""
        plot = self.plot()
        return figure(plot.title, [plot.chart()])

    def _noise_table(self) -> Table:
        """Noise by kind and source, all sites and steps together; noise-only gradients left out."""
        rows: list[tuple[str, ...]] = []
        for kind in (Kind.GRADIENT, Kind.BUFFER, Kind.LOSS, Kind.DECISION, Kind.STATE):
            sites = [measured for _, measured in self._sites(kind) if measured.in_rms]
            for source in (JITTER, *map(str, self.order.profiles)):
                spread, ulps = Distribution(), Distribution()
                for measured in sites:
                    if source in measured.in_rms:
                        spread.merge(measured.in_rms[source])
                    if source in measured.in_ulp:
                        ulps.merge(measured.in_ulp[source])
                if spread.count:
                    texts = [f"{value:.2g}" for value in spread.fields().values()]
                    rows.append(
                        (kind.name.lower(), source, *texts, f"{ulps.largest:.2g}" if ulps.count else "")
                    )
        columns = ("noise / rms", "source", "median", "p99", "p99.99", "max", "max in ulp")
        return Table(columns, rows, numbers=range(2, 7))

    def _is_noise(self, survey: Survey, measured: Measured) -> bool:
        grid = survey.table.sites.get(measured.place)
        return measured.place[0] == Kind.GRADIENT and grid is not None and is_noise_only(grid)

    def _sites(self, kind: Kind) -> list[tuple[Survey, Measured]]:
        """What was measured at the sites of one kind, without gradients that are nothing but noise."""
        return [
            (survey, measured)
            for survey in self.surveys
            for measured in survey.sites.values()
            if measured.place[0] == kind and not self._is_noise(survey, measured)
        ]

    def _loudest(self) -> Table:
        """The gradients with the largest noise over their scale, and the band proposed for each."""
        found = (
            (max(measured.relative.values(), default=0.0), survey, measured)
            for survey, measured in self._sites(Kind.GRADIENT)
        )
        ranked = sorted(found, key=lambda item: -item[0])
        rows: list[tuple[str, ...]] = []
        for noise, survey, measured in ranked[:LOUDEST]:
            grid = grid_of(self.proposal.policy, measured, survey)
            logged = ("", "")
            if grid is not None and measured.exponents is not None:
                logged = (f"2^{grid.band}", share(ambiguous_share(measured.exponents, grid)))
            rows.append((measured.name, str(survey.step), f"{noise:.2g}", *logged))
        return Table(("loudest gradients", "step", "noise", "band", "log share"), rows, numbers=range(1, 5))

    # -- the plot ----------------------------------------------------------------------------------

    def plot(self) -> Plot:
        """Return ambiguity and measured noise against the band, with the policy's point and the proposed one."""
        made, policy = self.proposal, self.order.policy
        marks = [
            Marked(
                f"{name}: {share(found.ambiguous)} at 2^{math.log2(found.band):.1f}",
                math.log2(found.band),
                found.ambiguous,
            )
            for name, found in (("the policy's choice", made.own), ("proposed", made.expected))
            if found.band is not None and found.ambiguous > 0.0
        ]
        least = math.floor(math.log10(min((mark.y for mark in marks), default=1.0))) - 3
        lowest = min(max(least, LOWEST_SHARES[0]), LOWEST_SHARES[1])
        centre = [math.floor(mark.x) for mark in marks] or [policy.gradient_band[0]]
        first, last = min(centre) - AROUND[0], min(max(centre) + AROUND[1], policy.gradient_band[1] + 2, -1)
        curves = [
            Curve(f"logged, the policy's grid {_grid_name(policy)}", self._ambiguity(policy, first, last))
        ]
        if _grid_name(made.policy) != _grid_name(policy):
            curves.append(
                Curve(
                    f"logged, proposed grid {_grid_name(made.policy)}",
                    self._ambiguity(made.policy, first, last),
                )
            )
        for source in (JITTER, *map(str, self.order.profiles)):
            points = self._noise_above(source, first, last)
            curves.append(Curve(f"noise above the band, {source}", points, measured=True))
        steps = ", ".join(map(str, self.order.at))
        name = self.order.source.name.removeprefix("tallystick.jobs.")
        return Plot(
            title=f"{name}, policy {policy.name}, before step {steps}",
            x_label="band, over the gradient's scale (its rms rounded up to a power of two)",
            y_label="share of gradient elements",
            x_range=(first, last),
            lowest=lowest,
            curves=curves,
            marks=marks,
        )

    def _gradients(self) -> list[Measured]:
        return [each for _, each in self._sites(Kind.GRADIENT) if each.exponents is not None]

    def _ambiguity(self, policy: Policy, first: int, last: int) -> list[tuple[float, float]]:
        if policy.residue_bits:
            return [(float(band), 1.0) for band in range(first, last + 1)]
        sites = self._gradients()
        total = sum(m.numel for m in sites) or 1
        points: list[tuple[float, float]] = []
        for band in range(first, last + 1):
            floor = floor_exponent(band, policy.finest_floor(band))
            grid = SiteGrid(policy.gradient_precision, band, floor, policy.dithered, [0])
            shares = (m.numel * ambiguous_share(m.exponents, grid) for m in sites if m.exponents is not None)
            points.append((float(band), sum(shares) / total))
        return points

    def _noise_above(self, source: str, first: int, last: int) -> list[tuple[float, float]]:
        together = Distribution()
        for measured in self._gradients():
            if source in measured.in_scale:
                together.merge(measured.in_scale[source])
        points = [(float(power), together.above(power)) for power in range(first, last + 1)]
        shown = [point for point in points if point[1] > 0.0]
        if 0.0 < together.largest < math.inf:
            shown.append((math.log2(together.largest), 1.0 / together.count))
        return sorted(shown)


def _in_words(found: Expectation) -> str:
    return (
        f"{found.log_bits:.3g} bits of log per parameter and step, freedom {share(found.freedom)} of roundings, "
        f"{share(found.ambiguous)} of gradient elements logged"
    )


def _grid_name(policy: Policy) -> str:
    coarsest = policy.finest_floor(policy.gradient_band[1])
    finest = f"2^{policy.gradient_floor}"
    return finest if coarsest == policy.gradient_floor else f"{finest} to 2^{coarsest}"
