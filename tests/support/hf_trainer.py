"""Runs through transformers.Trainer with DeepSpeed or FSDP, in user folders with the truth beside them.

A job without `"through": "trainer"` goes to the trainer's own loop.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FSDPModule, _state_dict_utils
from transformers import Trainer, TrainerCallback, TrainingArguments

from train import data, folders, launch, loop, models, stopping, truth
from train.config import WARMUP, ZERO, Config
from train.engine import Engine
from train.engines.native import gather
from train.operations.monitoring import Operations, require_free

_SCHEDULERS = {"deepspeed": "linear", "torch": "cosine", "none": "constant"}


def main() -> None:
    try:
        launch.start()
        for line in Path(sys.argv[1]).read_text().splitlines():
            run_job(json.loads(line))
            gc.freeze()  # finished jobs leave no garbage, so later collections can skip their objects
    except launch.ERRORS as error:
        launch.tell(error)
        sys.exit(1)
    finally:
        launch.stop()


def run_job(job: dict[str, Any]) -> None:
    """Run a job with its trainer."""
    through = job.pop("through", None)
    (run if through == "trainer" else loop.run)(Config(**job))


def run(config: Config) -> None:
    """Train with zero1, zero2, zero3, fsdp1 or fsdp2, and save. Needs a process group."""
    require_free(config)
    resumed = folders.find_checkpoint(config) if config.resume else None
    folder = None
    if resumed:  # DeepSpeed's tag lies inside Trainer's folder
        folder = resumed[0] if (resumed[0] / "trainer_state.json").is_file() else resumed[0] / resumed[1]
    first = json.loads((folder / "trainer_state.json").read_text())["global_step"] if folder else 0
    with Operations(config) as operations:
        if steps := operations.steps_to_take(first):
            _run(config, resumed, folder, first + steps, operations)


def _run(
    config: Config, resumed: tuple[Path, str] | None, folder: Path | None, last: int, operations: Operations
) -> None:
    """Train to step `last`, from Trainer's `folder` if there is one."""
    environment = dict(os.environ)
    model = models.build_model(config)
    if config.precision == "pure":
        model.to(models.DTYPES[config.dtype])
    trainer = OrderedTrainer(
        model=model,
        args=arguments(config, last),
        train_dataset=sequences(config),
        processing_class=data.build_tokenizer(),
        callbacks=[],
    )
    if config.strategy == "fsdp1" and trainer.args.use_cpu:
        # FSDP1 offloads from CPU to CPU as views of one buffer and refills the buffer for the next state.
        trainer.accelerator.state.fsdp_plugin.optim_state_dict_config.offload_to_cpu = False
    trainer.config = config
    trainer.add_callback(Recorder(trainer, operations, resumed))
    try:
        operations.enter("loading")
        trainer.train(resume_from_checkpoint=str(folder) if folder else None)
        if dist.get_rank() == 0:
            # Trainer saves neither with SHARDED_STATE_DICT; scripts leave them in the run folder.
            folders.write_run_files(Path(config.output), model, config)
    finally:
        operations.ended()
        close(trainer, config)
        os.environ.clear()
        os.environ.update(environment)
        del trainer, model
        gc.collect()


def arguments(config: Config, last: int) -> TrainingArguments:
    """Return the arguments a user would give Trainer to end this run at step `last`."""
    options: dict[str, Any] = {}
    if config.strategy in ZERO:
        options["deepspeed"] = deepspeed_options(config)
    else:
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": int(config.strategy[-1]),
            "state_dict_type": "FULL_STATE_DICT" if config.saving == "full" else "SHARDED_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "sync_module_states": launch.on_gpu(),  # FSDP1: Accelerate's way needs a GPU
        }
    args = TrainingArguments(
        output_dir=config.output,
        max_steps=last,
        save_steps=config.save_every or last,
        per_device_train_batch_size=config.batch // dist.get_world_size() // config.accumulate,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        optim="adamw_torch" if config.optimizer == "adamw" else "sgd",
        lr_scheduler_type=_SCHEDULERS[config.scheduler],
        warmup_steps=WARMUP if config.scheduler == "deepspeed" else 0,
        bf16=config.dtype == "bf16" and config.precision == "mixed",
        seed=config.seed,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not launch.on_gpu(),
        **options,
    )
    if args.use_cpu and args.fsdp:
        # Accelerate requires GPUs for FSDP. torch's FSDP also runs on gloo, so hide the device from that check.
        assert args.distributed_state.distributed_type == DistributedType.MULTI_CPU
        # FSDP1 treats cpu:0 as another device than cpu.
        PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}
    return args


