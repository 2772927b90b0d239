"""Number formats that only a run's files record: its compute dtype, and a model's quantization.

FSDP keeps float32 parameters and casts them when gathering (torch/distributed/fsdp, `MixedPrecision`; HF Trainer's and
Accelerate's `bf16` and `fp16`). No tensor shows the compute dtype.

Quantization is recorded in config.json, or in the quantizer's own file next to it. Sources: transformers 5.23
`utils/quantization_config.py`; AutoGPTQ and AutoAWQ `quantize_config.json`, `quant_config.json`; nvidia-modelopt 0.47
`hf_quant_config.json`; mlx-lm 0.30 `utils.py` (`save_config`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError, UnsafeError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.table import AnyName
from ckpt.containers.torchfile.values import Record
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.plan.checkpoint import HUB, MASTER, WEIGHT, Checkpoint, ComputesIn
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ckpt.plan.namespace import OF_RUNS, OF_THE_MODEL, config_parts
from ckpt.plan.precision import CAST_SOURCES, Choice, num_elements
from ckpt.runs.file_table import FILES, TRAINING_ARGS, FileKind
from ckpt.runs.model_files import CONFIG, QUANTIZATION_ENTRIES, QUANTIZATION_ENTRY

_MAX_ARGUMENTS = 16 << 20  # training arguments take a few kB
_HALF = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def with_computing_dtype(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with its run's compute dtype, or a note."""
    try:
        recorded = _recorded_dtype(checkpoint) if _keeps_float32(checkpoint) else None
    except (CorruptError, NotFoundError, UnsafeError) as error:
        note = f"{TRAINING_ARGS} is damaged and was not read, so the precision is unknown: {error.what}"
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    if recorded is not None and recorded.dtype == FLOAT32:
        is_run = bool(checkpoint.optimizer_states) or checkpoint.state.step is not None
        is_mixed = is_run and not recorded.record and checkpoint.namespace in (*OF_THE_MODEL, *OF_RUNS)
        recorded = ComputesIn(None) if is_mixed else None
    return replace(checkpoint, computes_in=recorded)


def _keeps_float32(checkpoint: Checkpoint) -> bool:
    """Return True for a run's checkpoint that stores weights only in float32. A Hugging Face folder is no run."""
    if checkpoint.namespace == HUB or checkpoint.is_adapter or checkpoint.state.ds_config is not None:
        return False  # DeepSpeed casts the model itself
    weights = list(checkpoint.with_role(WEIGHT))
    counts = num_elements(Choice(weight, weight.dtype) for weight in weights if weight.dtype in CAST_SOURCES)
    return set(counts) == {FLOAT32} and not any(True for _ in checkpoint.with_role(MASTER))


def _recorded_dtype(checkpoint: Checkpoint) -> ComputesIn:
    known = [
        arguments for folder in checkpoint.run_folders if (arguments := _read_arguments(Path(folder) / TRAINING_ARGS))
    ]
    for arguments in known:
        for name, dtype in (("bf16", BFLOAT16), ("fp16", FLOAT16)):
            if arguments.get(name) is True:
                return ComputesIn(dtype, f"{name} in {TRAINING_ARGS}")
    config = checkpoint.config or {}
    recorded = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if recorded in _HALF:
        return ComputesIn(_HALF[recorded], f"the dtype in {CONFIG}")
    return ComputesIn(FLOAT32, TRAINING_ARGS if known else "")


def read_training_args(path: Path) -> Record | Mapping[Any, Any] | None:
    """Return HF Trainer's saved training arguments (transformers, trainer.py, `_save`), or None."""
    try:
        return _read_arguments(path)
    except (CorruptError, NotFoundError, UnsafeError):  # not from torch.save, or damaged
        return None


