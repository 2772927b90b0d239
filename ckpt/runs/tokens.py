"""Tokens of a Hugging Face tokenizer, compared with the rows of the model's embedding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.plan.namespace import config_parts
from ckpt.runs.model_files import read_config

TOKENIZER = "tokenizer.json"


def tokens_without_rows(tokenizer: Any, folder: Path) -> str | None:
    """Return a note if `tokenizer.json` has ids that the config's vocabulary doesn't."""
    try:
        config = read_config([folder])
    except CkptError:  # reported with its file
        return None
    rows = max((size for one in config_parts(config) if type(size := one.get("vocab_size")) is int), default=None)
    largest = max(_ids(tokenizer), default=-1)
    if rows is None or largest < rows:
        return None
    told = f"token ids go up to {largest}, and config.json's vocab_size is {rows}"
    return f"{told}: the embedding has no row for ids from {rows} on"


def _ids(tokenizer: Any) -> Iterator[int]:
    """Yield the ids in a vocabulary and of added tokens. Unigram's vocabulary is a list."""
    content = tokenizer if isinstance(tokenizer, dict) else {}
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        yield len(vocabulary) - 1
    elif isinstance(vocabulary, dict):
        yield from (one for one in vocabulary.values() if type(one) is int)
    for one in added if isinstance(added, list) else ():
        if isinstance(one, dict) and type(one.get("id")) is int:
            yield one["id"]
