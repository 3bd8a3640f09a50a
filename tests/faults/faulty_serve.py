"""``octavo`` with a core and a front end that break on request: ``python -m tests.faults.faulty_serve serve ...``"""

from __future__ import annotations

import sys
from typing import Any

from octavo.engine import core_client
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.entrypoints.api.completions import CompletionAnswer
from octavo.entrypoints.chat.conversation import Conversation
from tests.faults.faulty_core import BOOTSTRAP, SECRET, Fault, raise_for


def break_front_end() -> None:
    init = IncrementalDetokenizer.__init__

    def remember(self: Any, tokenizer: Any, sampling_params: Any, *rest: Any) -> None:
        init(self, tokenizer, sampling_params, *rest)
        self.sampling_params = sampling_params

    IncrementalDetokenizer.__init__ = remember  # type: ignore[method-assign]
    raise_for(IncrementalDetokenizer, "update", Fault.DETOKENIZE, 0)
    event, choice = Conversation._event, CompletionAnswer._choice

    def _event(self: Conversation, *args: Any, **kwargs: Any) -> Any:
        if self.generation.params[0].seed == Fault.FORMAT:
            raise ZeroDivisionError(SECRET)
        return event(self, *args, **kwargs)

    def _choice(self: CompletionAnswer, *args: Any, **kwargs: Any) -> Any:
        if self.body.seed == Fault.FORMAT:
            raise ZeroDivisionError(SECRET)
        return choice(self, *args, **kwargs)

    Conversation._event = _event  # type: ignore[method-assign]
    CompletionAnswer._choice = _choice  # type: ignore[method-assign]


if __name__ == "__main__":
    from octavo.cli.main import main

    core_client.BOOTSTRAP = BOOTSTRAP
    break_front_end()
    sys.exit(main())
