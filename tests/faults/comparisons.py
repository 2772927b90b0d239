"""False claims from comparisons and from commands that load a model.

`verify` says equal, as the manifest says, as the adapter says, within the bound, loads; `doctor` says works.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import ckpt
from ckpt.compare.manifest import MANIFEST
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Layout
from tests.faults import claims
from tests.faults.claims import CAN_LOAD, RESUMES, TORN, WRITES, Lie, Maker, resumed
from tests.faults.samples import Sample
from tests.faults.tensor_files import Tensors, change
from tests.quantized.test_damaged_scales import (
    EVERY,
    OF_ANOTHER_LAYER,
    UNBOUNDED,
    broken,
    make,
    misvalued,
    not_finite,
    other_value,
)
from tests.quantized.test_parts import UNKNOWN_VALUES
from tests.support.model_files import merge_json

EQUAL, MANIFESTED, ADAPTED, LOADS = "equal", "as the manifest says", "as the adapter says", "loads"
#: `ckpt doctor`'s sentences, by the claim it checks.
_WORKS = {WRITES: "works: convert", RESUMES: "works: resume"}
_FORMATS = ("hf", "full", "dcp", "zero3", "universal")


def _lines(command: Callable[[], Any]) -> str:
    """Return a command's output, or "" if it ends with an error."""
    try:
        found = command()
    except CkptError:
        return ""
    return "\n".join(found.lines())


