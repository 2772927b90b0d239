"""Keys that describe the tokenizer in GGUF: a byte-level BPE in `tokenizer.json`.

llama.cpp names a tokenizer's way of splitting text, and computes with its own code for that name. The name follows from
the regular expression in `tokenizer.json` (`src/llama-vocab.cpp`). Any other expression is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import LossError, NotFoundError
from ckpt.move.json_files import read_json

FILE = "tokenizer.json"
_MAX = 256 << 20
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_START = r"[^\r\n\p{L}\p{N}]?"
#: llama.cpp's name for each expression that splits text.
_SPLITS = {
    _WORD + r"\p{N}{1,3}" + _END: "llama-bpe",
    _WORD + r"\p{N}" + _END: "qwen2",
    f"{_START}[{_UPPER}]*[{_LOWER}]+{_SUFFIX}{_START}[{_UPPER}]+[{_LOWER}]*{_SUFFIX}"
    r"\p{N}{1,3}" + _END.replace(r"[\r\n]*", r"[\r\n/]*"): "gpt-4o",
}
#: llama.cpp's types of tokens.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
#: Added tokens that llama.cpp takes for control tokens even if they are not marked as special.
_CONTROL_NAMES = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_CONTROL_FORMS = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))


def tokenizer_folder(folders: tuple[str, ...], path: str) -> Path:
    """Return the nearest folder with a `tokenizer.json`. Raise NotFoundError if there is none."""
    for one in map(Path, folders):
        folder = one.parent if one.is_file() else one
        if (folder / FILE).is_file():
            return folder
    raise NotFoundError(
        "GGUF holds the tokenizer, and there is none next to the model",
        path=path,
        expected=FILE,
        hint="give the folder or Hub name of the base model with --config",
    )


def add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Add the tokenizer in `folder` to a `gguf.GGUFWriter`. Raise LossError if llama.cpp has no name for it."""
    from converters.gguf.package import package

    found = read_json(folder / FILE, max_bytes=_MAX)
    kind = found.get("model", {}).get("type")
    if kind != "BPE" or found["model"].get("byte_fallback"):
        raise LossError(
            "only byte-level BPE tokenizers are written to GGUF",
            path=folder / FILE,
            expected="BPE",
            found=f"{kind} with byte_fallback" if kind == "BPE" else str(kind),
            hint="convert to hf first, and run llama.cpp's convert_hf_to_gguf.py on the result",
        )
    texts, types = _tokens(found, vocab_size, folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(found.get("pre_tokenizer"), folder))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    package().SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)


def _splitting(pre_tokenizer: Any, folder: Path) -> str:
    found = list(_expressions(pre_tokenizer))
    if len(found) == 1 and found[0] in _SPLITS:
        return _SPLITS[found[0]]
    raise LossError(
        "llama.cpp's name for this tokenizer's way of splitting text is not known",
        path=folder / FILE,
        expected="the expression of " + ", ".join(_SPLITS.values()),
        found=" and ".join(map(repr, found)) or "no expression",
        hint="convert to hf first, and run llama.cpp's convert_hf_to_gguf.py on the result",
    )


def _expressions(pre_tokenizer: Any) -> Iterator[str]:
    """Yield the regular expressions of a pre-tokenizer and the ones inside it."""
    if not isinstance(pre_tokenizer, Mapping):
        return
    pattern = pre_tokenizer.get("pattern")
    if isinstance(pattern, Mapping):
        yield str(pattern.get("Regex", pattern))
    if pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True):
        yield "ByteLevel's own"
    for one in pre_tokenizer.get("pretokenizers", ()):
        yield from _expressions(one)


def _tokens(found: Mapping[str, Any], vocab_size: int, folder: Path) -> tuple[list[str], list[int]]:
    """Return the text and type of each token, with unused ones up to `vocab_size`."""
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    added = {one["id"]: one for one in found.get("added_tokens", ())}
    listed = {**{number: text for text, number in found["model"]["vocab"].items()}}
    listed |= {number: one["content"] for number, one in added.items()}
    if listed and max(listed) >= vocab_size:
        raise LossError(
            "the tokenizer has more tokens than the model",
            path=folder / FILE,
            expected=f"ids below {vocab_size}, the config's vocab_size",
            found=f"id {max(listed)}",
        )
    for number, text in listed.items():
        texts[number], types[number] = text, _NORMAL
        if (one := added.get(number)) is not None:
            is_control = one.get("special") or _looks_like_control(text)
            types[number] = _CONTROL if is_control else _USER_DEFINED
            texts[number] = text if is_control else text.replace("▁", " ")
    return texts, types


def _looks_like_control(text: str) -> bool:
    return text in _CONTROL_NAMES or any(text.startswith(a) and text.endswith(b) for a, b in _CONTROL_FORMS)
