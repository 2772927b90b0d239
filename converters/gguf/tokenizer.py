"""Keys that describe the tokenizer in GGUF: byte-level BPE in `tokenizer.json`, or SentencePiece in `tokenizer.model`.

llama.cpp names a BPE tokenizer's way of splitting text, and has its own code for each name. The name follows from the
regular expression in `tokenizer.json` (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.base.errors import LossError, NotFoundError
from ckpt.base.words import Message
from ckpt.move.json_files import read_json
from converters.gguf import sentencepiece
from converters.gguf.package import package

FILE, _SETTINGS, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
#: Architectures whose converter looks for a SentencePiece model first.
_WITH_SENTENCEPIECE = ("llama", "qwen2", "qwen3", "gemma")
OTHER_WAY = "convert to hf first, and run llama.cpp's convert_hf_to_gguf.py on the result"
#: End-of-turn tokens for every gemma, and for a llama with CodeLlama's vocabulary.
_EOT_OF_GEMMA, _EOT_OF_CODE_LLAMA = 107, 32010
_MAX = 256 << 20
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_START = r"[^\r\n\p{L}\p{N}]?"
#: llama.cpp's name for each expression.
_SPLITS = {
    _WORD + r"\p{N}{1,3}" + _END: "llama-bpe",
    _WORD + r"\p{N}" + _END: "qwen2",
    f"{_START}[{_UPPER}]*[{_LOWER}]+{_SUFFIX}{_START}[{_UPPER}]+[{_LOWER}]*{_SUFFIX}"
    r"\p{N}{1,3}" + _END.replace(r"[\r\n]*", r"[\r\n/]*"): "gpt-4o",
}
#: llama.cpp takes a whole word if it is a token.
_IGNORE_MERGES = ("llama-bpe",)
#: Behaviour and inversion of splits whose words are the expression's matches.
_WHOLE_WORDS = (("Isolated", False), ("Removed", True))


class _Token(NamedTuple):
    """Token with SentencePiece's type number."""

    text: str
    score: float
    type: int


#: Control tokens in llama.cpp even if not marked as special.
_CONTROL_NAMES = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_CONTROL_FORMS = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))


def tokenizer_folder(folders: tuple[str, ...], path: str) -> Path:
    """Find the nearest tokenizer. Raise NotFoundError if there is none."""
    for one in map(Path, folders):
        folder = one.parent if one.is_file() else one
        if any((folder / name).is_file() for name in (FILE, sentencepiece.FILE)):
            return folder
    raise NotFoundError(
        "GGUF holds the tokenizer, and there is none next to the model",
        path=path,
        expected=f"{FILE} or {sentencepiece.FILE}",
        hint=Message("give the folder or Hub name of the base model with {config}"),
    )


def add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any], arch: str) -> None:
    """Raise LossError if llama.cpp has no name for the tokenizer."""
    settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
    size = int(config["vocab_size"])
    if arch == "llama" and settings.get("add_prefix_space") is not None:
        writer.add_add_space_prefix(settings["add_prefix_space"])
    if (folder / sentencepiece.FILE).is_file() and arch in _WITH_SENTENCEPIECE:
        _add_sentencepiece(writer, folder, settings, size)
    elif arch == "gemma":
        raise NotFoundError("llama.cpp needs gemma's SentencePiece model", path=folder, expected=sentencepiece.FILE)
    else:
        _add_bpe(writer, folder, size)
    is_code_llama = arch == "llama" and size == 32016
    if arch == "gemma" or is_code_llama:
        found = package().SpecialVocab(folder, special_token_types=["eot"]).special_token_ids
        writer.add_eot_token_id(found.get("eot", _EOT_OF_CODE_LLAMA if is_code_llama else _EOT_OF_GEMMA))
    if arch == "gemma":
        writer.add_add_space_prefix(False)
    if arch == "llama" and size == 49152:  # granite's
        writer.add_add_bos_token(False)


def _add_bpe(writer: Any, folder: Path, vocab_size: int) -> None:
    found = read_json(folder / FILE, max_bytes=_MAX) if (folder / FILE).is_file() else {}
    kind = found.get("model", {}).get("type")
    if kind != "BPE" or found["model"].get("byte_fallback"):
        raise LossError(
            "only byte-level BPE and SentencePiece tokenizers are written to GGUF",
            path=folder / FILE,
            expected=f"BPE, or {sentencepiece.FILE} next to it",
            found=f"{kind} with byte_fallback" if kind == "BPE" else str(kind),
            hint=OTHER_WAY,
        )
    texts, types = _tokens(found, vocab_size, folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(found, folder))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    vocabulary = package().SpecialVocab(folder, load_merges=True)
    processor = found.get("post_processor") or {}
    if any(one.get("type") == "ByteLevel" for one in processor.get("processors", [processor])):
        for name in ("bos", "eos"):  # as in gguf packages after 0.19.0; llama.cpp's own defaults differ
            vocabulary.add_special_token.setdefault(name, False)
    vocabulary.add_to_gguf(writer, quiet=True)


