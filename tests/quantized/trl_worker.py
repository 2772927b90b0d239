"""Fine-tuning of a released gpt-oss by TRL: `python -m tests.quantized.trl_worker FOLDER`.

FOLDER has the released model (`released`) and its plain values (`plain`). Each is trained in bf16 and saved as
`NAME-tuned`, with the trained model's logits in `NAME-logits.safetensors`.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: Trained parameters. One expert is frozen.
EXPERTS, ATTENTION = "model.layers.1.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight"
FROZEN_EXPERT = 1
TOKENS = [list(range(24)), list(range(24, 48))]


def main() -> None:
    folder = Path(sys.argv[1])
    for name in ("released", "plain"):
        tune(folder, name)


def tune(folder: Path, name: str) -> None:
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
    from trl import SFTConfig, SFTTrainer

    how = {"quantization_config": Mxfp4Config(dequantize=True)} if name == "released" else {}
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16, **how)
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad = fqn in (EXPERTS, ATTENTION)
    mask = torch.arange(model.config.num_local_experts)[:, None, None] != FROZEN_EXPERT
    model.get_parameter(EXPERTS).register_hook(lambda gradient: gradient * mask)
    args = SFTConfig(
        output_dir=str(folder / f"{name}-tuned"),
        max_steps=3,
        learning_rate=1e-2,
        max_length=64,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}."}] for n in range(24)]
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"messages": messages} for messages in turns]),
        processing_class=AutoTokenizer.from_pretrained(folder / name),
    )
    trainer.train()
    trainer.save_model()
    with torch.no_grad():
        logits = model.float().eval()(torch.tensor(TOKENS)).logits
    save_file({"logits": logits}, folder / f"{name}-logits.safetensors")


if __name__ == "__main__":
    main()
