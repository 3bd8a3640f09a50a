"""What the routes share: the served models, each with its engine once that is ready, and the server's own settings.

``octavo serve`` fills it; the routes only read. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import octavo
from octavo.config import ChatConfig, EngineConfig, LogConfig, ServerConfig
from octavo.entrypoints.server.access import Caller, KeyRing
from octavo.entrypoints.server.request_log import RequestLog, request_log
from octavo.exceptions import EngineDeadError, OctavoError
from octavo.messages import EngineInfo

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.entrypoints.chat.chat_format import ChatFormats

Abort = Callable[[], Awaitable[None]]


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
    chat_formats: ChatFormats | None = None  # see chat.prompts
    system_fingerprint: str | None = None  # equal fingerprints: equal answers to equal requests

    def ready_engine(self) -> AsyncLLM:
        """The engine. Raises NotReadyError while it starts and EngineDeadError if it could not."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        if self.engine is None:
            raise NotReadyError(f"the model is still loading ({self.phase})")
        return self.engine


@dataclass(eq=False)
class _Answer:
    abort: Abort
    owner: str  # a caller's name


@dataclass
class RunningAnswers:
    """The answers that are being made, by every id their client may know them by, so that one can be aborted.

    Ids may repeat: an id stands for every running answer that was given it.
    """

    _answers: dict[str, set[_Answer]] = field(default_factory=lambda: defaultdict(set))
    count: int = 0

    @contextlib.contextmanager
    def track(self, ids: Collection[str], abort: Abort, owner: Caller) -> Iterator[None]:
        """Within, ``abort`` is called when ``owner`` or an administrator asks to abort one of ``ids``."""
        answer = _Answer(abort, owner.name)
        names = set(ids)
        for name in names:
            self._answers[name].add(answer)
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            for name in names:
                self._answers[name].remove(answer)
                if not self._answers[name]:
                    del self._answers[name]

    async def abort(self, request_id: str, caller: Caller) -> int:
        """Abort what runs under ``request_id`` for ``caller``, or for anyone if an administrator asks; how many."""
        answers = [a for a in self._answers.get(request_id, ()) if caller.admin or a.owner == caller.name]
        for answer in answers:
            await answer.abort()
        return len(answers)


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


def fingerprint(config: EngineConfig, info: EngineInfo) -> str:
    """Of answers with equal fingerprints to equal requests every bit is equal.

    A short hash of all that decides an answer: octavo, the model, its weights' format, the kernels, the KV type.

    Threads, batch sizes and cache sizes do not: they never change an answer.
    """
    parts = (
        octavo.__version__,
        os.path.basename(config.model.model.rstrip("/")),
        config.model.dtype,
        config.cache.kv_dtype,
        info.facts.get("weights", ""),
        info.facts.get("kernels", "").partition(",")[0],
    )
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
