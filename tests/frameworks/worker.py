"""Runs of Megatron-LM on the CPU: `python -m tests.frameworks.worker jobs.jsonl`.

Each line is a job on `ranks` processes with Megatron-LM's `arguments`. `load` is a run to resume, `frozen` a pattern of
parameter names, `steps` the number of steps. The folder `output` gets `truth.safetensors` and `facts.json`. If `fails`
is set, it gets `error-RANK.txt` instead. The module imports nothing at the top, because processes spawned by
megatron-core would import it again.
"""

import json
import os
import re
import socket
import sys
from functools import partial
from typing import Any


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = [json.loads(line) for line in file]
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # torch's FSDP would request more
    import gc

    import megatron.training.training  # noqa: F401
    import torch.multiprocessing as mp

    import train.truth.megatron  # noqa: F401
    from train.megatron.cpu import on_this_machine

    with on_this_machine():  # imports inside this block exist on every rank
        pass
    gc.collect()
    gc.freeze()
    for job in jobs:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        mp.start_processes(_rank, (job, port), job["ranks"], start_method="fork")


def _rank(rank: int, job: dict[str, Any], port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(job["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["pretrain_gpt.py", *job["arguments"]]
    from contextlib import nullcontext
    from pathlib import Path
    from types import SimpleNamespace
    from unittest import mock

    import torch
    import torch.distributed as dist
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.training import initialize

    from train.megatron.cpu import numbered_device, on_this_machine

    cuda = {
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: SimpleNamespace(major=9, minor=0),
    }
    with (
        on_this_machine(),
        mock.patch.multiple(torch.cuda, **cuda),
        numbered_device() if "--use-megatron-fsdp" in sys.argv else nullcontext(),
        mock.patch.object(initialize, "_compile_dependencies"),  # builds the C++ code for datasets
        mock.patch.object(ChainedOptimizer, "state_dict", _state_of_the_only_one),
    ):
        try:
            tensors, facts = _run(job)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if not job["fails"]:
                raise
            folder = Path(job["output"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
            os._exit(0)  # the other ranks wait for this rank and fail with their own error once it exits
        if rank == 0:
            _write(Path(job["output"]), tensors, facts)
        dist.barrier()
        dist.destroy_process_group()


def _state_of_the_only_one(chain: Any, is_loading: bool = False) -> Any:
    """Return the state of a single optimizer, even during loading.

    Stands in for `ChainedOptimizer.state_dict`. In 0.19.2 it doesn't accept the argument that `load_checkpoint` passes
    for torch_dcp, so the release can't load that format.
    """
    states = [one.state_dict(**({"is_loading": True} if is_loading else {})) for one in chain.chained_optimizers]
    return states[0] if len(states) == 1 else states


def _write(folder: Any, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "truth.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts))


def _run(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    from megatron.core.enums import ModelType
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint
    from megatron.training.global_vars import get_args, set_global_variables
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    from train.megatron import fsdp
    from train.truth import megatron as truth
    from train.truth.pieces import collect

    parsed = parse_args()
    validate_args(parsed)
    parsed.padded_vocab_size = parsed.vocab_size  # no tokenizer is built to pad the vocabulary
    set_global_variables(parsed, build_tokenizer=False)
    initialize_megatron(allow_no_cuda=True)
    args = get_args()
    args.load = None
    provider = partial(_build_model, frozen=job.get("frozen"))
    how = {"model_type": ModelType.encoder_or_decoder, "model_provider_func": provider}  # called in either order
    model, optimizer, scheduler = setup_model_and_optimizer(**how)
    is_fsdp = args.use_megatron_fsdp
    if is_fsdp:
        optimizer.optimizer.register_step_pre_hook(fsdp.give_empty_gradients)
    if load := job.get("load"):
        # megatron-core asks each state for its step number, but torch's Adam has no states before its first step.
        for one in truth.leaves(optimizer):
            if hasattr(one, "gbuf_ranges"):
                one._init_optimizer_states_with_dummy_values()
            elif args.ckpt_format == "torch_dcp":
                one.init_state_fn(one.optimizer, one.config)  # omits the step, but Transformer Engine's groups need it
                for state in one.optimizer.state.values():
                    state["step"] = torch.tensor(0.0)
        args.load = load
        args.iteration, _ = load_checkpoint(model, optimizer, scheduler)
    losses = [_step(model, optimizer, scheduler, step) for step in range(args.iteration, args.iteration + job["steps"])]
    bare = [(chunk.module if is_fsdp else chunk).module.module for chunk in model]
    if job["steps"] and args.overlap_param_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=True)
    if args.save:
        args.consumed_train_samples = (args.iteration + job["steps"]) * args.global_batch_size
        save_checkpoint(args.iteration + job["steps"], model, optimizer, scheduler, 0)
    if is_fsdp:
        held = model[0].module.param_and_grad_buffer, bare[0].places, optimizer
        pieces, named = list(fsdp.pieces(*held)), fsdp.named_groups(*held)
    else:
        pieces = truth.model_pieces(bare) + truth.optimizer_pieces(bare, optimizer)
        named = truth.named_groups(optimizer, {t: place.name for chunk in bare for place, t, _ in truth.placed(chunk)})
    return collect(pieces), _facts(args, named, optimizer, scheduler, losses)


def _build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    frozen: str | None = None,
    **more: Any,
) -> Any:
    """Build megatron-core's model from the arguments. Weights depend only on their names."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args

    from train.truth import megatron as truth

    args = get_args()
    config = core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
    )
    chunk = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )
    truth.initialize([chunk], args.padded_vocab_size, args.seed)
    chunk.places = {tensor: place for place, tensor, _ in truth.placed(chunk)}
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(frozen is None or re.search(frozen, name) is None)
    return chunk


def _step(model: list[Any], optimizer: Any, scheduler: Any, step: int) -> float:
    """Take one step on sequences that depend only on the step number."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
    from megatron.core.utils import get_model_config
    from megatron.training.global_vars import get_args

    args = get_args()
    config = get_model_config(model[0])
    _prepare(config, model, optimizer)
    for chunk in model:
        chunk.train()
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    drawn = torch.Generator().manual_seed(1000 + step)
    shape = (args.global_batch_size, args.seq_length)
    sequences = torch.randint(args.vocab_size, shape, generator=drawn)
    share = sequences.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    micro_batches = list(share.chunk(get_num_microbatches()))
    iterators = [RerunDataIterator(iter(micro_batches)) for _ in model]
    machine, found = get_rerun_state_machine(), []
    while machine.should_run_forward_backward(iterators):
        found = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
    machine.should_checkpoint_and_exit()
    stepped, _, _ = optimizer.step()
    assert stepped
    scheduler.step(increment=args.global_batch_size)
    loss = torch.stack([one["loss"] for one in found]).mean() if found else torch.zeros([])
    dist.broadcast(loss, mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group())
    dist.all_reduce(loss, group=mpu.get_data_parallel_group())
    return float(loss) / mpu.get_data_parallel_world_size()


def _prepare(config: Any, model: list[Any], optimizer: Any) -> None:
    """Give the schedule the facts that Megatron-LM's `train` sets before the first step."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.training.global_vars import get_args

    args = get_args()

    def functions(name: str) -> Any:
        found = [getattr(chunk, name) for chunk in model]
        return found if len(found) > 1 else found[0]

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = functions("no_sync")
        if args.align_grad_reduce:
            config.grad_sync_func = functions("start_grad_sync")
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = functions("start_param_sync")


def _forward(batches: Any, chunk: Any) -> tuple[Any, Any]:
    import torch

    input_ids = next(batches)
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    output = chunk(input_ids, positions, None, labels=input_ids.roll(-1, 1))

    def loss(losses: Any) -> tuple[Any, dict[str, Any]]:
        mean = losses[:, :-1].float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def _facts(args: Any, named: list[Any], optimizer: Any, scheduler: Any, losses: list[float]) -> dict[str, Any]:
    """Return the facts a resumed run needs besides tensors. Only a group's names differ between ranks."""
    import hashlib
    import random

    import torch
    import torch.distributed as dist

    from train.truth import megatron as truth

    mine = [
        ({key: value for key, value in group.items() if key not in ("params", "step")}, members)
        for group, members in named
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    steps = {
        int(state["step"])
        for one in truth.leaves(optimizer)
        for state in one.optimizer.state.values()
        if "step" in state
    }
    numbers = hashlib.sha256(repr(random.getstate()).encode() + bytes(torch.get_rng_state().tolist())).hexdigest()
    dist.all_gather_object(everyone, (mine, steps, numbers))
    groups: dict[str, list[str]] = {}
    for theirs, _, _ in everyone:
        for options, members in theirs:
            known = groups.setdefault(json.dumps(options, sort_keys=True, default=str), [])
            known += [name for name in members if name not in known]
    return {
        "iteration": args.iteration,
        "consumed": args.consumed_train_samples,
        "losses": losses,
        "scheduler": scheduler.state_dict(),
        "groups": sorted([options, sorted(members)] for options, members in groups.items()),
        "steps": sorted({step for _, theirs, _ in everyone for step in theirs}),
        "random": [numbers for _, _, numbers in everyone],
    }


if __name__ == "__main__":
    main()
