"""Claims about checkpoints, and changes that make them false: each claim has to disappear.

A class of faults yields endless lies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import ckpt
from ckpt.commands.inspect.rows import picture
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.tensors import Tensor
from tests.faults.running import EXCUSED, Ending
from tests.faults.samples import Sample
from tests.faults.tensor_files import Tensors, change, is_changeable
from tests.quantized.test_parts import LAYOUTS, content_of, damaged, model

#: Claims: a command's output or action if it accepts a checkpoint as sound.
WHOLE, EVERY_PART, FINDS, WRITES, RESUMES, VALUES = "whole", "every part", "finds", "writes", "resumes", "values"
CAN_LOAD = "can load this folder"
#: A picture from `ckpt inspect`: the parts of every tensor cover it once.
DRAWN = "a picture without red"
#: Claims disproved by missing or damaged weights.
OF_WEIGHTS = (WHOLE, EVERY_PART, FINDS, CAN_LOAD, WRITES)
#: Usual target formats to convert a lie to.
_TARGETS = ("hf", "peft", "full", "dcp")


#: Commands' claims about a run, each with the output.
Claims = Callable[[Path], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Lie:
    """A change to a run, the claims it makes false, and the file to name.

    `truth` makes a checkpoint for which the claims hold; `unless` and `excuse` say when nothing on the disk reveals the
    lie.
    """

    what: str
    do: Callable[[Path], object]
    false: tuple[str, ...] = ()
    named: str | None = None
    kind: str = ""
    claims: Claims | None = None
    truth: Callable[[Path], object] | None = None
    format: str | None = None
    unless: str | None = None
    excuse: str | None = None
    about: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a lie: its claims, format and kind."""

    what: str
    ending: Ending
    claims: tuple[str, ...]
    format: str
    kind: str


Maker = Callable[[Sample, Random], Lie | None]


def lies(make: Maker, sample: Sample, folder: Path, random: Random) -> Iterator[Outcome]:
    """Yield cases of one class. A lie counts only for claims made about the intact sample."""
    true_of: dict[str, set[str]] = {}
    while (lie := make(sample, random)) is not None:
        if lie.about not in true_of:
            run = sample.copy(folder / sample.path.name)
            if lie.truth is not None:
                lie.truth(run)
            true_of[lie.about] = {claim for claim, _ in _said(run, lie)}
            _clear(folder)
        made = tuple(claim for claim in lie.false if claim in true_of[lie.about])
        if lie.truth is not None and not made:
            yield _case(sample, lie, ("", f"of the checkpoint as it is, nobody says: {', '.join(lie.false)}"), made)
        run = sample.copy(folder / sample.path.name)
        try:
            lie.do(run)
            ending = _ending(sample, run, lie)
        except Exception as error:
            ending = "", f"{type(error).__name__}: {error}"
        _clear(folder)
        if lie.false and not made and ending[1] is None:
            ending = "nobody says it of the checkpoint as it is", None
        yield _case(sample, lie, ending, made)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _case(sample: Sample, lie: Lie, ending: Ending, made: tuple[str, ...]) -> Outcome:
    format = lie.format or ckpt.open(sample.path).format
    return Outcome(f"{sample.name}: {lie.what}", ending, made, format, lie.kind)


def _said(run: Path, lie: Lie) -> Iterator[tuple[str, str]]:
    return lie.claims(run) if lie.claims is not None else _claims(run, values=VALUES in lie.false)


def _ending(sample: Sample, run: Path, lie: Lie) -> Ending:
    said = dict(_said(run, lie))
    still = [claim for claim in lie.false if claim in said]
    hidden = [claim for claim in still if lie.unless is None or lie.unless not in said[claim]]
    if hidden and lie.excuse is not None:
        return f"{EXCUSED}: {lie.excuse}", None
    if hidden:
        return "", f"it is still said: {', '.join(f'{claim} ({said[claim][:200]})' for claim in hidden)}"
    if still:
        return f"said with the words: {lie.unless}", None
    if lie.named is not None:
        silent = [claim for claim, text in said.items() if claim in (WHOLE, WRITES, RESUMES) and lie.named not in text]
        if silent:
            return "", f"{lie.named} is not named by: {', '.join(silent)}"
        return "the file is named", None
    return "no false sentence", None


