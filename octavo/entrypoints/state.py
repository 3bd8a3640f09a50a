"""What the routes share: the served models, each with its engine once that is ready, and the server's own settings.

``octavo serve`` fills it; the routes only read. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
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
class ServedModel:
    """One model by the name that requests use. ``failure`` is set when its engine could not start or died for good."""

    name: str
    engine: AsyncLLM | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    phase: str = "starting"
    progress: float | None = None  # 0..1 of the phase, where it is known
    failure: str | None = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    chat_config: ChatConfig = field(default_factory=ChatConfig)
    chat_formats: ChatFormats | None = None  # see openai/prompts.py
    system_fingerprint: str | None = None  # equal fingerprints: equal answers to equal requests

    def ready_engine(self) -> AsyncLLM:
        """The engine. Raises NotReadyError while it starts and EngineDeadError if it could not."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        if self.engine is None:
            raise NotReadyError(f"the model is still loading ({self.phase})")
        return self.engine


@dataclass
class ServerState:
    """One server: its models by name, in the order in which they are listed, and what all of them share."""

    served: InitVar[Sequence[ServedModel]]
    models: dict[str, ServedModel] = field(init=False)
    draining: bool = False  # told to end: what runs is finished, nothing new is taken in
    only_local: bool = False  # only this machine can connect, over TCP
    config: ServerConfig = field(default_factory=ServerConfig)
    log_config: LogConfig = field(default_factory=LogConfig)
    running: RunningAnswers = field(default_factory=RunningAnswers)
    keys: KeyRing = field(init=False)
    request_log: RequestLog = field(init=False)

    def __post_init__(self, served: Sequence[ServedModel]) -> None:
        """Raises ConfigError for a wrong key file."""
        self.models = {model.name: model for model in served}
        self.keys = KeyRing(self.config)
        self.request_log = request_log(self.log_config)

    @property
    def default(self) -> ServedModel:
        """The model of a request that names none: the first one."""
        return next(iter(self.models.values()))

    def find(self, name: str | None) -> ServedModel:
        """The model called ``name``, ready or not; without a name the default. Raises UnknownModelError."""
        if name is None:
            return self.default
        if (model := self.models.get(name)) is None:
            have = ", ".join(map(repr, self.models))
            raise UnknownModelError(f"the model {name[:200]!r} does not exist; this server has {have}")
        return model

    def model(self, name: str | None = None) -> ServedModel:
        """The model called ``name``, or the default, once its engine is ready.

        Raises NotReadyError while that starts (as a name does that is unknown while the default starts),
        EngineDeadError if it could not, and UnknownModelError.
        """
        model = self.models.get(name, self.default) if name is not None else self.default
        model.ready_engine()
        return self.find(name)
