"""Train a tiny Llama with HF Trainer under ZeRO-3, from a checkpoint if you give one.

torchrun --nproc-per-node 4 finetune.py outputs
torchrun --nproc-per-node 2 finetune.py outputs-2 outputs-2/checkpoint-4
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
args = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=8,
    save_steps=4,
    logging_steps=1,
    per_device_train_batch_size=24 // int(os.environ["WORLD_SIZE"]),  # 24 rows per step on any number of GPUs
    learning_rate=1e-2,
    bf16=True,
    deepspeed={
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    },
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
)
starts, strides = torch.randint(97, (2, 120, 1))
rows = (starts + strides * torch.arange(16)) % 97
shape = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train(resume_from_checkpoint=sys.argv[2] if len(sys.argv) > 2 else None)
