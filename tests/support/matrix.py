"""Every format to every other format at other numbers of ranks.

Each conversion is compared with the source's truth, in the files and in the target's own framework. Four models take
turns: the toy, qwen2, gpt2 and llama.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.plan.checkpoint import BUFFER, HUB, MASTER, TRANSFORMERS, WEIGHT, Checkpoint, Layout
from ckpt.plan.dtypes import BFLOAT16
from ckpt.plan.tensors import Extent
from ckpt.state.naming import to_namespace
from tests.support.describing import content
from tests.support.engines import Truth, launch_in_turn
from tests.support.sampling import sample
from tests.support.universal import ds_to_universal

Raw = tuple[str, tuple[int, ...], bytes]
Key = tuple[str, str]

STEPS = 2
BATCH = 24  # the trainer's
RANKS = (1, 2, 3, 4)
ZERO = ("zero1", "zero2", "zero3")
SOURCES = (*ZERO, "universal", "dcp", "full", "fsdp-ranks", "hf")
TARGETS = (*ZERO, "universal", "dcp", "full", "hf")
FROZEN = {"model": "qwen2", "freeze": r"embed|layers\.0\."}
MODELS: tuple[dict[str, Any], ...] = ({"model": "toy"}, FROZEN, {"model": "gpt2"}, {"model": "llama"})
#: Without weight decay there is one parameter group, as in verl, so the numbers in rank files map to names.
ONE_GROUP: tuple[dict[str, Any], ...] = tuple({"model": m, "weight_decay": 0.0} for m in ("qwen2", "gpt2", "llama"))
#: Trainers for the single-file and the file-per-rank formats, by rank count.
FULL_BY = {1: "ddp", 2: "fsdp1", 3: "fsdp2", 4: "hsdp"}
RANKS_BY = {1: "fsdp2", 2: "fsdp1", 3: "fsdp2", 4: "hsdp"}
#: Loaders for DCP and for full files.
DCP_BY = {1: "fsdp1", 2: "hsdp", 3: "fsdp2", 4: "fsdp1"}
LOADS_FULL = {1: "fsdp2", 2: "fsdp1", 3: "fsdp1", 4: "fsdp2"}
SEED = 4321  # for the loading models: values match only if they were loaded


@dataclass(frozen=True)
class Source:
    """A run: its format, trainer, rank count and trainer options."""

    format: str
    strategy: str
    ranks: int
    options: Mapping[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        freeze = "-frozen" if "freeze" in self.options else ""
        return f"{self.format}-{self.strategy}-{self.options['model']}{freeze}-{self.ranks}"

    @property
    def title(self) -> str:
        """Row title: the format, or `dcp/STRATEGY` if the run shards differently from FSDP2."""
        return f"dcp/{self.strategy}" if self.format == "dcp" and self.strategy != "fsdp2" else self.format

    def job(self, folder: Path) -> dict[str, Any]:
        job = {"strategy": self.strategy, "steps": STEPS, "truth": True, "output": str(folder / self.name)}
        if self.format == "hf":
            job["through"] = "trainer"
        elif self.format not in (*ZERO, "universal"):
            job["save"] = {"dcp": "dcp", "full": "full", "fsdp-ranks": "ranks"}[self.format]
        return job | dict(self.options)

    def truth(self, folder: Path) -> Truth:
        truth = Truth.load(next(p for p in (folder / self.name / "truth").iterdir() if "logits" not in p.name))
        if self.format != "hf":
            return truth
        return replace(truth, tensors={key: t for key, t in truth.tensors.items() if key[1] in (WEIGHT, BUFFER)})

    def open(self, folder: Path) -> Checkpoint:
        run = folder / self.name
        if self.format == "hf":
            run = run / f"checkpoint-{STEPS}"
        elif self.format == "universal":
            step = run / f"global_step{STEPS}"
            if not step.with_name(f"{step.name}_universal").exists():
                ds_to_universal(step, step.with_name(f"{step.name}_universal"))
        return api.open(run, self.format)


@dataclass(frozen=True)
class Cell:
    """A conversion: source, target format, and the engine and number of ranks to load it."""

    source: Source
    target: str
    engine: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.source.name}-to-{self.target}-{self.ranks}"

    @property
    def is_sharded(self) -> bool:
        return self.target in (*ZERO, "dcp")

    def convert(self, folder: Path) -> Checkpoint:
        """Convert, and open the result."""
        checkpoint = self.source.open(folder)
        # A toy run's files don't record 16-bit compute. FSDP stores its parameters in 32 bits.
        is_foreign = checkpoint.config is None and not (checkpoint.framework or "").startswith("deepspeed")
        dtype = BFLOAT16 if is_foreign and self.target in (*ZERO, "universal") else None
        layout = Layout(dtype=dtype, world_size=self.ranks if self.is_sharded else None)
        api.plan(checkpoint, self.target, layout).run(folder / "converted" / self.name)
        return api.open(folder / "converted" / self.name, self.target)

    def job(self, folder: Path) -> dict[str, Any]:
        """Return the job for tests/support/matrix_loading.py."""
        output = folder / "converted" / self.name
        job = {"strategy": self.engine, "resume": str(output), "output": str(output), "seed": SEED}
        job |= dict(self.source.options)
        weights_only = self.source.format == "hf"
        if self.target in (*ZERO, "universal"):
            by_name = {"load_optimizer_states": False} if self.target != "universal" else {}
            job |= {"loader": "zero", "load": by_name | {"load_lr_scheduler_states": False} if weights_only else {}}
            if self.target == "universal":
                config = folder / "load_universal.json"
                config.write_text(json.dumps({"checkpoint": {"load_universal": True}}))
                job["ds_config"] = str(config)
        elif self.target == "dcp":
            job |= {"loader": "dcp"} | ({"folders": {"model": ""}} if weights_only else {})
        else:
            job["loader"] = "full" if self.target == "full" and not weights_only else "hf"
        return job


def sources() -> Iterator[Source]:
    """Yield one run for every format and number of ranks.

    For the toy also yield FROZEN, because not every target can hold the toy.
    """
    for (index, format), ranks in product(enumerate(SOURCES), RANKS):
        options = MODELS[(index + ranks) % len(MODELS)]
        strategy = {**{zero: zero for zero in ZERO}, "dcp": "fsdp2", "hf": "zero3"}.get(format, "")
        if format == "universal":
            strategy = ZERO[(ranks + 1) % len(ZERO)]
            # DeepSpeed's converter fails on parameters without dims.
            if options["model"] == "toy" and strategy != "zero3":
                options = FROZEN
        elif format == "full":
            strategy = FULL_BY[ranks]
        elif format == "fsdp-ranks":
            strategy, options = RANKS_BY[ranks], ONE_GROUP[ranks % len(ONE_GROUP)]
        elif format == "hf":
            options = {"model": "qwen3_moe"} if options["model"] == "toy" else options
        yield Source(format, strategy, ranks, options)
        if options["model"] == "toy":
            yield Source(format, strategy, ranks, FROZEN)
    yield Source("dcp", "fsdp1", 2, {"model": "toy"})
    yield Source("dcp", "fsdp1", 2, FROZEN)
    yield Source("dcp", "fsdp1", 3, {"model": "gpt2"})
    yield Source("dcp", "hsdp", 4, FROZEN)
    yield Source("dcp", "tp-fsdp", 4, {"model": "llama_even"})


def loader_of(source: Source, target: str, ranks: int) -> str:
    """Return the loading engine."""
    if target == "universal" and source.strategy in ZERO and source.format != "hf":
        return source.strategy  # a conversion from a ZeRO stage keeps that stage's form
    if target == "universal":
        return ZERO[ranks % (2 if source.format == "hf" else 3)]  # stage 3 can't load weights without an optimizer
    if target == "dcp":
        return "tp-fsdp" if source.strategy == "tp-fsdp" and ranks % 2 == 0 else DCP_BY[ranks]
    return {"full": LOADS_FULL[ranks], "hf": "ddp"}.get(target, target)


def cells() -> Iterator[Cell]:
    """Yield the conversions.

    Target ranks and source ranks form a Latin square, a different one for every pair of formats.
    """
    by_place: dict[tuple[str, int], list[Source]] = defaultdict(list)
    for source in sources():
        by_place[source.title, source.ranks].append(source)
    titles = list(dict.fromkeys(title for title, _ in by_place))
    for (title, before), choice in by_place.items():
        for number, target in enumerate(TARGETS):
            after = RANKS[(before + number + 2 * titles.index(title)) % len(RANKS)]
            if target == "hf" or (title == "hf" and target == "full"):
                after = 1  # read by from_pretrained
            source = choice[0]
            engine = loader_of(source, target, after)
            # The toy is not a Hub model. It has no empty parameter under ZeRO-3, one without an optimizer under the
            # other stages, and one with states under FSDP.
            stays = source.strategy not in ZERO or engine in ZERO
            is_at_home = target != "hf" and stays and (source.strategy == "zero3") == (engine == "zero3")
            if target == "universal" and engine != "zero3" and after == 4:
                is_at_home = False  # DeepSpeed fails on a rank with only padding: base_optimizer.py, steps[0]
            if source.options["model"] == "toy" and not is_at_home:
                source = choice[-1]
                engine = loader_of(source, target, after)
            yield Cell(source, target, engine, after)
            if target == title:  # with ALL=1, each ZeRO stage to itself from every number to every number
                others = (ranks for ranks in RANKS if ranks != after and target in ZERO)
                yield from (Cell(source, target, engine, ranks) for ranks in others)


CELLS = list(cells())


def cells_from(formats: Container[str]) -> list[Cell]:
    """Return the conversions from these source formats, or a sample: all pairs of formats and all pairs of ranks."""
    found = [cell for cell in CELLS if cell.source.format in formats]
    return sample(sorted(found, key=turn), facets)


def turn(cell: Cell) -> int:
    """Sort key that takes a format to its targets from different numbers of ranks."""
    return (cell.source.ranks + TARGETS.index(cell.target) // 2) % len(RANKS)


def facets(cell: Cell) -> Iterator[object]:
    source, model = cell.source, cell.source.options["model"]
    yield "formats", source.format, cell.target
    yield "ranks", source.ranks, cell.ranks
    yield "files", source.format, source.ranks
    yield "engines", source.title, source.strategy
    yield "loader", cell.target, cell.engine
    yield "model", model, "freeze" in source.options, source.strategy == "zero3"
    yield "damage", cell.target, model == "llama"


# -- comparing ---------------------------------------------------------------------------------------------------------
def cast(value: Raw, dtype: str) -> Raw:
    """Cast a tensor to another dtype with torch's rounding."""
    import torch

    name, shape, data = value
    if name == dtype or not data:
        return dtype, shape, data
    bits = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    tensor = bits.view(getattr(torch, name)).to(getattr(torch, dtype))
    return dtype, shape, tensor.view(torch.uint8).numpy().tobytes()


