"""Who made, moved, lost and scrapped which chips."""
