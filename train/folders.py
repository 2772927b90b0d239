"""The files of a run folder, apart from those that the engine writes itself.

plain     OUTPUT/{config.json, tokenizer.json, ..., latest, global_stepN/}       zero1, zero2, zero3
          OUTPUT/{config.json, tokenizer.json, ..., step-N/}                     ddp, fsdp1, fsdp2, hsdp, tp-fsdp
          OUTPUT/{config.json, tokenizer.json, ..., latest_checkpointed_iteration.txt, iter_000000N/}   megatron
          OUTPUT/{config.json, tokenizer.json, ..., latest, global_stepN/layer_*}   megatron-deepspeed
          OUTPUT/random_states/TAG/rng_state_R.pth     where the engine saves none: zero1-3, megatron-deepspeed
trainer   OUTPUT/checkpoint-N/{config.json, tokenizer.json, ..., trainer_state.json, latest, global_stepN/}
"""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train import data, launch, randomness
from train.config import ZERO, Config, UserError, read_ds_config


def checkpoint_folder(config: Config, step: int) -> Path:
    """The folder handed to the engine's save call."""
    output = Path(config.output)
    return output / f"checkpoint-{step}" if config.layout == "trainer" else output


def write_run_files(folder: Path, model: Any, config: Config) -> None:
    """What makes a folder loadable as a Hub model: config, generation config, tokenizer, adapter config."""
    if config.model == "toy":
        return
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    data.build_tokenizer().save_pretrained(folder)
    if config.lora:
        model.peft_config["default"].save_pretrained(folder)


def write_trainer_files(folder: Path, step: int, losses: dict[int, float]) -> None:
    """What HF Trainer puts beside the engine's files: its state."""
    if dist.get_rank() == 0:
        log = [{"step": number, "loss": loss} for number, loss in losses.items()]
        state = {"global_step": step, "max_steps": step, "best_model_checkpoint": None, "log_history": log}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")


def save_random_states(config: Config, folder: Path, tag: str) -> None:
    """Writes this rank's random states beside a checkpoint, where the engine saves none."""
    if config.saving == "zero":
        randomness.save(folder if config.layout == "trainer" else folder / "random_states" / tag)


def load_random_states(config: Config, folder: Path, tag: str) -> None:
    """Goes on from them, and says so where there are none, as after a conversion."""
    if config.saving != "zero" or any(map(randomness.load, (folder / "random_states" / tag, folder))):
        return
    if dist.get_rank() == 0:
        print(f"note: {folder} has no random states of its ranks for {tag}; they start anew", file=sys.stderr)


def left_by_a_run(output: Path) -> list[str]:
    """Names of what a run has left in a folder, and another one would overwrite or add to: the files, and two steps."""
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    steps = [name for name in names if re.fullmatch(r"(checkpoint-|step-|global_step|iter_)\d+", name)]
    files = ("latest", "latest_universal", "latest_checkpointed_iteration.txt", "metrics.jsonl")
    return steps[-2:] + [name for name in names if name in files]


def find_checkpoint(config: Config) -> tuple[Path, str]:
    """The folder and the tag that --resume means, after a check that this run's engine can load what lies there.

    --resume is a run folder (its newest checkpoint is meant), a Trainer checkpoint or the folder of one tag.
    """
    assert config.resume is not None
    hint = "\nhint: `ckpt check` finds damage"
    with launch.as_user_error(f"--resume {config.resume}: it cannot be read", hint):
        return _find_checkpoint(config, Path(config.resume))


def _find_checkpoint(config: Config, folder: Path) -> tuple[Path, str]:
    if not folder.is_dir():
        raise UserError(f"--resume {folder}: no such folder")
    tracker = folder / "latest_checkpointed_iteration.txt"  # Megatron-DeepSpeed leaves one beside `latest`
    if tracker.is_file() and config.strategy != "megatron-deepspeed":
        latest = tracker.read_text().strip()
        folder = folder / (latest if latest == "release" else f"iter_{int(latest):07d}")
    numbered = [child for child in folder.iterdir() if re.fullmatch(r"(checkpoint|step)-\d+", child.name)]
    if numbered:
        folder = max(numbered, key=lambda child: int(child.name.partition("-")[2]))
    tag = folder.resolve().name
    pointers = ["latest", "latest_universal"]
    if _loads_universal(config):
        pointers.reverse()
    if pointer := next((folder / name for name in pointers if (folder / name).is_file()), None):
        tag = pointer.read_text().strip()
        folder = folder / tag
    _require_fit(config, folder)
    return folder.resolve().parent, tag


