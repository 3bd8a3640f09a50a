"""The one line that the log gets for each request that fails."""

from __future__ import annotations

import logging
import uuid

from octavo.messages import RequestFault

logger = logging.getLogger(__name__)


def tell(fault: RequestFault, request_id: str, engine_id: str, label: str) -> str:
    """What the client is told of a fault, after the log has been: both name the same error id.

    ``request_id`` is the caller's, ``engine_id`` what the core calls the sequence, ``label`` the id of its log lines.
    """
    error_id = uuid.uuid4().hex
    cause = fault.cause or fault.message
    logger.error(
        "error %s: request %s (%s) failed: %s", error_id, request_id, engine_id, cause, extra={"request_id": label}
    )
    return f"{fault.message} (error id {error_id})"
