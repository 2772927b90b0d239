"""`converters/megatron/read.py`, `write.py`, `optimizer_read.py`, `optimizer_write.py`: runs resume elsewhere.

Checkpoints after 4 of 8 steps move to another layout or engine, and resume. The loss equals the unbroken run's bit for
bit if engine and layout stay, or if megatron-core reshards the checkpoint itself. Otherwise only rounding differs. The
last row shows that a lost state exceeds the bound.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ckpt
from tests.support.engines import Truth, launch
from tests.support.megatron_runs import without_padding
from tests.support.pages import row_differs
from tests.support.places import REPOSITORY
from tests.support.resuming import BOUNDS, Row, Run, apart, losses, options, shown, side_by_side, title
from tests.support.sampling import sample
from tests.support.tiny_sizes import tiny_sizes
from train import models
from train.config import Config

pytestmark = pytest.mark.slow

RECORDED = (REPOSITORY / "docs" / "losses.txt").read_text()

RANKS = 4
#: Options of every run. No layout here pads a vocabulary with 512 rows. The 8 steps cover a third of the schedule.
COMMON = {"vocab": 512, "batch": 8, "scheduler": "torch", "schedule_steps": 24, "lr": 2e-3}


@dataclass(frozen=True)
class Engine(Run):
    """An engine on four ranks. All engines train the same model weights."""

    model: str = "llama"

    @property
    def sizes(self) -> dict[str, Any]:
        return {name: value for name, value in self.options if name in ("tp", "pp", "vpp", "ep")}

    @property
    def name(self) -> str:
        if self.strategy != "megatron":
            return f"{self.strategy} on {self.ranks}"
        sizes = self.sizes | {"dp": self.ranks // (self.sizes["tp"] * self.sizes["pp"])}
        shown = "".join(f" {name.upper()}{size}" for name, size in sizes.items() if size > 1)
        model = "" if self.model == "llama" else f"{self.model} "
        return f"{model}{self.format}{shown}"

    @property
    def format(self) -> str:
        if self.strategy != "megatron":
            return super().format
        return "megatron-dist" if dict(self.options)["save"] == "torch_dist" else "megatron"

    def job(self, output: Path, steps: int, **more: Any) -> dict[str, Any]:
        megatron = {}
        if self.strategy == "megatron":  # Megatron's interleaved schedule needs as many micro batches as stages
            megatron = {"vocab_multiple": 128, "accumulate": self.sizes["pp"] if self.sizes["vpp"] > 1 else 1}
            megatron |= {"sequence_parallel": self.model in SPARSE and self.sizes["tp"] > 1}
            megatron |= {"sees": tiny_sizes("qwen2_5_vl")["vision_config"]} if self.model == SEEING else {}
        model = "qwen2" if self.model == SEEING else self.model
        return super().job(output, steps, model=f"{model}_wide", **COMMON, **megatron, **more)


def megatron(tp: int = 1, pp: int = 1, *, vpp: int = 1, ep: int = 1, save: str = "torch", model: str = "llama") -> Run:
    sizes = (("tp", tp), ("pp", pp), ("vpp", vpp), ("ep", ep), ("save", save))
    return Engine("megatron", RANKS, "fp32", sizes, model)


def other(strategy: str) -> Run:
    return Engine(strategy, RANKS, "fp32")


#: Models with experts, where megatron-core requires sequence parallelism under TP, and a model with images.
SPARSE, SEEING = ("qwen3_moe", "deepseek_v3", "qwen3_next"), "qwen2_5_vl"
GRID, DIST = megatron(tp=2, pp=2), megatron(tp=2, pp=2, save="torch_dist")
ZERO3, FSDP2 = other("zero3"), other("fsdp2")
#: One move per family between different layouts. The loaded state is also compared bit for bit.
FAMILIES = {
    "dense": Row(GRID, megatron(pp=2, vpp=2)),
    "grouped queries": Row(megatron(tp=2, pp=2, model="qwen2"), megatron(pp=4, model="qwen2")),
    "experts": Row(megatron(pp=2, ep=2, model="qwen3_moe"), megatron(pp=2, model="qwen3_moe")),
    "latent attention": Row(megatron(pp=2, ep=2, model="deepseek_v3"), megatron(ep=2, model="deepseek_v3")),
    "hybrid": Row(megatron(pp=2, ep=2, model="qwen3_next"), megatron(tp=2, pp=2, model="qwen3_next")),
    "images": Row(megatron(tp=2, pp=2, model=SEEING), megatron(pp=2, model=SEEING)),
    "images, torch_dist": Row(
        megatron(pp=2, save="torch_dist", model=SEEING),
        megatron(tp=2, save="torch_dist", model=SEEING),
        ("megatron-dist",),
    ),
}
#: Moves done by ckpt.resume, and the layout it gets.
UNFIT = {
    Row(GRID, megatron(pp=4)): {"tp": 1, "pp": 4, "ep": 1, "vpp": 1},
    Row(megatron(tp=4), GRID): {"tp": 2, "pp": 2, "ep": 1, "vpp": 1},
    Row(megatron(pp=2), GRID): {"tp": 2, "pp": 2, "ep": 1, "vpp": 1},
    Row(megatron(pp=2, vpp=2), GRID): {"tp": 2, "pp": 2, "ep": 1, "vpp": 1},
    FAMILIES["dense"]: {"tp": 1, "pp": 2, "ep": 1, "vpp": 2},
    FAMILIES["experts"]: {"tp": 1, "pp": 2, "ep": 1, "vpp": 1},
    FAMILIES["grouped queries"]: {"tp": 1, "pp": 4, "ep": 1, "vpp": 1},
    FAMILIES["latent attention"]: {"tp": 1, "pp": 1, "ep": 2, "vpp": 1},
    FAMILIES["hybrid"]: {"tp": 2, "pp": 2, "ep": 1, "vpp": 1},
    FAMILIES["images"]: {"tp": 1, "pp": 2, "ep": 1, "vpp": 1},
    Row(GRID, ZERO3): {},
    Row(ZERO3, GRID): {"tp": 2, "pp": 2, "transformer_impl": "local"},
    Row(FSDP2, GRID): {"tp": 2, "pp": 2, "dtype": "fp32", "transformer_impl": "local"},
    Row(DIST, FSDP2): {},
}
RESHARDED = Row(DIST, megatron(pp=4), ("megatron",), own={})
BY_HAND = [
    Row(GRID, GRID, ("megatron-dist", "megatron"), equal=True),
    Row(GRID, GRID, ("zero3", "megatron"), equal=True),
    Row(ZERO3, ZERO3, ("megatron", "zero3"), equal=True),
    Row(ZERO3, DIST, ("megatron-dist",)),
]


def in_bf16(one: Row) -> Row:
    return replace(one, source=replace(one.source, dtype="bf16"), target=replace(one.target, dtype="bf16"))


BF16 = [
    in_bf16(Row(GRID, GRID, ("zero3", "megatron"), equal=True)),
    in_bf16(Row(GRID, megatron(pp=4), ("megatron",))),
    in_bf16(Row(GRID, ZERO3, ("zero3",))),
    in_bf16(Row(ZERO3, GRID, ("megatron",))),
]
ALIKE = [FSDP2, ZERO3, megatron(tp=4), megatron(pp=2, vpp=2)]
FORGETFUL = Row(GRID, megatron(pp=4), ("megatron",))


def facets(one: Row) -> Iterator[object]:
    """Yield a row's model, the formats that it reads and writes, and its options.

    `tests/formats/megatron/test_matrix.py` loads the states of more models, and those that come from FSDP.
    """
    formats = ["zero3" if name == "dcp" else name for name in (one.source.format, *one.through, one.target.format)]
    yield "experts" if one.source.model in SPARSE else one.source.model
    yield from (("from", one.source.model == SEEING, name) for name in formats[:-1])
    yield from (("to", name) for name in formats[1:])
    yield one.source.dtype, one.source.strategy == one.target.strategy
    yield from (("by hand", bool(one.through)), ("equal", one.equal), ("own", one.own is None))


ALL_ROWS: list[Any] = list(dict.fromkeys([*FAMILIES.values(), RESHARDED, *UNFIT, *BY_HAND, *BF16]))
TABLE: list[Any] = sample(ALL_ROWS, facets)
#: Runs with an unbroken counterpart on the page, and those that this session runs.
SOURCES = {one.source for one in ALL_ROWS}
UNBROKEN = SOURCES & {run for one in TABLE for run in (one.source, one.target)}


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all unbroken runs in one launch, and conversions and resumed runs in another."""
    folder = tmp_path_factory.mktemp("resume")
    whole: list[dict[str, Any]] = []
    for run in sorted(UNBROKEN, key=lambda run: run.folder):
        begins = {}
        if run.format.startswith("megatron") and run.job(folder, 0)["model"] == "llama_wide":
            begins = {"resume": str(start(folder, run.dtype))}
        whole.append(run.job(folder / "unbroken" / run.folder, 8, save_every=4, save_at=4, truth=True, **begins))
    launch(whole, RANKS, folder / "unbroken", module="tests.support.recorded_runs")
    jobs: list[dict[str, Any]] = []
    for one in [*TABLE, FORGETFUL]:
        home = folder / one.folder
        checkpoint = home / "a run"
        job = one.target.job(home / "goes-on", 4)
        if one in UNFIT:
            job["anywhere"] = {"path": str(checkpoint), "format": one.target.format} | UNFIT[one]
        else:
            job["resume"] = str(home / "converted")
        job |= {"copied": [str(folder / "unbroken" / one.source.folder), str(checkpoint)], "save_at": 0}
        job |= {"commands": conversions(one, home), "forget": one is FORGETFUL, "loaded": one in FAMILIES.values()}
        jobs.append(job)
        if one.own is not None:
            jobs.append(one.target.job(home / "own", 4, resume=str(checkpoint), save_at=0) | one.own)
    launch(jobs, RANKS, folder, module="tests.support.resume_worker")
    return folder