def _claims(run: Path, *, values: bool) -> Iterator[tuple[str, str]]:
    """Yield the claims commands make about `run`, each with the output."""
    try:
        report = ckpt.check(run)
        if report.whole:
            yield WHOLE, str(report)
        if "every part of every tensor" in str(report):
            yield EVERY_PART, str(report)
    except CkptError:
        pass
    for target in _TARGETS:
        try:
            conversion = ckpt.plan(run, target)
        except CkptError:
            continue
        if conversion.source.passed_over:  # every command says that it uses an older step
            break
        text = "\n".join([*conversion.lines(), *conversion.source.notes, *conversion.plan.target.notes])
        yield WRITES, f"to {target}: {text}"
        if "from_pretrained finds every tensor" in text:
            yield FINDS, text
        if (loads := conversion.plan.target.loads) is not None and loads.can:
            yield CAN_LOAD, loads.sentence("FOLDER") + text
        break
    with suppress(CkptError):
        checkpoint = ckpt.open(run)
        if not checkpoint.passed_over and not picture(checkpoint).damaged:
            yield DRAWN, checkpoint.format
    if told := resumed(run):
        yield RESUMES, told
    if values:
        try:
            found = ckpt.check(run, values=True)  # type: ignore[call-arg]
            if found.whole:
                yield VALUES, str(found)
        except CkptError:
            pass


def resumed(run: Path) -> str:
    """Return the output of `resume` if it accepts `run` with its newest step, else ""."""
    told: list[str] = []
    try:
        ckpt.resume(run, say=told.append)
    except CkptError:
        return ""
    takes = any(line.startswith("resuming from") for line in told) and not any("is skipped" in line for line in told)
    return "\n".join(told) if takes else ""


# -- the classes -------------------------------------------------------------------------------------------------------
def _places(checkpoint: Checkpoint, *, weights: bool) -> dict[str, set[str]]:
    """Map each file to the tensors it stores: only weights, or the other trained state."""
    found: dict[str, set[str]] = {}
    for key, tensor in checkpoint.tensors.items():
        fqn, role = key
        if (role == "weight") is weights and role != "buffer":
            for fragment in tensor.fragments():
                if os.path.isabs(fragment.extent.path):  # others are computed while they are read
                    found.setdefault(fragment.extent.path, set()).add(fqn)
    return found


def half_folders(sample: Sample, random: Random) -> Lie | None:
    """Delete the model's files or the optimizer's: neither half is enough to resume."""
    checkpoint = ckpt.open(sample.path)
    models, optimizer = _places(checkpoint, weights=True), _places(checkpoint, weights=False)
    halves = {
        "the model's files": (models.keys() - optimizer.keys(), (*OF_WEIGHTS, RESUMES, DRAWN)),
        "the optimizer's files": (optimizer.keys() - models.keys(), (RESUMES,)),
    }
    choices = [(name, files, false) for name, (files, false) in halves.items() if files and len(files) < 50]
    if not (models and optimizer and choices):
        return None
    name, files, false = random.choice(choices)
    if not models.keys() - optimizer.keys() and name == "the optimizer's files":
        return None
    own = [Path(file).relative_to(sample.path) for file in files]
    return Lie(f"without {name} ({', '.join(map(str, own[:3]))})", partial(_remove, own), false, kind=f"without {name}")


def _remove(names: list[Path], run: Path) -> None:
    for name in names:
        (run / name).unlink()


#: Damage to a file with weights.
TORN: dict[str, Callable[[Path], object]] = {
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "without its last byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "gone": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "only its first bytes": lambda file: os.truncate(file, 5),
}


