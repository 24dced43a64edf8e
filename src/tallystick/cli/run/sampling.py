"""The options of a sampled audit, and the draw they lead to."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tallystick.cli.options import flag, option
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.drand import spoken, verify_time
from tallystick.run.public_randomness import BEACON_BYTES
from tallystick.run.sample import (
    DRAW_LIMIT,
    Announcement,
    LogPosition,
    SegmentDraw,
    announce,
    draw_segments,
    parse_announcement,
)
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.tlog.policy import POLICY_LIMIT, parse_log_policy
from tallystick.tlog.tree import LOG_PROOF_LIMIT, LogEntry, parse_log_proof

PANEL = "Sampled audit"
ROUND_FORM = "SOURCE:ROUND:TIME"


Sample = Annotated[bool, flag("--sample", "Repeat segments drawn from public randomness only.", panel=PANEL)]
Detect = Annotated[str | None, option("--detect", "P", "Find false steps with probability P ..", panel=PANEL)]
Fraction = Annotated[
    str | None, option("--fraction", "F", ".. if at least a share F of the steps is false.", panel=PANEL)
]
Round = Annotated[
    str | None,
    option("--round", ROUND_FORM, "The beacon's name, round, and the second it speaks.", panel=PANEL),
]
Beacon = Annotated[
    str | None,
    option(
        "--beacon",
        "HEX",
        "What the beacon said in that round: of drand/quicknet its signature, which is verified.",
        panel=PANEL,
    ),
]
RunProof = Annotated[
    Path | None,
    option("--log-proof", "FILE", "The .tlog-proof of the run: it was published.", panel=PANEL),
]
RunPolicy = Annotated[
    Path | None,
    option("--log-policy", "FILE", "Logs and witnesses that the proof must have.", panel=PANEL),
]
AnnounceOut = Annotated[
    Path | None, option("--announce", "FILE", "Write the announcement there and stop.", panel=PANEL)
]
AnnouncementFile = Annotated[
    Path | None,
    option("--announcement", "FILE", "An announcement published before the beacon spoke.", panel=PANEL),
]
DrawOut = Annotated[
    Path | None, option("--draw", "FILE", "Write the draw there, so that anyone repeats it.", panel=PANEL)
]


@dataclass(frozen=True)
class SampleOptions:
    """What was asked for on the command line."""

    sample: bool
    detect: str | None
    fraction: str | None
    round: str | None
    beacon: str | None
    log_proof: Path | None
    log_policy: Path | None
    announce: Path | None
    announcement: Path | None
    draw: Path | None

    def check(self, *, whole: bool) -> None:
        """Return if the options fit together; ``whole`` if neither steps nor a claim were asked for.

        Raises:
            InvalidInput: they do not.
        """
        given = {
            name: value
            for name, value in vars(self).items()
            if value not in (None, False) and name != "sample"
        }
        if not self.sample:
            if given:
                raise InvalidInput(f"--{next(iter(given)).replace('_', '-')}: belongs to --sample")
            return
        if not whole:
            raise InvalidInput("--sample: draws its own steps; leave out --steps and --claim")
        if (self.announcement is None) == (self.detect is None):
            raise InvalidInput("--sample: give --detect, --fraction and --round, or --announcement FILE")
        if self.announcement is None and (self.fraction is None or self.round is None):
            raise InvalidInput("--sample: --detect needs --fraction F and --round " + ROUND_FORM)
        if self.announcement is not None and {"fraction", "round", "announce"} & set(given):
            raise InvalidInput("--announcement: fixes fraction and round; leave those options out")
        if (self.beacon is None) == (self.announce is None):
            raise InvalidInput("--sample: give either --beacon HEX, or --announce FILE to publish first")
        if (self.log_proof is None) != (self.log_policy is None):
            raise InvalidInput(
                "--log-proof: needs --log-policy FILE, which says whose log counts, and the reverse"
            )

    @property
    def is_checked(self) -> bool:
        """Whether a log proof was given, against which the publication is checked here."""
        return self.log_proof is not None

    def announced(self, transcript: Transcript) -> Announcement:
        """Return the announcement that the options ask for, or the one in their file.

        Raises:
            InvalidInput: a malformed option or file.
            Mismatch: the announcement or the proof is about another run, or the proof is not of what the announcement says.
        """
        root, size = transcript.root(), len(transcript.leaf_hashes)
        if self.announcement is not None:
            found = parse_announcement(
                read_whole(self.announcement, limit=DRAW_LIMIT, what="an announcement")
            )
            specification = transcript.specification
            own = (root, size, specification.steps, specification.checkpoint_every)
            if own != (found.run_root, found.tree_size, found.steps, found.checkpoint_every):
                raise Mismatch(
                    f"announcement: is about run {found.run_root.hex()}, this is {root.hex()}",
                    where="run of the announcement",
                    own=root.hex(),
                    stated=found.run_root.hex(),
                )
            if self.is_checked and (shown := self._position(transcript)) != found.log:
                raise Mismatch(
                    f"announcement: says {_words(found.log)}; the log proof shows {_words(shown)}",
                    where="log of the announcement",
                    own=_words(shown),
                    stated=_words(found.log),
                )
            return found
        assert self.fraction is not None and self.detect is not None and self.round is not None
        verify_time(*(beacon := _parse_round(self.round)))
        return announce(
            run_root=root,
            tree_size=size,
            steps=transcript.specification.steps,
            checkpoint_every=transcript.specification.checkpoint_every,
            fraction=self.fraction,
            detect=self.detect,
            log=self._position(transcript),
            beacon=beacon,
        )

    def drawn(self, directory: RunDirectory) -> SegmentDraw | Announcement | None:
        """Return the draw; or the announcement, written to its file, where that was asked for; or None without --sample.

        Raises:
            InvalidInput: as for ``announced``, or the beacon has not spoken yet.
            Mismatch: as for ``announced``.
        """
        if not self.sample:
            return None
        announcement = self.announced(directory.load_transcript())
        if self.announce is not None:
            write_whole(self.announce, announcement.encode())
            return announcement
        assert self.beacon is not None
        if (now := int(time.time())) < announcement.beacon_time:
            raise InvalidInput(
                f"--beacon: round {announcement.beacon_round} speaks at {announcement.beacon_time}, now is {now}: "
                "nobody can know its value yet"
            )
        round_of = announcement.beacon_source, announcement.beacon_round
        verify_time(*round_of, announcement.beacon_time)
        drawn = draw_segments(announcement, spoken(*round_of, _parse_beacon(self.beacon)))
        if self.draw is not None:
            write_whole(self.draw, drawn.encode())
        return drawn

    def _position(self, transcript: Transcript) -> LogPosition | None:
        if self.log_proof is None or self.log_policy is None:
            return None
        policy = parse_log_policy(read_whole(self.log_policy, limit=POLICY_LIMIT, what="a log policy"))
        proof = parse_log_proof(read_whole(self.log_proof, limit=LOG_PROOF_LIMIT, what="a log proof"))
        seen = proof.verify(LogEntry.of("run", transcript.statement().encode()), policy)
        return LogPosition(seen.origin, seen.size, seen.root, seen.seen_at)


def _words(position: LogPosition | None) -> str:
    if position is None:
        return "nothing of a log"
    seen = "no witness" if position.seen_at is None else f"seen at {position.seen_at}"
    return f"{position.origin}, {position.size} entries, root {position.root.hex()}, {seen}"


def _parse_round(text: str) -> tuple[str, int, int]:
    found = re.fullmatch(r"(.+):([0-9]{1,18}):([0-9]{1,18})", text, re.ASCII)
    if found is None:
        raise InvalidInput(f"--round {text}: must be {ROUND_FORM}, such as drand/quicknet:41:1692803487")
    return found[1], int(found[2]), int(found[3])


def _parse_beacon(text: str) -> bytes:
    least, most = BEACON_BYTES
    return parse_hex(text.lower(), n_bytes=min(max(len(text) // 2, least), most), what="--beacon")
