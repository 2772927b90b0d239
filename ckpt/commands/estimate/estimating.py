"""`ckpt estimate`: what each GPU will hold in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ckpt.base.errors import UsageError
from ckpt.base.returned import Returned
from ckpt.base.sizes import parse_size
from ckpt.base.text import counted
from ckpt.base.typed import typed
from ckpt.commands.estimate import run_config as configs
from ckpt.commands.estimate import text
from ckpt.commands.estimate.setup import RECOMPUTED, STRATEGIES, Device, Optimizer, Setup, StateDType, TrainDType
from ckpt.commands.estimate.table import USABLE, Sizing, find, size
from ckpt.pictures.bars import draw_bars
from ckpt.plan.options import Option
from ckpt.runs.yaml_files import read_run_config

#: Options that are counts, with the least that each may be.
_LEAST = dict.fromkeys(("batch_size", "seq_len", "gpus", "cp", "tp", "pp", "ep"), 1) | {"lora_r": 0}


class Estimate(Sizing, Returned):
    """What `ckpt.estimate` returns: `rows`, one for each strategy, and `suggestions`."""

    def __repr__(self) -> str:
        return f"<{self.subject.path} on {counted(self.setup.gpus, 'GPU')}: {'; '.join(self.suggestions)}>"

    def lines(self) -> Iterator[str]:
        return text.lines(self)

    def to_json(self) -> dict[str, Any]:
        return text.to_json(self)

    def picture(self) -> str:
        """Stacked bars by strategy under the GPU's limit, an SVG, as `ckpt estimate --picture` writes it."""
        return draw_bars(*text.title_lines(self), text.bars(self), self.gpu_memory, USABLE)


@typed
def estimate(
    model: str | PathLike[str],
    *,
    strategy: str | Sequence[str] | None = None,
    run_config: str | PathLike[str] | None = None,
    ds_config: str | PathLike[str] | None = None,
    dtype: TrainDType | None = None,
    pure: bool = False,
    batch_size: int | None = None,
    seq_len: int | None = None,
    fused_cross_entropy: bool = False,
    eager_attention: bool = False,
    activation_offload: bool = False,
    recompute_modules: str | Sequence[str] | None = None,
    gpus: int | None = None,
    gpu_memory: str | int = "80GB",
    cp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    no_sequence_parallel: bool = False,
    optimizer: Optimizer | None = None,
    master_dtype: StateDType | None = None,
    state_dtype: StateDType | None = None,
    offload_optimizer: Device | None = None,
    offload_param: Device | None = None,
    lora_r: int | None = None,
    lora_target_modules: str | Sequence[str] | None = None,
    qlora: bool = False,
) -> Estimate:
    """Estimate what each GPU will hold in training, by strategy, and suggest one that fits.

    `model` is a config.json or its folder, a Hub id, a checkpoint, or Axolotl's YAML.  The options are those of
    `ckpt estimate`.  An option that is not given is taken from the run's config, or else is the command's default.

    Raises the errors of `ckpt.errors`.

    Args:
        model: The model: a config.json, a folder, a Hub id or a checkpoint.
        strategy: Strategies to show; None for all.
        run_config: An Axolotl, Accelerate or FSDP config.
        ds_config: A DeepSpeed config.
        dtype: Dtype that the model computes in.
        pure: Hold parameters in `dtype`, without float32 ones.
        batch_size: Sequences of a micro batch on one GPU.
        seq_len: Tokens of a sequence.
        fused_cross_entropy: Never hold all logits.
        eager_attention: Keep attention scores.
        activation_offload: Keep inputs of checkpointed layers in host memory.
        recompute_modules: Modules that Megatron recomputes.
        gpus: Number of GPUs.
        gpu_memory: Memory of a GPU: a number of GB, or a size as `24GB`.
        cp: Context parallel size.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        no_sequence_parallel: Turn Megatron's sequence parallelism off.
        optimizer: The optimizer, such as `adam` or `adamw_8bit`.
        master_dtype: Dtype of masters in DeepSpeed's and Megatron's optimizers.
        state_dtype: Dtype of states in DeepSpeed's and Megatron's optimizers.
        offload_optimizer: `cpu`, `nvme` or `none`.
        offload_param: `cpu`, `nvme` or `none`.
        lora_r: Rank of LoRA; 0 for none.
        lora_target_modules: Modules that get adapters; None for all linear ones.
        qlora: Hold the frozen model in 4 bits.
    """
    given = locals()
    for name, least in _LEAST.items():
        if given[name] is not None:
            Option(name, int, None, "", min=least).check(given[name])
    recompute, targets = _listed(recompute_modules), _listed(lora_target_modules)
    for one in _listed(strategy) or ():
        if one not in STRATEGIES:
            raise UsageError(f"there is no strategy called {one!r}", expected="one of " + ", ".join(STRATEGIES))
    for one in recompute or ():
        if one not in RECOMPUTED:
            raise UsageError(f"no module called {one!r} is recomputed", expected=", ".join(RECOMPUTED))
    where = fspath(model)
    if where.endswith((".yaml", ".yml")):
        if run_config is not None:
            raise UsageError("a run has one config", found=f"{where} and --run-config {run_config}")
        run_config = where
        where = configs.model_of(read_run_config(Path(where)), Path(where))
    subject = find(where)
    run = configs.RunConfig()
    for path in (Path(one) for one in (run_config, ds_config) if one is not None):
        run = run.under(configs.understand(read_run_config(path), path, subject.model.hidden))
    asked: dict[str, Any] = {
        "gpus": gpus,
        "context_parallel": cp,
        "sequence_parallel": False if no_sequence_parallel else None,
        "dtype": dtype,
        "mixed": False if pure else None,
        "batch": batch_size,
        "length": seq_len,
        "fused_loss": fused_cross_entropy or None,
        "eager_attention": eager_attention or None,
        "activation_offload": activation_offload or None,
        "recompute": recompute,
        "optimizer": optimizer,
        "master_dtype": master_dtype,
        "state_dtype": state_dtype,
        "offload_optimizer": offload_optimizer and offload_optimizer.replace("none", ""),
        "offload_params": offload_param and offload_param.replace("none", ""),
        "lora_rank": lora_r,
        "lora_targets": targets,
        "quantized": qlora or None,
    }
    setup = Setup(**{**run.setup, **{name: value for name, value in asked.items() if value is not None}})
    chosen = _listed(strategy) or ([run.strategy] if run.strategy else [])
    if (setup.lora_targets or setup.quantized) and not setup.lora_rank:
        raise UsageError("--lora-target-modules and --qlora go with --lora-r")
    axes = {name: count for name, count in (("tp", tp), ("pp", pp), ("ep", ep)) if count}
    if axes and chosen and "megatron" not in chosen:
        raise UsageError("--tp, --pp and --ep need the strategy megatron", found=", ".join(chosen))
    found = size(subject, setup, _gpu_memory(gpu_memory), list(chosen), **{**run.axes, **axes})
    return Estimate(**vars(found))


def _listed(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names, or a text with commas between them; None where there are none."""
    return tuple(names.split(",") if isinstance(names, str) else names) if names else None


def _gpu_memory(size: str | int) -> int:
    """Return bytes.  GPUs are sold by the GB, so a small number alone is of these."""
    if isinstance(size, int):
        size = f"{size}B" if size >= 1 << 16 else str(size)
    if not size.strip().replace(".", "", 1).isdecimal():
        return parse_size(size)
    if float(size) >= 1 << 16:
        raise UsageError("this is not a size of GPU memory", expected="GB, or a size as 24GB or 24564MiB", found=size)
    return parse_size(f"{size.strip()}GB")
