"""Conversations without a protocol: prompts, tools, constraints, and how answers are read. Knows no HTTP."""
