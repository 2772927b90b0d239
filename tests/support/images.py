"""Images for tiny vision models.

One side is transformers' whole model, the other its tower in front of megatron-core's GPTModel, as in Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from ckpt import api
from ckpt.plan.checkpoint import MEGATRON, Checkpoint, Layout
from ckpt.state.naming import to_namespace
from converters.names.megatron.model.spelling import is_outside_language_model
from tests.support.tiny_sizes import layers_of
from train.config import Config
from train.megatron.engine import build_optimizer
from train.truth import megatron as megatron_truth

#: Language models that need more of the tower than embeddings: megatron-core 0.16.1 can't pass it.
TEXT_ALONE = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_IMAGE, _START = 200, 202
#: Megatron's modules by their names in transformers' `model`.
_MODULES = {"vision_model": "visual"}

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def difference(model: Any, architecture: str, tensors: Mapping[str, torch.Tensor], forward: Forward) -> float | None:
    """Return the largest difference in logits for an image within text, or None if megatron-core can't compute them."""
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
    """Return tensors that megatron-core's loader reads differently from our `torch_dist` checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    api.plan(moved, "megatron-dist", Layout(transformer_impl=_layers_of(moved.config))).run(folder)
    with torch.no_grad():
        for tensor in chunk.parameters():
            tensor.zero_()
    beside = {name: torch.zeros(shape) for name, shape in moved.shapes.items() if is_outside_language_model(name)}
    wanted = chunk.sharded_state_dict(prefix="language_model.")
    wanted |= make_sharded_tensors_for_checkpoint(beside, "")
    (iteration,) = (path for path in folder.iterdir() if path.is_dir())
    loaded = dist_checkpointing.load({"model": wanted}, str(iteration))["model"]
    chunk.load_state_dict({name.removeprefix("language_model."): t for name, t in loaded.items() if name not in beside})
    held = {place.name: tensor for place, tensor, _ in megatron_truth.placed(chunk)}
    held |= {name: loaded[name] for name in beside}
    assert held.keys() == moved.shapes.keys()
    return [name for name, role in moved.tensors if not torch.equal(held[name], moved[name, role][...])]


def misplaced(model: Any, chunk: Any, args: Any, folder: Path) -> list[str]:
    """Return the parameters with misplaced Adam states in Megatron's optimizer.

    It numbers transformers' modules first.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    run = trained(deepcopy(model), folder / "run")
    source = api.open(run)
    api.plan(source, "megatron", Layout(transformer_impl=_layers_of(source.config))).run(folder / "ranks")
    ranks = folder / "ranks/iter_0000001/mp_rank_00"
    content = torch.load(ranks / "model_optim_rng.pt", weights_only=False)
    expected = to_namespace(source, MEGATRON, Layout())
    whole = torch.nn.Module()
    for name, _ in model.model.named_children():
        if name != "language_model":
            is_own = any(fqn.startswith(f"{name}.") for fqn in expected.shapes)
            own = name if is_own else next(ours for ours, theirs in _MODULES.items() if theirs == name)
            whole.add_module(own, deepcopy(getattr(model.model, name)))
    if hasattr(model.model, "image_newline"):
        whole.image_newline = torch.nn.Parameter(torch.zeros_like(model.model.image_newline))
    whole.add_module("language_model", chunk)
    whole.load_state_dict({name: value for name, value in content["model"].items() if value is not None})
    for parameter in whole.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    sharing = DistributedDataParallelConfig(use_distributed_optimizer=True)
    args.use_distributed_optimizer = True
    optimizer = build_optimizer(args, Config(tp=1), [DistributedDataParallel(chunk.config, sharing, whole)])
    optimizer.load_state_dict(content["optimizer"])
    with torch.no_grad():
        optimizer.load_parameter_state(str(ranks / "distrib_optim.pt"))
    (only,) = getattr(optimizer, "chained_optimizers", [optimizer])
    found = {}
    for name, parameter in whole.named_parameters():
        own = name.removeprefix("language_model.")
        found[name if own == name else megatron_truth.canonical(chunk, own)] = (
            only._get_main_param_and_optimizer_states(parameter)
        )
    states = [key for key in expected.tensors if key[1].startswith("exp_avg")]
    assert len(states) == 2 * len(found)
    pairs = {(name, state): (found[name][state], expected[name, state][...]) for name, state in states}
    return [name for (name, _), (held, due) in pairs.items() if not torch.equal(held.flatten(), due.flatten())]


def _layers_of(config: Mapping[str, Any] | None) -> str | None:
    return layers_of(str((config or {}).get("model_type")))


def trained(model: Any, run: Path) -> Path:
    """Do one AdamW step on random gradients and write an HF Trainer folder."""
    folder, vectors = run / "checkpoint-1", [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    TrainerState(global_step=1, max_steps=1).save_to_json(str(folder / "trainer_state.json"))
    return run


def _load(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the modules outside the language model by their Megatron names."""
    beside: dict[str, dict[str, torch.Tensor]] = {}
    for name in filter(is_outside_language_model, tensors):
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
    """Return an image's pixels, and tokens with the image's tokens among them."""
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
    if architecture in ("llava_next", "llava_onevision"):  # the image and a tile with an end token in each row
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