def deepspeed_options(config: Config) -> dict[str, Any]:
    """Return our own loop's DeepSpeed config, except for options that Trainer sets."""
    from train.engines.zero import ds_config

    options = ds_config(config, [{"lr": config.lr}])
    options["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if "scheduler" in options:  # DeepSpeed's only scheduler independent of the number of steps
        rates = {"warmup_min_lr": config.lr / 10, "warmup_max_lr": config.lr}
        options["scheduler"] = {"type": "WarmupLR", "params": rates | {"warmup_num_steps": WARMUP}}
    return options


def _unshard_in_place(module: nn.Module, fsdp_state: Any, offload_to_cpu: bool, rank0_only: bool) -> None:
    """Gather FSDP1's state dict without the offload: on a CPU, torch 2.13 reads memory freed by the offload."""
    _unshard(module, fsdp_state, offload_to_cpu and launch.on_gpu(), rank0_only)


_unshard = _state_dict_utils._common_unshard_pre_state_dict_hook
_state_dict_utils._common_unshard_pre_state_dict_hook = _unshard_in_place


def sequences(config: Config) -> Any:
    """Return our data, for more steps than any run takes."""
    rows = data.batch(0, config.batch * config.schedule_steps, config.length, config.seed)
    return [{"input_ids": row, "labels": row} for row in rows]


class OrderedTrainer(Trainer):
    """Trainer with a schedule independent of --steps, and the loss of each step."""

    config: Config
    losses: list[torch.Tensor]
    norm: float | None = None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create Trainer's schedule over --schedule-steps."""
        return super().create_scheduler(self.config.schedule_steps, optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint and self.config.strategy == "fsdp1":
            # From SHARDED_STATE_DICT, Accelerate 1.15 reads only a fresh optimizer's keys: none.
            optimizer: Any = self.optimizer
            _init_optim_state(optimizer.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.norm = None if norm is None else float(norm)
        return norm

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train one micro batch."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach().clone())
        return loss


class TrainersEngine(Engine):
    """Adapter from Trainer to the loop's engine interface."""

    def __init__(self, trainer: OrderedTrainer) -> None:
        self.trainer, self.config = trainer, trainer.config
        model: Any = trainer.model
        decaying = set(trainer.get_decay_parameter_names(model))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.groups = [[name for name in trained if (name in decaying) == decays] for decays in (True, False)]
        if "optimizer" in (trainer.args.deepspeed or {}):  # then Trainer hands DeepSpeed a single group
            self.groups = [trained]
        self.names = [name for name, _ in model.named_parameters()]
        self.buffers = list(truth.persistent_buffers(model))
        self.facts = truth.facts_of(model) | {"precision": self.config.precision}

    def wrapped(self) -> None:
        """Store the model, engine and optimizer, after Trainer has wrapped and made them."""
        self.model: Any = self.trainer.model_wrapped
        self.engine = self.model if self.config.strategy in ZERO else None
        self.optimizer: Any = self.engine.optimizer if self.engine else self.trainer.optimizer
        self.scheduler: Any = self.trainer.lr_scheduler

    @property
    def step(self) -> int:
        return self.trainer.state.global_step

    @property
    def sequences(self) -> int:
        return self.step * self.config.batch

    @property
    def grad_norm(self) -> float | None:
        return self.trainer.norm

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        logits: torch.Tensor = self.model(input_ids=input_ids)["logits"]
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return logits

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if self.engine:
            from train.engines.zero import ZeroEngine

            parameters = dict(self.engine.module.named_parameters())
            groups = [{name: parameters[name] for name in group} for group in self.groups]
            tensors, facts = ZeroEngine.around(self.engine, groups).gather()
            return tensors, self.facts | facts
        optimizer = self.optimizer.optimizer  # under Accelerate's
        tensors, adam_step = gather(self.model, optimizer, self.names, self.buffers)
        described = truth.describe_groups(optimizer.param_groups, self.groups)
        return tensors, self.facts | {"param_groups": described, "adam_step": adam_step}


class Recorder(TrainerCallback):
    """Callback to run the operations and write the truth beside every checkpoint."""

    def __init__(self, trainer: OrderedTrainer, operations: Operations, resumed: tuple[Path, str] | None) -> None:
        self.trainer, self.operations, self.resumed = trainer, operations, resumed
        self.engine = TrainersEngine(trainer)
        trainer.losses = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act before every optimizer step, when the batch is there and a checkpoint has been loaded."""
        if self.operations.engine is None:
            self.engine.wrapped()
            self.operations.started(self.engine, self.resumed)
        self.operations.next_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act after every optimizer step."""
        loss = torch.stack(self.trainer.losses).sum()
        self.trainer.losses.clear()
        own_loss = loss.item()
        dist.all_reduce(loss)
        self.operations.after_step(loss.item() / dist.get_world_size(), own_loss)
        if stopping.stop_requested():
            control.should_save = control.should_training_stop = True
        if control.should_save:
            self.operations.enter("saving")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act after every checkpoint."""
        config, tag = self.engine.config, f"checkpoint-{state.global_step}"
        if config.truth:
            truth.record(self.engine, config, tag)
            dist.barrier()
        self.operations.saved(Path(config.output, tag))


def close(trainer: Trainer, config: Config) -> None:
    """Clear all process-wide state in Trainer, Accelerate and DeepSpeed."""
    if config.strategy in ZERO:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        from train.engines.zero import ZeroEngine

        if not isinstance(trainer.model_wrapped, nn.Module) or hasattr(trainer.model_wrapped, "destroy"):
            ZeroEngine.around(trainer.model_wrapped, []).close()
        unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    main()
