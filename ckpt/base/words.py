"""Messages name options as the command line has them; this says them as Python has them."""

from __future__ import annotations

import re

#: Options that take no value, and all others that messages name; other programs' options stay as they are.
_FLAGS = (
    "accept-base all bytes cast create-pr dequantize exact flat-optimizer missing-ok model-only overwrite private push "
    "qlora restart run tensors values verify"
)
_OPTIONS = (
    "accept-setting adapter-slot adapter-weights atol base batch-size combination commit-message config density dtype "
    "ep ep-size etp expert-layout from-a from-b fsdp-version lora-r lora-target-modules make-vocab-size-divisible-by "
    "master-dtype max-memory max-shard-size names only optimizer optimizer-dtype output picture pp recompute-modules "
    "replica repo-id revision rtol run-config seed seq-len tag tag-a tag-b tp vpp workers world-size"
)
#: Where a function's parameter has another name.
_OTHERWISE = {"accept-setting": "accept_settings", "all": "everything", "bytes": "every_byte"}
_VALUE = r"\d+:\w+:[\w.]+|own|hub|peft|unsloth|keep|fp32|bf16|fp16|weights|[\w.-]*\d[\w.-]*"
_NAMED = re.compile(
    rf"`ckpt (?P<command>[\w-]+) --help`|`[^`]*`|(?<![\w-])(?:(?P<place>-o\b)"
    rf"|--(?P<flag>{_FLAGS.replace(' ', '|')})(?![\w-])"
    rf"|--(?P<name>{_OPTIONS.replace(' ', '|')})(?![\w-])(?: (?P<value>{_VALUE})(?![\w-]))?)"
)


def in_python(text: str) -> str:
    """`text` with options as keywords: `--dequantize` is `dequantize=True`, and `--tp 2` is `tp=2`."""
    return _NAMED.sub(_keyword, text)


def _keyword(found: re.Match[str]) -> str:
    if command := found["command"]:
        return f"help(ckpt.{command.replace('-', '_')})"
    if found["place"]:
        return "output"
    if flag := found["flag"]:
        return f"{_OTHERWISE.get(flag, flag).replace('-', '_')}=True"
    if not (option := found["name"]):
        return found[0]  # a command in backticks
    name = _OTHERWISE.get(option, option).replace("-", "_")
    value = found["value"]
    return name if value is None else f"{name}={value if value.isdecimal() else repr(value)}"
