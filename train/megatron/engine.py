"""Megatron-core engine: tensor, pipeline and expert parallelism with its own model, schedule and optimizers."""

import gc
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from train import launch, truth
from train.config import WARMUP, Config
from train.engine import Engine
from train.megatron import args as megatron_args
from train.megatron.cpu import on_this_machine
from train.truth import megatron as megatron_truth
from train.truth.pieces import collect

# It warns about every missing GPU package.
warnings.filterwarnings("ignore", module="megatron")
# It calls deprecated torch functions.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
logging.getLogger("megatron").setLevel(logging.ERROR)


class MegatronEngine(Engine):
    def __init__(self, sizes: Any, config: Config) -> None:
        self.config = config
        self.args = megatron_args.arguments(sizes, config)
        with on_this_machine():
            self._initialize()

    def _initialize(self) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.module import Float16Module

        args = self.args
        axes = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "expert_tensor")
        sizes = {f"{axis}_parallel_size": getattr(args, f"{axis}_parallel_size") for axis in axes}
        parallel_state.initialize_model_parallel(**sizes)
        # An earlier run may have left its generators in this process.
        tensor_parallel.model_parallel_cuda_manual_seed(self.config.seed, force_reset_rng=True)
        self.transformer = megatron_args.transformer_config(args)
        self.bare = build_chunks(args, self.transformer)
        megatron_truth.initialize(self.bare, args.vocab_size, self.config.seed)
        chunks = self.bare
        if args.bf16 or args.fp16:
            chunks = [Float16Module(self.transformer, chunk) for chunk in chunks]
        self.chunks = self._wrap(chunks)
        self.optimizer = build_optimizer(args, self.config, self.chunks)
        self.optimizers = list(megatron_truth.leaves(self.optimizer))
        self.scheduler = build_scheduler(self.optimizer, self.config)
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        self.transformer.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.chunks]
            self.transformer.no_sync_func = functions if len(functions) > 1 else functions[0]

    def _wrap(self, chunks: list[Any]) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        args = self.args
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
            overlap_grad_reduce=args.overlap_grad_reduce,
            use_distributed_optimizer=args.use_distributed_optimizer,
            bucket_size=args.ddp_bucket_size,
        )
        return [
            DistributedDataParallel(self.transformer, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]

    @property
    def data_shard(self) -> tuple[int, int]:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def train(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        with on_this_machine():
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self._run(micro_batches, _train_step, forward_only=False)
            self.watch()
            stepped, norm, _ = self.optimizer.step()
            self.grad_norm = None if norm is None else float(norm)
            if stepped:
                self.scheduler.step(increment=self.config.batch)
            self.step += 1
            self.sequences += self.config.batch
            loss = torch.stack([entry["loss"] for entry in losses]).mean() if losses else torch.zeros([])
            return _broadcast_last_stage(loss.to(launch.device()))

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits without the padded vocabulary."""
        with on_this_machine():
            for chunk in self.chunks:
                chunk.eval()
            # With several chunks, the stages must divide the micro batches.
            micro_batches = [input_ids] * self.args.pipeline_model_parallel_size
            # Layers for multi-token prediction only produce a loss.
            with (
                mock.patch.object(self.transformer, "mtp_num_layers", None),
                mock.patch.object(self.bare[-1], "mtp_process", False),
            ):
                found = self._run(micro_batches, _logits_step, forward_only=True, collect_non_loss_data=True)
            shape = (*input_ids.shape, self.args.padded_vocab_size)
            logits = found[0] if found else torch.empty(shape, dtype=torch.float32, device=launch.device())
            _broadcast_last_stage(logits)
        return logits[..., : self.args.vocab_size].to(self.args.params_dtype)

    def save(self, folder: Path) -> str:
        from train.megatron import files  # it imports megatron-core

        with on_this_machine():
            return files.save(self, folder)

    @torch.no_grad()
    def load(self, folder: Path, tag: str) -> None:
        """Resume from this strategy's checkpoint. A checkpoint with only weights starts a new run."""
        from train.megatron import files

        with on_this_machine():
            files.load(self, folder / tag)

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        with on_this_machine():
            pieces = megatron_truth.model_pieces(self.bare)
            pieces += megatron_truth.optimizer_pieces(self.bare, self.optimizer)
            tensors = collect(pieces)
            megatron_truth.check_distributed(self.bare, self.optimizer, tensors)
        return tensors, self._facts()

    def _facts(self) -> dict[str, Any]:
        tied = not self.args.untie_embeddings_and_output_weights
        return {
            "ties": {"output_layer.weight": "embedding.word_embeddings.weight"} if tied else {},
            "frozen": [],
            "param_groups": self._described_groups(),
            "adam_step": self._adam_step(),
            "vocab_size": self.args.vocab_size,
            "layout": {name: getattr(self.config, name) for name in ("tp", "pp", "vpp", "ep", "etp")},
        }

    def close(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        RotaryEmbedding.forward.cache_clear()  # both caches refer to this run's groups
        _clear_sharding_prop_cache()
        for module in [module for chunk in self.chunks for module in chunk.modules()]:
            vars(module).clear()  # autograd's hooks form cycles that Python's collector can't see
        del self.chunks, self.bare, self.optimizer, self.optimizers, self.scheduler, self.transformer
        gc.collect()
        # megatron-core only forgets most groups, and their threads keep polling. The default group is None.
        for group in filter(None, parallel_state._global_process_group_list or ()):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()

    def _run(self, micro_batches: list[torch.Tensor], step: Any, **options: Any) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micro_batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(micro_batches),
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].shape[1],
            micro_batch_size=micro_batches[0].shape[0],
            **options,
        )
        return results

    def _described_groups(self) -> list[dict[str, Any]]:
        groups, names = zip(*self._named_groups(), strict=True)
        return truth.merged_groups(truth.describe_groups(groups, names), lambda number, _: number)

    def _named_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        names = {tensor: place.name for chunk in self.bare for place, tensor, _ in megatron_truth.placed(chunk)}
        return megatron_truth.named_groups(self.optimizer, names)

    def _adam_step(self) -> int | None:
        steps = {
            int(state["step"]) for one in self.optimizers for state in one.optimizer.state.values() if "step" in state
        }
        return max(steps, default=None)


def build_chunks(args: Any, transformer: Any, make: Callable[..., Any] | None = None) -> list[Any]:
    """Build this rank's model chunks: one, or several with --vpp. `make` builds another model than GPTModel."""
    from megatron.core import parallel_state, tensor_parallel

    number = args.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for stage in range(number):
        of_stage = {"vp_stage": stage if number > 1 else None}
        chunk = (make or _gpt_model)(
            args,
            transformer,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **of_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **of_stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            **of_stage,
        )
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.to(launch.device()))
    return chunks


