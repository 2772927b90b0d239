"""A model's quantization method and settings, from config.json or the quantizer's own file next to it.

Sources: transformers 5.23 `utils/quantization_config.py`; AutoGPTQ and AutoAWQ `quantize_config.json`,
`quant_config.json`; nvidia-modelopt 0.47 `hf_quant_config.json`; mlx-lm 0.30 `utils.py` (`save_config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.text import pluralize
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.plan.model_config import config_parts
from ckpt.runs.file_table import FILES, FileKind
from ckpt.runs.model_files import CONFIG, QUANTIZATION_ENTRY

_MLX = "quantization"


@dataclass(frozen=True)
class Quantization:
    """`method` is None if only settings are recorded."""

    method: str | None
    settings: Mapping[str, Any]
    file: str

    @property
    def is_for_transformers(self) -> bool:
        """True if `from_pretrained` reads the record."""
        return self.file == CONFIG and self.method != "mlx"

    @property
    def title(self) -> str:
        """Method and main setting for messages: "modelopt NVFP4", "mlx, 4 bits"."""
        inner = self.settings.get(_MLX)
        settings = {**self.settings, **(inner if isinstance(inner, Mapping) else {})}
        algorithm, bits = settings.get("quant_algo"), settings.get("bits")
        name = " ".join(map(str, filter(None, (self.method, algorithm))))
        return f"{name}, {pluralize(bits, 'bit')}" if type(bits) is int else name


def quantization_of(config: Mapping[str, Any] | None, folders: Iterable[str] = ()) -> Quantization | None:
    found = _config_quantization(config or {})
    return found or next((one for folder in folders if (one := _folder_quantization(Path(folder))) is not None), None)


def _config_quantization(config: Mapping[str, Any]) -> Quantization | None:
    for part in config_parts(config):
        recorded, mlx = part.get(QUANTIZATION_ENTRY) or part.get("compression_config"), part.get(_MLX)
        if isinstance(recorded, Mapping) and recorded.get("quant_method"):
            return Quantization(str(recorded["quant_method"]).lower(), recorded, CONFIG)
        if isinstance(mlx, Mapping) and "bits" in mlx:
            return Quantization("mlx", mlx, CONFIG)
        if isinstance(recorded, Mapping) and recorded:
            is_bnb = recorded.get("load_in_4bit") or recorded.get("load_in_8bit")
            return Quantization("bitsandbytes" if is_bnb else None, recorded, CONFIG)
    return None


def _folder_quantization(folder: Path) -> Quantization | None:
    folder = folder.parent if folder.is_file() else folder
    for name, method, kind in FILES:
        if kind is FileKind.QUANTIZATION and (folder / name).is_file():
            recorded = read_object(confined(folder, name), "the quantization config")
            return Quantization(str(recorded.get("quant_method") or method).lower(), recorded, name)
    return None
