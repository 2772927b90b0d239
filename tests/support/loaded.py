"""Tiny models saved by `save_pretrained` after `from_pretrained` loaded Hub files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

_TOWER = re.compile(
    r"\b(vision_tower|image_tower|video_tower|model\.vision_model)\.(?=(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.)"
)


def save_loaded(model: Any, folder: Path) -> None:
    """Save `model` with the tower names used on the Hub, load it, and save it again.

    Do nothing more for other towers, or if `from_pretrained` can't read the model.
    """
    model.save_pretrained(folder)
    vision = getattr(model.config, "vision_config", None)
    if getattr(vision, "model_type", None) not in ("clip_vision_model", "siglip_vision_model", "siglip2_vision_model"):
        return
    if any(type(model).from_pretrained(folder, output_loading_info=True)[1].values()):
        return
    file = folder / "model.safetensors"
    tensors = {_TOWER.sub(r"\1.vision_model.", name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    loaded.save_pretrained(folder)
    assert load_file(file).keys() == tensors.keys()