def _gpt_model(args: Any, transformer: Any, vp_stage: int | None, **given: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs as specs

    plain = {"use_transformer_engine": False, "vp_stage": vp_stage}
    is_hybrid = getattr(args, "experimental_attention_variant", None) is not None
    if is_hybrid:
        with mock.patch.object(transformer, "transformer_impl", "transformer_engine"):
            spec = variants.get_transformer_block_with_experimental_attention_variant_spec(
                transformer, vp_stage=vp_stage
            )
    elif args.num_experts:
        spec = specs.get_gpt_decoder_block_spec(transformer, normalization=args.normalization, **plain)
    else:
        spec = specs.get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    further = None
    if args.mtp_num_layers:
        if is_hybrid:
            layers = spec.layer_specs
        else:
            layers = specs.get_gpt_decoder_layer_specs(transformer, normalization=args.normalization, **plain)
        further = specs.get_gpt_mtp_block_spec(transformer, layers[-1], **plain | {"use_transformer_engine": is_hybrid})
    return GPTModel(
        transformer,
        spec,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        mtp_block_spec=further,
        vp_stage=vp_stage,
        **given,
    )


def build_optimizer(args: Any, config: Config, chunks: list[Any]) -> Any:
    """Return Megatron's optimizer, chained with a second one for experts on other ranks.

    2-dim biases, used only by experts, are in the matrix group.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    floor = 0.0 if config.scheduler == "torch" else config.lr / 10
    vectors: dict[str, float] = {"wd_mult": 0.0}
    if config.weight_decay:
        vectors |= {"max_lr": config.lr / 2, "min_lr": floor / 2}
    is_vector = ParamPredicate("vector", lambda parameter: parameter.ndim == 1)
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args.optimizer,
            lr=config.lr,
            min_lr=floor,
            weight_decay=config.weight_decay,
            sgd_momentum=0.9 if config.optimizer == "momentum" else 0.0,
            bf16=args.bf16,
            fp16=args.fp16,
            params_dtype=args.params_dtype,
            initial_loss_scale=2.0**config.initial_scale_power,
            hysteresis=1,
            loss_scale_window=100,
            use_distributed_optimizer=args.use_distributed_optimizer,
            clip_grad=args.clip_grad,
        ),
        chunks,
        {ParamKey(name="*.bias", predicate=is_vector): vectors},
    )


def build_scheduler(optimizer: Any, config: Config) -> Any:
    """Return Megatron's schedule, counted in sequences: cosine, constant, or warmup and linear decay.

    The last differs slightly from DeepSpeed's: DeepSpeed is one step behind and warms up logarithmically from a tenth
    of each group's peak. Only the position is loaded from a checkpoint, like with Megatron-LM's
    --override-opt-param-scheduler; this run's options set the schedule.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    warms_up = config.scheduler == "deepspeed"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / 10 if warms_up else 0.0,
        max_lr=config.lr,
        min_lr=0.0 if config.scheduler == "torch" else config.lr / 10,
        lr_warmup_steps=WARMUP * config.batch if warms_up else 0,
        lr_decay_steps=config.schedule_steps * config.batch,
        lr_decay_style={"deepspeed": "linear", "torch": "cosine", "none": "constant"}[config.scheduler],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.schedule_steps * config.batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _broadcast_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state as mpu

    dist.broadcast(tensor, mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group())
    return tensor


def _inputs(batches: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    input_ids = next(batches)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    return input_ids, {"input_ids": input_ids, "position_ids": positions, "attention_mask": None}


def _train_step(batches: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
    input_ids, inputs = _inputs(batches)
    # The last token has no target.
    labels = input_ids.roll(-1, 1)
    output = chunk(labels=labels, **inputs)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses[:, :-1].float().mean()
        # The schedule divides the loss in place.
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def _logits_step(batches: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
    """Return the output, and a function that gathers the logits."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    _, inputs = _inputs(batches)
    return chunk(**inputs), lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(logits).float()
