"""Where and why two parties part."""