def _claim(sentence: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield `sentence` if a line in `text` begins or ends with it."""
    if re.search(rf"^{sentence}:|: {sentence}$", text, re.MULTILINE):
        yield sentence, text


# -- equal -------------------------------------------------------------------------------------------------------------
#: Changes to one element's bytes.
_ELEMENTS: dict[str, Callable[[bytes], bytes]] = {
    "lowest bit": lambda value: bytes([value[0] ^ 1]) + value[1:],
    "highest bit": lambda value: value[:-1] + bytes([value[-1] ^ 0x80]),
    "bit below the highest": lambda value: value[:-1] + bytes([value[-1] ^ 0x40]),
    "zero": lambda value: bytes(len(value)),
    "all ones": lambda value: b"\xff" * len(value),
    "all bits": lambda value: bytes(byte ^ 0xFF for byte in value),
}


def other_bits(sample: Sample, random: Random) -> Lie | None:
    """Change the bits of one tensor element in one file."""
    checkpoint = ckpt.open(sample.path)
    fragments_of = {
        key: [one for one in tensor.fragments() if one.extent.numel and os.path.isabs(one.extent.path)]
        for key, tensor in checkpoint.tensors.items()
        if tensor.dtype.name != "bool"
    }
    keys = [key for key, fragments in fragments_of.items() if fragments]
    if not keys:
        return None
    role = random.choice(sorted({role for _, role in keys}))
    key = random.choice([key for key in keys if key[1] == role])
    kind, fragments = random.choice([*_ELEMENTS]), fragments_of[key]
    extent = random.choice(fragments).extent
    index = [random.randrange(size) for size in extent.shape]
    at = extent.offset + extent.dtype.itemsize * int(np.dot(index, extent.strides))
    name = Path(extent.path).relative_to(sample.path)

    def do(run: Path) -> None:
        with open(run / name, "r+b") as file:
            file.seek(at)
            before = file.read(extent.dtype.itemsize)
            file.seek(at)
            after = _ELEMENTS[kind](before)
            file.write(after if after != before else _ELEMENTS["lowest bit"](before))

    def compared(run: Path) -> Iterator[tuple[str, str]]:
        yield from _claim(EQUAL, _lines(lambda: ckpt.verify(sample.path, run)))

    return Lie(
        f"{key}: {kind} in {name}", do, (EQUAL,), kind=f"{kind} of a {role}", claims=compared, truth=lambda run: None
    )


# -- the claim about the manifest --------------------------------------------------------------------------------------
FILES: dict[str, Callable[[Path, Random], object]] = {
    **{kind: (lambda file, _, tear=TORN[kind]: tear(file)) for kind in ("gone", "empty", "a folder")},
    "flipped bit": lambda file, random: _flip(file, random),
    "cut": lambda file, random: os.truncate(file, random.randrange(file.stat().st_size)),
    "longer": lambda file, random: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file, random: file.write_bytes(bytes(file.stat().st_size)),
}


def _flip(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def changed_outputs(sample: Sample, random: Random) -> Lie | None:
    """Replace a file in a conversion."""
    target, kind, seed = random.choice(_FORMATS), random.choice([*FILES]), random.randrange(1 << 30)
    try:
        conversion = ckpt.plan(sample.path, target)
    except CkptError:
        return None

    def write(run: Path) -> None:
        out = run.with_name("written")
        conversion.run(out)
        shutil.rmtree(run)
        out.rename(run)

    def do(run: Path) -> None:
        write(run)
        files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != MANIFEST]
        files = [path for path in files if path.stat().st_size]
        FILES[kind](Random(seed).choice(files), Random(seed))

    def checked(run: Path) -> Iterator[tuple[str, str]]:
        yield from _claim(MANIFESTED, _lines(lambda: ckpt.verify(run)))

    return Lie(
        f"as {target}: {kind}", do, (MANIFESTED,), kind=kind, claims=checked, truth=write, format=target, about=target
    )


# -- the claims about adapters and loading -----------------------------------------------------------------------------
@cache
def _models() -> Path:
    """Return a folder with a base, an adapter and PEFT's merge; each process makes it once."""
    import torch

    from tests.support.adapters import merge_by_peft, save_adapter, save_base

    folder = Path(tempfile.mkdtemp(prefix="faults-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    base = save_base("llama", torch.bfloat16, folder / "base")
    adapter = save_adapter(base, folder / "adapter", {"target_modules": ["q_proj", "down_proj"]})
    merge_by_peft(base, [adapter], folder / "merged")
    return folder


def _tensor(random: Random, tensors: Tensors, targets: bool) -> str:
    names = [name for name in sorted(tensors) if ("q_proj" in name or "down_proj" in name) is targets]
    return random.choice(names)


def _with_bit(tensors: Tensors, name: str) -> Tensors:
    import torch

    value = tensors[name].clone()
    value.view(torch.int16).view(-1)[0] ^= 1
    return {**tensors, name: value}


def _without(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key != name}


def _renamed(tensors: Tensors, name: str) -> Tensors:
    return {(f"{key}_" if key == name else key): value for key, value in tensors.items()}


_TENSORS: dict[str, Callable[[Tensors, Random], Tensors]] = {
    "bit of a target": lambda tensors, random: _with_bit(tensors, _tensor(random, tensors, True)),
    "bit of another tensor": lambda tensors, random: _with_bit(tensors, _tensor(random, tensors, False)),
    "tensor gone": lambda tensors, random: _without(tensors, random.choice(sorted(tensors))),
    "tensor renamed": lambda tensors, random: _renamed(tensors, random.choice(sorted(tensors))),
    "tensor of another shape": lambda tensors, random: _shorter(tensors, random.choice(sorted(tensors))),
    "tensor of another dtype": lambda tensors, random: _wider(tensors, random.choice(sorted(tensors))),
    "all zeros": lambda tensors, random: _zeros(tensors, _tensor(random, tensors, True)),
}


def _shorter(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: tensors[name][:-1].contiguous()}


def _wider(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: tensors[name].double()}


def _zeros(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: tensors[name] * 0}


def _model(run: Path, name: str) -> Path:
    shutil.rmtree(run)
    shutil.copytree(_models() / name, run)
    return run / "model.safetensors"


def other_merges(sample: Sample, random: Random) -> Lie:
    """Change a merged model so that it differs from its base with the adapter, in safetensors or another format."""
    kind = random.choice([*_TENSORS, "the base", "other scaling"])
    target, seed = random.choice(("hf", "full", "dcp")), random.randrange(1 << 30)
    base, adapter = _models() / "base", _models() / "adapter"

    def convert(run: Path) -> None:
        if target != "hf":
            out = run.with_name("written")
            ckpt.plan(run, target).run(out)
            shutil.rmtree(run)
            out.rename(run)

    def truth(run: Path) -> None:
        _model(run, "merged")
        convert(run)

    def do(run: Path) -> None:
        if kind in _TENSORS:
            change(_model(run, "merged"), lambda tensors: _TENSORS[kind](tensors, Random(seed)))
        else:
            _model(run, "base" if kind == "the base" else "merged")
        convert(run)

    def compared(run: Path) -> Iterator[tuple[str, str]]:
        used = adapter
        if kind == "other scaling" and (run.parent / "is a lie").exists():
            used = run.with_name("adapter")
            shutil.copytree(adapter, used)
            config = json.loads((used / "adapter_config.json").read_text())
            (used / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] + 1}))
        yield from _claim(ADAPTED, _lines(lambda: ckpt.verify_merge(base, run, [used])))

    def lie(run: Path) -> None:
        do(run)
        (run.parent / "is a lie").touch()

    return Lie(
        f"as {target}: {kind}", lie, (ADAPTED,), kind=kind, claims=compared, truth=truth, format=target, about=target
    )


_CONFIGS: dict[str, dict[str, Any]] = {
    "wider model": {"hidden_size": 96},
    "more layers": {"num_hidden_layers": 5},
    "other vocabulary": {"vocab_size": 77},
    "other MLP": {"intermediate_size": 200},
    "other size of heads": {"head_dim": 48},
}


