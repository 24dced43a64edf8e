"""Compute monitoring: which chips to inspect, how many, and what their logs prove; pure where no chip is touched."""
