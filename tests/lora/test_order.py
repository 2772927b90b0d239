"""`ckpt/lora/order.py`, `ckpt/lora/joint.py`: adapters that go by the order of a model's layers, or by all of their
weights, in a model that transformers does not know.

The truth is PEFT's merge in the live model, whose layers are not registered by the alphabet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt.errors import CorruptError
from ckpt.lora.order import is_registered
from tests.lora.test_kinds import case, trained
from tests.support.adapters import edited, merge, same, weights
from tests.support.commands import ckpt

#: Adapters whose file does not tell the order.
UNTOLD: dict[str, dict[str, Any]] = {
    "FROD": {"save_projection": False, "sparse_rate": 0.1},
    "TINYLORA": {"save_projection": False, "r": 2, "u": 6, "weight_tying": 0.4},
    "UNILORA": {"theta_d_length": 31},
}
#: And those that have what PEFT would make anew.
TOLD = {
    "FROD": {"sparse_rate": 0.1},
    "TINYLORA": {"r": 2, "u": 6, "weight_tying": 0.4},
    "UNILORA": {"theta_d_length": 31, "save_indices": True},
}
TARGETS = ["query", "key", "out"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(12, 12)
        self.key = nn.Linear(12, 8)
        self.inner = nn.ModuleDict({"out": nn.Linear(8, 12)})


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Block()


class Tower(nn.Module):
    """Two branches with layers of the same categories and no numbers, and blocks with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.right = Branch()
        self.left = Branch()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 4)


def tower(dtype: torch.dtype = torch.float32) -> Tower:
    torch.manual_seed(0)
    return Tower().to(dtype)


