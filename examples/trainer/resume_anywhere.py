"""Train a tiny Llama with HF Trainer under ZeRO or FSDP2, and resume on any number of GPUs.

torchrun --nproc-per-node 4 resume_anywhere.py zero3 outputs
torchrun --nproc-per-node 2 resume_anywhere.py fsdp2 outputs
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ckpt

engine, outputs = sys.argv[1:]
deepspeed = {
    "zero_optimization": {"stage": int(engine[-1])},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}
set_seed(0)
args = TrainingArguments(
    output_dir=outputs,
    max_steps=8,
    save_steps=2,
    logging_steps=1,
    per_device_train_batch_size=24 // int(os.environ["WORLD_SIZE"]),  # 24 rows per step on any number of GPUs
    learning_rate=1e-2,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
    **({"fsdp": True, "fsdp_config": fsdp} if engine == "fsdp2" else {"deepspeed": deepspeed}),
)
starts, strides = torch.randint(97, (2, 120, 1))
rows = (starts + strides * torch.arange(16)) % 97
shape = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train(resume_from_checkpoint=ckpt.resume(outputs, missing_ok=True))