def compare(truth: Truth, found: Mapping[Key, Raw], *, trained_only: bool, weights_only: bool) -> int:
    """Assert that every tensor equals the truth, in both directions, and return the number of equal tensors.

    Expected weights are rounded to their dtype. `trained_only` and `weights_only` leave out tensors the target does not
    keep.
    """
    live = {key: value for key, value in truth.tensors.items() if key[0] not in truth.ties}
    frozen = set(truth.metadata.get("frozen", ()))
    differing, equal = [], set()
    for (fqn, role), value in found.items():
        if fqn in truth.ties or (trained_only and (role == BUFFER or fqn in frozen)):
            continue
        if weights_only and role not in (WEIGHT, MASTER, BUFFER):
            continue
        expected = live.get((fqn, role))
        if role in (WEIGHT, MASTER):
            expected = live.get((fqn, MASTER)) or live.get((fqn, WEIGHT)) or live.get((fqn, BUFFER))
            expected = expected and cast(expected, "float32" if role == MASTER else value[0])
        elif role == BUFFER and expected:
            expected = cast(expected, value[0])
        if value != expected:
            differing.append((fqn, role))
        equal.add((fqn, role))
    assert not differing, f"not as the source's engine gathered: {differing}"
    for fqn, role in live:
        if role in (WEIGHT, MASTER, BUFFER):
            there = {WEIGHT, MASTER} if role != BUFFER else {WEIGHT, BUFFER}
            left = trained_only and (role == BUFFER or fqn in frozen)
        else:  # ZeRO has no states for empty parameters
            there, left = {role}, weights_only or 0 in live[fqn, role][1]
        assert left or any((fqn, one) in equal for one in there), f"missing: {fqn} {role}"
    return len(equal)


