"""Iteration folder in Megatron's `torch_dist` format, or Megatron-FSDP's, recognized by names."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.containers.dcp.metadata import METADATA
from ckpt.move.source import read_file
from ckpt.runs.steps import MEGATRONS_COMMON, MEGATRONS_LAST

COMMON, BACKENDS = MEGATRONS_COMMON, MEGATRONS_LAST
#: Megatron-Bridge: the run's config, its counters, a copy of the last counters beside all iterations, the tokenizer's
#: folder and, if requested, the model in the Hub's format.
RUN_CONFIG, TRAIN_STATE, LAST, RUN_TOKENIZER, RUN_HF = (
    "run_config.yaml",
    "train_state.pt",
    "latest_train_state.pt",
    "tokenizer",
    "hf",
)
#: NeMo 2: megatron-core's files, and the model's description with its tokenizer.
WEIGHTS, CONTEXT, TOKENIZER = "weights", "context", "nemo_tokenizer"
#: NeMo 1: an unpacked `.nemo` archive's content, and its key prefix.
WEIGHTS_1, CONFIG_1, MODULE_1 = "model_weights", "model_config.yaml", "model."
#: The model's class and arguments, for people.
MODEL = "model.yaml"
#: NeMo 2's key prefix: its wrapper module (nemo/lightning/megatron_parallel.py).
MODULE = "module."
_MARK = re.compile(
    rb"model\.module\.(embedding\.word_embeddings\.|decoder\.layers\.\d+\.(self_attention\.linear_|mlp\.(linear_|experts\.)))"
)
_PLAIN_MARK = re.compile(rb"model\.decoder\.layers\.\d+\.(self_attention\.linear_|mlp\.(linear_|experts\.))")
_MARKED = 1 << 20  # covers the metadata's first keys


def is_iteration(folder: Path) -> bool:
    """Return True if megatron-core wrote this folder: DCP's files with a megatron-core file."""
    if not folder.is_dir():
        return False
    return (folder / BACKENDS).is_file() or ((folder / COMMON).is_file() and (folder / METADATA).is_file())


def is_nemo(folder: Path) -> bool:
    """Return True for NeMo 2's folder: `weights` beside `context`."""
    return is_iteration(folder) and folder.name == WEIGHTS and (folder.parent / CONTEXT).is_dir()


def is_nemo_1(folder: Path) -> bool:
    """Return True for an unpacked NeMo 1 archive: `model_weights` beside `model_config.yaml`."""
    return is_iteration(folder) and folder.name == WEIGHTS_1 and (folder.parent / CONFIG_1).is_file()


def is_fsdp_iteration(folder: Path) -> bool:
    """Return True for Megatron-FSDP's folder of a GPT model, by the first names in its metadata."""
    return _is_plain(folder, _MARK)


def is_torch_dcp_iteration(folder: Path) -> bool:
    """Return True for torch FSDP2's folder of a GPT model, by the first names."""
    return _is_plain(folder, _PLAIN_MARK)


def _is_plain(folder: Path, mark: re.Pattern[bytes]) -> bool:
    path = folder / METADATA
    if not path.is_file() or (folder / BACKENDS).is_file() or (folder / COMMON).is_file():
        return False
    return mark.search(read_file(path, _MARKED)) is not None
