"""What a sampled audit finds, and with which probability."""

from __future__ import annotations

from fractions import Fraction

from tallystick.reports.layout import DonePage, Row, picked
from tallystick.run.sample import Announcement, SegmentDraw


def announcement_page(planned: Announcement, file: str) -> DonePage:
    """Return a sampled audit that is planned here and not yet drawn; where it names a log, that was checked."""
    values = {"announcement_file": file, **_plan_fields(planned, checked=True)}
    then = f"publish it (tally log add), then tally audit --sample --announcement {file} --beacon .."
    rows: list[Row] = [("file", file), *_plan_rows(planned, checked=True), ("next", then)]
    return DonePage(f"planned: {planned.samples} of {planned.segments} segments", values, rows)


def sample_fields(draw: SegmentDraw, *, checked: bool) -> dict[str, object]:
    """Return a draw as JSON; ``checked`` if a log proof was held against what its announcement says."""
    return {
        **_plan_fields(draw.announcement, checked=checked),
        "beacon_value": draw.beacon_value.hex(),
        "digest": draw.digest.hex(),
        "segments": [list(segment) for segment in draw.segments],
    }


def sample_rows(draw: SegmentDraw, verdict: str, *, checked: bool) -> list[Row]:
    """Return the lines of an audit's page about its draw; its power is stated where nothing was found.

    ``checked`` if a log proof was held against what its announcement says.
    """
    planned = draw.announcement
    rows: list[Row] = [
        ("drawn", f"{planned.samples} of {planned.segments} segments, digest {draw.digest.hex()[:16]}..")
    ]
    return rows + (_plan_rows(planned, checked=checked) if verdict == "match" else [])


def power_statement(planned: Announcement) -> str:
    """Return the sentence that says what the sample finds."""
    return (
        f"if at least {percent(planned.fraction)} of the steps ({planned.false_steps} of {planned.steps}) are false, "
        f"this audit finds one with probability {rounded_down(planned.power())}, however they are arranged"
    )


def rounded_down(probability: Fraction) -> str:
    """Return a probability with six decimals, never more than it is."""
    return f"{probability.numerator * 10**6 // probability.denominator / 10**6:.6f}"


def percent(text: str) -> str:
    """Return the share in ``text`` as a percentage, exactly."""
    share = Fraction(text) * 100
    return f"{float(share):.12g} %"


def _plan_fields(planned: Announcement, *, checked: bool) -> dict[str, object]:
    return {
        **picked(planned, "detect fraction false_steps samples"),
        "of": planned.segments,
        "power": rounded_down(planned.power()),
        "published_at": None if planned.log is None else planned.log.seen_at,
        "published_checked": planned.log is not None and checked,
        "log": None if planned.log is None else planned.log.origin,
        "beacon": {
            "source": planned.beacon_source, "round": planned.beacon_round, "time": planned.beacon_time,
        },
        "statement": power_statement(planned),
    }  # fmt: skip


def _plan_rows(planned: Announcement, *, checked: bool) -> list[Row]:
    log = planned.log
    if log is None:
        published = "nowhere: nothing shows that the run was fixed before the beacon spoke (--log-proof)"
    else:
        published = f"{log.origin}, {log.size} entries, " + (
            "no witness asked for" if log.seen_at is None else f"seen by a quorum at {log.seen_at}"
        )
        if not checked:
            published = (
                f"so says the announcement: {published}; that was not checked here (--log-proof with --log-policy "
                "checks it, and so does tally verify of a bundle)"
            )
    beacon = f"{planned.beacon_source} round {planned.beacon_round}, at {planned.beacon_time}"
    return [
        ("power", power_statement(planned)),
        ("beacon", f"{beacon}; its own signature was not checked here"),
        ("published", published),
    ]
