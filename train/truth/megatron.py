"""Places in the whole model for megatron-core's live parameters and optimizer states.

Names follow megatron-core's GPTModel, with layers and experts numbered over the whole model. Layer norms use
Transformer Engine's names, like torch_dist does for both kinds of layers.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.truth.pieces import Piece, Place, bits

_NUMBERED = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_EMBEDDING = "embedding.word_embeddings.weight"
_VOCABULARY = (_EMBEDDING, "output_layer.weight")


def placed(chunk: nn.Module) -> Iterator[tuple[Place, torch.Tensor, bool]]:
    """Yield every parameter (True) and persistent buffer (False) with its place."""
    from megatron.core import parallel_state as mpu

    kept = chunk.state_dict().keys()
    parameters = [(name, tensor, True) for name, tensor in chunk.named_parameters()]
    buffers = [(name, tensor, False) for name, tensor in chunk.named_buffers() if name in kept]
    for name, tensor, is_parameter in parameters + buffers:
        dim, stride, index, count = None, 1, 0, 1
        sections = _sections(chunk, name)
        # Attention sinks are sharded by heads but carry no attributes for it.
        sinks = name.endswith(".softmax_offset")
        if is_parameter and (sinks or getattr(tensor, "tensor_model_parallel", False)):
            # A gated delta net is sharded along dim 0, but megatron-core 0.16.1 does not record it.
            dim = 0 if sinks or tensor.partition_dim < 0 else tensor.partition_dim
            stride = 1 if sinks else tensor.partition_stride
            if _EXPERT.search(name) or _GROUPED.search(name):
                index, count = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
            else:
                index, count = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        place = Place(canonical(chunk, name), tuple(tensor.shape), dim, stride, index, count, sections)
        yield place, tensor, is_parameter


def _sections(chunk: nn.Module, name: str) -> tuple[int, ...]:
    """Return a rank's rows for each part of a hybrid's packed layers."""
    module, _, rest = name.rpartition(".in_proj.") if ".in_proj." in name else name.rpartition(".conv1d.")
    if rest not in ("weight", "bias"):
        return ()
    net: Any = chunk.get_submodule(module)
    if hasattr(net, "ngroups_local_tp"):  # Mamba's mixer
        inner, each, heads = net.d_inner_local_tp, net.ngroups_local_tp * net.d_state, net.nheads_local_tp
        return (inner, inner, each, each, heads) if ".in_proj." in name else (inner, each, each)
    keys, values, heads = (size // net.tp_size for size in (net.qk_dim, net.v_dim, net.num_value_heads))
    return (keys, keys, values, values, heads, heads) if ".in_proj." in name else (keys, keys, values)


def canonical(chunk: Any, name: str) -> str:
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return _EMBEDDING  # the last stage's copy
    numbered = _NUMBERED.match(name)
    if numbered is None:
        return name
    layer = chunk.get_submodule(numbered[0].removesuffix("."))
    number = layer.layer_number - 1
    if numbered[1] == "mtp":
        prefix, rest = f"mtp.layers.{number}.", name[numbered.end() :]
        if not rest.startswith("transformer_layer."):
            return prefix + rest
        prefix, rest = prefix + "transformer_layer.", rest.removeprefix("transformer_layer.")
        layer = layer.transformer_layer
    else:
        prefix, rest = f"decoder.layers.{number}.", name[numbered.end() :]
    if (expert := _EXPERT.search("." + rest)) is not None:
        whole = layer.mlp.local_expert_indices[int(expert[1])]
        rest = ("." + rest).replace(expert[0], f".local_experts.{whole}.")[1:]
    elif (grouped := _GROUPED.search(rest)) is not None:
        whole = layer.mlp.local_expert_indices[int(grouped[3])]
        rest = f"{rest[: grouped.start()]}.experts.local_experts.{whole}.{grouped[1]}.{grouped[2]}"
    if not hasattr(layer, "self_attention"):  # Mamba's
        return prefix + rest
    attention, mlp = dict(layer.self_attention.named_modules()), dict(layer.mlp.named_modules())
    fused = {
        "input_layernorm.": "self_attention.linear_qkv." if "linear_qkv" in attention else None,
        "pre_mlp_layernorm.": "mlp.linear_fc1." if "linear_fc1" in mlp else None,
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj." if "linear_q_up_proj" in attention else None,
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
    }
    for norm, matrix in fused.items():
        if matrix and rest.startswith(norm):
            rest = f"{matrix}layer_norm_{rest.removeprefix(norm)}"
    return prefix + rest


def initialize(chunks: Iterable[nn.Module], vocabulary: int, seed: int) -> None:
    """Draw every weight by its name, so the model starts equal for every sharding and padding."""
    with torch.no_grad():
        for chunk in chunks:
            for place, parameter, is_parameter in placed(chunk):
                if not is_parameter:
                    continue
                shape = place.full_shape
                if place.name in _VOCABULARY:
                    rows = _draw(place.name, (vocabulary, *shape[1:]), seed)
                    padding = _draw(f"padding {place.name}", (shape[0] - vocabulary, *shape[1:]), seed)
                    whole = torch.cat([rows, padding])
                else:
                    whole = _draw(place.name, shape, seed)
                parameter.copy_(place.cut(whole))


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
    drawn = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(number))
    is_norm = len(shape) == 1 and name.endswith("weight")
    return 1.0 + drawn if is_norm else drawn


def model_pieces(chunks: Iterable[nn.Module], *, parameters: bool = True) -> list[Piece]:
    return [
        Piece("weight" if is_parameter else "buffer", place, 0, _elements(tensor))
        for chunk in chunks
        for place, tensor, is_parameter in placed(chunk)
        if parameters or not is_parameter
    ]


def optimizer_pieces(chunks: Iterable[nn.Module], optimizer: Any) -> list[Piece]:
    places = {tensor: place for chunk in chunks for place, tensor, _ in placed(chunk)}
    pieces = []
    for one in leaves(optimizer):
        for parameter, master, start, inner in _optimizer_tensors(one):
            place = places[parameter]
            tensors = dict(inner.state.get(master, {}))
            if master is not parameter:
                tensors["master"] = master
            for role, value in tensors.items():
                if torch.is_tensor(value) and value.shape == master.shape and role != "step":
                    pieces.append(Piece(role, place, start, _elements(value)))
    return pieces


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Gather all shards if the tensor uses torch's FSDP2."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().reshape(-1).clone()


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers inside a ChainedOptimizer, at any depth."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    for one in chained or ():
        yield from leaves(one)


def _optimizer_tensors(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, Any]]:
    """Yield each parameter, its master, the master's first element, and the inner optimizer."""
    inner = optimizer.optimizer
    if hasattr(optimizer, "gbuf_ranges"):  # DistributedOptimizer
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            span = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, inner.param_groups[group]["params"][order], span.start, inner
    elif hasattr(optimizer, "float16_groups"):  # Float16OptimizerWithFloat16Params
        for halves, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(halves, masters, strict=True):
                yield parameter, master, 0, inner
        for group in optimizer.fp32_from_fp32_groups:
            yield from ((parameter, parameter, 0, inner) for parameter in group)
    else:  # FP32Optimizer
        for group in inner.param_groups:
            yield from ((parameter, parameter, 0, inner) for parameter in group["params"])