def _loads_universal(config: Config) -> bool:
    return config.strategy in ZERO and "load_universal" in read_ds_config(config.ds_config).get("checkpoint", {})


def _require_fit(config: Config, folder: Path) -> None:
    """UserError with the conversion that helps where an engine would fail on a checkpoint with words of its own.

    What the engine takes, it is given: DCP and Megatron's torch_dist load on any number of ranks.
    """
    if config.strategy == "megatron":
        _require_megatron(config, folder)
        return
    if config.strategy == "megatron-deepspeed":
        _require_pipeline(config, folder)
        return
    format, written_by = _identify(folder)
    zero, trainer = config.strategy in ZERO, config.through == "trainer"
    to = config.strategy if zero else "full" if config.saving == "full" else "dcp"
    stages_differ = zero and format != to and "zero3" in (format, to)
    if format == "universal" and _loads_universal(config):
        return
    if format == "universal":
        problem = "a universal checkpoint, which DeepSpeed reads only if --ds-config asks for it"
    elif format.startswith("megatron") or zero != (format in ZERO) or stages_differ:
        problem = f"a {format} checkpoint, which --strategy {config.strategy} does not read"
    elif trainer and not zero and format != to:
        problem = f"a {format} checkpoint, which Trainer does not read under --save {config.saving}"
    elif written_by not in (None, dist.get_world_size()):
        problem = f"a {format} checkpoint of {written_by} ranks, and this run has {dist.get_world_size()}"
    elif trainer and not any((path / "trainer_state.json").is_file() for path in (folder, folder.parent)):
        raise UserError(f"--resume {config.resume}: Trainer has not been here, so resume it without --through trainer")
    elif not trainer and not zero and (folder / "trainer_state.json").is_file():
        raise UserError(f"--resume {config.resume}: a folder of Trainer's, so resume it with --through trainer")
    else:
        return
    command = f"ckpt convert {format} {to} {shlex.quote(str(config.resume))}"
    if to != "full":
        command += f" --world-size {dist.get_world_size()}"
    if zero and format in ("dcp", "full", "fsdp-ranks"):  # fp32 weights, and DeepSpeed's file names tell the dtype
        command += f" --dtype {config.dtype}"
    raise UserError(f"--resume {config.resume}: {problem}\nhint: {command}")


