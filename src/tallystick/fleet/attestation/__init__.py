"""What hardware states about a chip and its keys, verified offline."""
