"""The reference backend: NumPy, for comparison only."""
