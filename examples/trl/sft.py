"""Fine-tune with TRL: accelerate launch --config_file zero3.yaml sft.py --config qwen3-30b-a3b.yaml."""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
training.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
trainer = SFTTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=load_dataset(script.dataset_name, split="train"),
    peft_config=get_peft_config(model),
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