def compare_files(cell: Cell, checkpoint: Checkpoint, truth: Truth) -> int:
    if cell.source.options["model"] == "qwen3_moe" and cell.target in ("hf", "full"):  # under other names on the Hub
        checkpoint = to_namespace(replace(checkpoint, namespace=HUB), TRANSFORMERS)
    found = {key: content(tensor) for key, tensor in checkpoint.tensors.items()}
    return compare(truth, found, trained_only=False, weights_only="hf" in (cell.source.format, cell.target))


def compare_engine(cell: Cell, output: Path, truth: Truth) -> int:
    after = Truth.load(output / "truth.safetensors")
    weights_only = "hf" in (cell.source.format, cell.target)
    if cell.source.format in ZERO and cell.target in ZERO:
        assert after.tensors.keys() == truth.tensors.keys()
        for fact in ("param_groups", "adam_step", "step", "ties", "frozen"):
            assert after.metadata[fact] == truth.metadata[fact], fact
        assert after.metadata["sequences"] == BATCH * STEPS
    elif not weights_only:
        assert after.metadata["adam_step"] == STEPS
        groups, expected = after.metadata["param_groups"], truth.metadata["param_groups"]
        if cell.target == "universal" and cell.engine == "zero3":
            groups, expected = groups[:1], expected[:1]  # it gives all groups the first group's options
        for ours, theirs in zip(groups, expected, strict=True):
            assert {k: ours[k] for k in ("lr", "weight_decay")} == {k: theirs[k] for k in ("lr", "weight_decay")}
            assert set(ours["names"]) <= set(theirs["names"])
    return compare(truth, after.tensors, trained_only=cell.target == "universal", weights_only=weights_only)