def _add_sentencepiece(writer: Any, folder: Path, settings: Mapping[str, Any], vocab_size: int) -> None:
    tokens = [_Token(f"[PAD{number}]", -10000.0, sentencepiece.UNUSED) for number in range(vocab_size)]
    pieces = dict(enumerate(sentencepiece.read_pieces(folder / sentencepiece.FILE)))
    _check_numbers(pieces, vocab_size, folder)
    for number, piece in pieces.items():
        kind = sentencepiece.NORMAL if piece.type == sentencepiece.USER_DEFINED else piece.type
        tokens[number] = _Token(piece.text, piece.score, kind)
    listed = read_json(folder / _ADDED) if (folder / _ADDED).is_file() else {}
    known_as = {number: _Token(text, -1000.0, sentencepiece.USER_DEFINED) for text, number in listed.items()}
    for number, one in settings.get("added_tokens_decoder", {}).items():
        text, kind = _added_token(one)
        known_as[int(number)] = _Token(text, -1000.0, kind)
    _check_numbers(known_as, vocab_size, folder)
    for number, token in known_as.items():
        tokens[number] = token
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([one.text for one in tokens])
    writer.add_token_scores([one.score for one in tokens])
    writer.add_token_types([one.type for one in tokens])
    package().SpecialVocab(folder, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _splitting(tokenizer: Mapping[str, Any], folder: Path) -> str:
    steps = [one for step in ("normalizer", "pre_tokenizer") for one in _steps(tokenizer.get(step))]
    expressions = [text for text in map(_expression, steps) if text != ""]
    name = _SPLITS.get(str(expressions[0])) if len(expressions) == 1 else None
    if name is None:
        raise LossError(
            "llama.cpp's name for this tokenizer's way of splitting text is not known",
            path=folder / FILE,
            expected="the expression of " + ", ".join(_SPLITS.values()),
            found=" and ".join(str(one) for one in steps) or "no expression",
            hint=OTHER_WAY,
        )
    ignores = bool(tokenizer["model"].get("ignore_merges"))
    if ignores != (name in _IGNORE_MERGES) and (text := _unmerged(tokenizer)) is not None:
        raise LossError(
            "llama.cpp would split a token that the tokenizer keeps, or keep one that it splits",
            path=folder / FILE,
            expected=f"ignore_merges {name in _IGNORE_MERGES}, as llama.cpp has it for {name}",
            found=f"ignore_merges {ignores}, and the token {text!r} is no result of merges",
            hint=OTHER_WAY,
        )
    return name


def _steps(found: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(found, Mapping):
        inside = found.get("pretokenizers", found.get("normalizers"))
        for one in [found] if inside is None else inside:
            yield from [found] if one is found else _steps(one)


def _expression(step: Mapping[str, Any]) -> str | None:
    """Return the expression that splits text, "" for a step that leaves words alone, and None for others."""
    if step.get("type") == "Split" and (step.get("behavior"), step.get("invert")) in _WHOLE_WORDS:
        pattern = step.get("pattern")
        return str(pattern.get("Regex")) if isinstance(pattern, Mapping) else None
    is_plain = step.get("type") == "ByteLevel" and not step.get("add_prefix_space") and step.get("use_regex") is False
    return "" if is_plain or step.get("type") == "NFC" else None


def _unmerged(tokenizer: Mapping[str, Any]) -> str | None:
    pairs = [tuple(one.split(" ") if isinstance(one, str) else one) for one in tokenizer["model"]["merges"]]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    added = {one["content"] for one in tokenizer.get("added_tokens", ())}
    for text in tokenizer["model"]["vocab"]:
        parts = [] if text in added else list(text)
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(parts)))
            if rank == len(ranks):
                return str(text)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return None


def _tokens(found: Mapping[str, Any], vocab_size: int, folder: Path) -> tuple[list[str], list[int]]:
    """Return texts and types, with unused tokens up to `vocab_size`."""
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [sentencepiece.UNUSED] * vocab_size
    added = {one["id"]: one for one in found.get("added_tokens", ())}
    listed = {**{number: text for text, number in found["model"]["vocab"].items()}}
    listed |= {number: one["content"] for number, one in added.items()}
    _check_numbers(listed, vocab_size, folder)
    for number, text in listed.items():
        texts[number], types[number] = text, sentencepiece.NORMAL
        if (one := added.get(number)) is not None:
            texts[number], types[number] = _added_token(one)
    return texts, types


def _check_numbers(tokens: Iterable[int], vocab_size: int, folder: Path) -> None:
    largest = max(tokens, default=-1)
    if largest >= vocab_size:
        raise LossError(
            "the tokenizer has more tokens than the model",
            path=folder,
            expected=f"ids below {vocab_size}, the config's vocab_size",
            found=f"id {largest}",
        )


def _added_token(one: Mapping[str, Any]) -> tuple[str, int]:
    """Return text and type. A plain token's spaces are real spaces."""
    text: str = one["content"]
    if one.get("special") or _looks_like_control(text):
        return text, sentencepiece.CONTROL
    return text.replace("▁", " "), sentencepiece.USER_DEFINED


def _looks_like_control(text: str) -> bool:
    return text in _CONTROL_NAMES or any(text.startswith(a) and text.endswith(b) for a, b in _CONTROL_FORMS)
