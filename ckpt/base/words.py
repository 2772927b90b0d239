"""Python spellings for command-line options in messages."""

from __future__ import annotations

import re

#: Flags, and options with a value. `tests/api/test_functions.py` compares both with the commands.
_FLAGS = (
    "accept-base account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split activation-offload all "
    "as-peft bytes cast check create-pr dequantize eager-attention exact flat-optimizer fused-cross-entropy loads "
    "manifest missing-ok model-only no-sequence-parallel offload-optimizer offload-param overwrite private pure push "
    "qlora restart run tensors values verify whole-run"
)
_OPTIONS = (
    "accept-setting adapter-slot adapter-weights atol base batch-size ckpt-format combination commit-message "
    "complete-from config cp decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers density ds-config "
    "dtype ep ep-size etp expert-layout format from-a from-b fsdp-version gpu-memory gpus ignore-file lora-r "
    "lora-target-modules make-vocab-size-divisible-by master-dtype max-memory max-shard-size mesh-device names only "
    "optimizer optimizer-dtype output peft-version picture pipeline-model-parallel-layout pp recompute-modules replica "
    "repo-id revision rtol run-config seed seq-len server state-dtype step step-a step-b step-folder strategy tag "
    "tag-a tag-b tensor to tp transformer-impl vpp workers world-size"
)
#: Options with a different parameter name.
_OTHERWISE = {
    "accept-setting": "accept_settings",
    "all": "everything",
    "bytes": "every_byte",
    "ignore-file": "ignore_files",
    "step": "tag",
    "step-a": "tag_a",
    "step-b": "tag_b",
}
#: Parameters that take a list.
_LISTS = ("accept-setting", "ignore-file")
#: Options with free text, and words that can't be their value.
_FREE = "accept-setting ignore-file step step-a step-b tag tag-a tag-b"
_WORDS = "and|ignores?|is|leaves?|merges|names|of|or|says|takes?|which"
_VALUE = r"\d+:\w+:[\w.]+|own|hub|peft|unsloth|keep|fp32|bf16|fp16|weights|torch_dist|torch|[\w.-]*\d[\w.-]*"
_TO_FILL_IN = r"[A-Z][A-Z_/]+(?![\w/])|N\b"
_NAMED = re.compile(
    rf"`ckpt (?P<command>[\w-]+) --help`"
    rf"|`(?!--?[a-z]|[\s,.;:)])[^`]*`"
    rf"|(?<![\w-])(?:-o (?P<folder>'[^']*'|[^\s`]*/[^\s`]*)|(?P<place>-o\b)"
    rf"|--(?P<flag>{_FLAGS.replace(' ', '|')})(?![\w-])"
    rf"|--(?P<free>{_FREE.replace(' ', '|')}) (?P<any>'[^']*'|(?!(?:{_WORDS})\b)[^\s`;,]+)"
    rf"|--(?P<name>{_OPTIONS.replace(' ', '|')})(?![\w-])(?: (?P<value>{_VALUE}|{_TO_FILL_IN})(?![\w-]))?)"
)
_TWO_LISTS = re.compile(r"(\w+)=\[([^]]*)\] \1=\[")
#: Words before an option that mark another program's option.
_OTHER_PROGRAM = re.compile(r"(?:\bMegatron-(?:LM|Bridge)\b|\bcontainer: |\bmegatron-core\b)[^;]*$")


def in_python(text: str) -> str:
    """Return `text` with keywords in place of options: `dequantize=True` for `--dequantize`, `tp=2` for `--tp 2`."""
    said = _NAMED.sub(_keyword, text)
    while (joined := _TWO_LISTS.sub(r"\1=[\2, ", said)) != said:
        said = joined
    return said


def _keyword(found: re.Match[str]) -> str:
    if command := found["command"]:
        return f"help(ckpt.{command.replace('-', '_')})"
    if _OTHER_PROGRAM.search(found.string[: found.start()]):
        return found[0]
    if folder := found["folder"]:
        return f"output={_unquoted(folder)!r}"
    if found["place"]:
        return "output"
    if flag := found["flag"]:
        return f"{_OTHERWISE.get(flag, flag).replace('-', '_')}=True"
    if option := found["free"]:
        value = repr(_unquoted(found["any"]))
        return f"{_keyword_for(option)}={f'[{value}]' if option in _LISTS else value}"
    if not (option := found["name"]):
        return found[0]  # a command in backticks
    value = found["value"]
    if value is None:
        return _keyword_for(option)
    return f"{_keyword_for(option)}={value if value.isdecimal() or value == 'N' else repr(value)}"


def _keyword_for(option: str) -> str:
    return _OTHERWISE.get(option, option).replace("-", "_")


def _unquoted(value: str) -> str:
    return value[1:-1] if value.startswith("'") else value
