"""Bytes at rest: immutable values, each under its own digest."""