def unloadable(sample: Sample, random: Random) -> Lie:
    """Change a model so that `from_pretrained` would load missing, unexpected or different tensors."""
    of_files = ("tensor gone", "tensor renamed", "tensor of another shape")
    kind, seed = random.choice([*of_files, *_CONFIGS]), random.randrange(1 << 30)

    def truth(run: Path) -> None:
        _model(run, "merged")

    def do(run: Path) -> None:
        file = _model(run, "merged")
        if kind in of_files:
            change(file, lambda tensors: _TENSORS[kind](tensors, Random(seed)))
        else:
            merge_json(run / "config.json", _CONFIGS[kind])

    def loaded(run: Path) -> Iterator[tuple[str, str]]:
        yield from _claim(LOADS, _lines(lambda: ckpt.verify(run, loads=True)))
        try:
            loads = ckpt.plan(run, "hf", Layout(names="own")).plan.target.loads
        except CkptError:
            return
        if loads is not None and loads.can:
            yield CAN_LOAD, loads.sentence("FOLDER")

    return Lie(kind, do, (LOADS, CAN_LOAD), kind=kind, claims=loaded, truth=truth, format="hf")


# -- works -------------------------------------------------------------------------------------------------------------
def diagnosed(sample: Sample, random: Random) -> Lie | None:
    """Run `ckpt doctor` on a run damaged by another class."""
    makers = [maker for maker, _ in claims.CLASSES.values()]
    made = (random.choice(makers)(sample, random) for _ in range(20))
    lie = next((one for one in made if one and not _WORKS.keys().isdisjoint(one.false)), None)
    if lie is None:
        return None
    works = tuple(_WORKS[claim] for claim in lie.false if claim in _WORKS)
    return replace(lie, false=works, claims=_works)


def _works(run: Path) -> Iterator[tuple[str, str]]:
    try:
        found = ckpt.doctor(run)
    except CkptError:
        return
    if found.checkpoint is None or found.checkpoint.passed_over:
        return
    text = "\n".join(found.lines())
    for trial in found.commands:
        is_conversion = trial.command.startswith(tuple(f"ckpt convert auto {name} " for name in ("hf", "peft", "full")))
        if trial.problem is None and (is_conversion or (trial.command.startswith("ckpt resume") and resumed(run))):
            yield _WORKS[WRITES if is_conversion else RESUMES], text


# -- within the bound -------------------------------------------------------------------------------------------------
_BOUNDED = [layout for layout in EVERY if layout not in (*UNKNOWN_VALUES, *UNBOUNDED)]
ROUNDED = "within the bound"


def other_roundings(sample: Sample, random: Random) -> Lie:
    """Change a quantized model, or the plain one."""
    layout, seed = random.choice(_BOUNDED), random.randrange(1 << 30)
    kind = random.choice(("part", "scale", "not finite", "value", "plain value", "other tensor"))

    def home(run: Path) -> Path:
        (folder := run.parent / "quantized").mkdir()
        return folder

    def do(run: Path) -> None:
        model, draw = make(layout, home(run), seed), Random(seed)
        if kind in ("part", "scale", "not finite"):
            cases = {"part": broken, "scale": misvalued, "not finite": lambda one: [("", not_finite(one))]}[kind](model)
            # two layers' scales may be so close that every value stays within the bound
            model.save(draw.choice([parts for case, parts in cases if case != OF_ANOTHER_LAYER]))
        elif kind == "value":
            model.save(other_value(model, draw))
        else:
            name = "model.norm.weight" if kind == "other tensor" else model.owner
            change(model.plain / "model.safetensors", lambda tensors: _with_other_element(tensors, name, draw))

    def measured(run: Path) -> Iterator[tuple[str, str]]:
        folder = run.parent / "quantized"
        yield from _claim(ROUNDED, _lines(lambda: ckpt.verify(folder / "plain", folder / "model", quantized=True)))

    def truth(run: Path) -> None:
        make(layout, home(run), seed)

    return Lie(
        f"{layout}: {kind}",
        do,
        (ROUNDED,),
        kind=kind,
        claims=measured,
        truth=truth,
        format="hf",
        about=f"{layout} {seed}",
    )


def _with_other_element(tensors: Tensors, name: str, random: Random) -> Tensors:
    """Replace one element by a number beyond all others."""
    changed = tensors[name].clone()
    changed.view(-1)[random.randrange(changed.numel())] = 3 * float(changed.abs().max())
    return {**tensors, name: changed}


#: Each class of lies and its share in the campaign.
CLASSES: dict[str, tuple[Maker, float]] = {
    "other bits": (other_bits, 0.06),
    "changed outputs": (changed_outputs, 0.03),
    "other merges": (other_merges, 0.02),
    "models that do not load": (unloadable, 0.02),
    "doctor on damaged runs": (diagnosed, 0.04),
    "other roundings": (other_roundings, 0.02),
}
