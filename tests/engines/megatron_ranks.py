"""Convert each table's random model for four ranks and load it in megatron-core.

`outcomes.json` lists the differences.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ckpt import api
from ckpt.plan.checkpoint import Layout
from converters.names.megatron.model.spelling import LANGUAGE, is_outside_language_model
from tests.support import two_heads
from tests.support.megatron_logits import arguments, logits_of, random_model, save
from tests.support.megatron_models import build_chunks
from tests.support.tiny_sizes import layers_of
from train.megatron import args as megatron_args
from train.megatron.cpu import on_this_machine
from train.megatron.files import TRACKER, rank_folder

#: Layout of every case. Tables with experts also distribute the experts and use sequence parallelism, as megatron-core
#: requires.
LAYOUT = {"tp": 2, "pp": 2, "vpp": 2}
EXPERTS = {"ep": 2, "etp": 1}
RANKS = 4
_LENGTH = 24

State = dict[str, Any]


def main() -> None:
    """Run the cases given on the command line. A case is an architecture and its config sizes."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ["RANK"])
    for case in cases[rank::RANKS]:  # a process group would make transformers save on one rank only
        noted(case, _write)(folder / case[0], *case)
    dist.init_process_group("gloo")
    outcomes = {}
    with on_this_machine(), torch.no_grad():
        layouts = {case[0]: layout_of(folder / case[0], case[0]) for case in cases}
        for sizes in {tuple(layout.items()): layout for layout in layouts.values()}.values():
            initialize_groups(**sizes)
            for case in cases:
                if layouts[case[0]] == sizes:
                    outcomes[case[0]] = noted(case, _load)(folder / case[0])
            forget_groups()
    dist.barrier()
    for case in cases[rank::RANKS]:
        outcomes[case[0]]["changed"] = noted(case, _changed)(folder / case[0])
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, outcomes)
    if rank == 0:
        merged = {name: _merged([one[name] for one in everyone]) for name in outcomes}
        (folder / "outcomes.json").write_text(json.dumps(merged))
    dist.destroy_process_group()


