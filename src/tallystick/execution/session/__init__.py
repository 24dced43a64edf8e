"""A session: one model, optimizer and policy, and what happens to them in every step."""
