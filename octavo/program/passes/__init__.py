"""Passes: from one program to another that computes the same. Knows no backend.

A pass is a function in a file of its own; what else it needs to know, it takes by keyword.
"""

from collections.abc import Callable

from octavo.program.program import Program

Pass = Callable[[Program], Program]
