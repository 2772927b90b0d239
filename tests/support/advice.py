"""Kinds of hints without a command or option, each with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Hints without a testable action: `phrases` are regular expressions to match a hint, `reason` says why."""

    name: str
    reason: str
    phrases: tuple[str, ...]


KINDS = (
    Kind(
        "install",
        "The test environment must not change.",
        (
            r"\bpip install\b",
            r"\bapt-get install\b",
            r"\bon a machine with more memory\b",
            r"\b(?:update|uninstall) (?:it|that package|the package|one of)\b",
        ),
    ),
    Kind(
        "help",
        "The help of a command lists all options. tests/support/hints.py runs a command in backticks.",
        (r"\bhelp\(ckpt\.\w+\)",),
    ),
    Kind(
        "another program",
        "The command or the function belongs to another program.",
        (
            r"`(?:hf|git|aws|mkdir|fusermount3|gsutil|gcloud|llama-quantize|gguf-convert-endian) [^`]*`",
            r"\bhf download \S+",
            r"\b(?:load|save|have|train|fetch|merge)\b.* with (?:[A-Z]\w+|the |a newer |torch\b|orbax|megatron)",
            r"\bload and save the model with transformers\b",
            r"\b(?:load|save|saved?) (?:it|them|the|each)\b.*\b(?:torch|orbax|Megatron|megatron-core|safetensors)\b",
            r"\btorch\.save\(|\bmerge_and_unload\b|\bPeftModel\b|\bsave_pretrained\(|\bmlx_lm\.fuse\b|\bllm\.export_ckpt",
            r"\bconsolidate_safetensors_files_on_every_rank\b",
            r"\bload it with the script that trained it\b|\bmerge the adapter where it was trained\b",
            r"\bMegatron-LM itself loads it\b|\bsave (?:it|them) with --no-save-optim\b",
            r"\bset stage3_gather_16bit_weights_on_model_save\b|\bStateDictOptions\(",
            r"\bwhich save_pretrained writes\b|\bdiffusers reads it\b|\btorchtune also saves it\b",
            r"\bhave the script that trained it save\b|\btrain with(?:out)?\b|\bparallel-size\b",
            r"\bload the file with \w+, only if you trust\b|\bon a little-endian machine\b",
            r"\bsave with Megatron-LM\b|\bHub's config\.json of the model\b",
            r"\bconvert it with GPT-NeoX's\b|\bolmo_core\.nn\.hf\.save_hf_model\b",
            r"\bmodel\.to_empty\(|\bmpirun -x\b|\bcall ckpt\.resume after\b",
        ),
    ),
    Kind(
        "copy again",
        "The data is not in the test: it has to be copied, fetched or saved again.",
        (
            r"\b(?:copy|fetch|download|push|save) (?:the folder|the whole folder|it|or copy|the files)\b",
            r"\bkeep the run on shared storage\b|\bfill it before it is sharded\b",
            r"\bcopied (?:completely|only in part)\b|\bonly part of it was copied\b|\bwas one copied over\b",
            r"\bfetch or save it again\b",
            r"\ba sharded state dict has it\b|\bit still has them$",
        ),
    ),
    Kind(
        "wait",
        "Another process or device has to do something first.",
        (
            r"\bwait (?:for it|until)\b|\bstart again\b|\bis (?:a run|the disk)\b|\bgoes on from what is done\b",
            r"\bcheck that every process runs this command\b|\bstart the same command everywhere\b",
            r"\bsame options, and the same\b",
        ),
    ),
    Kind(
        "files by hand",
        "The user has to decide about files that belong to somebody: a test must not guess.",
        (
            r"\b(?:move|remove|rename|replace|write|correct|set) (?:it|them|those|the|that|one|this)\b",
            r"\bif you trust it\b|\bdamaged since; remove \S+|\bset its vocab_size to\b|\bin their command's table\b",
            r"\bremove entries that change nothing\b",
            r"^write \"\w+\"",
        ),
    ),
    Kind(
        "value to give",
        "The user alone knows the value. The option has to exist on the command.",
        (
            r"(?:^|\W)(?:--[a-z-]+|[a-z]+(?:_[a-z]+)*) (?:says|takes|names) ",
            r"`ckpt [^`]* [A-Z]{3,}[^`]*`|--[a-z-]+ [A-Z][A-Z/_]+|[a-z_]+='[A-Z/_]+'|=N\b|--[a-z-]+ N\b|:ALPHA\b|hf://",
            r"\bgive (?:the|a|an|another|one|it) \S.*(?:--[a-z-]+|\b(?:base|config|output|repo_id)\b)",
        ),
    ),
    Kind(
        "another source",
        "The user alone knows the path of the other checkpoint.",
        (
            r"\bgive (?:the|a|an|one|another|only|local)\b",
            r"\b(?:take|convert) (?:the|that|this|a) \S+",
            r"\bwas trained on\b",
            r"\bthe manifest has the digests\b",
        ),
    ),
    Kind(
        "push goes on",
        "The command talks to a server. tests/hub runs it again by hand.",
        (
            r"`ckpt push [^`]*` continues",
            r"\bpush again\b",
            r"^convert to a local folder",
            r"^leave out (?:--)?revision or (?:--)?create.pr$",
        ),
    ),
    Kind(
        "larger change of the command",
        "The words to change are not one option: another format, a place, or a value among many.",
        (
            r"\bconvert (?:to hf first|each model with the same options)\b",
            r"\b(?:the format|formats?) `?[\w-]+",
            r"^hf, full and dcp hold\b|^give its full name$|\bthe first argument, as in\b",
            r"\bgive that folder$|^give \S+\.(?:svg|html)$",
            r"^for example ckpt convert\b|^ckpt convert \S+ \S+|^\d+GB or\b|^-o$",
            r"\bchoose another place\b|\bgive a local path without\b|^fewer workers\b|, writes elsewhere$",
            r"^check the path; give a Hub model as ORG/NAME$",
            r"^use another (?:--)?pp or (?:--)?vpp|^(?:--)?pp times (?:--)?vpp must",
            r"^without them, one adapter is merged after the other$|^keep the ep_size of the source\b",
            r"\bmerge_lora PATH|`ckpt merge-lora PATH`|^the adapter of .* fits: ckpt merge-lora\b",
            r"\bleave [a-z_]+(?:=True)? out\b",
        ),
    ),
    Kind(
        "serve",
        "The command serves a folder until it is unmounted.",
        (r"--foreground\b",),
    ),
    Kind(
        "fact",
        "It explains the refusal; there is nothing to do with this source.",
        (
            r"^DeepSpeed before [\d.]+ saved no\b|^PEFT (?:before [\d-]+ stored|does not merge)\b",
            r"^see the red parts in",
            r"^the file is (?:truncated|of another save)\b|^wait until it has finished\b",
        ),
    ),
    Kind("question", "It names what the user has to look at.", (r"\?$", r"\?; ", r"^check ")),
)


def kind(hint: str) -> str | None:
    """Return the name of the first matching kind, or None if the hint is of no known kind."""
    return next((one.name for one in KINDS if any(re.search(phrase, hint) for phrase in one.phrases)), None)
