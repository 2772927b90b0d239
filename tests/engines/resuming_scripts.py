"""User scripts for TRL and Accelerate on forked ranks.

Arguments: WHAT (`sft`, `save` or `load`), STAGE, RUN and OUTPUT.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from train.engines.zero import ZeroEngine

GLOBAL_BATCH = 6


def main() -> None:
    what, stage, run, output = sys.argv[1:]
    Path(output).mkdir(parents=True, exist_ok=True)
    losses = sft(int(stage), run, output) if what == "sft" else accelerated(what, int(stage), run, output)
    if dist.get_rank() == 0:
        Path(output, "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def note(engine: Any, groups: Iterable[Container[str]], output: str) -> None:
    """Save the engine's full weights, masters and states. `groups` lists the names in each param group."""
    parameters = list(engine.module.named_parameters())
    named = [{name: parameter for name, parameter in parameters if name in group} for group in groups]
    tensors, _ = ZeroEngine.around(engine, named).gather()
    if dist.get_rank() == 0:
        torch.save(tensors, Path(output, "loaded.pt"))


def sft(stage: int, run: str, output: str) -> list[float]:
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            names, decaying = [name for name, _ in model.named_parameters()], trainer.get_decay_parameter_names(model)
            note(trainer.model_wrapped, [decaying, set(names) - set(decaying)], output)

    (step,) = Path(run).glob("checkpoint-*")
    zero = {"stage": stage}
    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    args = SFTConfig(
        output_dir=output,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        learning_rate=1e-3,
        bf16=True,
        use_cpu=True,
        deepspeed={"zero_optimization": zero, "bf16": {"enabled": "auto"}, **batch},
        disable_tqdm=True,
        report_to="none",
    )
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}."}] for n in range(24)]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(step), dtype=torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"messages": messages} for messages in turns]),
        processing_class=AutoTokenizer.from_pretrained(step),
        callbacks=[Noting()],
    )
    trainer.train(resume_from_checkpoint=ckpt.resume(run))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line and line["step"] > 2]


def accelerated(what: str, stage: int, run: str, output: str) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import set_seed

    PartialState(cpu=True)  # as Trainer does: `Accelerator(cpu=True)` doesn't use DeepSpeed
    set_seed(0)
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    rows = torch.utils.data.TensorDataset(torch.randn(24, 7), torch.randn(24, 5))
    loader = torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    every = [[name for name, _ in model.named_parameters()]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if what == "load":
        accelerator.load_state(ckpt.resume(f"{run}/step_2"))
        loader = accelerator.skip_first_batches(loader, 2)
        note(model, every, output)
    losses = []
    for number, (inputs, targets) in enumerate(loader):
        if what == "save" and number == 2:
            accelerator.save_state(f"{run}/step_2")
            note(model, every, output)
        loss = (model(inputs.bfloat16()).float() - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses[-2:]
