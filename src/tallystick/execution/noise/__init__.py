"""How far two machines' values may differ: measured, and held against a log."""
