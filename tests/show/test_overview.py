"""`ckpt/commands/inspect/overview.py`, `parts.py`: counts in the description, and its safety for terminals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.base.text import aligned, one_line
from ckpt.commands.inspect.overview import HEADS, RIGHT, describe, lines, mesh, mesh_text, ranks_text, rows
from ckpt.commands.inspect.parts import part_lines, parts_of
from ckpt.containers.torchfile.values import Record
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, ParamGroup, SourceFile, TrainingState
from ckpt.plan.dtypes import BFLOAT16, BOOL, FLOAT32, DType
from ckpt.plan.tensors import Extent, FlatRange, Fragment, Pieces, Shape, Tensor, Whole
from ckpt.state.summaries import summarise, summary_text
from tests.support.golden import agrees


def tensor(fqn: str, role: str, dtype: DType, shape: Shape, num_ranks: int = 0) -> Tensor:
    if not num_ranks:
        return Tensor(fqn, role, dtype, shape, Whole(Extent.contiguous("file", 0, dtype, shape)))
    whole = Extent.contiguous("file", 0, dtype, shape)
    edges = [whole.numel * rank // num_ranks for rank in range(num_ranks + 1)]
    parts = [Fragment(FlatRange(a, b), whole.flat(a, b), rank) for rank, (a, b) in enumerate(pairwise(edges))]
    return Tensor(fqn, role, dtype, shape, Pieces(tuple(parts)))


def checkpoint(*tensors: Tensor, **fields: Any) -> Checkpoint:
    keyed = {(one.fqn, one.role): one for one in tensors}
    return Checkpoint("outputs/step4", "zero3", keyed, fields.pop("files", ()), **fields)


def trained() -> Checkpoint:
    """Return a ZeRO run with Adam: two trained parameters, a frozen one and a buffer."""
    state = TrainingState(
        step=4,
        param_groups=(
            ParamGroup(("embed", "head"), {"lr": 0.001, "betas": (0.9, 0.999), "weight_decay": 0.0}),
            ParamGroup((), {"lr": 0.01}),
        ),
        scalars={"step": {"embed": 4, "head": 4}},
        lr_scheduler={"last_epoch": 4, "base_lrs": [0.001]},
        private={"torch": {"rng": b"\0" * 5000, "loss_scaler": None}},
    )
    return checkpoint(
        *(tensor("embed", role, FLOAT32, (10, 4), 4) for role in (MASTER, "exp_avg", "exp_avg_sq")),
        *(tensor("head", role, FLOAT32, (4,), 4) for role in (MASTER, "exp_avg", "exp_avg_sq")),
        tensor("frozen", WEIGHT, BFLOAT16, (6,)),
        tensor("mask", BUFFER, BOOL, (3,)),
        state=state,
        framework="deepspeed 0.19.8",
        world_size=4,
        ties={"lm_head": "embed"},
        config={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 10},
        files=(SourceFile("a", 700, 0, 0), SourceFile("b", 50, 0, 0)),
        notes=("a note",),
    )


def test_what_a_training_checkpoint_holds() -> None:
    found = describe(trained())
    assert found["format"] == "zero3"
    assert (found["framework"], found["step"], found["world_size"]) == ("deepspeed 0.19.8", 4, 4)
    assert found["model"] == {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert found["parameters"] == {
        "tensors": 3,
        "elements": 50,
        "trainable": 44,
        "frozen": 6,
        "dtypes": {"float32": 44, "bfloat16": 6},
    }
    assert found["bytes_per_rank"] == {"0": 132, "1": 132, "2": 132, "3": 132}
    assert found["mesh"] is None
    assert found["files"] == {"count": 2, "bytes": 750}
    assert found["roles"]["exp_avg"] == {"tensors": 2, "bytes": 176, "dtypes": ["float32"]}
    assert found["dtypes"]["float32"] == {"tensors": 6, "elements": 132, "bytes": 528}
    assert found["dtypes"]["bool"] == {"tensors": 1, "elements": 3, "bytes": 3}
    assert found["ties"] == [{"alias": "lm_head", "owner": "embed"}]
    training = found["training"]
    assert training["masters"] is True
    assert training["optimizer_states"] == ["exp_avg", "exp_avg_sq", "step"]
    assert training["scalars"] == {"step": {"parameters": 2, "values": [4]}}
    assert training["param_groups"][0]["parameters"] == 2
    assert training["param_groups"][0]["options"] == {"lr": 0.001, "betas": [0.9, 0.999], "weight_decay": 0.0}
    assert training["items"]["rng"] == "<5000 bytes>"
    assert found["notes"] == ["a note"]
    assert "tensors" not in found
    json.dumps(found, allow_nan=False)


def test_the_text_for_people() -> None:
    assert list(lines(trained())) == [
        "path          outputs/step4",
        "format        zero3",
        "framework     deepspeed 0.19.8",
        "model         qwen2",
        "step          4",
        "world size    4",
        "parameters    50 in 3 tensors, 44 trainable and 6 frozen",
        "              44 float32, 6 bfloat16",
        "on disk       750 B in 2 files",
        "per rank      132 B of tensors on each of 4",
        "tensors       master: 2 tensors, 176 B, float32",
        "              exp_avg: 2 tensors, 176 B, float32",
        "              exp_avg_sq: 2 tensors, 176 B, float32",
        "              weight: 1 tensor, 12 B, bfloat16",
        "              buffer: 1 tensor, 3 B, bool",
        "ties          lm_head is embed",
        "optimizer     exp_avg, exp_avg_sq, step",
        "scalars       step: 4, for 2 parameters",
        "param groups  2 parameters: lr 0.001, betas [0.9, 0.999], weight_decay 0.0",
        "              0 parameters: lr 0.01",
        "also stored   lr_scheduler: last_epoch 4, base_lrs [0.001]",
        "              rng: <5000 bytes>",
        "              loss_scaler: None",
        "notes         a note",
    ]


def test_weights_alone() -> None:
    found = checkpoint(tensor("x", WEIGHT, BFLOAT16, (2, 3)))
    counts = {"tensors": 1, "elements": 6, "trainable": None, "frozen": None, "dtypes": {"bfloat16": 6}}
    assert describe(found)["parameters"] == counts
    text = list(lines(found))
    assert "parameters  6 in 1 tensor" in text
    assert "optimizer   no states" in text
    assert not any(line.startswith(("step", "model", "framework", "ties", "notes")) for line in text)


def test_an_optimizer_without_states_still_tells_what_is_trained() -> None:
    state = TrainingState(param_groups=(ParamGroup(("x",), {}),))
    found = checkpoint(tensor("x", WEIGHT, FLOAT32, (2,)), tensor("y", WEIGHT, FLOAT32, (3,)), state=state)
    counts = describe(found)["parameters"]
    assert (counts["tensors"], counts["elements"], counts["trainable"], counts["frozen"]) == (2, 5, 2, 3)


def test_the_table_of_tensors_is_aligned() -> None:
    one = tensor("layers.0.weight", MASTER, FLOAT32, (10, 4), 4)
    other = tensor("b", BUFFER, BOOL, ())._replace(replicas=(Pieces(()),))
    assert list(aligned(HEADS, rows(checkpoint(one, other)), RIGHT)) == [
        "name             role    dtype    shape    bytes  fragments  ranks",
        "layers.0.weight  master  float32  [10, 4]    160          4  0-3",
        "b                buffer  bool     []           1          1  1 replica",
    ]
    assert describe(checkpoint(one), tensors=True)["tensors"] == [
        {
            "fqn": "layers.0.weight",
            "role": "master",
            "dtype": "float32",
            "shape": [10, 4],
            "bytes": 160,
            "fragments": 4,
            "files": 1,
            "ranks": [0, 1, 2, 3],
            "replicas": 0,
        }
    ]


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 5, 7, 8, 9], "0-1, 5, 7-9")]
)
def test_ranks_as_runs(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


class Untouchable:
    """Object whose own methods must not run."""

    def __repr__(self) -> str:
        raise AssertionError("somebody else's code was run")

    __str__ = __iter__ = __len__ = __eq__ = __repr__  # type: ignore[assignment]
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, True),
        (2**63, 2**63),
        (pytest.param(2**100_000, "<integer of 100001 bits>", id="long")),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        ("a\x1b[2Jb\nc", "a\\x1b[2Jb\\nc"),
        (b"123", "<3 bytes>"),
        (FLOAT32, "float32"),
        ((1, [2, {3}]), [1, [2, [3]]]),
        (list(range(1000)), [*range(8), "... 992 more"]),
        (Untouchable(), "<Untouchable>"),
        ({Untouchable(): Untouchable()}, {"<Untouchable>": "<Untouchable>"}),
        (Record("torch.optim", "Adam", (1, 2)), "<torch.optim.Adam>"),
        ({1: {2: {3: {4: {5: 6}}}}}, {"1": {"2": {"3": {"4": "<1 entry>"}}}}),
        ({"\x1b": 1}, {"\\x1b": 1}),
        ([[[[[1]]]]], [[[["<1 value>"]]]]),
        (dict.fromkeys(range(100)), dict.fromkeys(map(str, range(16))) | {"...": "84 more"}),
    ],
)
def test_a_value_is_summarised(value: object, shown: object) -> None:
    assert summarise(value) == shown


def test_a_long_text_is_cut() -> None:
    shown = summarise("x" * 10_000_000)
    assert isinstance(shown, str)
    assert len(shown) < 200


def bomb() -> Any:
    """Return a small value that prints ten to the 300 values."""
    value: Any = {"leaf": 1}
    for _ in range(300):
        value = {f"key{number}": value for number in range(10)}
    return value


def deep() -> Any:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("make", [bomb, deep, circle])
def test_trees_that_blow_up_are_bounded(make: Any) -> None:
    value = make()
    assert len(json.dumps(summarise(value))) < 20_000
    assert len(summary_text(value)) <= 120
    found = checkpoint(tensor("x", WEIGHT, FLOAT32, (1,)), state=TrainingState(private={"torch": {"odd": value}}))
    assert len(json.dumps(describe(found))) < 30_000
    assert sum(map(len, lines(found))) < 3000


def texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from (key, *texts(member))
    elif isinstance(value, list):
        for member in value:
            yield from texts(member)


def test_hostile_names_are_escaped_and_cut_everywhere() -> None:
    evil = "\x1b]0;owned\x07\u202e\n<script>" + "x" * 10_000_000
    found = checkpoint(
        tensor(evil, WEIGHT, FLOAT32, (1,)),
        tensor("x", evil, FLOAT32, (1,)),
        framework=evil,
        namespace=evil,
        ties={evil: evil},
        notes=(evil,),
        config={"model_type": evil, "architectures": {evil: evil}},
        state=TrainingState(
            step=1,
            scalars={evil: {evil: evil}},
            private={evil: {evil: {evil: evil}}},
            param_groups=(ParamGroup((evil,), {evil: evil}),),
        ),
    )
    table = aligned(HEADS, rows(found), RIGHT)
    shown = [*lines(found), *table, *texts(describe(found, tensors=True))]
    assert len(shown) > 20
    for text in shown:
        assert text.isprintable()
        assert len(text) < 2000
    json.dumps(describe(found, tensors=True), allow_nan=False)


def test_one_line_has_no_line_end() -> None:
    assert one_line("a\nb\r\x00") == "a\\nb\\r\\x00"


def test_long_lists_are_cut_in_the_text() -> None:
    found = checkpoint(tensor("x", WEIGHT, FLOAT32, (1,)), ties={f"alias{n}": "x" for n in range(1000)})
    assert len(list(lines(found))) < 40
    assert any(line.endswith("... and 980 more") for line in lines(found))
    assert len(describe(found)["ties"]) == 1000


def test_everything_is_shown_where_it_is_asked_for() -> None:
    value = {f"key{number}": ["x" * 200] * 10 for number in range(40)}
    found = checkpoint(
        tensor("x", WEIGHT, FLOAT32, (1,)),
        ties={f"alias{n}": "x" for n in range(50)},
        state=TrainingState(ds_config=value, param_groups=(ParamGroup(("x",), {"betas": list(range(30))}),)),
    )
    short, long = list(lines(found)), list(lines(found, everything=True))
    assert short[-1].endswith("(--all shows in full what ends in ...)")
    assert not any("..." in line for line in long)
    assert sum("alias" in line for line in long) == 50
    assert describe(found, everything=True)["training"]["items"]["ds_config"] == value
    assert any("27, 28, 29]" in line for line in long)


@pytest.mark.parametrize("width", [40, 80])
def test_lines_are_folded_to_the_terminal(width: int) -> None:
    for line in lines(trained(), everything=True, width=width):
        assert len(line) <= width
    folded, whole = " ".join(lines(trained(), width=width)), " ".join(lines(trained()))
    assert "".join(folded.split()) == "".join(whole.split())


@pytest.mark.parametrize("name", ["toy-zero3", "megatron-fsdp"])
def test_a_checkpoint_at_80_columns(fixtures: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(fixtures)
    found = "".join(f"{line}\n" for line in lines(api.open(name), width=80))
    agrees(Path(__file__).parent / "golden" / f"inspect-{name}.txt", found)


def megatron(**args: int) -> Checkpoint:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
    names |= {"ep": "expert_model_parallel_size", "dp": "data_parallel_size", "cp": "context_parallel_size"}
    state = TrainingState(args={names[axis]: size for axis, size in args.items()})
    return checkpoint(tensor("x", WEIGHT, FLOAT32, (8,)), state=state, world_size=16)


@pytest.mark.parametrize(
    ("found", "sizes", "text"),
    [
        (megatron(tp=2, pp=4), {"tp": 2, "pp": 4, "dp": 2}, "TP 2 x PP 4 x DP 2 on 16 ranks"),
        (
            megatron(tp=2, pp=2, ep=2, dp=4, cp=1),
            {"tp": 2, "pp": 2, "ep": 2, "cp": 1, "dp": 4},
            "TP 2 x PP 2 x EP 2 x DP 4 on 16 ranks, experts spread within DP",
        ),
        (megatron(tp=3), {"tp": 3}, "TP 3 on 16 ranks"),
        (checkpoint(tensor("x", WEIGHT, FLOAT32, (8,)), world_size=4), None, ""),
        (
            checkpoint(tensor("x", WEIGHT, FLOAT32, (8,)), world_size=4, state=TrainingState(zero_stage=3)),
            {"dp": 4},
            "DP 4 on 4 ranks; ZeRO-3 partitions weights and optimizer",
        ),
    ],
)
def test_the_mesh(found: Checkpoint, sizes: dict[str, int] | None, text: str) -> None:
    assert (mesh(found), mesh_text(found)) == (sizes, text)


def test_bytes_of_each_rank() -> None:
    few = checkpoint(tensor("w", WEIGHT, FLOAT32, (9, 1), 4))
    assert describe(few)["bytes_per_rank"] == {"0": 8, "1": 8, "2": 8, "3": 12}
    assert "            rank 3: 12 B of tensors" in list(lines(few))
    many = checkpoint(tensor("w", WEIGHT, FLOAT32, (33,), 32))
    assert "per rank    4 B of tensors (rank 0) to 8 B (rank 31) on 32 ranks ..." in list(lines(many))
    assert sum("of tensors" in line for line in lines(many, everything=True)) == 32


def test_where_the_parts_of_a_tensor_lie() -> None:
    copy = tensor("", "", FLOAT32, (10, 4)).source
    one = tensor("layers.0.weight", MASTER, FLOAT32, (10, 4), 2)._replace(replicas=(copy,))
    assert list(part_lines(one, "")) == [
        "layers.0.weight  master float32 [10, 4], 160 B",
        "  rank 0, elements 0:20: file at byte 0, 80 B",
        "  rank 1, elements 20:40: file at byte 80, 80 B",
        "  copy 1: all of it: file at byte 0, 160 B",
    ]
    first, second, third = parts_of(one)["parts"]
    assert (first["copy"], second["copy"], third["copy"]) == (0, 0, 1)
    place = {"copy": 0, "region": "elements 20:40", "rank": 1, "file": "file", "offset": 80, "bytes": 80}
    assert second == place


def test_inspecting_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, ckpt.commands.inspect.overview; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
