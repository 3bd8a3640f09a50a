"""The name of a block's contents: SHA-256 over canonical CBOR (RFC 8949, section 4.2) of parent, tokens and extras.

Length-delimited and tagged by its encoding, so that no two different inputs have the same bytes; the same in every
process, whatever ``PYTHONHASHSEED``. 256 bits, so equal names are taken as equal contents. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import cbor2

Extra = tuple[str, str | bytes]
"""A tag ("cache_salt", ...) and its value: what a block's KV depends on besides its tokens."""


def hash_block(parent: bytes | None, token_ids: Sequence[int], extras: Sequence[Extra] = ()) -> bytes:
    """32 bytes naming a full block. ``parent`` is the previous block's hash, None for a sequence's first block.

    The order of ``extras`` does not matter.
    """
    key = [parent, list(token_ids), [list(extra) for extra in sorted(extras, key=repr)]]
    return hashlib.sha256(cbor2.dumps(key, canonical=True)).digest()
