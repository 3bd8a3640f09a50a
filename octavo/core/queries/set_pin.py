"""SetPin: pin a prefix for an administrator. Changes the pins, and renews one on the same prefix."""

from __future__ import annotations

from octavo.core.kv_cache.pinning import pin_prefix
from octavo.core.kv_cache.prefix_tree import PrefixTree
from octavo.core.queries import CoreState, unrun_request
from octavo.exceptions import ValidationError
from octavo.messages import NotFound, PinInfo, SetPin


def answer(query: SetPin, core: CoreState) -> PinInfo | NotFound:
    """The pin. Raises ValidationError for a prompt of less than a block, and where there is no room for the pin."""
    size = core.kv.block_size
    if query.prefix is None:
        request = unrun_request(query.prompt_token_ids, query.cache_salt)
        hashes = request.hashes(size)
        if not hashes:
            raise ValidationError(
                f"the prompt has {request.num_tokens} tokens; less than {size}, a block, cannot be pinned",
                parameter="prompt",
            )
    else:
        hashes = [row.row_hash for row in PrefixTree(core.kv.index.names.entries()).path(query.prefix)]
        if not hashes:
            return NotFound()
    return core.kv.cache.pins.describe(pin_prefix(core.kv, hashes, None, query.ttl, query.pin_id))
