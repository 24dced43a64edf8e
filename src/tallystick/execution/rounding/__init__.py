"""The rounding context of a step: grids, recording and following."""
