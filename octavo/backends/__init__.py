"""Backends: what turns a Program and weights into something that runs."""
