"""The same weights in transformers and megatron-core: one JSON line per case.

A line has shapes, arguments and fp32 logit differences both ways.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForPreTraining

from ckpt import api
from ckpt.plan.checkpoint import MEGATRON, Layout
from ckpt.state.naming import to_namespace
from converters.names.families.composites import COMPOSITES
from converters.names.families.rows import spelled_out
from converters.names.families.tables import FAMILIES
from converters.names.megatron.model.spelling import is_outside_language_model
from tests.support import images, two_heads
from tests.support.loaded import save_loaded
from tests.support.megatron_models import build_chunks
from tests.support.tiny_sizes import tiny_sizes
from tests.support.twins import PARTS, TWINS, twin_of
from train.config import ARCHITECTURES, Config
from train.megatron import args as megatron_args
from train.megatron.cpu import on_this_machine
from train.truth import megatron as megatron_truth

_LENGTH = 24
#: Second copies in DeepSeek's multi-token prediction layer.
_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
#: Parallel sizes for one rank, by Megatron-LM's names.
_ONE_RANK: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}
#: Arguments that the tables leave to the run.
_RUN: dict[str, Any] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "params_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "optimizer": "adam",
    "use_distributed_optimizer": False,
    "clip_grad": 0.0,
}


def main() -> None:
    """Run the cases from the command line. Each has a name, an architecture and changes to its config, as JSON."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with on_this_machine(), _latent_attention():
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        for name, architecture, more in cases:
            print(json.dumps({"case": name} | _compare(folder / name, architecture, more)), flush=True)


def _compare(folder: Path, architecture: str, more: Mapping[str, Any]) -> dict[str, Any]:
    model = random_model(architecture, more)
    save(model, folder / "hub", architecture)
    moved = to_namespace(api.open(folder / "hub"), MEGATRON, Layout())
    ours = dict(moved.state.args or {})
    args = arguments(ours | _ONE_RANK)
    trained = architecture in ARCHITECTURES
    theirs = vars(megatron_args.arguments(model.config, Config(tp=1))) if trained else {}
    outcome: dict[str, Any] = {
        "arguments": sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    }
    (chunk,) = build_chunks(args, megatron_args.transformer_config(args))
    tensors = {place.name: tensor for place, tensor, _ in megatron_truth.placed(chunk)}
    if hasattr(chunk, "encoder"):
        tensors = {two_heads.name_here(name): tensor for name, tensor in tensors.items()}
    if architecture in COMPOSITES:
        tensors |= {name: torch.empty(moved.shapes[name]) for name in moved.shapes if is_outside_language_model(name)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found = {name: tensor.shape for (name, _), tensor in moved.tensors.items()}
    different = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    outcome["different"] = different
    if different:
        return outcome

    inputs = torch.randint(0, args.vocab_size, (2, _LENGTH), generator=torch.Generator().manual_seed(0))
    if architecture in COMPOSITES:
        outcome["unlike"] = images.unlike(chunk, moved, folder / "dist")
        # transformers trains no multi-token prediction
        outcome["misplaced"] = [] if args.mtp_num_layers else images.misplaced(model, chunk, args, folder)
    with torch.no_grad():
        for name, role in moved.tensors:
            tensors[name].copy_(moved[name, role][...])
        expected = logits_of(model, inputs)
        to_megatron = _difference(_logits(chunk, inputs, args), expected)
        if architecture in COMPOSITES:
            outcome["seen"] = images.difference(
                model, architecture, tensors, lambda *given: _forward(chunk, args, *given)
            )

        generator = torch.Generator().manual_seed(2)
        around = float(not args.apply_layernorm_1p)
        for name, tensor in tensors.items():  # the padding's rows too
            tensor.copy_(("norm" in name) * around + 0.05 * torch.randn(tensor.shape, generator=generator))
        (folder / "megatron").mkdir(parents=True)
        save_file(
            {name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / "megatron/model.safetensors"
        )
        trained = dataclasses.replace(
            api.open(folder / "megatron"), namespace=MEGATRON, config=moved.config, folders=(str(folder / "hub"),)
        )
        api.plan(trained, "hf").run(folder / "back")
        if architecture in TWINS:
            to_twin(folder / "back", architecture, model.config)
        back = (
            auto_class(architecture)
            .from_pretrained(
                folder / "back", attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
            )
            .eval()
        )
        to_hub = _difference(_logits(chunk, inputs, args), logits_of(back, inputs))
    return {**outcome, "to_megatron": to_megatron, "to_hub": to_hub, "largest": float(expected.abs().max())}


def random_model(architecture: str, more: Mapping[str, Any]) -> Any:
    """Return transformers' model with random weights and buffers everywhere, norms and biases included."""
    torch.manual_seed(0)
    known = architecture.removesuffix("_wide")
    config = AutoConfig.for_model(twin_of(known), **{**tiny_sizes(architecture), **more})
    model = auto_class(architecture).from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    kept = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.add_(0.05 * torch.randn_like(buffer))
    return model.eval()


def auto_class(architecture: str) -> Any:
    """Return the auto class of transformers' model: with images, without images, or with BERT's heads."""
    if architecture == "megatron-bert":
        return AutoModelForPreTraining
    return AutoModelForImageTextToText if architecture in COMPOSITES else AutoModelForCausalLM


def logits_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits; BERT has two heads."""
    return two_heads.of_transformers(model, inputs) if hasattr(model, "cls") else model(inputs).logits


def save(model: Any, hub: Path, architecture: str) -> None:
    """Save like the architecture's release: with its own `model_type` and its multi-token prediction tensors."""
    save_loaded(model, hub)
    if architecture in TWINS:
        to_release(hub, architecture)
    config = json.loads((hub / "config.json").read_text())
    family = (COMPOSITES if architecture in COMPOSITES else FAMILIES)[config["model_type"]]
    sizes = family.sizes(config)
    if not sizes.predicted:
        return
    tensors, generator = load_file(hub / "model.safetensors"), torch.Generator().manual_seed(3)
    for number, layer in enumerate(sizes.predicted):
        prefix = family.predicted_prefix(number, sizes.num_layers)
        for name, shape in spelled_out(layer, prefix, sizes.num_experts):
            tensors[name] = torch.randn(shape, generator=generator)
        for copy, original in _COPIES.items():
            if prefix + copy in tensors:
                tensors[prefix + copy] = tensors[original].clone()
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})


