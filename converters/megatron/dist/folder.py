"""The folder of one iteration in Megatron's `torch_dist` format, or of Megatron-FSDP, by its names.

Format facts: see `converters.megatron.dist.format`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.containers.dcp.metadata import METADATA
from ckpt.move.source import read_file
from ckpt.runs.steps import MEGATRONS_COMMON, MEGATRONS_LAST

COMMON, BACKENDS = MEGATRONS_COMMON, MEGATRONS_LAST
#: What Megatron-Bridge writes in place of arguments: the run's config, how far it has come, a copy of that beside all
#: iterations, which says which one is the last, a folder with the tokenizer, and, if asked to, the model as of the Hub.
RUN_CONFIG, TRAIN_STATE, LAST, RUN_TOKENIZER, RUN_HF = (
    "run_config.yaml",
    "train_state.pt",
    "latest_train_state.pt",
    "tokenizer",
    "hf",
)
#: The folders of a checkpoint of NeMo 2: what megatron-core writes, and what describes the model, with its tokenizer.
WEIGHTS, CONTEXT, TOKENIZER = "weights", "context", "nemo_tokenizer"
#: NeMo 1: what an unpacked `.nemo` archive holds, and the prefix of its keys.
WEIGHTS_1, CONFIG_1, MODULE_1 = "model_weights", "model_config.yaml", "model."
#: In the context: the model's class and its arguments, for people.
MODEL = "model.yaml"
#: What NeMo 2 has before the model's keys: its own module around the model (nemo/lightning/megatron_parallel.py).
MODULE = "module."
_MARK = re.compile(
    rb"model\.module\.(embedding\.word_embeddings\.|decoder\.layers\.\d+\.(self_attention\.linear_|mlp\.(linear_|experts\.)))"
)
_PLAIN_MARK = re.compile(rb"model\.decoder\.layers\.\d+\.(self_attention\.linear_|mlp\.(linear_|experts\.))")
_MARKED = 1 << 20  # bytes of the metadata in which the first keys stand


def is_iteration(folder: Path) -> bool:
    """Whether megatron-core wrote this folder: DCP's files with one of its own beside them."""
    if not folder.is_dir():
        return False
    return (folder / BACKENDS).is_file() or ((folder / COMMON).is_file() and (folder / METADATA).is_file())


def is_nemo(folder: Path) -> bool:
    """Whether megatron-core wrote this folder for NeMo 2: `weights` beside `context`."""
    return is_iteration(folder) and folder.name == WEIGHTS and (folder.parent / CONTEXT).is_dir()


def is_nemo_1(folder: Path) -> bool:
    """Return True for the weights in an unpacked archive of NeMo 1: `model_weights` next to `model_config.yaml`."""
    return is_iteration(folder) and folder.name == WEIGHTS_1 and (folder.parent / CONFIG_1).is_file()


def is_fsdp_iteration(folder: Path) -> bool:
    """Whether this is DCP's folder of a GPT model under Megatron-FSDP, by the first names in its metadata."""
    return _is_plain(folder, _MARK)


def is_torch_dcp_iteration(folder: Path) -> bool:
    """Whether this is DCP's folder of a GPT model of megatron-core under torch's FSDP2, by names in the same way."""
    return _is_plain(folder, _PLAIN_MARK)


def _is_plain(folder: Path, mark: re.Pattern[bytes]) -> bool:
    path = folder / METADATA
    if not path.is_file() or (folder / BACKENDS).is_file() or (folder / COMMON).is_file():
        return False
    return mark.search(read_file(path, _MARKED)) is not None
