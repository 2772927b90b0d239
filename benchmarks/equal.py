"""Whether two conversions hold the same tensors, byte for byte, read by torch and safetensors and never by ckpt.

    python -m benchmarks.equal KIND OURS THEIRS

prints how many tensors there are.  The kinds:

    safetensors       two folders
    zero3-hf          a folder of safetensors, and the masters of a step folder
    zero3-bf16        the same, where the masters were rounded
    zero3-loaded      what transformers loads of a folder, and the masters of a step folder, rounded to that
    dcp-hf            a folder of safetensors, and the file of `dcp_to_torch_save`
    dcp-full          model and optimizer in two files, and that one
    zero3             two step folders of any numbers of ranks
    universal         two step folders
    hash-hf           what `ckpt hash --json` printed, and a folder, whose digests are made here by the rule of its page
    hash-zero3        the same, and a step folder

ZeRO-3's tensors are put together here by DeepSpeed's rule.
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

#: Tensors by name, each read when it is asked for.
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
        file = safe_open(path, "pt")  # it stays open: each opening reads the names of all tensors
        found |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return found


def _flat(tree: Any, prefix: str = "") -> Tensors:
    """The tensors of nested dicts, by path."""
    if isinstance(tree, torch.Tensor):
        return {prefix: lambda: tree}
    if not isinstance(tree, Mapping):
        return {}
    return {name: t for key, value in tree.items() for name, t in _flat(value, f"{prefix}/{key}").items()}


def zero3_tensors(folder: Path) -> Tensors:
    """Masters and states: every parameter is cut into as many equal slots as there are ranks, the last one padded."""
    count = len(list(folder.glob("*_optim_states.pt")))
    ranks = [
        _load(next(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")))["optimizer_state_dict"]
        for rank in range(count)
    ]
    groups = _load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    found: Tensors = {}
    for number, group in enumerate(groups):
        flat = {"fp32": [rank["fp32_flat_groups"][number] for rank in ranks]}
        states = [rank["optimizer_state_dict"]["state"].get(number, {}) for rank in ranks]  # weights alone have none
        flat |= {name: [state[name] for state in states] for name in states[0] if states[0][name].dim()}
        if states[0]:
            found[f"step {number}"] = lambda step=states[0]["step"]: step
        at = 0
        for fqn, shape in group.items():
            slot = -(-prod(shape) // count)
            for name, parts in flat.items():
                found[f"{fqn} {name}"] = lambda parts=parts, at=at, slot=slot, shape=shape: torch.cat(
                    [part[at : at + slot] for part in parts]
                )[: prod(shape)].reshape(shape)
            at += slot
    return found


def _masters(folder: Path) -> Tensors:
    return {name.removesuffix(" fp32"): t for name, t in zero3_tensors(folder).items() if name.endswith(" fp32")}


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters and buffers that transformers makes of a folder, in the dtype that its config has."""
    from transformers import AutoModelForCausalLM

    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return found


def hashed(report: Path, tensors: Tensors) -> int:
    """The digests of the tensors in a report against those made here; of an optimizer's numbers there are none."""
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
        masters = _masters(theirs)  # weights are these, too, as the model is in fp32
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
