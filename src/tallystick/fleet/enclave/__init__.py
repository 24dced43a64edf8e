"""Agreed programs on committed data, where neither party sees more than agreed."""