def torn_files(sample: Sample, random: Random) -> Lie | None:
    """Truncate or delete a weights file."""
    files = [Path(file) for file in _places(ckpt.open(sample.path), weights=True)]
    if not files:
        return None
    kind, name = random.choice([*TORN]), random.choice(files).relative_to(sample.path)
    false = (*OF_WEIGHTS, RESUMES, DRAWN)
    return Lie(f"{name}: {kind}", lambda run: TORN[kind](run / name), false, kind=f"{kind}, of a file")


def empty_tensors(sample: Sample, random: Random) -> Lie | None:
    """Empty some weights, like rank 0 under ZeRO-3 without a gather."""
    checkpoint = ckpt.open(sample.path)
    files = [file for file in _places(checkpoint, weights=True) if file.endswith((".safetensors", ".bin", ".pt"))]
    files = [file for file in files if is_changeable(Path(file))]
    if not files or checkpoint.world_size not in (None, 1):
        return None
    file = random.choice(files)
    number = random.choice((1, 2, 5, 1000))
    name = Path(file).relative_to(sample.path)

    def emptied(tensors: Tensors) -> Tensors:
        full = sorted(key for key, value in tensors.items() if value.numel() and value.dim())
        chosen = set(random.sample(full, k=min(number, len(full))))
        return {key: value.new_empty(0) if key in chosen else value for key, value in tensors.items()}

    false = (*OF_WEIGHTS, RESUMES)
    return Lie(
        f"{name}: up to {number} empty",
        lambda run: change(run / name, emptied),
        false,
        kind=f"{number} empty",
        unless="no elements",
    )


#: Non-finite bits, by dtype.
_NOT_FINITE: dict[str, list[bytes]] = {
    "float32": [bytes.fromhex(bits) for bits in ("0000c07f", "0000807f", "000080ff", "0000c0ff", "0100807f")],
    "bfloat16": [bytes.fromhex(bits) for bits in ("c07f", "807f", "80ff", "c0ff", "817f")],
    "float16": [bytes.fromhex(bits) for bits in ("007e", "007c", "00fc", "00fe", "017c")],
}


def bad_values(sample: Sample, random: Random) -> Lie | None:
    """Make one element of one tensor NaN or infinite, in every place the format stores it."""
    checkpoint = ckpt.open(sample.path)
    keys = [key for key, tensor in checkpoint.tensors.items() if tensor.dtype.name in _NOT_FINITE and tensor.numel]
    if not keys:
        return None
    key = random.choice(keys)
    fragments = [one for one in checkpoint.tensors[key].fragments() if one.extent.numel]
    fragments = [one for one in fragments if one.extent.dtype.name in _NOT_FINITE and os.path.isabs(one.extent.path)]
    if not fragments:
        return None
    extent = random.choice(fragments).extent
    index = [random.randrange(size) for size in extent.shape]
    at = extent.offset + extent.dtype.itemsize * int(np.dot(index, extent.strides))
    content = random.choice(_NOT_FINITE[extent.dtype.name])
    name = Path(extent.path).relative_to(sample.path)

    def do(run: Path) -> None:
        with open(run / name, "r+b") as file:
            file.seek(at)
            file.write(content)

    kind = f"{content.hex()} in a {key[1]}"
    return Lie(f"{key}: {content.hex()} in {name}", do, (VALUES,), kind=kind)


def two_models(sample: Sample, random: Random) -> Lie | None:
    """Add a second model like Accelerate with two engines. Half of the time, damage the first one."""
    latest = sample.path / "latest"
    tag = latest.read_text().strip() if latest.is_file() else ""
    folders = [
        path.name for path in sample.path.iterdir() if path.is_dir() and path.name.startswith("pytorch_model_fsdp")
    ]
    if not tag and not folders:
        return None
    first = "pytorch_model" if tag else "pytorch_model_fsdp_0"
    second = f"{first}_1" if tag else "pytorch_model_fsdp_1"
    damage = random.choice(("none", "cut", "gone", "empty"))
    number = random.randrange(1 << 30)

    def do(run: Path) -> None:
        source = run / (tag or folders[0])
        if source.name != first:
            source.rename(run / first)
        shutil.copytree(run / first, run / second)
        if tag:
            (run / "latest").write_text(second)
        files = sorted(path for path in (run / first).rglob("*") if path.is_file() and path.stat().st_size)
        file = files[number % len(files)]
        if damage == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif damage == "empty":
            os.truncate(file, 0)
        elif damage == "gone":
            file.unlink()

    false = (FINDS, CAN_LOAD, WRITES) if damage == "none" else (*OF_WEIGHTS, RESUMES)
    return Lie(f"{first} and {second}, damage to the first: {damage}", do, false, kind=f"{damage} of two models")


