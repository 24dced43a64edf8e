"""Rules about training as data, and what the evidence says about them."""
