"""Commands on fleets of chips."""
