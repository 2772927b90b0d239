"""Images for tiny models that see: transformers' whole model, and its tower with Megatron's names before megatron-core.

A model of Megatron-Bridge's is transformers' modules around megatron-core's GPTModel.  The modules are made anew here,
loaded by name from the tensors that the conversion put beside the language model, and what they make of an image takes
the place of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt import api
from ckpt.plan.checkpoint import Checkpoint, Layout
from converters.names.megatron.model.spelling import is_beside
from train.truth import megatron as megatron_truth

#: Models whose language model takes more of the tower than embeddings: megatron-core 0.16.1 has no place for that.
TEXT_ALONE = ("qwen3_vl", "qwen3_vl_moe")
_IMAGE, _START = 200, 202
#: How Megatron's modules are called in transformers' `model`.
_MODULES = {"vision_model": "visual"}

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def difference(model: Any, architecture: str, tensors: Mapping[str, torch.Tensor], forward: Forward) -> float | None:
    """The largest difference of logits of an image between text; None where megatron-core cannot compute them.

    `tensors` has all tensors under Megatron's names; `forward` is megatron-core's model, of tokens, positions and
    embeddings.
    """
    _load(model, tensors)
    if architecture in TEXT_ALONE:
        return None
    given = _inputs(model, architecture)
    taken: dict[str, Any] = {}
    inner = model.model.language_model
    hook = inner.register_forward_pre_hook(lambda _, args, named: taken.update(named), with_kwargs=True)
    expected = model(**given).logits
    hook.remove()
    tokens, embedded, positions = given["input_ids"], taken["inputs_embeds"], taken.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    assert not torch.equal(embedded, model.get_input_embeddings()(tokens)), "the image changes nothing"
    return float((forward(tokens, positions[-3:], embedded) - expected).abs().max())


def unlike(chunk: Any, moved: Checkpoint, folder: Path) -> list[str]:
    """Names of tensors that megatron-core's own loader takes otherwise from a `torch_dist` checkpoint that we write.

    Its sharded state dict is that of a model of which GPTModel is `language_model`.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    api.plan(moved, "megatron-dist", Layout(transformer_impl="local")).run(folder)
    with torch.no_grad():
        for tensor in chunk.parameters():
            tensor.zero_()
    beside = {name: torch.zeros(shape) for name, shape in moved.shapes.items() if is_beside(name)}
    wanted = chunk.sharded_state_dict(prefix="language_model.")
    wanted |= make_sharded_tensors_for_checkpoint(beside, "")
    (iteration,) = (path for path in folder.iterdir() if path.is_dir())
    loaded = dist_checkpointing.load({"model": wanted}, str(iteration))["model"]
    chunk.load_state_dict({name.removeprefix("language_model."): t for name, t in loaded.items() if name not in beside})
    held = {place.name: tensor for place, tensor, _ in megatron_truth.placed(chunk)}
    held |= {name: loaded[name] for name in beside}
    assert held.keys() == moved.shapes.keys()
    return [name for name, role in moved.tensors if not torch.equal(held[name], moved[name, role][...])]


def _load(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the modules beside the language model by the names that Megatron has for what is in them."""
    beside: dict[str, dict[str, torch.Tensor]] = {}
    for name in filter(is_beside, tensors):
        module, _, rest = name.partition(".")
        beside.setdefault(_MODULES.get(module, module), {})[rest] = tensors[name]
    assert beside
    for module, state in beside.items():
        part = getattr(model.model, module)
        if "" in state:
            part.zero_()
            part.copy_(state[""])
        else:
            for parameter in part.parameters():
                parameter.zero_()
            part.load_state_dict(state, strict=True)


def _inputs(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """Tokens with those of one image between them, and its pixels."""
    generator = torch.Generator().manual_seed(3)
    vision, count = model.config.vision_config, 4
    given: dict[str, Any] = {}
    if hasattr(vision, "temporal_patch_size"):
        side = 2 * vision.spatial_merge_size
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        given["pixel_values"] = torch.randn(side * side, size, generator=generator)
        given["image_grid_thw"] = torch.tensor([[1, side, side]])
    else:
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        given["pixel_values"] = torch.randn(1, 3, side, side, generator=generator)
    if architecture == "llava":
        count = 16
    if architecture == "mistral3":
        given["image_sizes"] = torch.tensor([[side, side]])
    if architecture in ("llava_next", "llava_onevision"):  # the image as it is and as one tile, whose rows have an end
        given["pixel_values"] = given["pixel_values"].expand(1, 2, -1, -1, -1)
        given["image_sizes"] = torch.tensor([[side, side]])
        model.config.image_grid_pinpoints = [[side, side]]
        count = 16 + 4 * (4 + 1)
    text = torch.randint(3, 199, (1, 12), generator=generator)
    image = torch.full((1, count), _IMAGE)
    start = torch.tensor([[_START]])
    given["input_ids"] = torch.cat([text[:, :5], start, image, text[:, 5:]], 1)
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (given["input_ids"] == _IMAGE).int()
    return given
