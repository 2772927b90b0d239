"""Run configuration, and its command line."""

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

ZERO = ("zero1", "zero2", "zero3")
STRATEGIES = (*ZERO, "ddp", "fsdp1", "fsdp2", "hsdp", "tp-fsdp", "megatron", "megatron-deepspeed")
_TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")  #: that tp-fsdp can shard
ARCHITECTURES = (*_TENSOR_PARALLEL, "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "qwen3_next")
MODELS = (*ARCHITECTURES, "llama_even", *(f"{name}_wide" for name in ARCHITECTURES), "toy")
DTYPES = ("bf16", "fp16", "fp32")
OPTIMIZERS = ("adamw", "sgd", "momentum", "lion", "muon")
SCHEDULERS = ("deepspeed", "torch", "none")
SAVES = ("native", "dcp", "full", "ranks", "torch", "torch_dist", "fsdp_dtensor")
_MEGATRON_SAVES = ("torch", "torch_dist", "fsdp_dtensor")
TRACKERS = ("none", "wandb", "tensorboard", "trackio")
ON_SPIKE = ("keep", "stop", "off")
OPTIMIZER_FORMATS = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space", "dp_zero_gather_scatter")
KEYS = ("nested", "flat")
PRECISIONS = ("mixed", "pure")

#: In --scheduler deepspeed.
WARMUP = 3
#: Unless the strategy accepts all.
_OWN_MODEL: dict[str, tuple[Any, ...]] = {
    "model": tuple(model for model in MODELS if model != "toy"),
    "lora": (0,),
    "freeze": (None,),
    "fused": (False,),
}
_TORCHS = {"save": ("native", "dcp", "full", "ranks"), "dtype": ("bf16", "fp32"), "optimizer": OPTIMIZERS[:4]}
_SPLIT = tuple(f"{name}{size}" for name in _TENSOR_PARALLEL for size in ("", "_even", "_wide"))
_TAKES: dict[str, dict[str, tuple[Any, ...]]] = {
    **{strategy: {"save": ("native",)} for strategy in ZERO},
    **dict.fromkeys(("ddp", "fsdp1", "fsdp2", "hsdp"), _TORCHS),
    "tp-fsdp": _TORCHS | {"model": _SPLIT, "lora": (0,)},
    "megatron": _OWN_MODEL | {"save": ("native", *_MEGATRON_SAVES), "optimizer": OPTIMIZERS[:3]},
    "megatron-deepspeed": _OWN_MODEL | {"save": ("native",), "optimizer": ("adamw",), "vocab": (0,), "dropout": (0.0,)},
}
_OF_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")
#: For sharding strategies; all others default to llama.
_MODELS = {"tp-fsdp": "llama_even", "megatron": "llama_wide", "megatron-deepspeed": "llama_wide"}
#: By each group's first option.
_GROUPS = {
    "strategy": "strategy and model",
    "output": "run folder and checkpoints",
    "steps": "steps and resuming",
    "batch": "data",
    "optimizer": "optimizer",
    "vocab": "sizes and layouts, mostly for Megatron",
}
#: Minimum unless 0. --length needs one input token and one target.
_LEAST = {"length": 2} | dict.fromkeys(
    ("batch", "accumulate", "tp", "pp", "vpp", "ep", "schedule_steps", "vocab_multiple"), 1
)
#: Maximum: numpy's largest seed, and the largest initial loss scale for fp16.
_MOST = {"seed": 2**32 - 1, "initial_scale_power": 127}


class UserError(Exception):
    """User's mistake, shown as one line without a traceback; exit code 2."""


def print_error(text: str) -> None:
    print(f"train: error: {text}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UserError, so a mistake is printed once and not by every rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _option(default: Any, help: str, **argparse_options: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **argparse_options})


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run. Every field is a command line option."""

    strategy: str = _option("zero1", "sharding strategy", choices=STRATEGIES)
    model: str = _option(
        "", "architecture for a tiny random model (llama; tp-fsdp: llama_even; megatron*: llama_wide)", choices=MODELS
    )
    dtype: str = _option("bf16", "the model's dtype", choices=DTYPES)
    precision: str = _option(
        "mixed", "not zero: fp32 parameters with compute in --dtype, or all in --dtype", choices=PRECISIONS
    )
    tp: int = _option(
        0,
        "tp-fsdp, megatron, megatron-deepspeed: ranks sharing each matrix (0: 2, or 1 if ranks or model do not divide)",
        metavar="N",
    )
    pp: int = _option(1, "megatron, megatron-deepspeed: pipeline stages", metavar="N")
    vpp: int = _option(1, "megatron: model chunks in each pipeline stage", metavar="N")
    ep: int = _option(1, "megatron: ranks sharing a layer's experts", metavar="N")
    etp: int = _option(0, "megatron: ranks sharing each expert matrix (0: the same as --tp)", metavar="N")
    output: str = _option("outputs", "run folder", metavar="DIR")
    save: str = _option(
        "native",
        "sharded by DCP, one full file, one file per rank, or a Megatron format (fsdp_dtensor: also trained "
        "by Megatron-FSDP); native: the strategy's own format",
        choices=SAVES,
    )
    keys: str = _option("nested", "--save dcp: form of the optimizer's keys", choices=KEYS)
    steps: int = _option(4, "optimizer steps in this run, after the resumed ones; megatron*: 0 only writes the truth")
    until: int = _option(0, "last step, counted from the first run's start, instead of --steps (0: off)", metavar="N")
    save_every: int = _option(0, "also save every N steps (0: only at the end)", metavar="N")
    keep: int = _option(
        0, "keep only the newest N checkpoints and the last good one before a spike (0: keep all)", metavar="N"
    )
    truth: bool = _option(False, "write the gathered truth next to every checkpoint")
    resume: str | None = _option(
        None,
        "continue from this run folder or checkpoint; `ckpt resume` prints the newest, and makes it fit",
        metavar="PATH",
    )
    skip_batches: str | None = _option(None, "skip batches A to B (numbers in metrics.jsonl)", metavar="A:B")
    on_spike: str = _option(
        "keep",
        "if the loss jumps: warn and keep the last good checkpoint, also stop, or do nothing",
        choices=ON_SPIKE,
    )
    track: str = _option("none", "also send metrics to a tracker, not only to metrics.jsonl", choices=TRACKERS)
    beat: float = _option(5.0, "seconds between a rank's heartbeats, for ckpt watch", metavar="S")

    batch: int = _option(24, "sequences per optimizer step, over all ranks")
    accumulate: int = _option(1, "micro batches per optimizer step")
    length: int = _option(16, "tokens per sequence")
    seed: int = _option(1234, "seed for weights and data")

    optimizer: str = _option(
        "adamw", "adamw, plain sgd, sgd with momentum, lion; zero: DeepSpeed's muon", choices=OPTIMIZERS
    )
    fused: bool = _option(False, "adamw, not megatron*: torch's fused kernel")
    scheduler: str = _option("deepspeed", "learning rate schedule", choices=SCHEDULERS)
    schedule_steps: int = _option(100, "schedule length, independent of --steps so runs can resume")
    lr: float = _option(1e-3, "peak learning rate")
    weight_decay: float = _option(0.1, "weight decay for matrices; vectors and scalars have none")
    freeze: str | None = _option(None, "freeze parameters with matching names", metavar="REGEX")
    lora: int = _option(0, "train a LoRA adapter with this rank instead of the model (0: off)", metavar="R")
    dropout: float = _option(0.0, "probability for every dropout in the model", metavar="P")
    initial_scale_power: int = _option(8, "fp16: first loss scale is 2**N; 40 overflows in every step", metavar="N")
    ds_config: str | None = _option(None, "JSON merged over the generated DeepSpeed config", metavar="FILE")

    vocab: int = _option(0, "embedding rows (0: one for each token in the tokenizer)", metavar="N")
    layers: int = _option(0, "megatron: model layers (0: the model's own number)", metavar="N")
    first_stage_layers: int = _option(0, "megatron: layers in the first stage (0: an even share)", metavar="N")
    last_stage_layers: int = _option(0, "megatron: layers in the last stage (0: an even share)", metavar="N")
    count_embedding: bool = _option(False, "megatron: count the embedding as a layer when splitting the pipeline")
    count_loss: bool = _option(False, "megatron: count the loss as a layer when splitting the pipeline")
    mtp_layers: int = _option(0, "megatron: multi-token prediction layers", metavar="N")
    sequence_parallel: bool = _option(False, "megatron: tensor-parallel ranks share the sequence between matrices")
    vocab_multiple: int = _option(
        4, "megatron: pad the vocabulary to a multiple of this number times --tp", metavar="N"
    )
    no_distributed_optimizer: bool = _option(False, "megatron: every data-parallel rank holds all optimizer states")
    optimizer_format: str = _option(
        "fully_reshardable", "torch_dist: form for the distributed optimizer's states", choices=OPTIMIZER_FORMATS
    )
    bucket_size: int = _option(0, "megatron: parameters per gradient bucket (0: all in one)", metavar="N")

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model or _MODELS.get(self.strategy, "llama"))
        object.__setattr__(self, "tp", self.tp or self._default_tp())
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))
        for name, taken in _TAKES[self.strategy].items():
            if (value := getattr(self, name)) not in taken:
                raise UserError(
                    f"--{name} {value}: --strategy {self.strategy} takes "
                    + (f"only {', '.join(taken)}" if taken[0] else f"no --{name}")
                )
        if self.strategy == "megatron":
            self._check_megatron_options()
        elif self.steps < 1 and self.strategy != "megatron-deepspeed":
            raise UserError("--steps is at least 1")
        if self.dropout >= 1 or self.beat == 0:
            raise UserError("--dropout is below 1, --beat more than 0")
        if self.model == "toy" and (self.lora or self.vocab or self.dropout):
            raise UserError("--lora, --vocab and --dropout need a transformer, not --model toy")
        if self.fused and self.optimizer != "adamw":
            raise UserError("--fused is for --optimizer adamw")
        if self.keys != "nested" and self.saving != "dcp":
            raise UserError(f"--keys {self.keys} is for --save dcp")
        read_ds_config(self.ds_config)

    def _default_tp(self) -> int:
        """Return 2 if the strategy shards matrices and 2 divides the model and the ranks, else 1."""
        architecture, _, sizes = self.model.rpartition("_")
        experts = self.strategy == "megatron" and architecture in _OF_EXPERTS and not self.sequence_parallel
        divides = int(os.environ.get("WORLD_SIZE", "1")) % (2 * max(self.pp, 1)) == 0
        return 2 if self.strategy in _MODELS and sizes in ("even", "wide") and not experts and divides else 1

    @property
    def saving(self) -> str:
        """Resolved --save: zero, dcp, full, ranks, torch, torch_dist or fsdp_dtensor."""
        if self.save != "native":
            return self.save
        if self.strategy == "megatron-deepspeed":
            return "zero"
        return "zero" if self.strategy in ZERO else {"ddp": "full", "megatron": "torch_dist"}.get(self.strategy, "dcp")

    def _check_megatron_options(self) -> None:
        if self.optimizer != "adamw" and not self.no_distributed_optimizer:
            raise UserError(f"--optimizer {self.optimizer}: Megatron has it only under --no-distributed-optimizer")
        if self.scheduler == "deepspeed" and self.schedule_steps <= WARMUP:
            raise UserError(f"--schedule-steps {self.schedule_steps}: Megatron's schedule warms up for {WARMUP} steps")
        if self.vpp > 1 and (self.pp < 2 or self.accumulate % self.pp):
            raise UserError("--vpp needs at least two stages, and --accumulate a multiple of --pp")
        if self.save != "fsdp_dtensor":
            return
        if self.pp > 1 or self.no_distributed_optimizer:
            raise UserError("--save fsdp_dtensor: Megatron-FSDP has one stage and the distributed optimizer")
        if self.dtype != "bf16":  # for fp32 models Megatron-LM looks up MLPs under missing names
            raise UserError(
                "--save fsdp_dtensor: only --dtype bf16 works; fp16 unscales gradients missing on some ranks"
            )
        if self.resume:
            raise UserError("--save fsdp_dtensor starts a new run, so leave --resume out")


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    option, choices = f"--{field.name.replace('_', '-')}", field.metadata.get("choices")
    if choices and value not in choices:
        raise UserError(f"{option}: {value!r} is not one of {', '.join(choices)}")
    if isinstance(value, int | float):
        least, most = _LEAST.get(field.name, 0), _MOST.get(field.name, math.inf)
        if not (least <= value <= most and math.isfinite(value)):
            raise UserError(f"{option} {value}: at least {least}" + (f" and at most {most}" if most < math.inf else ""))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per Config field. Dashes and underscores both work."""
    group: Any = parser
    for field in dataclasses.fields(Config):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        options = dict(field.metadata) | {"default": field.default, "dest": field.name}
        if isinstance(field.default, bool):
            options["action"] = "store_true"
        else:
            options["type"] = str if field.default is None else type(field.default)
            options["help"] += "" if field.default in (None, "") else " (%(default)s)"
        names = [f"--{field.name.replace('_', '-')}", f"--{field.name}"]
        group.add_argument(*dict.fromkeys(names), **options)


def parse_options(options: argparse.Namespace) -> Config:
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{name: value for name, value in vars(options).items() if name in names})


def read_jobs(path: Path) -> list[Config]:
    """Read JSON lines with command line words or options."""
    jobs = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            job = json.loads(line)
            if isinstance(job, dict):
                jobs.append(Config(**{name.replace("-", "_"): value for name, value in job.items()}))
            else:
                parser = Parser(add_help=False)
                add_options(parser)
                jobs.append(parse_options(parser.parse_args([str(word) for word in job])))
        except (ValueError, TypeError, UserError) as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    return jobs


def read_ds_config(path: str | None) -> dict[str, Any]:
    """Read the user's changes to the generated DeepSpeed config."""
    if path is None:
        return {}
    try:
        overrides = json.loads(_read(Path(path)))
    except ValueError as error:
        raise UserError(f"--ds-config {path}: {error}") from None
    if not isinstance(overrides, dict):
        raise UserError(f"--ds-config {path}: not a JSON object")
    return overrides


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