def exchange(path_a: str, path_b: str, a: Extent, b: Extent) -> None:
    """Exchange the bytes in two extents."""
    files = {path: bytearray(Path(path).read_bytes()) for path in (path_a, path_b)}
    of_a, of_b = files[path_a][a.offset : a.end], files[path_b][b.offset : b.end]
    files[path_a][a.offset : a.end] = of_b
    files[path_b][b.offset : b.end] = of_a
    for path, content_now in files.items():
        Path(path).write_bytes(content_now)


@dataclass(frozen=True)
class Damage:
    """Damage to a copy of a conversion: swap two tensors with the same shape, or flip one bit."""

    target: str
    keys: tuple[Key, ...]

    @property
    def cell(self) -> Cell:
        """First conversion of a llama to the target."""
        cells = cells_from((*ZERO, "universal"))
        return next(c for c in cells if c.target == self.target and c.source.options["model"] == "llama")

    @property
    def name(self) -> str:
        return f"damaged-{self.target}-{len(self.keys)}"

    def make(self, folder: Path) -> Checkpoint:
        """Return the damaged copy, still readable."""
        copy = folder / "converted" / self.name
        shutil.copytree(folder / "converted" / self.cell.name, copy)
        checkpoint = api.open(copy, self.target)
        fragments = [list(checkpoint.tensors[key].fragments()) for key in self.keys]
        if len(self.keys) == 2:
            for one, other in zip(*fragments, strict=True):
                exchange(one.extent.path, other.extent.path, one.extent, other.extent)
        else:
            extent = fragments[0][0].extent
            data = bytearray(Path(extent.path).read_bytes())
            data[extent.offset] ^= 1
            Path(extent.path).write_bytes(data)
        return checkpoint

    def job(self, folder: Path) -> dict[str, Any]:
        copy = str(folder / "converted" / self.name)
        return self.cell.job(folder) | {"resume": copy, "output": copy}


