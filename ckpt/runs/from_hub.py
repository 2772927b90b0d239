"""Hub repository names and small files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt.base.errors import NotFoundError
from ckpt.base.text import HUB_ID

#: Config, tokenizer, chat templates and code.
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.py", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*")

#: By name prefix.
_OWNERS = {
    "qwen": "Qwen",
    "llama": "meta-llama",
    "meta-llama": "meta-llama",
    "mistral": "mistralai",
    "mixtral": "mistralai",
    "gemma": "google",
    "deepseek": "deepseek-ai",
    "gpt-oss": "openai",
    "phi": "microsoft",
    "olmo": "allenai",
    "smollm": "HuggingFaceTB",
    "glm": "zai-org",
    "granite": "ibm-granite",
    "falcon": "tiiuae",
}


def is_repository(where: str) -> bool:
    """Return True if `where` is a Hub repository's name. A local path with the same name wins."""
    return HUB_ID.fullmatch(where) is not None and not Path(where).exists()


def owner_hint(where: str, scheme: str = "", owner: str | None = None) -> str | None:
    """Return a hint with the Hub repository, or None. `scheme` is the prefix for a repository's name."""
    if "/" in where or where.startswith("."):
        return f"to read it from the Hub, give {scheme}{where}" if scheme and HUB_ID.fullmatch(where) else None
    owner = next((one for start, one in _OWNERS.items() if where.lower().startswith(start)), owner)
    return f"give the Hub model with its owner: {scheme}{owner}/{where}" if where and owner else None


def unknown_hint(where: str) -> str:
    return owner_hint(where, owner="ORG") or "check the path; give a Hub model as ORG/NAME"


def fetched(repo_id: str, patterns: Sequence[str] = BESIDE_WEIGHTS) -> Path:
    """Raise NotFoundError if the files are unavailable."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repo_id, allow_patterns=list(patterns), ignore_patterns=["*.safetensors.index.json"])
        )
    except Exception as error:  # the library's errors, requests' errors and OS errors
        raise NotFoundError(
            f"{repo_id!r} does not exist here, and the Hub did not return its config",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="give the folder of a local copy",
        ) from error


def cached_snapshot(repo_id: str, revision: str | None) -> Path:
    """Return a Hub repository's folder in the local cache, without fetching anything."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except Exception as error:  # huggingface_hub raises its own errors and OS errors
        at = f" --revision {revision}" if revision else ""
        raise NotFoundError(
            f"{repo_id!r} is not in the local Hugging Face cache", hint=f"fetch it first: hf download {repo_id}{at}"
        ) from error
