"""Text to token ids and back, and chat templates. Knows no engine.

Importing this loads neither ``tokenizers`` nor ``jinja2``; ``load_tokenizer`` does, and the first template.
"""

from __future__ import annotations

import os

from octavo.exceptions import ModelNotFound
from octavo.tokenizer.base import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face folder.

    Raises ModelNotFound, FormatError (malformed) and UnsupportedModel (a kind of tokenizer octavo lacks).
    """
    if os.path.isdir(path):
        from octavo.tokenizer.hf_folder import load_from_folder

        return load_from_folder(path)
    if not os.path.exists(path):
        raise ModelNotFound(f"{os.fspath(path)}: no such file or folder")
    from octavo.tokenizer.gguf import load_from_gguf

    return load_from_gguf(path)
