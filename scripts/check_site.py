"""Check a built site: no page loads anything from elsewhere, and every link inside the site leads to a file and an anchor.

    python scripts/check_site.py build/site

Exit code 1 with a line for each fault; pages may link to other sites, which load only when a reader follows the link.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
ELSEWHERE = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
IN_STYLE = re.compile(
    r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)|@import\s+['\"]((?:https?:)?//[^'\"]+)", re.IGNORECASE
)


class Page(HTMLParser):
    """What one page loads, links to and offers as anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)
        self.loads += [first or second for first, second in IN_STYLE.findall(text)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take one element's addresses."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADS and LOADS[tag] in given:
            self.loads.append(given[LOADS[tag]])
        elif tag == "link" and not {"canonical", "next", "prev", "search", "index"}.intersection(
            given.get("rel", "").split()
        ):
            self.loads.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


def faults_of(folder: Path) -> list[str]:
    """Return a line for each address that is loaded from elsewhere and each dead link inside the folder."""
    pages = {
        path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))
    }
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        found += [
            f"{name}: loads {address} from elsewhere" for address in page.loads if ELSEWHERE.match(address)
        ]
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not there.is_file():
                found.append(f"{name}: link {address} leads to no file")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                found.append(f"{name}: link {address} leads to no anchor")
    for path in sorted(folder.rglob("*.css")):
        for first, second in IN_STYLE.findall(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(folder)}: loads {first or second} from elsewhere")
    return found


def main() -> int:
    folder = Path(sys.argv[1])
    if not (folder / "index.html").is_file():
        print(f"check_site: {folder} has no index.html", file=sys.stderr)
        return 2
    faults = faults_of(folder)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
