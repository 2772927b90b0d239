"""One deliberately changed byte, seen by `ckpt` and the format's own library: `python -m tests.faults.peers`."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.plan.checkpoint import Layout
from ckpt.plan.dtypes import FLOAT32
from tests.support.adapters import merge, merge_by_peft, save_adapter, save_base
from tests.support.places import FIXTURES

Tensors = dict[str, bytes]


@dataclass(frozen=True)
class Peer:
    """A library and `ckpt` on one source: `make` writes it, `elements` finds bytes, `theirs` and `ours` read it."""

    make: Callable[[Path], object]
    elements: Callable[[Path], tuple[Path, bytes]]
    theirs: Callable[[Path, Path], Tensors]
    ours: Callable[[Path, Path], Tensors]


@dataclass(frozen=True)
class Found:
    """Number of tensors on both sides, number of equal ones, and the tensors changed by the byte on each side."""

    num_tensors: int
    num_equal: int
    num_equal_changed: int
    theirs: frozenset[str]
    ours: frozenset[str]

    @property
    def is_right(self) -> bool:
        """Return True if all tensors are equal both times, and the byte changed the same ones."""
        return self.num_tensors == self.num_equal == self.num_equal_changed > 0 and self.theirs == self.ours != set()

    def __str__(self) -> str:
        return (
            f"as it is: {self.num_equal} of {self.num_tensors} tensors equal; with one byte changed:"
            f" {self.num_equal_changed} of {self.num_tensors} equal; the byte changed {', '.join(sorted(self.theirs))}"
            f" for the library and {', '.join(sorted(self.ours))} for ckpt"
        )


def found(peer: Peer, folder: Path) -> Found:
    """Run both sides on the intact source and on a source with one changed byte."""
    source = folder / "source"
    source.mkdir()
    peer.make(source)
    before = [side(source, folder / f"{name}-before") for name, side in _sides(peer)]
    file, elements = peer.elements(source)
    _change_byte(file, elements)
    after = [side(source, folder / f"{name}-after") for name, side in _sides(peer)]
    (theirs, ours), (theirs_changed, ours_changed) = before, after
    return Found(
        len(theirs.keys() | ours.keys()),
        len(theirs.items() & ours.items()),
        len(theirs_changed.items() & ours_changed.items()),
        _changed(theirs, theirs_changed),
        _changed(ours, ours_changed),
    )


def _sides(peer: Peer) -> Iterator[tuple[str, Callable[[Path, Path], Tensors]]]:
    yield "theirs", peer.theirs
    yield "ours", peer.ours


def _changed(before: Tensors, after: Tensors) -> frozenset[str]:
    return frozenset(name for name, _ in before.items() ^ after.items())


def _change_byte(file: Path, elements: bytes) -> None:
    """Change the highest byte in the third of these fp32 or bf16 elements in the file."""
    content = bytearray(file.read_bytes())
    assert content.count(elements) == 1, file
    content[content.index(elements) + 11] ^= 0x40
    file.write_bytes(content)


def _bytes(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return each tensor's dtype, shape and elements."""
    return {
        name: f"{one.dtype} {tuple(one.shape)} ".encode()
        + one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, one in tensors.items()
    }


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _safetensors(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return _bytes({name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()})


def _copied(fixture: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copytree(
        FIXTURES / fixture, folder, ignore=shutil.ignore_patterns("truth"), dirs_exist_ok=True
    )


def _converted(target: str, layout: Layout, read: Callable[[Path], Tensors]) -> Callable[[Path, Path], Tensors]:
    def ours(source: Path, scratch: Path) -> Tensors:
        ckpt.plan(ckpt.open(source), target, layout).run(scratch)
        return read(scratch)

    return ours


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------
def _masters(source: Path) -> tuple[Path, bytes]:
    file = next(source.glob("global_step2/*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    state = _load(file)["optimizer_state_dict"]
    flat = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
    return file, flat[0].detach().numpy().tobytes()


def _zero_to_fp32(source: Path, scratch: Path) -> Tensors:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return _trained(source, _bytes(get_fp32_state_dict_from_zero_checkpoint(str(source))))


def _trained(source: Path, tensors: Tensors) -> Tensors:
    """Keep the parameters listed by DeepSpeed: its script changes the dtype of buffers, frozen and tied weights."""
    file = next(source.glob("global_step2/*mp_rank_00_model_states.pt"))
    names = {name for group in _load(file)["param_shapes"] for name, shape in group.items() if shape.numel()}
    return {name: one for name, one in tensors.items() if name in names}


def _written_in_fp32(source: Path, scratch: Path) -> Tensors:
    ckpt.plan(ckpt.open(source), "hf", Layout(dtype=FLOAT32)).run(scratch)
    return _trained(source, _safetensors(scratch))


# -- PEFT --------------------------------------------------------------------------------------------------------------
def _save_adapter(folder: Path) -> None:
    base = save_base("llama", torch.bfloat16, folder / "base")
    save_adapter(base, folder / "adapter", {"target_modules": ["q_proj", "down_proj"]})


def _first_tensor(file: Path, name: str) -> tuple[Path, bytes]:
    from safetensors.torch import load_file

    tensors = load_file(file)
    key = next(key for key in sorted(tensors) if name in key)
    return file, tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _merged_by_peft(source: Path, scratch: Path) -> Tensors:
    merge_by_peft(source / "base", [source / "adapter"], scratch)
    return _safetensors(scratch)


def _merged(source: Path, scratch: Path) -> Tensors:
    merge([source / "adapter"], source / "base", scratch)
    return _safetensors(scratch)


# -- DCP and Megatron --------------------------------------------------------------------------------------------------
def _first_chunk(folder: Path) -> tuple[Path, bytes]:
    """Return a DCP file, and a tensor's chunk in it, found by `.metadata`."""
    from torch.distributed.checkpoint import FileSystemReader

    listed = FileSystemReader(folder).read_metadata().storage_data
    for index, place in sorted(listed.items(), key=lambda one: str(one[0])):
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            chunk = torch.load(io.BytesIO(file.read(place.length)), weights_only=False)
        if (
            isinstance(chunk, torch.Tensor)
            and chunk.is_floating_point()
            and chunk.numel() > 8
            and "exp" not in index.fqn
        ):
            return folder / place.relative_path, chunk.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    raise AssertionError(f"no tensor in {folder}")


def _step(folder: Path) -> Path:
    return next(path.parent for path in folder.rglob(".metadata"))


def _loaded_by_dcp(source: Path, scratch: Path) -> Tensors:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    scratch.mkdir()
    dcp_to_torch_save(_step(source), scratch / "all.pt")
    return _bytes(dict(_flat(_load(scratch / "all.pt"))))


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}/{key}")


def _full_run(folder: Path) -> Tensors:
    both = {"model": next(folder.glob("pytorch_model*.bin")), "optimizer": folder / "optimizer.bin"}
    return _bytes(dict(_flat({name: _load(path) for name, path in both.items()})))


def _loaded_by_megatron(source: Path, scratch: Path | None = None) -> Tensors:
    """Return the model read by Megatron-core's own loader. `ckpt` renames the optimizer, so it is not compared."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        tensors = _bytes(dict(_flat(load_plain_tensors(str(_step(source))))))
        return {name: one for name, one in tensors.items() if not name.startswith("/optimizer")}
    finally:
        torch.distributed.destroy_process_group()


def _written_for_megatron(source: Path, scratch: Path) -> Tensors:
    ckpt.plan(ckpt.open(source), "megatron-dist", Layout()).run(scratch)
    return _loaded_by_megatron(scratch)


PEERS = {
    "DeepSpeed zero_to_fp32, ZeRO-2": Peer(_copied("toy-zero2"), _masters, _zero_to_fp32, _written_in_fp32),
    "DeepSpeed zero_to_fp32, ZeRO-3": Peer(_copied("toy-zero3"), _masters, _zero_to_fp32, _written_in_fp32),
    "PEFT merge_and_unload, base": Peer(
        _save_adapter,
        lambda source: _first_tensor(source / "base/model.safetensors", "q_proj"),
        _merged_by_peft,
        _merged,
    ),
    "PEFT merge_and_unload, adapter": Peer(
        _save_adapter,
        lambda source: _first_tensor(source / "adapter/adapter_model.safetensors", "lora_A"),
        _merged_by_peft,
        _merged,
    ),
    "torch dcp_to_torch_save": Peer(
        _copied("dcp-fsdp2"),
        lambda source: _first_chunk(_step(source)),
        _loaded_by_dcp,
        _converted("full", Layout(), _full_run),
    ),
    "Megatron-core load_plain_tensors": Peer(
        _copied("megatron-dist-flattened"),
        lambda source: _first_chunk(_step(source)),
        _loaded_by_megatron,
        _written_for_megatron,
    ),
}


def main() -> int:
    """Print a line for each library. Return 1 if one of them disagrees with `ckpt`."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong = 0
    for name, peer in PEERS.items():
        with tempfile.TemporaryDirectory(prefix="peers-") as folder, contextlib.redirect_stdout(io.StringIO()):
            result = found(peer, Path(folder))
        wrong += not result.is_right
        print(f"{name}: {result}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
