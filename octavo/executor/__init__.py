"""Executors: how a plan reaches the workers, whichever process or host they live in."""
