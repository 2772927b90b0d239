"""A damaged scale, by method and command: exit code, and the name of the part.

`damaged_scales.txt` has the exit codes. A legal scale with another value is found by `verify`: with `--quantized`
against the plain model, or against the original folder or its manifest.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt as library
from ckpt.base.errors import CkptError, CorruptError
from ckpt.plan.dtypes import BY_TAG
from tests.quantized.test_parts import IN, LAYOUTS, OUT, UNKNOWN_VALUES
from tests.support.commands import Result, ckpt
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

Parts = dict[str, torch.Tensor]
MODULES = [f"model.layers.{number}.mlp.down_proj" for number in range(3)]
MXFP4 = {"blocks": ("U8", [2, OUT, IN // 32, 16]), "scales": ("U8", [2, OUT, IN // 32])}
EVERY = {**LAYOUTS, "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, MXFP4)}
#: Methods without a bound: `verify --quantized` ends with 1 for an intact model too.
UNBOUNDED = ("gptq", "awq", "bitsandbytes nf4")
_SCALES = ("weight_scale", "scales", "scale_inv", "SCB", "nested_absmax", ".scale")
_VALUES = (".weight", "weight_packed", "_blocks", "qdata")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Lowest bit of the exponent.
EXPONENT = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3}


#: Parts with fixed content. Others that are no scales are random.
CONTENT = {
    "weight_shape": torch.tensor([OUT, IN]),
    "g_idx": torch.arange(IN) // 128,
    "qzeros": torch.full((2, 16), 0x77777777),
    "weight_format": torch.tensor(0),
    "_weight_zero_point": torch.zeros(OUT, 1),
}


def content(part: str, dtype: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return legal numbers for a part."""
    of = getattr(torch, BY_TAG[dtype].name)
    if part in CONTENT:
        return CONTENT[part].to(of)
    if "scale" in part or part in ("SCB", "biases"):
        if dtype in ("U8", "F8_E8M0"):
            return torch.randint(115, 122, shape, generator=generator, dtype=torch.uint8).view(of)
        return (torch.rand(shape, generator=generator) * 0.9 + 0.1).to(of)
    if dtype == "F8_E4M3":
        return (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(of)
    size = torch.Size(shape).numel() * of.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(of).reshape(shape)


@dataclass(frozen=True)
class Model:
    """A model in one layout. `owner` is the quantized weight with the part `scale`."""

    layout: str
    home: Path
    parts: Parts
    metadata: dict[str, str]

    @property
    def scale(self) -> str:
        return next(name for name in self.parts if name.startswith(MODULES[1]) and name.endswith(_SCALES))

    @property
    def owner(self) -> str:
        return f"{MODULES[1]}.weight" if self.layout != "mxfp4" else f"{MODULES[1]}"

    @property
    def plain(self) -> Path:
        return self.home / "plain"

    def save(self, parts: Parts) -> Path:
        folder = self.home / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(EVERY[self.layout][0]))
        save_file({name: part.clone() for name, part in parts.items()}, folder / "model.safetensors", self.metadata)
        return folder


def four_bit_parts(name: str, generator: torch.Generator) -> Parts:
    import bitsandbytes.functional as functional

    weight = torch.randn(OUT, IN, generator=generator).half()
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return {name: codes, **{f"{name}.{part}": one for part, one in state.as_dict(packed=True).items()}}


def torchao_metadata(layout: str) -> dict[str, str]:
    """Return a file's header with each weight's class and block size."""
    kind = "float8" if "Float8" in layout else "int8"
    with safe_open(REPOSITORY / f"fixtures/weights-torchao/{kind}-fp32.safetensors", "pt") as file:
        settings = file.metadata()["layer.weight"].replace("96", str(IN))
    names = [f"{module}.weight" for module in MODULES]
    return {"tensor_names": json.dumps(names), **dict.fromkeys(names, settings)}


