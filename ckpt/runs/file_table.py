"""Names of files next to tensors: their writers, their kinds, and their use in commands.

Facts: transformers (trainer.py, `_save_rng_state`), accelerate (utils/constants.py, `checkpointing.py`), Lightning
(strategies/fsdp.py), Megatron-LM and Megatron-Bridge (training/checkpointing.py in both), torch/utils/tensorboard.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import NamedTuple

from ckpt.runs.steps import RECORDS, TRAINER_STATE

TRAINING_ARGS = "training_args.bin"
GENERATION = "generation_config.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
TENSOR_SUFFIXES = (".safetensors", ".distcp", *TORCH_SUFFIXES)


class FileKind(Enum):
    TOKENIZER = "copied next to every model"
    PROCESSOR = "copied next to every model, like a tokenizer"
    GENERATION = "copied next to every model; its settings are checked"
    QUANTIZATION = "copied next to quantized weights"
    ADAPTER = "copied into a training step; read as an adapter's config"
    SCRIPT = "copied into a training step for DeepSpeed"
    RUN = "state of the whole run: copied into a training step"
    RANK = "state of one rank: copied into a training step that has the rank"
    OPTIMIZER = "read, and written in the target's own form"
    RECORD = "read to find the step; never copied"
    WEIGHTS = "read; a second copy next to a step is reported"
    DATA_POSITION = "never read; reported in a checkpoint's own folder"
    COUNTER = "never read; always reported"
    FOREIGN = "another program's form of the model: never read; always reported"
    LOG = "never read or reported"


TRAINING_STATE = (FileKind.RUN, FileKind.RANK, FileKind.OPTIMIZER)


class KnownFile(NamedTuple):
    """Files whose names match a shell-style pattern."""

    pattern: str
    writer: str
    kind: FileKind


FILES = tuple(
    KnownFile(pattern, writer, kind)
    for kind, writer, patterns in (
        (FileKind.TOKENIZER, "transformers", "tokenizer.json tokenizer_config.json special_tokens_map.json"),
        (FileKind.TOKENIZER, "transformers", "added_tokens.json vocab.json vocab.txt merges.txt *.tiktoken"),
        (FileKind.TOKENIZER, "SentencePiece", "tokenizer.model spiece.model sentencepiece.bpe.model"),
        (FileKind.TOKENIZER, "transformers", "chat_template.jinja chat_template.json"),
        (FileKind.PROCESSOR, "transformers", "preprocessor_config.json processor_config.json"),
        (FileKind.PROCESSOR, "transformers", "image_processor_config.json video_preprocessor_config.json"),
        (FileKind.PROCESSOR, "LeRobot", "policy_preprocessor.json policy_postprocessor.json train_config.json"),
        (
            FileKind.PROCESSOR,
            "LeRobot",
            "policy_preprocessor_step_*.safetensors policy_postprocessor_step_*.safetensors",
        ),
        (FileKind.GENERATION, "transformers", GENERATION),
        (FileKind.QUANTIZATION, "modelopt", "hf_quant_config.json"),
        (FileKind.QUANTIZATION, "gptq", "quantize_config.json"),
        (FileKind.QUANTIZATION, "awq", "quant_config.json"),
        (FileKind.ADAPTER, "PEFT", "adapter_config.json"),
        (FileKind.SCRIPT, "DeepSpeed", "zero_to_fp32.py zero_to_torch.py"),
        (FileKind.RUN, "HF Trainer", f"{TRAINER_STATE} {TRAINING_ARGS}"),
        (FileKind.RUN, "HF Trainer, Accelerate", "scheduler*.pt scheduler*.bin scaler*.pt"),
        (FileKind.RUN, "Accelerate", "sampler*.bin dl_state_dict*.bin custom_checkpoint_*.pkl"),
        (FileKind.RUN, "Lightning, next to DCP files", "meta.pt"),
        (FileKind.RANK, "HF Trainer", "rng_state*.pth"),
        (FileKind.RANK, "Accelerate", "random_states_*.pkl"),
        (FileKind.OPTIMIZER, "HF Trainer, Accelerate", "optimizer.pt optimizer.bin"),
        (FileKind.RECORD, "DeepSpeed, Megatron-LM, verl, SkyRL", " ".join(RECORDS)),
        (FileKind.WEIGHTS, "transformers", "model*.safetensors model.safetensors.index.json pytorch_model*.bin"),
        (FileKind.WEIGHTS, "PEFT", "adapter_model.*"),
        (FileKind.DATA_POSITION, "verl, EasyR1", "data.pt dataloader*.pt"),
        (FileKind.COUNTER, "Megatron-LM, Megatron-Bridge", "train_dataloader_dprank*.pt *train_state.pt"),
        (FileKind.FOREIGN, "other programs", "*.gguf *.h5 *.msgpack *.onnx *.onnx_data *.tflite rust_model.*"),
        (FileKind.LOG, "TensorBoard", "events.out.tfevents.*"),
        (FileKind.LOG, "slime, rank 0's random state", "rng.pt"),
    )
    for pattern in patterns.split()
)


@cache
def patterns_of(*kinds: FileKind) -> tuple[str, ...]:
    return tuple(file.pattern for file in FILES if file.kind in kinds)


def is_of(name: str, *kinds: FileKind) -> bool:
    return fits(name, patterns_of(*kinds))


def fits(name: str, patterns: Iterable[str]) -> bool:
    return _joined(tuple(patterns)).fullmatch(name) is not None


@cache
def _joined(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)))