def start(folder: Path, dtype: str) -> Path:
    """Write the initial weights of the trainer's other engines for any Megatron layout."""
    output = folder / f"start-{dtype}"
    if not output.exists():
        model = models.build_model(Config(model="llama_wide", vocab=COMMON["vocab"]))
        model.save_pretrained(folder / f"hub-{dtype}")
        layout = ["--tp", "2", "--pp", "2", "--dtype", dtype, "--transformer-impl", "local"]
        done = ckpt("convert", "hf", "megatron-dist", folder / f"hub-{dtype}", "-o", output, *layout)
        assert done.code == 0, done.err
    return output


def conversions(one: Row, home: Path) -> list[str]:
    """Return the commands that convert through all formats to `converted`."""
    lines, source, checkpoint = [], one.source.format, home / "a run"
    grid = dict((one.target if one.target.strategy == "megatron" else GRID).options)
    for left, target in zip(reversed(range(len(one.through))), one.through, strict=True):
        output = home / (f"converted-{left}" if left else "converted")
        words = ["ckpt", "convert", source, target, str(checkpoint), "-o", str(output)]
        if target.startswith("megatron"):
            words += ["--tp", str(grid["tp"]), "--pp", str(grid["pp"])]
            words += [] if source.startswith("megatron") else ["--transformer-impl", "local"]
        else:
            words += ["--world-size", str(RANKS)]
        lines.append(shlex.join(words))
        source, checkpoint = target, output
    return lines