#: Files with trained weights that trainers write next to a checkpoint.
_NEIGHBOURS = (
    "value_head.safetensors",
    "value_head.bin",
    "non_lora_trainables.bin",
    "mm_projector.bin",
    "new_embeddings.safetensors",
    "ema.safetensors",
    "optimizer_1.bin",
    "critic.pt",
    "reward_head.pth",
    "layer_99-model_00-model_states.pt",
    "zero_pp_rank_99_mp_rank_00_optim_states.pt",
)


def neighbours(sample: Sample, random: Random) -> Lie | None:
    """Put a file with weights into the checkpoint's folder, or next to it in the run."""
    import torch
    from safetensors.torch import save_file

    checkpoint = ckpt.open(sample.path)
    folder = Path(checkpoint.path)
    inside = folder if folder.is_dir() else folder.parent
    places = [place for place in (inside, inside.parent) if place.is_relative_to(sample.path)]
    name = random.choice(_NEIGHBOURS)
    place = random.choice(places).relative_to(sample.path) / name
    weights: dict[str, Any] = {f"head.{random.randrange(100)}.weight": torch.ones(3, 2)}

    def do(run: Path) -> None:
        if name.endswith(".safetensors"):
            save_file(weights, run / place)
        else:
            torch.save(weights, run / place)

    if checkpoint.is_adapter and name == "non_lora_trainables.bin":
        return None  # its reader opens this file
    return None if (sample.path / place).exists() else Lie(f"{place} next to it", do, (), name, kind=name)


def quantized_parts(sample: Sample, random: Random) -> Lie:
    """Remove a part of a quantized weight, add one, or change its dtype or shape."""
    layout = random.choice([*LAYOUTS])
    tensors, config = model(layout)
    what, changed = random.choice([*damaged(tensors, layout)])
    has_state = layout == "bitsandbytes nf4"  # it records the weight's shape
    is_of_size = not has_state and what.startswith(("weight of", "_weight_qdata of"))
    return Lie(
        f"{layout}: {what}",
        lambda run: write_model(run, changed, config),
        OF_WEIGHTS,
        kind=what,
        format="hf",
        truth=lambda run: write_model(run, tensors, config),
        about=layout,
        excuse="the sizes of a weight, in a folder whose config does not state them" if is_of_size else None,
    )


def write_model(run: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Replace a run by a folder with these tensors, all zeros except for recorded states."""
    import torch
    from safetensors.torch import save_file

    shutil.rmtree(run)
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config))
    stored = {fqn: torch.zeros(one.shape, dtype=getattr(torch, one.dtype.name)) for fqn, one in tensors.items()}
    for fqn in [fqn for fqn, one in tensors.items() if ".quant_state." in fqn and one.dtype.name == "uint8"]:
        stored[fqn] = torch.frombuffer(bytearray(content_of(fqn)), dtype=torch.uint8)
    save_file(stored, run / "model.safetensors")


#: Each class of lies and its share in the campaign.
CLASSES: dict[str, tuple[Maker, float]] = {
    "quantized parts": (quantized_parts, 0.06),
    "torn files": (torn_files, 0.06),
    "half folders": (half_folders, 0.05),
    "empty tensors": (empty_tensors, 0.05),
    "values": (bad_values, 0.07),
    "two models in one save": (two_models, 0.05),
    "files next to a step": (neighbours, 0.07),
}
