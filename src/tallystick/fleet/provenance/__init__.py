"""Which declared run explains what a chip saw."""
