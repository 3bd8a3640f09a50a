"""One folder a connector: ``planner.py`` (no arrays) and ``mover.py``."""
