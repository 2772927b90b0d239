"""API of `ckpt estimate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import UsageError
from ckpt.base.flags import takes
from ckpt.base.results import Returned
from ckpt.base.text import parse_size, pluralize
from ckpt.base.words import Message
from ckpt.commands.estimate import run_config as configs
from ckpt.commands.estimate import text
from ckpt.commands.estimate.options import Gpus, Lora, Stated, StateOptions, Training
from ckpt.commands.estimate.setup import RECOMPUTED, STRATEGIES, Setup
from ckpt.commands.estimate.table import USABLE, Sizing, find, size
from ckpt.pictures.bars import draw_bars
from ckpt.plan.options import Option
from ckpt.runs.yaml_files import read_run_config

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpt.plan.keywords import EstimateKeywords

_LEAST = dict.fromkeys(("batch_size", "seq_len", "gpus", "cp", "tp", "pp", "ep"), 1) | {"lora_r": 0}


class Estimate(Sizing, Returned):
    """Result of `ckpt.estimate`: one of `rows` per strategy, and `suggestions`."""

    def __repr__(self) -> str:
        return f"<{self.subject.path} on {pluralize(self.setup.gpus, 'GPU')}: {'; '.join(self.suggestions)}>"

    def lines(self) -> Iterator[str]:
        return text.lines(self)

    def to_json(self) -> dict[str, Any]:
        return text.to_json(self)

    def picture(self) -> str:
        """Return an SVG with stacked bars per strategy under the GPU's limit."""
        return draw_bars(*text.title_lines(self), text.bars(self), self.gpu_memory, USABLE)


@takes(Stated, Training, Gpus, StateOptions, Lora)
def estimate(
    model: str | PathLike[str],
    **options: Unpack[EstimateKeywords],
) -> Estimate:
    """Estimate the memory that each GPU needs in training, by strategy, and suggest a strategy that fits.

    Missing options come from the run's config, or else from the defaults of `ckpt estimate`.

    Raises the errors of `ckpt.errors`.

    Args:
        model: The model: a config.json or its folder, a Hub id, a checkpoint, or Axolotl's YAML.
        strategy: Strategies to show; None for all.
        run_config: An Axolotl, Accelerate or FSDP config.
        ds_config: A DeepSpeed config.
        dtype: Dtype for computing.
        pure: Hold parameters in `dtype` instead of float32.
        batch_size: Sequences in one GPU's micro batch.
        seq_len: Tokens per sequence.
        fused_cross_entropy: Never hold all logits.
        eager_attention: Keep attention scores.
        activation_offload: Keep inputs of checkpointed layers in host memory.
        recompute_modules: Modules that Megatron recomputes.
        gpus: Number of GPUs.
        gpu_memory: Memory per GPU in GB, or as `24GB`.
        cp: Context parallel size.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        no_sequence_parallel: Turn Megatron's sequence parallelism off.
        optimizer: The optimizer, such as `adam` or `adamw_8bit`.
        master_dtype: Dtype for masters in DeepSpeed and Megatron.
        state_dtype: Dtype for states in DeepSpeed and Megatron.
        offload_optimizer: `cpu`, `nvme` or `none`.
        offload_param: `cpu`, `nvme` or `none`.
        lora_r: LoRA rank; 0 for none.
        lora_target_modules: Modules with adapters; None for all linear ones.
        qlora: Hold the frozen model in 4 bits.
    """
    stated, training, on = Stated.of(options), Training.of(options), Gpus.of(options)
    states, lora = StateOptions.of(options), Lora.of(options)
    for name, least in _LEAST.items():
        if (count := options.get(name)) is not None:
            Option(name, int, None, "", min=least).check(count)
    recompute, targets = _listed(training.recompute_modules), _listed(lora.lora_target_modules)
    for one in _listed(stated.strategy) or ():
        if one not in STRATEGIES:
            raise UsageError(f"unknown strategy {one!r}", expected="one of " + ", ".join(STRATEGIES))
    for one in recompute or ():
        if one not in RECOMPUTED:
            raise UsageError(f"unknown module {one!r} to recompute", expected=", ".join(RECOMPUTED))
    where, run_config = fspath(model), stated.run_config
    if where.endswith((".yaml", ".yml")):
        if run_config is not None:
            raise UsageError(
                "two run configs given", found=Message("{} and {run_config}", where, run_config=run_config)
            )
        run_config = where
        where = configs.model_of(read_run_config(Path(where)), Path(where))
    subject = find(where)
    run = configs.RunConfig()
    for path in (Path(one) for one in (run_config, stated.ds_config) if one is not None):
        run = run.under(configs.understand(read_run_config(path), path, subject.model.hidden))
    requested: dict[str, Any] = {
        "gpus": on.gpus,
        "context_parallel": on.cp,
        "sequence_parallel": False if on.no_sequence_parallel else None,
        "dtype": training.dtype,
        "mixed": False if training.pure else None,
        "batch": training.batch_size,
        "length": training.seq_len,
        "fused_loss": training.fused_cross_entropy or None,
        "eager_attention": training.eager_attention or None,
        "activation_offload": training.activation_offload or None,
        "recompute": recompute,
        "optimizer": states.optimizer,
        "master_dtype": states.master_dtype,
        "state_dtype": states.state_dtype,
        "offload_optimizer": states.offload_optimizer and states.offload_optimizer.replace("none", ""),
        "offload_params": states.offload_param and states.offload_param.replace("none", ""),
        "lora_rank": lora.lora_r,
        "lora_targets": targets,
        "quantized": lora.qlora or None,
    }
    setup = Setup(**{**run.setup, **{name: value for name, value in requested.items() if value is not None}})
    chosen = _listed(stated.strategy) or ([run.strategy] if run.strategy else [])
    if (setup.lora_targets or setup.quantized) and not setup.lora_rank:
        raise UsageError(Message("{lora_target_modules} and {qlora=True} go with {lora_r}"))
    axes = {name: count for name, count in (("tp", on.tp), ("pp", on.pp), ("ep", on.ep)) if count}
    if axes and chosen and "megatron" not in chosen:
        raise UsageError(Message("{tp}, {pp} and {ep} need the strategy megatron"), found=", ".join(chosen))
    found = size(subject, setup, _gpu_memory(on.gpu_memory), list(chosen), **{**run.axes, **axes})
    return Estimate(**vars(found))


def _listed(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return tuple(names.split(",") if isinstance(names, str) else names) if names else None


def _gpu_memory(size: str | int) -> int:
    """Return bytes. A small number alone means GB, as in GPU names."""
    if isinstance(size, int):
        size = f"{size}B" if size >= 1 << 16 else str(size)
    if not size.strip().replace(".", "", 1).isdecimal():
        return parse_size(size)
    if float(size) >= 1 << 16:
        raise UsageError("invalid GPU memory size", expected="GB, or a size like 24GB or 24564MiB", found=size)
    return parse_size(f"{size.strip()}GB")