def unbroken(folder: Path, run: Run) -> dict[int, float]:
    return losses(folder / "unbroken" / run.folder)


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.folder)
def test_training_goes_on(one: Row, resumed: Path, tables: Any) -> None:
    whole, rest = unbroken(resumed, one.source), losses(resumed / one.folder / "goes-on")
    assert sorted(rest) == [5, 6, 7, 8]
    difference = apart(rest, whole)
    cells = tables[f"Megatron: {title(one.source.dtype)}"][one.name]
    cells |= side_by_side(rest, whole)
    has_twin = one.target in SOURCES and one.target != one.source
    cells["apart"] = shown(apart(unbroken(resumed, one.target), whole)) if has_twin else "-"
    if one.equal:
        assert difference == 0
    assert difference < BOUNDS[one.source.dtype]
    if one.own is not None:
        own = losses(resumed / one.folder / "own")
        cells["without conversion"] = shown(apart(rest, own))
        assert rest == own
    assert not (different := row_differs(RECORDED, one.name, cells)), different


@pytest.mark.parametrize("family", [family for family, one in FAMILIES.items() if one in TABLE])
def test_weights_masters_and_states_are_those_of_the_live_ranks(family: str, resumed: Path) -> None:
    """Compare every bit gathered by megatron-core when it saved, and after other ranks loaded."""
    one = FAMILIES[family]
    held = Truth.load(resumed / "unbroken" / one.source.folder / "truth" / "iter_0000004.safetensors")
    loaded = Truth.load(resumed / one.folder / "goes-on" / "truth" / "loaded.safetensors")
    assert without_padding(loaded) == without_padding(held)
    assert {role for _, role in held.tensors} >= {"weight", "exp_avg", "exp_avg_sq"}
    assert loaded.metadata["adam_step"] == held.metadata["adam_step"] == 4


