"""What the routes share: the engine once it is ready, and until then how far it is.

Filled by whoever starts the engine (``octavo serve``, or a test); the routes only read. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.config import ChatConfig, LogConfig, ServerConfig
from octavo.entrypoints.access import KeyRing
from octavo.entrypoints.request_log import RequestLog, request_log
from octavo.entrypoints.running import RunningAnswers
from octavo.exceptions import EngineDeadError, OctavoError

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.entrypoints.chat.chat_format import ChatFormats


class NotReadyError(OctavoError):
    """The engine is still starting; the client may try again."""


class NotFoundError(OctavoError):
    """The request names something that is not here; ``parameter`` is the field that does."""

    parameter: str | None = None


class UnknownModelError(NotFoundError):
    """The request names a model that is not served here."""

    parameter = "model"


class UnknownRequestError(NotFoundError):
    """No running request has this id."""

    parameter = "request_id"


@dataclass
class ServerState:
    """One server, one model. ``failure`` is set when the engine could not start or has died for good."""

    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    engine: AsyncLLM | None = None
    phase: str = "starting"
    progress: float | None = None  # 0..1 of the phase, where it is known
    failure: str | None = None
    draining: bool = False  # told to end: what runs is finished, nothing new is taken in
    only_local: bool = False  # only this machine can connect, over TCP
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    config: ServerConfig = field(default_factory=ServerConfig)
    log_config: LogConfig = field(default_factory=LogConfig)
    chat_config: ChatConfig = field(default_factory=ChatConfig)
    chat_formats: ChatFormats | None = None  # see openai/prompts.py
    running: RunningAnswers = field(default_factory=RunningAnswers)
    system_fingerprint: str | None = None  # equal fingerprints: equal answers to equal requests
    keys: KeyRing = field(init=False)
    request_log: RequestLog = field(init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError for a wrong key file."""
        self.keys = KeyRing(self.config)
        self.request_log = request_log(self.log_config)

    def ready_engine(self) -> AsyncLLM:
        """The engine. Raises NotReadyError while it starts and EngineDeadError if it could not."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        if self.engine is None:
            raise NotReadyError(f"the model is still loading ({self.phase})")
        return self.engine

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless ``name`` is absent or the served model's."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}")