DAMAGES = [
    Damage("zero3", (("model.norm.weight", MASTER),)),
    Damage("dcp", (("model.norm.weight", WEIGHT),)),
    Damage(
        "zero1", (("model.layers.1.mlp.up_proj.weight", "exp_avg"), ("model.layers.1.mlp.up_proj.weight", "exp_avg_sq"))
    ),
    Damage(
        "dcp",
        (("model.layers.0.input_layernorm.weight", "exp_avg"), ("model.layers.1.input_layernorm.weight", "exp_avg")),
    ),
]


# -- the table ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Matrix:
    """All runs and conversions in `folder`, with the content read back from files and from the target's framework."""

    folder: Path
    written: dict[str, Checkpoint]


def build_matrix(folder: Path, cells: Sequence[Cell], damages: Sequence[Damage] = ()) -> Matrix:
    """Run one launch of trainers and one launch of loading engines."""
    used = {cell.source.name: cell.source for cell in cells}.values()
    launch_in_turn(
        [(ranks, [source.job(folder) for source in used if source.ranks == ranks]) for ranks in RANKS],
        folder,
        "tests.support.hf_trainer",
    )
    written = {cell.name: cell.convert(folder) for cell in cells}
    written |= {damage.name: damage.make(folder) for damage in damages}
    loads = [(one.ranks, one.job(folder)) for one in cells]
    loads += [(damage.cell.ranks, damage.job(folder)) for damage in damages]
    launch_in_turn(
        [(ranks, [job for on, job in loads if on == ranks]) for ranks in RANKS],
        folder / "converted",
        "tests.support.matrix_loading",
    )
    return Matrix(folder, written)


def check(matrix: Matrix, cell: Cell, tables: Any) -> None:
    """Assert that a conversion equals the source's truth, in the files and in the target's engine."""
    truth = cell.source.truth(matrix.folder)
    files = compare_files(cell, matrix.written[cell.name], truth)
    engine = compare_engine(cell, matrix.folder / "converted" / cell.name, truth)
    assert files and engine
    row = tables["Tensors bit for bit equal to the source's live engine: in the files / in the target's engine"][
        f"{cell.source.title} -> {cell.target}"
    ]
    for before, after in product(RANKS, RANKS):
        row.setdefault(f"{before}->{after}", "-")
    row[f"{cell.source.ranks}->{cell.ranks}"] = f"{files}/{engine}"


def check_that_it_is_seen(matrix: Matrix, damage: Damage) -> None:
    """Assert that the comparison finds the damage and names the tensor, in the files and in the engine."""
    truth = damage.cell.source.truth(matrix.folder)
    with pytest.raises(AssertionError, match="not as the source's engine gathered") as in_files:
        compare_files(damage.cell, matrix.written[damage.name], truth)
    with pytest.raises(AssertionError, match="not as the source's engine gathered") as in_engine:
        compare_engine(damage.cell, matrix.folder / "converted" / damage.name, truth)
    for error in (in_files, in_engine):
        named = str(error.value).split("gathered: ")[1].split("\n")[0]
        assert all(str(key) in named for key in damage.keys)
        assert named.count("('") <= len(damage.keys) + 1  # a master's weight, if its rounding differs too