def _require_megatron(config: Config, folder: Path) -> None:
    """The same for Megatron: format torch must have been written at this layout, torch_dist at any."""
    format, _ = _identify(folder)
    if format == "megatron-dist":
        _require_same_optimizer(config, torch.load(folder / "common.pt", map_location="cpu", weights_only=False))
        return
    if format == "dcp" and folder.name.startswith("iter_"):  # Megatron-FSDP's
        raise UserError(
            f"--resume {config.resume}: a checkpoint of Megatron-FSDP, which this trainer only writes\n"
            f"hint: ckpt convert megatron-dist megatron-dist {shlex.quote(str(config.resume))}"
        )
    if format != "megatron":
        raise UserError(
            f"--resume {config.resume}: a {format} checkpoint, which Megatron does not read\n"
            f"hint: {_to_megatron(config, format)} --transformer-impl local"
        )
    file = next(folder.glob("mp_rank_*/model_optim_rng.pt"))
    state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    args = state["args"]
    wanted = {
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "virtual_pipeline_model_parallel_size": config.vpp if config.vpp > 1 else None,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": config.etp or config.tp,
        "decoder_first_pipeline_num_layers": config.first_stage_layers or None,
        "decoder_last_pipeline_num_layers": config.last_stage_layers or None,
        "account_for_embedding_in_pipeline_split": config.count_embedding,
        "account_for_loss_in_pipeline_split": config.count_loss,
    }
    for name, value in wanted.items():
        found = getattr(args, name, value)
        if found != value:
            raise UserError(
                f"--resume {config.resume}: written with {name} {found}, and this run has {value}\n"
                f"hint: {_to_megatron(config, format)}"
            )
    multiple = config.vocab_multiple * config.tp
    padded = -(-args.vocab_size // multiple) * multiple
    if args.padded_vocab_size != padded:
        raise UserError(
            f"--resume {config.resume}: written with a vocabulary of {args.padded_vocab_size} rows, padding included, "
            f"and this run has {padded}\nhint: --vocab-multiple {args.make_vocab_size_divisible_by}"
        )
    _require_same_optimizer(config, state)


def _to_megatron(config: Config, format: str) -> str:
    """The conversion to this run's layout; what a checkpoint of Megatron's may have otherwise is always named."""
    others = {
        "ep": config.ep if config.ep > 1 or format == "megatron" else 0,
        "vpp": config.vpp if config.vpp > 1 or (format == "megatron" and config.pp > 1) else 0,
        "etp": config.etp if config.etp and config.etp != config.tp else 0,
        "decoder-first-pipeline-num-layers": config.first_stage_layers,
        "decoder-last-pipeline-num-layers": config.last_stage_layers,
    }
    command = f"ckpt convert {format} megatron {shlex.quote(str(config.resume))} --tp {config.tp} --pp {config.pp}"
    command += "".join(f" --{name} {value}" for name, value in others.items() if value)
    command += " --account-for-embedding-in-pipeline-split" if config.count_embedding else ""
    command += " --account-for-loss-in-pipeline-split" if config.count_loss else ""
    # FSDP's weights are fp32 whatever the model computes in.
    return command + (f" --dtype {config.dtype}" if format in ("dcp", "full", "fsdp-ranks") else "")


def _require_same_optimizer(config: Config, state: dict[str, Any]) -> None:
    """UserError where the optimizer is not of this run's kind, which no conversion changes."""
    distributed = not config.no_distributed_optimizer
    found = getattr(state.get("args"), "use_distributed_optimizer", distributed)
    if "optimizer" in state and found != distributed:
        raise UserError(
            f"--resume {config.resume}: written with use_distributed_optimizer {found}, and this run has {distributed}"
            f"\nhint: go on {'without' if found else 'with'} --no-distributed-optimizer"
        )


def _require_pipeline(config: Config, folder: Path) -> None:
    """The same for a pipeline of DeepSpeed's, which takes no other layout than its own."""
    tensor_ranks = len(set(re.findall(r"-model_(\d+)-model_states", " ".join(p.name for p in folder.glob("layer_*")))))
    slices = len(list(folder.glob("mp_rank_*_model_states.pt")))
    partitions = len(list(folder.glob("*zero_pp_rank_*_optim_states.pt")))
    if not tensor_ranks or not slices:
        raise UserError(f"--resume {config.resume}: no checkpoint of a DeepSpeed pipeline in {folder}")
    wanted = (config.tp, config.tp * config.pp, dist.get_world_size())
    if (tensor_ranks, slices, partitions or wanted[2]) != wanted:
        convert = f"ckpt convert megatron-deepspeed megatron-deepspeed {shlex.quote(str(config.resume))}"
        raise UserError(
            f"--resume {config.resume}: written with TP {tensor_ranks}, PP {slices // tensor_ranks} on {partitions} "
            f"ranks\nhint: {convert} --tp {config.tp} --pp {config.pp} --world-size {wanted[2]}"
        )


def _identify(folder: Path) -> tuple[str, int | None]:
    """Name of a checkpoint's format, as `ckpt` knows it, and the number of ranks that wrote it if that matters."""
    if (folder / ".metadata").is_file() and (folder / "metadata.json").is_file():
        return "megatron-dist", None
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return "megatron", None
    if any((dcp / ".metadata").is_file() for dcp in (folder, folder / "pytorch_model_fsdp_0")):
        return "dcp", None
    if any((folder / name).is_file() for name in ("model.pt", "pytorch_model_fsdp.bin", "optimizer.pt")):
        return "full", None
    if (folder / "zero").is_dir():
        return "universal", None
    if models := list(folder.glob("model_world_size_*_rank_0.pt")):
        return "fsdp-ranks", int(models[0].name.split("_")[3])
    if optimizers := list(folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")):
        if any(folder.glob("zero_pp_rank_*_model_states.pt")):
            return "zero3", len(optimizers)
        state = torch.load(optimizers[0], map_location="cpu", weights_only=False)["optimizer_state_dict"]
        return f"zero{int(state['zero_stage'])}", len(optimizers)
    raise UserError(f"--resume {folder}: no checkpoint of this trainer's in it")
