"""Runs of Megatron-LM with Transformer Engine's modules: `python -m tests.frameworks.engine_worker jobs.jsonl`.

Jobs have the form of `tests.frameworks.worker`. Without a GPU the modules can't compute: gradients are random, and Adam
steps.
"""

import os
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.frameworks import worker
from tests.frameworks.engine_double import install
from tests.frameworks.runs import ENGINE

#: True if this rank loads a run.
_loads = False


def main() -> None:
    import torch

    torch.cuda.is_available = lambda: True  # Transformer Engine and megatron-core check this during construction
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # allows loading its pickled FP8 state
    install(ENGINE)
    torch.cuda.is_available = lambda: False
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as stepping

    if "--use-precision-aware-optimizer" in Path(sys.argv[1]).read_text():
        _keep_whole()
    else:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
        distrib_optimizer.HAVE_APEX_OR_TE = False
    for module in (clip_grads, stepping):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    worker._build_model = _build_model
    worker._step = _step
    worker._run = partial(_run, worker._run)
    worker.main()


def _keep_whole() -> None:
    """Run Transformer Engine's Adam on the CPU and record its fp32 masters as the truth."""
    import transformer_engine_torch

    from tests.frameworks import adam_double
    from train.truth import megatron as truth
    from train.truth.pieces import Piece

    transformer_engine_torch.multi_tensor_adam_param_remainder = adam_double.step

    def pieces(chunks: Any, optimizer: Any) -> list[Piece]:
        places = {tensor: place for chunk in chunks for place, tensor, _ in truth.placed(chunk)}
        found = []
        for one in truth.leaves(optimizer):
            for parameter, shard, start, inner in truth._held(one):
                held = {role: inner.state[shard][role] for role in ("exp_avg", "exp_avg_sq")}
                if (whole := adam_double.MASTERS.get(shard.data_ptr())) is not None:
                    held["master"] = whole
                found += [Piece(role, places[parameter], start, truth._elements(value)) for role, value in held.items()]
        return found

    truth.optimizer_pieces = pieces


def _run(run: Callable[[dict[str, Any]], Any], job: dict[str, Any]) -> Any:
    global _loads
    _loads = bool(job.get("load"))
    return run(job)


def _build_model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None, **more: Any
) -> Any:
    """Build megatron-core's model over Transformer Engine's modules. Weights depend only on their names."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args

    from train.truth import megatron as truth

    args = get_args()
    config = core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, normalization=args.normalization, vp_stage=vp_stage
    )
    torch.cuda.is_available = lambda: True
    try:
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
    finally:
        torch.cuda.is_available = lambda: False
    truth.initialize([chunk], args.padded_vocab_size, args.seed)
    if args.fp8:
        _scale(chunk)
    return chunk


def _scale(chunk: Any) -> None:
    """Create the FP8 scales and their history as the first forward pass does, with different numbers in each module.

    A run that loads a checkpoint starts with zeros.
    """
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    recipe = DelayedScaling(amax_history_len=4)
    for name, module in chunk.named_modules():
        if isinstance(module, TransformerEngineBaseModule):
            module.fp8 = module.fp8_initialized = True
            module.fp8_meta |= {"recipe": recipe, "num_gemms": getattr(module, "num_gemms", 1)}
            module.init_fp8_meta_tensors(recipe)
            for state in ("scaling_fwd", "scaling_bwd"):
                module.fp8_meta[state].scale.fill_(0 if _loads else 1 + zlib.crc32(name.encode()) % 1000)


def _step(model: list[Any], optimizer: Any, scheduler: Any, step: int) -> float:
    """Take one step. Gradients depend only on parameter name and step."""
    import torch
    from megatron.training.global_vars import get_args

    optimizer.zero_grad()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=drawn))
    stepped, _, _ = optimizer.step()
    assert stepped
    scheduler.step(increment=get_args().global_batch_size)
    return 0.0


if __name__ == "__main__":
    main()
