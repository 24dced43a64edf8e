"""The shipped test kit: fake hardware, a toy game, cheats; product code never imports it."""