def save_adapter(folder: Path) -> None:
    folder.mkdir()
    factors = {"lora_A": torch.ones(2, IN), "lora_B": torch.ones(OUT, 2)}
    tensors = {f"base_model.model.{MODULES[0]}.{factor}.weight": one for factor, one in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [MODULES[0]], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make(layout: str, home: Path, seed: int = 1) -> Model:
    """Write a model with random content, its plain values if they are known, and an adapter."""
    generator = torch.Generator().manual_seed(seed)
    parts = {"model.norm.weight": torch.ones(OUT, dtype=torch.bfloat16)}
    for module in MODULES:
        if layout == "bitsandbytes nf4":
            parts |= four_bit_parts(f"{module}.weight", generator)
        else:
            kinds = EVERY[layout][1].items()
            separator = "_" if layout == "mxfp4" else "."
            parts |= {f"{module}{separator}{part}": content(part, *one, generator) for part, one in kinds}
    metadata = torchao_metadata(layout) if layout.startswith("torchao") else {}
    found = Model(layout, home, parts, {"format": "pt", **metadata})
    folder = found.save(parts)
    save_adapter(home / "adapter")
    if layout not in UNKNOWN_VALUES:
        library.convert(folder, "hf", found.plain, dequantize=True)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return a function that makes each layout's model once. Every test saves the parts it needs."""
    return functools.cache(lambda layout: make(layout, tmp_path_factory.mktemp("layout")))


@pytest.fixture
def model(request: pytest.FixtureRequest, made: Callable[[str], Model]) -> Model:
    return made(request.param)


def bits(one: torch.Tensor) -> torch.Tensor:
    return one.view(-1).view(INTEGERS[one.element_size()])


def broken(model: Model) -> Iterator[tuple[str, Parts]]:
    """Yield models with missing, unexpected or mismatched parts."""
    parts, name = model.parts, model.scale
    yield "missing", {other: part for other, part in parts.items() if other != name}
    yield "shape", {**parts, name: torch.stack([parts[name]] * 3)}
    yield "dtype", {**parts, name: parts[name].to(torch.float32).to(torch.int16)}
    extra = f"{model.owner}_scale{'_2' if name.endswith('scale_inv') else '_inv'}"
    yield f"extra {extra}", {**parts, extra: torch.ones(1)}


OF_ANOTHER_LAYER = "swapped with another layer"


def misvalued(model: Model) -> Iterator[tuple[str, Parts]]:
    """Yield models with other legal scales."""
    parts, name = model.parts, model.scale
    flipped = parts[name].clone()
    bits(flipped)[-1] ^= 1 << EXPONENT.get(flipped.dtype, 0)
    yield "flipped", {**parts, name: flipped}
    swapped = parts[name].clone()
    first, last = bits(swapped).float().argmin(), bits(swapped).float().argmax()
    bits(swapped)[first], bits(swapped)[last] = bits(parts[name])[last], bits(parts[name])[first]
    if first != last:
        yield "swapped", {**parts, name: swapped}
    other = name.replace("layers.1.", "layers.2.")
    yield OF_ANOTHER_LAYER, {**parts, name: parts[other], other: parts[name]}


def not_finite(model: Model) -> Parts:
    scale = model.parts[model.scale].clone()
    if scale.element_size() == 1:
        bits(scale)[-1] = 255
    else:
        scale.view(-1)[-1] = torch.nan
    return {**model.parts, model.scale: scale}


def other_value(model: Model, random: Random) -> Parts:
    """Change one quantized value, by less than half of its range."""
    name = next(name for name in model.parts if name.startswith(MODULES[1]) and name.endswith(_VALUES))
    changed = model.parts[name].clone()
    codes = changed.view(-1).view(torch.uint8)
    codes[random.randrange(len(codes))] ^= 4
    return {**model.parts, name: changed}


def ending(command: Callable[[Path], Any], folder: Path) -> tuple[int, str]:
    """Return the exit code and output."""
    try:
        found = command(folder)
    except CkptError as error:
        return error.exit_code, f"{error.fqn} {error}"
    if isinstance(found, Result):
        return found.code, found.out + found.err
    return getattr(found, "exit_code", 0), "\n".join(found.lines())


def merge(base: Path) -> Any:
    return library.merge_lora(base.parent / "adapter", base.parent / "no", base=base, dequantize=True, names="own")


#: Commands on a model's folder.
COMMANDS: dict[str, Callable[[Path], Any]] = {
    "check": lambda folder: library.check(folder),
    "check --values": lambda folder: library.check(folder, values=True),
    "inspect": lambda folder: ckpt("inspect", folder),
    "convert": lambda folder: library.plan(folder, "hf"),
    "verify ORIGINAL": lambda folder: library.verify(folder.parent / "original", folder),
}
#: Commands that need plain values.
PLAIN: dict[str, Callable[[Path], Any]] = {
    "convert --dequantize": lambda folder: library.convert(folder, "hf", folder.parent / "no", dequantize=True),
    "merge-lora": merge,
    "verify --quantized": lambda folder: library.verify(folder.parent / "plain", folder, quantized=True),
}
#: Commands that compare a folder with its manifest.
MANIFEST: dict[str, Callable[[Path], Any]] = {
    "check --bytes": lambda folder: library.check(folder, every_byte=True),
    "verify": lambda folder: library.verify(folder),
}
COLUMNS = (*COMMANDS, *MANIFEST, *PLAIN)
#: Commands for a fault in the parts, except for a missing part: all commands read them in the same place.
OF_PARTS = ("check", "inspect", "convert", "verify ORIGINAL", "convert --dequantize")
TABLE = Path(__file__).with_name("damaged_scales.txt")


def exit_codes(model: Model) -> Iterator[str]:
    """Yield a line for each fault, and check that refusals name the part."""
    written = None
    if not model.layout.startswith("torchao"):
        library.convert(model.save(model.parts), "hf", model.home / "written")
        written = model.home / "written"
    shutil.copytree(model.save(model.parts), model.home / "original")
    usual: dict[str, str] = {}
    faults = [("intact", model.parts), *broken(model), ("NaN", not_finite(model)), next(misvalued(model))]
    for what, parts in faults:
        folder, codes = model.save(parts), dict.fromkeys(COLUMNS, "-")
        commands = COMMANDS | ({} if model.layout in UNKNOWN_VALUES else PLAIN)
        if what in ("shape", "dtype") or what.startswith("extra "):
            commands = {command: run for command, run in commands.items() if command in OF_PARTS}
        for command, run in commands.items():
            code, text = ending(run, folder)
            codes[command] = str(code)
            names = (model.scale, model.owner, what.removeprefix("extra "))
            is_usual = str(code) == usual.setdefault(command, str(code))
            assert is_usual or any(name in text for name in names), (what, command, text)
            assert code == 0 or not (model.home / "no").exists()
            shutil.rmtree(model.home / "no", ignore_errors=True)
        if written is not None and parts.keys() == model.parts.keys() and what not in ("shape", "dtype"):
            with overwritten(written / "model.safetensors", parts):
                codes |= {command: str(ending(run, written)[0]) for command, run in MANIFEST.items()}
        yield f"{model.layout:<33}{what.partition(' model')[0]:<27}" + "".join(
            f"{code:^{len(column) + 2}}" for column, code in codes.items()
        )


@contextlib.contextmanager
def overwritten(file: Path, parts: Parts) -> Iterator[None]:
    """Change values in a written file, and restore them."""
    before = file.read_bytes()
    length = int.from_bytes(before[:8], "little")
    header, after = json.loads(before[8 : 8 + length]), bytearray(before)
    for name, part in parts.items():
        start, stop = (8 + length + offset for offset in header[name]["data_offsets"])
        after[start:stop] = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    file.write_bytes(after)
    yield
    file.write_bytes(before)


def facets(layout: str) -> list[object]:
    """Return the method with the parts of a weight, and the parts with their dtypes."""
    parts = EVERY[layout][1]
    return [(layout.split()[0], *parts), *((part, dtype) for part, (dtype, _) in parts.items())]


@pytest.mark.parametrize("model", sample(EVERY, facets), indirect=True)
def test_exit_codes_are_those_in_the_table(model: Model) -> None:
    found = [line.rstrip() for line in exit_codes(model)]
    head = f"{'layout':<33}{'fault':<27}" + "".join(f"{column:^{len(column) + 2}}" for column in COLUMNS)
    _, *rows = TABLE.read_text().splitlines() if TABLE.exists() else [""]
    others = [row for row in rows if not row.startswith(f"{model.layout:<33}")]
    if os.environ.get("CKPT_GOLDEN") == "write":
        TABLE.write_text("".join(f"{row}\n" for row in [head.rstrip(), *others, *found]))
    assert found == [row for row in TABLE.read_text().splitlines()[1:] if row not in others]


@pytest.mark.parametrize("model", [layout for layout in EVERY if layout not in UNKNOWN_VALUES], indirect=True)
def test_another_legal_scale_is_found_by_verify(model: Model) -> None:
    intact = library.verify(model.plain, model.save(model.parts), quantized=True)
    for what, parts in misvalued(model):
        report = library.verify(model.plain, model.save(parts), quantized=True)
        (worst, *_), (best, *_) = report.rounded, intact.rounded
        assert "layers.1." in worst.fqn + report.rounded[1].fqn, what
        assert worst.rounding is not None and best.rounding is not None
        assert worst.rounding.largest > 2 * best.rounding.largest, (what, str(report))


def extreme(model: Model) -> Iterator[tuple[str, Parts]]:
    """Yield models with one finite scale of the largest size, and with one byte that may be a NaN."""
    scale = model.parts[model.scale].clone()
    if scale.element_size() > 1:
        scale.view(-1)[-1] = torch.finfo(scale.dtype).max
    else:
        bits(scale)[-1] = 126 if scale.dtype == torch.float8_e4m3fn else 254
    yield "scale", {**model.parts, model.scale: scale}
    name = next(name for name in model.parts if name.startswith(MODULES[1]) and name.endswith((*_VALUES, "qweight")))
    values = model.parts[name].clone()
    values.view(-1).view(torch.uint8)[5] = 0x7F
    yield "value", {**model.parts, name: values}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("model", [layout for layout in EVERY if layout not in UNKNOWN_VALUES], indirect=True)
def test_plain_values_are_finite_or_refused(model: Model) -> None:
    refused = set()
    for what, parts in extreme(model):
        folder, out = model.save(parts), model.home / "no"
        for command in ("convert --dequantize", *(() if model.layout == "mxfp4" else ("merge-lora",))):
            code, text = ending(PLAIN[command], folder)
            if code:
                assert code == CorruptError.exit_code and model.owner in text and "the first at [" in text, text
                assert not out.exists()
                refused.add(what)
            else:
                assert all(one.isfinite().all() for one in load_file(out / "model.safetensors").values()), what
                shutil.rmtree(out)
    is_e4m3 = any(parts.dtype == torch.float8_e4m3fn for name, parts in model.parts.items() if name.endswith(_VALUES))
    assert ("value" in refused) == is_e4m3