def check_distributed(chunks: Iterable[nn.Module], optimizer: Any, whole: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if DistributedOptimizer's own gathered states differ from `whole`."""
    places = {tensor: place for chunk in chunks for place, tensor, _ in placed(chunk)}
    for one in leaves(optimizer):
        if not hasattr(one, "get_parameter_state_dp_zero") or not one.optimizer.state:
            continue
        gathered = one.get_parameter_state_dp_zero()
        if one.data_parallel_group.rank() != 0:
            continue
        for number, buffer in enumerate(one.buffers):
            tensors = gathered[number][buffer.param_dtype, buffer.grad_dtype]
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                place, skipped = places[parameter], sum(padding[:bucket])
                for theirs, ours in (("param", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                    claimed = tensors[theirs][start - skipped : end - skipped]
                    found = place.cut(whole[f"{ours}/{place.name}"]).reshape(-1)
                    if not torch.equal(bits(claimed), bits(found)):
                        raise RuntimeError(f"{place.name}: the gathered {ours} is not the distributed optimizer's")


def named_groups(optimizer: Any, names: dict[torch.Tensor, str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return every param group with this rank's names."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for one in leaves(optimizer):
        held = {id(master): names[parameter] for parameter, master, _, _ in _optimizer_tensors(one)}
        groups += [(group, [held[id(master)] for master in group["params"]]) for group in one.optimizer.param_groups]
    return groups
