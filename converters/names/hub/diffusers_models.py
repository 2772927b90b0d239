"""Files of a diffusers model: names, and the tensors that the installed diffusers saves.

Facts: diffusers 0.42 (`models/modeling_utils.py`, `save_pretrained`; `utils/constants.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import CorruptError

if TYPE_CHECKING:
    from converters.names.families.rows import Saved

#: File name without its suffix, and transformers' one.
STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"


def class_name(config: Mapping[str, Any]) -> str | None:
    name = config.get("_class_name")
    return name if isinstance(name, str) and not config.get("model_type") else None


def file_stem(config: Mapping[str, Any] | None) -> str:
    return TRANSFORMERS_STEM if config is None or class_name(config) is None else STEM


def is_available() -> bool:
    return find_spec("diffusers") is not None and find_spec("torch") is not None


def saved(config: Mapping[str, Any]) -> Saved | None:
    """Return the tensors saved by the config's diffusers class. None without diffusers or this class.

    Raise CorruptError if diffusers does not accept the config.
    """
    name = class_name(config)
    if name is None or not is_available():
        return None
    import torch

    from converters.names.families.rows import Saved

    diffusers: Any = import_module("diffusers")
    cls: Any = getattr(diffusers, name, None)
    if not inspect.isclass(cls) or not issubclass(cls, diffusers.ModelMixin):
        return None
    try:
        with torch.device("meta"):
            model = vars(diffusers)[name].from_config(dict(config))
    except Exception as error:
        raise CorruptError(f"diffusers does not accept the model's config: {error}") from error
    return Saved(name, {fqn: tuple(tensor.shape) for fqn, tensor in model.state_dict().items()})
