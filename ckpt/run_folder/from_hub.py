"""Files of a Hub repository that stand beside its weights, from the local cache or else from the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt.base.errors import NotFoundError

#: Config, tokenizer, chat templates and code.
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.py", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*")


def fetched(repo_id: str, patterns: Sequence[str] = BESIDE_WEIGHTS) -> Path:
    """The folder of these files in the cache.  Raises NotFoundError where they cannot be had."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repo_id, allow_patterns=list(patterns), ignore_patterns=["*.safetensors.index.json"])
        )
    except Exception as error:  # the library raises its own, requests' and OS errors
        raise NotFoundError(
            f"the config of {repo_id!r} could not be downloaded from the Hub",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="give the folder of a local copy",
        ) from error
