"""GPT-2's printable alphabet for bytes: 188 printable Latin-1 bytes stand for themselves, others for U+0100 on."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF: dict[str, int] = _alphabet()


def to_bytes(token: str) -> bytes:
    """Bytes a byte-level token stands for; a token outside the alphabet (some added tokens) stands for its own text."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
