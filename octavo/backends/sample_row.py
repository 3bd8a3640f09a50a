"""What is wanted of one row of logits: SAMPLE_ROW's fields, defined here once. Run, it prints them as a C++ struct.

The build runs it (CMakeLists.txt) and has nothing but the standard library then.
"""

from __future__ import annotations

FIELDS: tuple[tuple[str, str, str], ...] = (
    ("seed", "u8", "the key of the draw,"),
    ("sample_index", "u8", ""),
    ("position", "u8", "and its counter: the token's position in the sequence"),
    ("top_p", "f8", ""),
    ("temperature", "f4", "0: greedy"),
    ("min_p", "f4", ""),
    ("top_k", "i4", "0 or less: off"),
    ("num_logprobs", "i4", "-1: none; 0: of the token only; at most the vocabulary"),
    ("given_token", "i4", "-1: choose one, else its logprobs are wanted"),
    ("logit_row", "i4", "of the logits"),
    ("adjusted_row", "i4", "of the adjusted rows, from which the token is chosen; -1: from the logits themselves"),
    ("mask_row", "i4", "of the masks, whose tokens alone may be chosen; -1: every token may"),
)
"""(name, type, meaning), the type as NumPy has it."""

_C_TYPES = {"u8": "uint64_t", "f8": "double", "f4": "float", "i4": "int32_t"}


def cpp_struct() -> str:
    """A C++ header with the same layout; its compiler checks that there is no padding."""
    lines = [f"  {_C_TYPES[kind]} {name};{f'  // {meaning}' if meaning else ''}" for name, kind, meaning in FIELDS]
    size = sum(int(kind[1:]) for _, kind, _ in FIELDS)
    head = ["#pragma once", "", "#include <cstdint>", "", "namespace octavo {", "", "struct SampleRow {"]
    tail = ["};", f"static_assert(sizeof(SampleRow) == {size});", "", "}  // namespace octavo", ""]
    return "\n".join([*head, *lines, *tail])


if __name__ == "__main__":
    print(cpp_struct(), end="")