def to_release(folder: Path, architecture: str) -> None:
    """Convert a twin's folder to the release's names."""
    twin, path = TWINS[architecture], folder / "config.json"
    config = twin.config(architecture, json.loads(path.read_text()))
    path.write_text(json.dumps(config))
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, own in twin.names:
            name = name.replace(theirs, own)
        renamed[name] = tensor
    for name in [name for name in renamed if "#q." in name]:
        renamed[name.replace("#q.", "")] = torch.cat([renamed.pop(name.replace("#q", f"#{part}")) for part in PARTS])
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def to_twin(folder: Path, architecture: str, config: Any) -> None:
    """Convert ckpt's output for a release to the names of the twin's class. `config` is the twin's."""
    twin, renamed = TWINS[architecture], {}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    place = next((own.split("#")[0].split(".")[-2] + "." for _, own in twin.names if "#" in own), None)
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {name: tensor}
        if place and place in name:
            head = len(tensor) // (heads + 2 * groups)
            split = tensor.split([heads * head, groups * head, groups * head])
            parts = {name.replace(place, f"{place}#{part}."): one for part, one in zip(PARTS, split, strict=True)}
        for one, value in parts.items():
            for theirs, own in reversed(twin.names):
                one = one.replace(own, theirs)
            renamed[one] = value.contiguous()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))


def arguments(table: Mapping[str, Any]) -> Namespace:
    """Return the table's arguments in fp32, with YaRN's arguments in the form of Megatron-LM's argument_utils."""
    values = {**table, **_RUN}
    yarn = {}
    if values["position_embedding_type"] == "yarn":
        yarn = {name.removeprefix("yarn_"): value for name, value in values.items() if name.startswith("yarn_")}
        yarn |= {name: values.pop(name) for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
    return Namespace(**values, yarn=yarn)


def _logits(chunk: Any, inputs: torch.Tensor, args: Namespace) -> torch.Tensor:
    positions = torch.arange(_LENGTH).expand_as(inputs)
    if args.position_embedding_type == "mrope":
        positions = positions.expand(3, *inputs.shape)
    return _forward(chunk, args, inputs, positions)


def _forward(
    chunk: Any, args: Namespace, inputs: torch.Tensor, positions: torch.Tensor, embedded: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits. `embedded` holds the output of the embedding and the vision tower for each input."""
    chunk.eval()
    if hasattr(chunk, "binary_head"):
        return two_heads.joined(*two_heads.of_megatron(chunk, inputs), args.vocab_size)
    chunk.mtp_process = False  # transformers has nothing to compare with it
    given = None if embedded is None else embedded.transpose(0, 1).contiguous()
    with mock.patch.object(chunk.config, "mtp_num_layers", None):
        logits = chunk(input_ids=inputs, position_ids=positions, attention_mask=None, decoder_input=given)
    return logits[..., : args.vocab_size]


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _latent_attention() -> Any:
    """Drop two latent-attention arguments of megatron-core 0.16.1 that only Transformer Engine accepts."""
    from contextlib import ExitStack

    from megatron.core.models import backends
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **more: Any) -> None:
            super().__init__(*args, **more)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(backends.LocalSpecProvider, "core_attention", lambda self: Attention))
    stack.enter_context(mock.patch.object(multi_latent_attention, "HAVE_TE", False))
    return stack


if __name__ == "__main__":
    main()
