"""A tokenizer out of a Hugging Face folder: ``tokenizer.json`` and the small files around it.

``tokenizer.json`` rules; the others only name special tokens, further added tokens, end tokens and chat templates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.exceptions import FormatError, UnsupportedModel
from octavo.formats.hf import read_json
from octavo.tokenizer.fast import Description, FastTokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_from_folder(folder: str | os.PathLike[str]) -> FastTokenizer:
    """Raises ModelNotFound, FormatError and UnsupportedModel (no ``tokenizer.json``)."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{folder}: no tokenizer.json; older formats must be converted with transformers first")
    try:
        backend = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception, or panics, which is not even that
        raise FormatError(path, f"not a tokenizer: {error}") from error
    config = read_json(folder, "tokenizer_config.json", required=False)
    special_map = read_json(folder, "special_tokens_map.json", required=False)
    special = {role: text for role in ROLES if (text := _text(config.get(role) or special_map.get(role)))}
    _add_tokens(backend, config, path)
    names = [
        *special.values(),
        *_further_special(Path(folder) / "tokenizer_config.json", config),
        *_further_special(Path(folder) / "special_tokens_map.json", special_map),
    ]
    _mark_special(backend, names)
    description = Description(special, _end_ids(folder), _chat_templates(folder, config))
    return FastTokenizer(backend, description)


def _text(token: Any) -> str | None:
    """A token is written as its text or as ``{"content": text, ...}``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(backend: Any, config: dict[str, Any], path: Path) -> None:
    """Tokens that only ``added_tokens_decoder`` of tokenizer_config.json knows; their ids must come out as stated."""
    from tokenizers import AddedToken

    stated = config.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        entries = sorted((int(i), entry) for i, entry in stated.items())
        missing = [(i, e["content"], {f: bool(e[f]) for f in flags if f in e}) for i, e in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(path.with_name("tokenizer_config.json"), str(error), key="added_tokens_decoder") from error
    missing = [entry for entry in missing if backend.token_to_id(entry[1]) is None]
    backend.add_tokens([AddedToken(text, **options) for _, text, options in missing])
    for i, text, _ in missing:
        if backend.token_to_id(text) != i:
            reason = f"{text!r} should have id {i}, but the vocabulary gives it {backend.token_to_id(text)}"
            raise FormatError(path.with_name("tokenizer_config.json"), reason, key="added_tokens_decoder")


def _further_special(path: Path, config: dict[str, Any]) -> list[str]:
    """Special tokens without a role that the file at ``path`` names. Raises FormatError."""
    names: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        if not isinstance(extra, list | Mapping):
            raise FormatError(path, f"{extra!r:.80} is neither a list nor an object", key=key)
        names += [t for t in map(_text, extra.values() if isinstance(extra, Mapping) else extra) if t]
    return names


def _mark_special(backend: Any, names: list[str]) -> None:
    """``names`` are special even where tokenizer.json does not say so; those not in the vocabulary are ignored."""
    from tokenizers import AddedToken

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    new = [name for name in dict.fromkeys(names) if backend.token_to_id(name) is not None]
    new = [name for name in new if name not in known or not known[name].special]
    if new:
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new])


def _end_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """EOS ids of generation_config.json, else of config.json; the tokenizer's own is added by the caller."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name, required=False).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise FormatError(Path(folder) / name, f"{value!r} is neither an id nor a list of ids", key="eos_token_id")
        return tuple(ids)
    return ()


def _chat_templates(folder: str | os.PathLike[str], config: dict[str, Any]) -> dict[str, str]:
    """By name. A file of its own wins over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template") or read_json(folder, "chat_template.json", required=False).get("chat_template")
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        for entry in stated:
            if not isinstance(entry, Mapping) or not {"name", "template"} <= entry.keys():
                reason = "must be a string or a list of {name, template}"
                raise FormatError(Path(folder) / "tokenizer_config.json", reason, key="chat_template")
            templates[str(entry["name"])] = str(entry["template"])
    files = [(Path(folder) / "chat_template.jinja", "default")]
    files += [(path, path.stem) for path in sorted((Path(folder) / "additional_chat_templates").glob("*.jinja"))]
    for path, name in files:
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise FormatError(path, f"not UTF-8: {error.reason}", offset=error.start) from error
    return templates
