"""How many chips to inspect, which, and how often what evades is found."""
