"""Bitwise comparison of two conversions, without ckpt.

    python -m benchmarks.equal KIND OURS THEIRS

prints the number of tensors. The kinds:

    safetensors       two folders
    mxfp4-plain       a plain folder, and gpt-oss's packed experts, dequantized by transformers
    zero3-hf          a safetensors folder, and a step folder's masters
    zero3-bf16        the same, with rounded masters
    zero3-loaded      a folder loaded by transformers, and a step folder's masters rounded to the loaded dtype
    dcp-hf            a safetensors folder, and a file from `dcp_to_torch_save`
    dcp-full          model and optimizer in two files, and the same file
    zero3             two step folders with any numbers of ranks
    universal         two step folders
    hash-hf           output of `ckpt hash --json`, and a folder; digests are computed here by the documented rule
    hash-zero3        the same, and a step folder

ZeRO-3's tensors are assembled here by DeepSpeed's rule.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from xxhash import xxh3_128

Tensors = dict[str, Callable[[], torch.Tensor]]


def compare(ours: Tensors, theirs: Tensors) -> int:
    if ours.keys() != theirs.keys():
        raise SystemExit(f"different tensors: {sorted(ours.keys() ^ theirs.keys())[:5]}")
    for name in ours:
        a, b = ours[name](), theirs[name]()
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
            raise SystemExit(f"{name} differs")
    return len(ours)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _safetensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, "pt")  # each opening reads all names
        found |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return found


def _dequantized(folder: Path) -> Tensors:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = _safetensors(folder)
    found = {name: read for name, read in packed.items() if not name.endswith(("_blocks", "_scales"))}
    for owner in (name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")):
        parts = packed[f"{owner}_blocks"], packed[f"{owner}_scales"]
        found[owner] = lambda parts=parts: convert_moe_packed_tensors(*(read() for read in parts))
    return found


def _flat(tree: Any, prefix: str = "") -> Tensors:
    if isinstance(tree, torch.Tensor):
        return {prefix: lambda: tree}
    if not isinstance(tree, Mapping):
        return {}
    return {name: t for key, value in tree.items() for name, t in _flat(value, f"{prefix}/{key}").items()}


def zero3_tensors(folder: Path) -> Tensors:
    """Return masters, states and buffers.

    Every parameter is cut into one equal slot per rank, with padding in the last.
    """
    count = len(list(folder.glob("*_optim_states.pt")))
    ranks = [
        _load(next(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")))["optimizer_state_dict"]
        for rank in range(count)
    ]
    model = _load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    found: Tensors = {f"{name} buffer": lambda name=name: model["module"][name] for name in model["buffer_names"]}
    for number, group in enumerate(model["param_shapes"]):
        flat = {"fp32": [rank["fp32_flat_groups"][number] for rank in ranks]}
        states = [rank["optimizer_state_dict"]["state"].get(number, {}) for rank in ranks]  # weights alone have none
        flat |= {name: [state[name] for state in states] for name in states[0] if name != "step"}
        at = 0
        for fqn, shape in group.items():
            slot = -(-prod(shape) // count)
            if states[0]:  # a tensor or a number, as the optimizer has it
                found[f"{fqn} step"] = lambda step=states[0]["step"]: torch.as_tensor(step, dtype=torch.float64)
            for name, parts in flat.items():
                found[f"{fqn} {name}"] = lambda parts=parts, at=at, slot=slot, shape=shape: torch.cat(
                    [part[at : at + slot] for part in parts]
                )[: prod(shape)].reshape(shape)
            at += slot
    return found


def _masters(folder: Path) -> Tensors:
    return {name.removesuffix(" fp32"): t for name, t in zero3_tensors(folder).items() if name.endswith(" fp32")}


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return found


def hashed(report: Path, tensors: Tensors) -> int:
    """Compare digests. An optimizer's numbers have none."""
    listed = [one for one in json.loads(report.read_text())["tensors"] if one["dtype"] != "number"]
    if {f"{one['fqn']} {one['role']}" for one in listed} != tensors.keys():
        raise SystemExit("digests of other tensors")
    for one in listed:
        tensor = tensors[f"{one['fqn']} {one['role']}"]()
        words = one["fqn"], one["role"], str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape)), ""
        elements = xxh3_128(_bits(tensor).numpy()).digest()
        if one["digest"] != xxh3_128("\0".join(words).encode() + elements).hexdigest():
            raise SystemExit(f"the digest of {one['fqn']} ({one['role']}) differs")
    return len(listed)


def _universal(folder: Path) -> Tensors:
    def tensor(path: Path) -> torch.Tensor:
        found = _load(path)
        return found["param"] if isinstance(found, Mapping) else found

    paths = [path for path in (folder / "zero").rglob("*.pt") if path.name != "optimizer_state.pt"]
    return {str(path.relative_to(folder)): lambda path=path: tensor(path) for path in paths}


def main(kind: str, ours: Path, theirs: Path) -> int:
    if kind == "safetensors":
        return compare(_safetensors(ours), _safetensors(theirs))
    if kind == "mxfp4-plain":
        return compare(_safetensors(ours), _dequantized(theirs))
    if kind == "zero3-hf":
        return compare(_safetensors(ours), _masters(theirs))
    if kind == "zero3-bf16":
        rounded = {name: lambda t=t: t().to(torch.bfloat16) for name, t in _masters(theirs).items()}
        return compare(_safetensors(ours), rounded)
    if kind == "zero3-loaded":
        loaded = _loaded(ours)
        rounded = {name: lambda t=t, dtype=loaded[name].dtype: t().to(dtype) for name, t in _masters(theirs).items()}
        return compare({name: lambda t=t: t for name, t in loaded.items()}, rounded)
    if kind == "hash-hf":
        return hashed(ours, {f"{name} weight": t for name, t in _safetensors(theirs).items()})
    if kind == "hash-zero3":
        states = {name: t for name, t in zero3_tensors(theirs).items() if " exp_avg" in name}
        masters = _masters(theirs)  # an fp32 model's weights equal the masters
        of_roles = {f"{name} {role}": t for name, t in masters.items() for role in ("weight", "master")}
        return hashed(ours, states | of_roles)
    if kind == "dcp-hf":
        return compare(_safetensors(ours), {name[1:]: t for name, t in _flat(_load(theirs)["model"]).items()})
    if kind == "dcp-full":
        mine = {"model": _load(ours / "pytorch_model_fsdp.bin"), "optimizer": _load(ours / "optimizer.bin")}
        return compare(_flat(mine), _flat(_load(theirs)))
    read = {"zero3": zero3_tensors, "universal": _universal}[kind]
    return compare(read(ours), read(theirs))


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
