"""Check if `from_pretrained` loads a folder: its weights, tokenizer and generation config.

The installed transformers loads the model on the meta device. Only bitsandbytes 4-bit weights are really loaded,
because their shapes are in the data. No model code runs, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckpt.base.errors import NotFoundError, UsageError, printable, shown
from ckpt.base.results import Returned
from ckpt.base.text import pluralize
from ckpt.runs.file_table import GENERATION
from ckpt.runs.model_files import CONFIG, read_config

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
#: Each must be a row in the embedding.
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, repr=False)
class Loading(Returned):
    """Result: `problems` by part, and the parts checked."""

    verdict: ClassVar[str] = ".good"

    path: str
    model: str
    num_tensors: int
    problems: tuple[str, ...]
    looked_at: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        return f"<{shown(self.path)}: {'loads' if self.good else pluralize(len(self.problems), 'problem')}>"

    @property
    def exit_code(self) -> int:
        return int(not self.good)

    def lines(self) -> list[str]:
        found = [f"- {printable(problem)}" for problem in self.problems]
        end = "loads" if self.good else pluralize(len(self.problems), "problem")
        return [
            *found,
            f"{printable(self.model)}, {pluralize(self.num_tensors, 'tensor')}; {', '.join(self.looked_at)}: {end}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "loads": self.good,
            "model": self.model,
            "tensors": self.num_tensors,
            "looked_at": list(self.looked_at),
            "problems": list(self.problems),
        }


def check_loads(path: Path) -> Loading:
    """Load the folder like its users will, and return the problems.

    Raise UsageError if transformers, torch or accelerate is missing, NotFoundError without a config.
    """
    taken = ("torch", "transformers", "accelerate")  # puts the model on the meta device
    if lacking := [name for name in taken if importlib.util.find_spec(name) is None]:
        hint = "pip install 'transformers>=5' torch accelerate"
        raise UsageError(f"loading a model needs {' and '.join(lacking)}", found="not installed", hint=hint)
    import transformers

    if not path.is_dir() or read_config([path]) is None:
        raise NotFoundError(f"{CONFIG} is missing, so the model class is unknown", path=path)
    problems: list[str] = []
    with _quiet(transformers):
        config = _attempt(problems, CONFIG, lambda: transformers.AutoConfig.from_pretrained(path))
        name, count = ("no model", 0) if config is None else _load_model(transformers, path, config, problems)
        looked_at = ["weights"]
        tokenizer = None
        if any((path / file).is_file() for file in _TOKENIZERS):
            looked_at.append("tokenizer")
            tokenizer = _attempt(problems, "tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(path))
        rows = getattr(config and config.get_text_config(), "vocab_size", None)  # embedding rows
        size = rows if isinstance(rows, int) else None
        if tokenizer is not None:
            problems += _tokenizer_problems(tokenizer, size)
        if (path / GENERATION).is_file():
            looked_at.append("generation config")
            problems += _generation_problems(transformers, path, size)
    return Loading(str(path), name, count, tuple(problems), tuple(looked_at))


def _load_model(transformers: Any, path: Path, config: Any, problems: list[str]) -> tuple[str, int]:
    name = next(iter(config.architectures or ()), None)
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None:
        what = "names no architectures" if name is None else f"names {name!r}, unknown to transformers"
        problems.append(f"{CONFIG}: {what}")
        cls = transformers.AutoModelForCausalLM
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and _attempt(problems, CONFIG, lambda: _knows(quantization)) is False:
        method = quantization.get("quant_method")
        problems.append(f"{CONFIG}: transformers does not know quantization method {method!r}, and loads plain weights")
    device = "cpu" if isinstance(quantization, dict) and quantization.get("load_in_4bit") else "meta"
    options = {"device_map": device, "output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": "auto"}
    loaded = _attempt(problems, "weights", lambda: cls.from_pretrained(path, local_files_only=True, **options))
    if loaded is None:
        return str(name), 0
    model, info = loaded
    problems += [f"missing: {key}" for key in sorted(info["missing_keys"])]
    problems += [f"unexpected: {key}" for key in sorted(info["unexpected_keys"])]
    problems += [
        f"mismatched: {key} has shape {list(stored)}, the model's is {list(wanted)}"
        for key, stored, wanted in sorted(info["mismatched_keys"])
    ]
    problems += [f"weights: {message}" for message in info.get("error_msgs", ())]
    return type(model).__name__, len(model.state_dict())


def _knows(quantization: dict[str, Any]) -> bool:
    """Return True if transformers has this method. Weights with other methods load as plain ones."""
    from transformers.quantizers import AutoHfQuantizer

    return bool(AutoHfQuantizer.supports_quant_method(quantization))


def _tokenizer_problems(tokenizer: Any, size: int | None) -> Iterator[str]:
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        yield "tokenizer: it has no vocabulary; is a tokenizer file missing?"
    if size is not None and len(tokenizer) > size:
        yield f"tokenizer: it has {pluralize(len(tokenizer), 'token')}, the embedding {pluralize(size, 'row')}"
    for message in _ids(tokenizer, size):
        yield f"tokenizer: {message}"
    if tokenizer.chat_template:
        problems: list[str] = []
        messages = [{"role": "user", "content": "a"}]
        _attempt(problems, "chat template", lambda: tokenizer.apply_chat_template(messages, tokenize=False))
        yield from problems


def _generation_problems(transformers: Any, path: Path, size: int | None) -> Iterator[str]:
    problems: list[str] = []
    generation = _attempt(
        problems,
        "generation config",
        lambda: transformers.GenerationConfig.from_pretrained(path, local_files_only=True),
    )
    if generation is not None:
        _attempt(problems, "generation config", lambda: generation.validate(strict=True))
        problems += [f"generation config: {message}" for message in _ids(generation, size)]
    yield from problems


def _ids(holder: Any, size: int | None) -> Iterator[str]:
    for name in _SPECIAL:
        value = getattr(holder, name, None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(token, int) and size is not None and not -1 <= token < size:
                yield f"{name} {token} is outside the embedding, with {pluralize(size, 'row')}"


def _attempt(problems: list[str], what: str, action: Callable[[], Any]) -> Any:
    """Return the result of `action`, or record a problem and return None: the library raises any error type.

    System errors are raised. The library's own OSErrors have no errno.
    """
    try:
        return action()
    except Exception as error:
        is_systems = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)
        if is_systems or isinstance(error, MemoryError):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        problems.append(f"{what}: {text}")
        return None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        transformers.utils.logging.enable_progress_bar()
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
