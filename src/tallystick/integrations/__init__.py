"""Doors for other training frameworks; each module is one framework."""
