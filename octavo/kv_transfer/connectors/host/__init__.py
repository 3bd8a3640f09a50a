"""The host tier."""
