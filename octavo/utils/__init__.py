"""Small helpers without a home of their own; no knowledge of the engine."""