@pytest.mark.parametrize("engine", [run for run in ALIKE if run in UNBROKEN], ids=lambda run: run.folder)
def test_engines_begin_and_learn_alike(engine: Run, resumed: Path) -> None:
    """Without this, different engine settings could explain a difference after a conversion."""
    assert unbroken(resumed, engine) == pytest.approx(unbroken(resumed, GRID), rel=BOUNDS["fp32"])


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.folder)
def test_every_step_has_the_hyperparameters_of_the_unbroken_run(one: Row, resumed: Path) -> None:
    """The schedule continues, so the learning rate of each step matches in every group."""
    whole = kinds(resumed / "unbroken" / one.source.folder)
    rest = kinds(resumed / one.folder / "goes-on")
    # torch computes the cosine from the previous step, Megatron from the step number.
    same = one.source.strategy == one.target.strategy
    for found, expected in zip(rest, whole[4:], strict=True):
        assert found == (expected if same else pytest.approx(expected, rel=1e-12))
    assert len({json.dumps(step) for step in whole}) == 8, "the learning rate does not change"


def kinds(run: Path) -> list[dict[str, Any]]:
    """Return hyperparameters by step, for groups with and without decay. Experts may have their own."""
    steps = []
    for groups in options(run):
        step: dict[str, Any] = {}
        for group in groups:
            kind = "decayed" if group["weight_decay"] else "not decayed"
            for name, value in group.items():
                for number, item in enumerate(value if isinstance(value, list) else [value]):
                    assert step.setdefault(f"{kind}: {name}[{number}]", item) == item
        steps.append(step)
    return steps


def test_forgetting_the_optimizer_shows(resumed: Path, tables: Any) -> None:
    """The bounds would catch a lost state."""
    whole, rest = unbroken(resumed, FORGETFUL.source), losses(resumed / FORGETFUL.folder / "goes-on")
    row = f"{FORGETFUL.name}, without the optimizer's states"
    cells = tables[f"Megatron: {title('fp32')}"][row]
    cells |= side_by_side(rest, whole)
    assert not (different := row_differs(RECORDED, row, cells)), different
    assert apart(rest, whole) > 5 * max(BOUNDS.values())