def torch_file(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    torch.save(tower(dtype).state_dict(), folder / "pytorch_model.bin")
    return folder


def by_peft(
    adapter: Path, dtype: torch.dtype = torch.float32, before: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    from peft import PeftModel

    model = tower(dtype)
    model.load_state_dict(before or model.state_dict())
    state = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    kept = {name: tensor for name, tensor in state.items() if ".original_module." not in name}
    return {name.replace(".modules_to_save.default", ""): tensor for name, tensor in kept.items()}


def is_pefts(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = load_file(folder / "model.safetensors")
    return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", UNTOLD)
def test_a_torch_file_has_the_order(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapter = torch_file(tmp_path / "base", dtype), tmp_path / "adapter"
    trained(tower(dtype), kind, case(*TARGETS, **UNTOLD[kind]), adapter)
    merge([adapter], base, tmp_path / "merged")
    assert is_pefts(tmp_path / "merged", by_peft(adapter, dtype))


@pytest.mark.parametrize("kind", TOLD)
def test_a_file_without_an_order_is_enough_where_the_adapter_tells(kind: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file(tower().state_dict(), base / "model.safetensors")
    trained(tower(), kind, case(*TARGETS, **TOLD[kind]), adapter)
    merge([adapter], base, tmp_path / "merged")
    assert is_pefts(tmp_path / "merged", by_peft(adapter))


@pytest.mark.parametrize("kind", UNTOLD)
def test_names_in_the_order_of_the_alphabet_tell_none(kind: str, tmp_path: Path) -> None:
    """In safetensors, and in a torch file that was made of it, by ckpt as by others; nor do those that were moved."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file(tower().state_dict(), base / "model.safetensors")
    trained(tower(), kind, case(*TARGETS, **UNTOLD[kind]), adapter)
    (tmp_path / "again").mkdir()
    torch.save(load_file(base / "model.safetensors"), tmp_path / "again/pytorch_model.bin")
    assert ckpt("convert", base, "--to", "full", "-o", tmp_path / "ours").code == 0
    first, *others = tower().state_dict().items()
    (tmp_path / "moved").mkdir()
    torch.save(dict([*others, first]), tmp_path / "moved/pytorch_model.bin")
    for place in (base, tmp_path / "again", tmp_path / "ours", tmp_path / "moved"):
        done = ckpt("merge-lora", adapter, "--base", place, "-o", tmp_path / "out")
        assert (done.code, (tmp_path / "out").exists()) == (2, False), place
        assert "which the base does not record" in done.err and "torch.save" in done.err


@pytest.mark.parametrize("kind", UNTOLD)
def test_names_that_are_sorted_in_part_tell_none(kind: str, tmp_path: Path) -> None:
    """Shards that somebody joined, or ckpt did, and a tensor that was put behind those of a file."""
    adapter, state = tmp_path / "adapter", tower().state_dict()
    trained(tower(), kind, case(*TARGETS, **UNTOLD[kind]), adapter)
    first = {name: tensor for name, tensor in state.items() if name.startswith("right")}
    last = {name: tensor for name, tensor in state.items() if name not in first}
    shards, places = tmp_path / "shards", [tmp_path / name for name in ("ours", "joined", "behind")]
    shards.mkdir()
    joined: dict[str, torch.Tensor] = {}
    for name, tensors in (("model-00001-of-00002", first), ("model-00002-of-00002", last)):
        save_file(tensors, shards / f"{name}.safetensors")
        joined |= load_file(shards / f"{name}.safetensors")
    where = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in state}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert ckpt("convert", shards, "--to", "full", "-o", places[0]).code == 0
    behind = {name: state[name] for name in sorted(state) if name != "head.weight"}
    for place, made in zip(places[1:], (joined, behind | {"head.weight": state["head.weight"]}), strict=True):
        place.mkdir()
        torch.save(made, place / "pytorch_model.bin")
    for place in places:
        done = ckpt("merge-lora", adapter, "--base", place, "-o", tmp_path / "out")
        assert (done.code, (tmp_path / "out").exists()) == (2, False), place
        assert "which the base does not record" in done.err and "sorted, wholly or in part" in done.err


def blocks(num: int, *names: str) -> list[str]:
    return [f"model.layers.{number}.{name}" for number in range(num) for name in names]


LLAMA = ["attn.q.weight", "attn.k.weight", "attn.v.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight"]
GPT = ["ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "ln_2.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
BIASED = ["query.weight", "query.bias", "score.weight", "score.bias"]


@pytest.mark.parametrize(
    ("is_seen", "fqns"),
    [
        (True, ["model.embed.weight", *blocks(12, *LLAMA), "score.weight"]),
        (True, ["model.wte.weight", "model.wpe.weight", *blocks(2, *GPT), "model.ln_f.weight"]),
        (True, ["token", "model.embed.weight", *blocks(12, *BIASED), "score.weight"]),
        (False, ["model.embed.weight", *sorted(blocks(10, *LLAMA)), *sorted(blocks(12, *LLAMA)[60:]), "score.weight"]),
        (False, ["model.embed.weight", *sorted(blocks(10, *BIASED)), *sorted(blocks(12, *BIASED)[40:])]),
        (False, [*blocks(1, *LLAMA[:2]), *sorted(blocks(2, *LLAMA)[2:])]),  # cut within a block that others are like
        (False, [*sorted(blocks(9, "out.weight", "query.weight")), "top.out.weight", "top.key.weight"]),
        (False, blocks(12, "query.weight", "score.weight")),  # in which all is as in a sorted file
        (False, blocks(12, *LLAMA)[::-1]),
        (False, [*blocks(2, *BIASED), "token"]),  # which stands before the modules
        (False, [*(name for name in blocks(9, *BIASED) if "bias" not in name), *blocks(9, "query.bias", "score.bias")]),
    ],
)
def test_an_order_that_is_not_seen_to_be_a_models_is_none(is_seen: bool, fqns: list[str]) -> None:
    assert is_registered(fqns) == is_seen


@pytest.mark.parametrize("kind", UNTOLD)
def test_one_layer_has_no_order(kind: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file(tower().state_dict(), base / "model.safetensors")
    trained(tower(), kind, case("head", **UNTOLD[kind]), adapter)
    merge([adapter], base, tmp_path / "merged")
    assert is_pefts(tmp_path / "merged", by_peft(adapter))


@pytest.mark.parametrize("kind", UNTOLD)
def test_a_layer_that_is_saved_as_a_whole_does_not_count(kind: str, tmp_path: Path) -> None:
    base, adapter = torch_file(tmp_path / "base"), tmp_path / "adapter"
    options = case(*TARGETS, **UNTOLD[kind], modules_to_save=["left.part.query"])
    trained(tower(), kind, options, adapter)
    merge([adapter], base, tmp_path / "merged")
    assert is_pefts(tmp_path / "merged", by_peft(adapter))


@pytest.mark.parametrize("kind", ["FROD", "TINYLORA"])
def test_a_factor_that_lacks_or_does_not_fit_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    base, adapter = torch_file(tmp_path / "base"), tmp_path / "adapter"
    trained(tower(), kind, case(*TARGETS, **TOLD[kind]), adapter)
    whole = load_file(adapter / "adapter_model.safetensors")
    for number, fqn in enumerate(sorted(whole)):
        for name, state in (
            ("lacks", {other: tensor for other, tensor in whole.items() if other != fqn}),
            ("short", whole | {fqn: whole[fqn][..., :-1].contiguous()}),
        ):
            folder = edited(adapter, tmp_path / f"{name}{number}")
            save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            done = ckpt("merge-lora", folder, "--base", base, "-o", tmp_path / "out")
            assert (done.code, (tmp_path / "out").exists()) == (CorruptError.exit_code, False), (name, fqn)
            leaf = "frod_lambda_s_values" if (name, "_s_indices." in fqn) == ("short", True) else fqn.rpartition(".")[2]
            assert leaf in done.err, (name, fqn, done.err)  # values and their places, which are in two tensors


def test_projections_that_are_none_tell_no_order(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file(tower().state_dict(), base / "model.safetensors")
    trained(tower(), "TINYLORA", case(*TARGETS, **TOLD["TINYLORA"]), adapter)
    whole = load_file(adapter / "adapter_model.safetensors")
    fqn = next(fqn for fqn in whole if fqn.endswith("tinylora_P"))
    for number, wrong in enumerate((torch.tensor(1.0), torch.zeros_like(whole[fqn]))):
        folder = edited(adapter, tmp_path / str(number))
        save_file(whole | {fqn: wrong}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        done = ckpt("merge-lora", folder, "--base", base, "-o", tmp_path / "out")
        assert (done.code, (tmp_path / "out").exists()) == (2, False)
        assert "which the base does not record" in done.err


class Tied(nn.Module):
    """The head's weight is the embedding's: a state dict has both names, and safetensors has one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(12, 20, bias=False)
        self.query = nn.Linear(12, 12)
        self.key = nn.Linear(12, 12)
        self.inner = nn.Linear(12, 12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("options", [UNTOLD, TOLD], ids=["untold", "told"])
@pytest.mark.parametrize("kind", UNTOLD)
def test_a_weight_that_layers_share_is_changed_in_the_adapted_one(
    kind: str, options: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    from peft import PeftModel

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    torch.manual_seed(0)
    torch.save(Tied().state_dict(), base / "pytorch_model.bin")
    torch.manual_seed(0)
    trained(Tied(), kind, case("head", "query", "key", **options[kind]), adapter)
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out", "--as-peft")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "not merged into a weight that two layers share" in done.err
    model = Tied()
    model.load_state_dict(torch.load(base / "pytorch_model.bin"))
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    theirs = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    assert ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out").code == 0
    ours = weights(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same(ours[name], theirs[name])] == []


def test_a_name_of_a_layer_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    """The layers are numbered, and one whose weight is another's is in no safetensors file."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    state = Tied().state_dict()
    save_file({name: tensor for name, tensor in state.items() if name != "head.weight"}, base / "model.safetensors")
    trained(Tied(), "UNILORA", case("head", "key", **UNTOLD["UNILORA"]), adapter)
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "names a layer that the base does not have" in done.err and "head" in done.err


@pytest.mark.parametrize("pattern", [r".*(head|key)", "head|key", ".*key"])
def test_a_pattern_may_name_a_layer_that_no_safetensors_file_has(pattern: str, tmp_path: Path) -> None:
    """PEFT adapts the layer whose weight is another's too, and what it adds to the one in the file goes by both."""
    from peft import PeftModel

    base, adapter, whole = tmp_path / "base", tmp_path / "adapter", tmp_path / "whole"
    for folder in (base, whole):
        folder.mkdir()
    torch.manual_seed(0)
    state = Tied().state_dict()
    save_file({name: tensor for name, tensor in state.items() if name != "head.weight"}, base / "model.safetensors")
    torch.save(state, whole / "pytorch_model.bin")
    trained(Tied(), "UNILORA", {"target_modules": pattern, **UNTOLD["UNILORA"]}, adapter)
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "names layers by a pattern" in done.err and "pytorch_model.bin" in done.err
    as_peft = ["--as-peft"] if "head" in pattern else []
    done = ckpt("merge-lora", adapter, "--base", whole, "-o", tmp_path / "out", *as_peft)
    if "head" in pattern:
        assert done.code == 2 and "a weight that two layers share" in done.err
        return
    assert done.code == 0, done.err
    model = Tied()
    model.load_state_dict(state)
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(same(found[name], expected[name]) for name in found)


def test_the_one_layer_that_is_taken_for_all_is_said(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file(tower().state_dict(), base / "model.safetensors")
    trained(tower(), "UNILORA", case("head", **UNTOLD["UNILORA"]), adapter)
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    assert done.code == 0 and "head is taken for the only one" in done.err


@pytest.mark.parametrize("options", [UNTOLD, TOLD], ids=["untold", "told"])
def test_a_basis_is_made_of_the_weights_that_an_adapter_before_it_brought(
    options: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    base, first, second = torch_file(tmp_path / "base"), tmp_path / "first", tmp_path / "second"
    trained(tower(), "LORA", case("query", modules_to_save=["key"]), first)
    before = by_peft(first)
    model = tower()
    model.load_state_dict(before)
    trained(model, "FROD", case("key", **options["FROD"]), second)
    merge([first, second], base, tmp_path / "merged")
    assert is_pefts(tmp_path / "merged", by_peft(second, before=before))


@pytest.mark.parametrize(("kind", "options"), [("FROD", UNTOLD["FROD"]), ("FROD", TOLD["FROD"]), ("LORA", {})])
def test_an_adapter_whose_layer_a_later_one_brings_as_a_whole_is_refused(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Merged by PEFT one after the other, nothing is left of the first one there."""
    base, first, second = torch_file(tmp_path / "base"), tmp_path / "first", tmp_path / "second"
    trained(tower(), kind, case("key", **options), first)
    trained(tower(), "LORA", case("query", modules_to_save=["key"]), second)
    alone, both = by_peft(second), by_peft(second, before=by_peft(first))
    assert all(same(both[name], tensor) for name, tensor in alone.items())
    done = ckpt("merge-lora", first, second, "--base", base, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "brings its own copy of this parameter, and one before it changes it" in done.err
    assert "key.weight" in done.err
    merge([second], base, tmp_path / "second-merged")
    assert is_pefts(tmp_path / "second-merged", alone)
    if kind == "LORA":
        merge([second, first], base, tmp_path / "merged")
        assert is_pefts(tmp_path / "merged", by_peft(first, before=alone))


@pytest.mark.parametrize("name", ["UNTOLD", "TOLD"])
def test_a_layer_is_computed_with_as_many_threads_as_pefts(name: str, tmp_path: Path) -> None:
    """Which is another number than the one in which tensors are merged side by side, and gives other bits."""
    from peft import PeftModel

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"out": nn.Linear(512, 512)})

    base, adapter, num = tmp_path / "base", tmp_path / "adapter", torch.get_num_threads()
    base.mkdir()
    torch.save(wide().state_dict(), base / "pytorch_model.bin")
    torch.set_num_threads(2)
    try:
        trained(wide(), "FROD", case("out", **{"UNTOLD": UNTOLD, "TOLD": TOLD}[name]["FROD"]), adapter)
        expected = PeftModel.from_pretrained(wide(), adapter).merge_and_unload().state_dict()
        merge([adapter], base, tmp_path / "merged")
    finally:
        torch.set_num_threads(num)
    assert is_pefts(tmp_path / "merged", expected)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "UNTOLD",
            "which takes about 12.8 kB of memory; where training computed it on another kind of processor, with",
        ),
        ("TOLD", "what layers of a category share stays in memory while they are merged"),
    ],
)
def test_a_basis_and_the_memory_it_takes_are_said(name: str, said: str, tmp_path: Path) -> None:
    base, adapter = torch_file(tmp_path / "base"), tmp_path / "adapter"
    trained(tower(), "FROD", case(*TARGETS, **{"UNTOLD": UNTOLD, "TOLD": TOLD}[name]["FROD"]), adapter)
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    assert done.code == 0 and said in done.err + done.out
    assert ("save_projection is false" in done.err + done.out) == (name == "UNTOLD")
