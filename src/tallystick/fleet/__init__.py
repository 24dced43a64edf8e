"""Compute monitoring: which chips to inspect, how many, and what their logs prove."""
