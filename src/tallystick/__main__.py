"""python -m tallystick: the command tally."""

from __future__ import annotations

import sys

from tallystick.cli.main import main
from tallystick.cli.profiles import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