def _merged(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' outcomes: join lists of names, and keep numbers from any rank."""
    merged: dict[str, Any] = {}
    for one in outcomes:
        for key, value in one.items():
            merged[key] = merged.get(key, []) + value if isinstance(value, list) else value
    return merged


def noted(case: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            error.add_note(f"in the case {case}")
            raise

    return called


# -- on one rank ---------------------------------------------------------------------------------------------
def _write(home: Path, architecture: str, more: Mapping[str, Any]) -> None:
    """Save a random transformers model and its logits, and convert its folder with ckpt."""
    model = random_model(architecture, more)
    save(model, home / "hub", architecture)
    source = api.open(home / "hub")
    with torch.no_grad():
        torch.save(logits_of(model, _inputs()), home / "logits.pt")
    sizes = layout_of(home, architecture)
    api.plan(source, "megatron", Layout(transformer_impl=layers_of(architecture), **sizes)).run(home / "ranks")
    api.plan(source, "megatron-dist", Layout(transformer_impl=layers_of(architecture), tp=2)).run(home / "dist")


def layout_of(home: Path, architecture: str) -> dict[str, int]:
    """Return the case's layout. megatron-core's MambaModel has no chunks."""
    experts = any(".experts." in name for name, _ in api.open(home / "hub").tensors)
    sizes = LAYOUT | (EXPERTS if experts else {})
    return sizes | {"vpp": 1} if architecture == "nemotron_h" else sizes


def _inputs() -> torch.Tensor:
    return torch.randint(3, 190, (2, _LENGTH), generator=torch.Generator().manual_seed(0))


def _changed(home: Path) -> list[str]:
    """Convert the folder saved by the ranks and return the Hub tensors that differ."""
    shutil.copy(home / "hub/config.json", home / "saved/config.json")
    api.plan(api.open(home / "saved"), "hf").run(home / "back")
    before, after = (load_file(home / name / "model.safetensors") for name in ("hub", "back"))
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before
        or name not in after
        or before[name].dtype != after[name].dtype
        or not torch.equal(before[name], after[name])
    ]


# -- on all ranks --------------------------------------------------------------------------------------------
def initialize_groups(tp: int, pp: int = 1, vpp: int = 1, ep: int = 1, etp: int | None = None) -> None:
    """Create megatron-core's process groups and random state."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def forget_groups() -> None:
    """Destroy all process groups. megatron-core only drops its references to most of them."""
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # the default group
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _load(home: Path) -> dict[str, Any]:
    """Load the files in megatron-core, return the differences, and save the ranks' content."""
    (iteration,) = (path for path in (home / "ranks").iterdir() if path.is_dir())
    content = torch.load(rank_folder(iteration) / "model_optim_rng.pt", weights_only=False)
    args = arguments(vars(content["args"]) | {"sequence_parallel": bool(content["args"].num_experts)})
    transformer = megatron_args.transformer_config(args)
    chunks = build_chunks(args, transformer)
    keys = _keys(chunks)
    sees = any(name.startswith(LANGUAGE) for name in content[keys[0]])
    for key, chunk in zip(keys, chunks, strict=True):
        held = chunk.state_dict()  # stand-ins for Transformer Engine's layers have no states besides tensors
        content[key] = {name: value for name, value in content[key].items() if name in held or value is not None}
        chunk.load_state_dict(_language(content[key], sees), strict=True)
    expected = torch.load(home / "logits.pt")
    found = _logits(chunks, args)
    outcome: dict[str, Any] = {}
    if found is not None:
        outcome = {"apart": float((found - expected).abs().max()), "largest": float(expected.abs().max())}
    outcome["unlike"] = _unlike(chunks, content, home / "dist", sees)
    _save(content, chunks, sees, home / "saved")
    return outcome


def _keys(chunks: list[Any]) -> list[str]:
    return [f"model{number}" for number in range(len(chunks))] if len(chunks) > 1 else ["model"]


def _language(state: State, sees: bool) -> State:
    """Return GPTModel's part of a chunk's state."""
    if not sees:
        return state
    return {name.removeprefix(LANGUAGE): value for name, value in state.items() if not is_outside_language_model(name)}


def _logits(chunks: list[Any], args: Namespace) -> torch.Tensor | None:
    """Run megatron-core's pipeline schedule. Return None on ranks before the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    inputs = _inputs()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    if args.position_embedding_type == "mrope":
        positions = positions.expand(3, *inputs.shape)

    def step(batches: Any, chunk: Any) -> Any:
        if hasattr(chunk, "binary_head") or hasattr(chunk, "encoder"):
            gathered = gather_from_tensor_model_parallel_region
            output = two_heads.of_megatron(chunk, next(batches))
            return output, lambda both, non_loss_data: two_heads.joined(gathered(both[0]), both[1], args.vocab_size)
        output = chunk(input_ids=next(batches), position_ids=positions, attention_mask=None)
        return output, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(logits).float()

    for chunk in chunks:
        chunk.eval()
    given = [inputs] * LAYOUT["pp"]  # interleaved schedules need as many micro batches as stages
    with ExitStack() as stack:  # transformers has no counterpart for multi-token prediction
        stack.enter_context(mock.patch.object(chunks[0].config, "mtp_num_layers", None))
        stack.enter_context(mock.patch.object(chunks[-1], "mtp_process", False, create=True))
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(given) for _ in chunks],
            model=chunks,
            num_microbatches=len(given),
            seq_length=inputs.shape[1],
            micro_batch_size=len(inputs),
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not outputs or hasattr(chunks[0], "encoder"):
        return outputs[0] if outputs else None
    return outputs[0][..., : args.vocab_size]


def _unlike(chunks: list[Any], content: State, folder: Path, sees: bool) -> list[str]:
    """Return the tensors that differ between `torch_dist`, loaded by megatron-core, and the rank files."""
    from megatron.core import dist_checkpointing, parallel_state

    prefix = LANGUAGE if sees else ""
    keys = _keys(chunks)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    wanted = {
        key: chunk.sharded_state_dict(prefix=prefix, metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)
    }
    (iteration,) = (path for path in folder.iterdir() if path.is_dir())
    loaded = dist_checkpointing.load(wanted, str(iteration))
    found = []
    for key in keys:
        held = {
            name: value
            for name, value in content[key].items()
            if torch.is_tensor(value) and not is_outside_language_model(name)
        }
        own = {name: value for name, value in loaded[key].items() if torch.is_tensor(value)}
        found += [name for name in held.keys() | own.keys() if not _same(held.get(name), own.get(name))]
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _save(content: State, chunks: list[Any], sees: bool, folder: Path) -> None:
    """Save like Megatron-LM, with unchanged modules around the language model."""
    mine = rank_folder(folder / "iter_0000001")
    mine.mkdir(parents=True)
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        state = chunk.state_dict_for_save_checkpoint()
        if sees:
            beside = {name: value for name, value in content[key].items() if is_outside_language_model(name)}
            state = beside | {LANGUAGE + name: value for name, value in state.items()}
        content[key] = state
    torch.save(content | {"iteration": 1}, mine / "model_optim_rng.pt")
    (folder / TRACKER).write_text("1")
    dist.barrier()