def _read_arguments(path: Path) -> Record | Mapping[Any, Any] | None:
    """Read unlisted names as inert records: the arguments' class may be anybody's."""
    if not os.path.lexists(path):
        return None
    inside = confined(path.parent, path.name)
    if not inside.is_file() or inside.stat().st_size > _MAX_ARGUMENTS:
        raise CorruptError("this file has no training arguments", path=path)
    found = torchfile.read(inside, table=AnyName()).root
    return found if isinstance(found, Record | Mapping) else None


_MLX = "quantization"


@dataclass(frozen=True)
class Quantization:
    """`method` is None if only settings are recorded. `key` is its name in a config."""

    method: str | None
    settings: Mapping[str, Any]
    file: str
    key: str = QUANTIZATION_ENTRY

    @property
    def is_for_transformers(self) -> bool:
        """True if `from_pretrained` reads the record, also in `text_config`."""
        return self.file == CONFIG and self.method != "mlx" and self.key == QUANTIZATION_ENTRY

    @property
    def where(self) -> str:
        return self.file if self.key == QUANTIZATION_ENTRY else f"{self.key} in {self.file}"

    @property
    def all_settings(self) -> Mapping[str, Any]:
        inner = self.settings.get(_MLX)
        return {**self.settings, **inner} if isinstance(inner, Mapping) else self.settings

    @property
    def title(self) -> str:
        """Method and main setting for messages: "modelopt NVFP4", "mlx, 4 bits"."""
        settings = self.all_settings
        algorithm, bits = settings.get("quant_algo"), settings.get("bits")
        name = " ".join(map(str, filter(None, (self.method, algorithm))))
        return f"{name}, {pluralize(bits, 'bit')}" if type(bits) is int else name


def quantization_of(config: Mapping[str, Any] | None, folders: Iterable[str] = ()) -> Quantization | None:
    """Return the record in `config`, or in a file. An empty one is of dequantized weights, whatever the files say."""
    if config and config.get(QUANTIZATION_ENTRY) == {}:
        return None
    found = _config_quantization(config) if config else None
    return found or next((one for folder in folders if (one := _folder_quantization(Path(folder))) is not None), None)


#: Settings that decide on the values, in config.json and in the quantizers' own files.
_DECISIVE = (
    *("quant_algo", "bits", "w_bit", "group_size", "q_group_size", "desc_act", "zero_point", "checkpoint_format"),
    "version",
)


def contradicting_records(
    config: Mapping[str, Any] | None, folders: Iterable[str]
) -> tuple[Quantization, str, Any, Any] | None:
    """Return the file next to the config that records another quantization: key, its value, and the config's value."""
    of_config, of_files = quantization_of(config), quantization_of(None, folders)
    if of_config is None or of_files is None:
        return None
    one, other = (of.all_settings for of in (of_files, of_config))
    for key in _DECISIVE:
        a, b = one.get(key), other.get(key)
        if None not in (a, b) and str(a).lower() != str(b).lower():
            return of_files, key, a, b
    return None


def _config_quantization(config: Mapping[str, Any]) -> Quantization | None:
    for part in config_parts(config):
        key = next((key for key in QUANTIZATION_ENTRIES if part.get(key)), QUANTIZATION_ENTRY)
        recorded, mlx = part.get(key), part.get(_MLX)
        if isinstance(recorded, Mapping) and recorded.get("quant_method"):
            return Quantization(str(recorded["quant_method"]).lower(), recorded, CONFIG, key)
        if isinstance(mlx, Mapping) and "bits" in mlx:
            return Quantization("mlx", mlx, CONFIG)
        if isinstance(recorded, Mapping) and recorded:
            is_bnb = recorded.get("load_in_4bit") or recorded.get("load_in_8bit")
            return Quantization("bitsandbytes" if is_bnb else None, recorded, CONFIG, key)
    return None


def _folder_quantization(folder: Path) -> Quantization | None:
    folder = folder.parent if folder.is_file() else folder
    for name, method, kind in FILES:
        if kind is FileKind.QUANTIZATION and (folder / name).is_file():
            recorded = read_object(confined(folder, name), "the quantization config")
            return Quantization(str(recorded.get("quant_method") or method).lower(), recorded, name)
    return None
