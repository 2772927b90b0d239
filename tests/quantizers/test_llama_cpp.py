"""`converters/gguf/metadata.py`, `names.py`, `quantize.py`, `tokenizer.py`, `write.py`: llama.cpp itself, as installed.

Its converter writes the same keys and tensors. Its engine chooses the same tokens as transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from converters.gguf.header import read_header
from fixtures.make_gguf import save_tokenizer
from tests.formats.gguf.test_gguf import tensors
from tests.quantized.test_dequantize import load
from tests.quantizers.llama_cpp import KINDS, split_of
from tests.support.places import REPOSITORY

pytestmark = pytest.mark.slow
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TIED, PARTIAL = {"tie_word_embeddings": True}, {"intermediate_size": 80}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    | {"norm_topk_prob": True},
    "gpt_oss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "gemma": {"head_dim": 32},
}
#: By name: architecture, dtype, changes. Rows of `PARTIAL` don't divide into blocks.
MODELS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    **{name: (name, BF16, {}) for name in ARCHITECTURES},
    "llama-sentencepiece": ("llama", BF16, {}),
    **{f"{name}-fp32": (name, F32, {}) for name in ("llama", "qwen3_moe", "gemma")},
    "qwen2-tied": ("qwen2", F32, TIED),
    "qwen3-tied": ("qwen3", F16, TIED),
    **{f"{name}-partial": (name, BF16, {**PARTIAL, "hidden_size": 96}) for name in ("llama", "qwen2", "qwen3")},
    "gemma-partial": ("gemma", BF16, PARTIAL),
}
SENTENCEPIECE = ("gemma", "gemma-fp32", "gemma-partial", "llama-sentencepiece")
#: Prompts with another token at some step: a tie between two experts of a router, and between two tokens.
TIES = {"gpt_oss": 1, "gemma": 1}
PROMPTS = [[start, start * 7 % 250 + 8, start * 11 % 250 + 8] for start in range(8, 248, 5)]
LENGTH = 16
#: Tokens at which llama.cpp stops.
ENDS = ("<|end|>", "<|endoftext|>", "<end_of_turn>", "<eos>", "</s>")


def save_sentencepiece(folder: Path) -> int:
    """Train and save a tokenizer like gemma's, and return the number of its tokens."""
    import sentencepiece

    text = ["the quick brown fox jumps over the lazy dog 123", "llama gemma qwen models of words"] * 40
    turns = ["<mask>", "<start_of_turn>", "<end_of_turn>"]
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "user_defined_symbols": turns}
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=file,
            vocab_size=330,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
            **ids,
        )
    special = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")}
    added = {str(4 + number): {"content": turn, "special": number > 0} for number, turn in enumerate(turns)}
    settings = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}
    settings |= {**special, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return 330


def save(name: str, folder: Path) -> Path:
    """Save a tiny model with random weights and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    model_type, dtype, changes = MODELS[name]
    if name in SENTENCEPIECE:
        count = save_sentencepiece(folder)
        tokens = {"vocab_size": count, "bos_token_id": 2, "eos_token_id": 1}
    else:
        count = save_tokenizer(folder, split_of(model_type)[0]) + 2
        tokens = {"vocab_size": count, "bos_token_id": count - 6, "eos_token_id": count - 5}
    config = AutoConfig.for_model(model_type, **{**SIZES, **ARCHITECTURES[model_type], **tokens, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.15)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with each model, and with its files by llama.cpp's converter."""
    home = tmp_path_factory.mktemp("models")
    folders = [save(name, home / name) for name in MODELS]
    command = [sys.executable, "-m", "tests.quantizers.llama_cpp", *map(str, folders)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return home


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_keys_and_tensors_equal_the_converters(name: str, kind: str, models: Path, tmp_path: Path) -> None:
    ckpt.convert(models / name, "gguf", tmp_path / "out", quantize=kind)
    ours, theirs = tmp_path / "out/model.gguf", models / f"{name}-{kind}.gguf"
    assert read_header(ours).metadata == read_header(theirs).metadata
    assert tensors(ours) == tensors(theirs)


def by_llama_cpp(file: Path) -> list[list[int]]:
    """Return the greedy tokens after each prompt, up to the end of a turn. The cache is in float32, too."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.sampling.temp = str(file), 0
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 128, 1, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity = 10  # its answers have the tokens
    server = xllamacpp.Server(params)
    asked = {"n_predict": LENGTH, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    answers = [server.handle_completions({"prompt": prompt, **asked}) for prompt in PROMPTS]
    return [one["__verbose"]["tokens"] for one in answers]


@pytest.mark.parametrize("name", [*ARCHITECTURES, "llama-sentencepiece"])
def test_greedy_tokens_equal_those_of_transformers(name: str, models: Path, tmp_path: Path) -> None:
    ckpt.convert(models / name, "gguf", tmp_path / "out", quantize="f32")
    file = tmp_path / "out/model.gguf"
    model, tokens = load(models / name, dtype=F32).eval(), torch.tensor(PROMPTS)
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    texts = read_header(file).metadata["tokenizer.ggml.tokens"]
    expected = []
    for row in tokens[:, len(PROMPTS[0]) :].tolist():
        stops = [number for number, token in enumerate(row) if texts[token] in ENDS]
        expected.append(row[: min(stops, default=LENGTH) + 1])
    found = by_llama_cpp(file)
    assert sum(map(len, expected)) > 0.8 * LENGTH * len(PROMPTS)
    differ = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert len(differ) == TIES.get(name, 0), differ
