"""Which logs and witnesses are known, and which witnesses suffice (C2SP tlog-policy).

log     example.org/log+..                  any of the logs will do
witness W1 w1.example+..
witness W2 w2.example+..
group   both all W1 W2                      or any, or a number
quorum  both                                or none
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.note import COSIGNATURE, NOTE, NoteKey, parse_vkey

POLICY_LIMIT = 1 << 16  # bytes
LINE_LIMIT = 512

_COUNT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


@dataclass(frozen=True)
class LogPolicy:
    """Which logs and witnesses are known, and which witnesses suffice (C2SP tlog-policy).

    Attributes:
        logs: keys of logs; any one of them will do.
        witnesses: by the policy's own names for them.
        groups: name to how many of which members, a member being a witness or an earlier group.
        quorum: the name of a witness or group, or ``none``.
    """

    logs: tuple[NoteKey, ...]
    witnesses: dict[str, NoteKey]
    groups: dict[str, tuple[int, tuple[str, ...]]]
    quorum: str

    def quorum_time(self, seen: dict[str, int]) -> int | None:
        """Return the second by which the quorum had seen a checkpoint, of the times that witnesses stated.

        None if the policy asks for no witness. A time is as honest as the k-th of the witnesses it needs.

        Raises:
            Mismatch: the quorum is not met.
        """
        if self.quorum == "none":
            return None
        times: dict[str, int | None] = {name: seen.get(name) for name in self.witnesses}
        for name, (least, members) in self.groups.items():
            met = sorted(when for member in members if (when := times[member]) is not None)
            times[name] = met[least - 1] if len(met) >= least else None
        found = times[self.quorum]
        if found is None:
            raise Mismatch(
                f"witnesses: quorum {self.quorum!r} is not met by {', '.join(sorted(seen)) or 'no witness'}"
            )
        return found


def parse_log_policy(data: bytes, *, what: str = "log policy") -> LogPolicy:
    """Return the policy in the text ``data``: lines ``log``, ``witness``, ``group`` and one ``quorum``.

    Names are UTF-8 here, which the format recommends and does not demand.

    Raises:
        InvalidInput: another line, a name twice or unknown, a key twice, a member twice, or no quorum.
    """
    if len(data) > POLICY_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {POLICY_LIMIT}")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what}: byte {error.start} is not UTF-8") from None
    if len(lines) > LINE_LIMIT:
        raise InvalidInput(f"{what}: {len(lines)} lines exceed the limit of {LINE_LIMIT}")
    reader = _PolicyReader(what)
    for number, line in enumerate(lines, start=1):
        if any(c < " " and c != "\t" for c in line):
            raise InvalidInput(f"{what}: line {number} holds a control character")
        words = [word for word in re.split(r"[ \t]+", line) if word]
        if words and not words[0].startswith("#"):
            reader.take(number, words)
    return reader.finish()


class _PolicyReader:
    """Takes the lines of a log policy one by one."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.logs: list[NoteKey] = []
        self.witnesses: dict[str, NoteKey] = {}
        self.groups: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.quorum: str | None = None
        self._keys: set[bytes] = set()
        self._used: set[str] = set()

    def take(self, number: int, words: list[str]) -> None:
        """Read one line's words."""
        what = f"{self.what}: line {number}"
        match words:
            case ["log", vkey] | ["log", vkey, _]:
                self.logs.append(self._key("log", vkey, what))
            case ["witness", name, vkey] | ["witness", name, vkey, _]:
                self._define(name, what)
                self.witnesses[name] = self._key("witness", vkey, what)
            case ["group", name, least, *members] if members:
                self._define(name, what)
                self.groups[name] = self._group(least, members, what)
            case ["quorum", name] if self.quorum is None:
                if name != "none" and name not in self.witnesses and name not in self.groups:
                    raise InvalidInput(f"{what}: {name[:80]!r} is no witness or group of the lines before")
                self.quorum = name
            case _:
                raise InvalidInput(
                    f"{what}: {' '.join(words)[:80]!r} is no line of a log policy, or its second quorum"
                )

    def finish(self) -> LogPolicy:
        """Return the policy."""
        if self.quorum is None:
            raise InvalidInput(f"{self.what}: has no quorum line; `quorum none` asks for no witness")
        return LogPolicy(tuple(self.logs), self.witnesses, self.groups, self.quorum)

    def _define(self, name: str, what: str) -> None:
        if name == "none" or name in self.witnesses or name in self.groups:
            raise InvalidInput(f"{what}: the name {name[:80]!r} is taken")

    def _key(self, role: str, vkey: str, what: str) -> NoteKey:
        key = parse_vkey(vkey)
        if key.kind != (NOTE if role == "log" else COSIGNATURE):
            raise InvalidInput(f"{what}: a {role}'s key must not have type {key.kind:#04x}")
        # One key under two names would count twice in a quorum; one that is log and witness would witness itself.
        if key.key.raw in self._keys:
            raise InvalidInput(f"{what}: the key of {key.name[:80]!r} is there already")
        self._keys.add(key.key.raw)
        return key

    def _group(self, least: str, members: list[str], what: str) -> tuple[int, tuple[str, ...]]:
        for member in members:
            if member not in self.witnesses and member not in self.groups:
                raise InvalidInput(f"{what}: {member[:80]!r} is no witness or group of the lines before")
            if member in self._used:
                raise InvalidInput(f"{what}: {member[:80]!r} is a member already")
            self._used.add(member)
        if least in ("any", "all"):
            return (1 if least == "any" else len(members)), tuple(members)
        if not _COUNT.fullmatch(least) or int(least) > len(members):
            raise InvalidInput(
                f"{what}: {least[:80]!r} of {len(members)} members; must be any, all or 1 to {len(members)}"
            )
        return int(least), tuple(members)
