"""`ckpt/commands/merge_lora/layer.py`, `ckpt/commands/merge_lora/empty_model.py`: other PEFT kinds, bit for bit.

The cases come from peft 0.21.2, `tests/test_custom_models.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt.adapters.config import BY_LAYER
from ckpt.adapters.config import KINDS as MERGED
from ckpt.errors import CorruptError, LossError
from tests.support.adapters import compare, differing, edited, load_base, merge, merge_by_peft, perturb, same, weights
from tests.support.commands import ckpt
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

KINDS = "PEFT's other kinds: tensors that equal peft's merge_and_unload, bit for bit"
LINEAR = ["first", "second"]
CAYLEY = {"use_cayley_neumann": False}
OFT = {"r": 2, "oft_block_size": 0}


class Layers(nn.Module):
    """A custom model with every layer class supported by PEFT's kinds."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first = nn.Linear(10, 20)
        self.second = nn.Linear(20, 2)
        self.bare = nn.Linear(8, 6, bias=False)
        self.turned = Conv1D(6, 4)
        self.table = nn.Embedding(30, 6)
        self.norm = nn.LayerNorm(10)
        self.line = nn.Conv1d(8, 16, 2)
        self.line_groups = nn.Conv1d(8, 8, 3, groups=2)
        self.plane = nn.Conv2d(5, 10, 3)
        self.plane_point = nn.Conv2d(8, 10, 1)
        self.plane_groups = nn.Conv2d(16, 32, 3, groups=2)
        self.space = nn.Conv3d(5, 10, 3)


def case(*targets: str, **options: Any) -> dict[str, Any]:
    return {"target_modules": list(targets), **options}


#: Adapters to merge into `Layers`, by peft_type.
CASES: dict[str, list[dict[str, Any]]] = {
    "ADALORA": [case(*LINEAR, init_r=6, target_r=4, total_step=10), case("turned", total_step=1)],
    "BEFT": [case(*LINEAR), case("first", modules_to_save=["second"])],
    "BOFT": [
        case("second", boft_block_size=2),
        case("second", boft_block_size=2, boft_n_butterfly_factor=1, boft_dropout=0.1, bias="boft_only"),
        case("second", boft_block_size=0, boft_block_num=2),
        case("plane", boft_block_size=45),
        case("plane", boft_block_size=0, boft_block_num=1),
    ],
    "C3A": [
        case(*LINEAR, block_size=2),
        case(*LINEAR, block_size_pattern={"first": 5, "second": 2}, modules_to_save=["norm"]),
    ],
    "DEFT": [
        case(*LINEAR),
        case("first", decomposition_method="qr", alpha=16),
        case("first", decomposition_method="relu", para=True),
        case("first", decomposition_method="qr", para=True),
        case("turned"),
    ],
    "DELORA": [case(*LINEAR), case("first", module_dropout=0.1)],
    "FOURIERFT": [case(*LINEAR, n_frequency=10), case(*LINEAR, n_frequency_pattern={"first": 5, "second": 10})],
    "GLORA": [case("first"), case(*LINEAR, modules_to_save=["norm"])],
    "GRALORA": [case(*LINEAR), case(*LINEAR, hybrid_r=4), case("turned", gralora_k=1)],
    "HIRA": [case(*LINEAR), case("turned"), case("line", "plane", "space"), case("table"), case("first", r=4)],
    "HRA": [case(*LINEAR), case("plane"), case("first", apply_GS=True)],
    "IA3": [
        case(*LINEAR, feedforward_modules=[]),
        case(*LINEAR, feedforward_modules=["second"], modules_to_save=["norm"]),
        case("first", "plane", "space", feedforward_modules="first|plane"),
        case("turned", "plane", "space", feedforward_modules=["turned", "space"]),
    ],
    "LN_TUNING": [case("norm"), case("norm", "first", modules_to_save=["second"])],
    "LOHA": [
        case(*LINEAR, modules_to_save=["norm"]),
        case("first", alpha=4, module_dropout=0.1, rank_dropout=0.5),
        case("line", "plane", "line_groups", "plane_groups", "plane_point", r=4),
        case("line", "plane", use_effective_conv2d=True, r=2),
    ],
    "LOKR": [
        case(*LINEAR),
        case("first", decompose_both=True, r=1, alpha=1),
        case("line", "plane", "line_groups", "plane_groups", "plane_point", r=4),
        case("plane", "first", use_effective_conv2d=True, decompose_both=True, decompose_factor=4),
    ],
    "MISS": [case(*LINEAR, r=2), case(*LINEAR, r=2, init_weights="bat")],
    "OFT": [
        case("first", **OFT, **CAYLEY),
        case("first", **OFT, coft=True, eps=1e-2),
        case("first", **OFT, block_share=True, module_dropout=0.1, **CAYLEY),
        case("first", "second", r=0, oft_block_size=2),
        case("plane", r=5, oft_block_size=0, coft=True, block_share=True),
    ],
    "OSF": [case(*LINEAR), case(*LINEAR, target_svd_config={"first.weight": 5, "second.weight": 1})],
    "PEANUT": [case(*LINEAR), case("first", modules_to_save=["second"])],
    "PSOFT": [
        case(*LINEAR, r=2, psoft_alpha=2),
        case("first", r=4, psoft_alpha=4, psoft_mag_a=False, psoft_mag_b=False),
        case("first", r=4, psoft_alpha=4, psoft_svd="lowrank", psoft_svd_lowrank_niter=10),
        case("first", r=4, psoft_alpha=4, use_cayley_neumann=True, num_cayley_neumann_terms=5),
        case("first", r=4, psoft_alpha=4, psoft_orth=False, psoft_mag_a=False, psoft_mag_b=False),
        case("first", r=4, psoft_alpha=4, ab_svd_init="pissa_init"),
    ],
    "ROAD": [case(*LINEAR, group_size=2), *(case("first", variant=f"road_{n}", group_size=2) for n in (2, 4))],
    "SHIRA": [case(*LINEAR, r=1, random_seed=56), case("bare", r=2)],
    "SUPERTUNING": [
        case(*LINEAR, sparsity=0.5),
        case("first", sparsity=0.5, select_top=False),
        case("first", sparsity=0.5, r=2),
    ],
    "TRAINABLE_TOKENS": [case("table", token_indices=[0, 1, 3])],
    "VBLORA": [case("first", vector_length=2, num_vectors=5), case(*LINEAR, "turned", vector_length=1, num_vectors=4)],
    "WAVEFT": [
        case(*LINEAR, n_frequency=8),
        case("first", n_frequency=8, scaling=25.0, wavelet_family="db1"),
        case("first", n_frequency=16, wavelet_family="sym2", use_idwt=False),
        case("first", n_frequency=16, wavelet_family="db1", proportional_parameters=True),
        case(*LINEAR, n_frequency=16, proportional_parameters=True),
    ],
}
#: Adapters to merge into transformers models with known layer classes, as changes to the kind's first case.
OF_MODELS: dict[str, dict[str, Any]] = {
    "BOFT": {"boft_block_size": 5},
    "C3A": {"block_size": 5},
    "GRALORA": {"gralora_k": 5, "r": 10},
    "VBLORA": {"vector_length": 5},
}
#: Kinds with support for transformers' Conv1D in gpt2.
OF_CONV1D = ["ADALORA", "DEFT", "FOURIERFT", "HIRA", "IA3", "WAVEFT"]
#: Kinds that adapt embeddings.
OF_EMBEDDINGS = ["HIRA", "OFT", "TRAINABLE_TOKENS"]
_MERGED_COPY = ".modules_to_save.default"


def trained(model: nn.Module, kind: str, options: dict[str, Any], folder: Path) -> None:
    """Save an adapter of this kind with PEFT, filled with random values."""
    from peft import PeftConfig, get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(model, PeftConfig.from_peft_type(peft_type=kind, **options))
    perturb(wrapped)
    wrapped.save_pretrained(folder)


def base(folder: Path) -> Any:
    model = Layers()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def test_every_kind_has_a_case_and_pefts_own_list_is_in_the_docs() -> None:
    from peft import PeftType

    assert {*CASES} == set(BY_LAYER)
    table = (REPOSITORY / "docs/merge-lora.md").read_text().partition("## Which kinds")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][2:]
    told = {kind: what for kinds, what in rows for kind in kinds.strip().split(", ")}
    assert set(told) == {kind.value for kind in PeftType}
    assert {kind for kind, what in told.items() if "refused" not in what} == set(MERGED)


@pytest.mark.parametrize("kind", CASES)
def test_a_kind_equals_pefts_own_merge(kind: str, own: Path, tmp_path: Path, tables: Any) -> None:
    from peft import PeftModel

    before, num_equal, num = weights(own), 0, 0
    for number, options in enumerate(CASES[kind]):
        saved, out = tmp_path / f"adapter-{number}", tmp_path / f"out-{number}"
        trained(base(own), kind, options, saved)
        torch.manual_seed(number)  # PEFT's random draws on load must not affect the result
        theirs = PeftModel.from_pretrained(base(own), saved).merge_and_unload().state_dict()
        theirs = {k.replace(_MERGED_COPY, ""): t for k, t in theirs.items() if ".original_module." not in k}
        merge([saved], own, out)
        ours = weights(out)
        assert differing(ours, theirs) == [], options
        changed = {name.rpartition(".")[0] for name in ours if not same(ours[name], before[name])}
        assert changed == {*options["target_modules"], *options.get("modules_to_save", [])}, options
        num_equal, num = num_equal + len(changed), num + len(changed)
    tables[KINDS][kind]["own model"] = f"{num_equal}/{num}"


def models() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the model, kind and adapted layers."""
    for kind in CASES:
        layers = ["input_layernorm"] if kind == "LN_TUNING" else ["q_proj"]
        if kind != "TRAINABLE_TOKENS":
            yield "qwen2", kind, layers
    yield from (("gpt2", kind, ["c_attn"]) for kind in OF_CONV1D)
    yield from (("llama", kind, ["embed_tokens"]) for kind in OF_EMBEDDINGS)


@pytest.mark.parametrize(("model", "kind", "layers"), list(models()))
def test_a_kind_on_a_model_of_transformers(
    model: str, kind: str, layers: list[str], bases: dict[str, Path], tmp_path: Path, tables: Any
) -> None:
    """The bf16 weights are not shared between layers."""
    options = CASES[kind][0] | {"target_modules": layers} | OF_MODELS.get(kind, {})
    options.pop("modules_to_save", None)
    trained(load_base(bases[model]), kind, options, tmp_path / "adapter")
    merge_by_peft(bases[model], [tmp_path / "adapter"], tmp_path / "peft")
    merge([tmp_path / "adapter"], bases[model], tmp_path / "ours")
    equal, total, changed = compare(tmp_path / "peft", tmp_path / "ours", bases[model])
    tables[KINDS][kind][model] = f"{equal}/{total} ({changed})"
    assert equal == total and changed


def test_adalora_after_its_ranks_were_pruned(own: Path, tmp_path: Path) -> None:
    """After pruning, each layer has another rank, and the config records the kept rows."""
    from peft import AdaLoraConfig, PeftModel, get_peft_model

    options = {"target_modules": LINEAR, "init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": 6}
    torch.manual_seed(5)  # a seed that prunes to ranks 3 and 1
    model = get_peft_model(base(own), AdaLoraConfig(**options))
    for step in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape) if parameter.requires_grad else None
        model.base_model.update_and_allocate(step)
    perturb(model)
    model.save_pretrained(tmp_path / "adapter")
    ranks = {name: t.shape[0] for name, t in weights(tmp_path / "adapter").items() if name.endswith("lora_E")}
    assert len(set(ranks.values())) == 2 and max(ranks.values()) < 6
    theirs = PeftModel.from_pretrained(base(own), tmp_path / "adapter").merge_and_unload().state_dict()
    merge([tmp_path / "adapter"], own, tmp_path / "ours")
    assert all(same(tensor, theirs[name]) for name, tensor in weights(tmp_path / "ours").items())


@pytest.fixture(scope="module")
def loha(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loha") / "adapter"
    trained(base(own), "LOHA", case(*LINEAR), folder)
    return folder


def test_the_outcome_counts_layers_and_verify_proves_them(loha: Path, own: Path, tmp_path: Path) -> None:
    file = loha / "adapter_model.safetensors"
    zero = edited(loha, tmp_path / "zero")
    factors = {name: t * ("second" not in name) for name, t in load_file(file).items()}
    save_file(factors, zero / file.name, metadata={"format": "pt"})
    done = ckpt("merge-lora", zero, "--base", own, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert "changed the weights of 1 of 2 targets; to 1 nothing was to be added" in done.err + done.out
    assert ckpt("verify", own, tmp_path / "out", "--adapter", zero).code == 0
    assert ckpt("verify", own, tmp_path / "out", "--adapter", loha).code == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("LILY", "ckpt can't merge this kind of adapter"),
        ("PREFIX_TUNING", "PEFT does not merge prompts"),
        (None, "the adapter config's peft_type is missing or wrong"),
    ],
)
def test_other_kinds_are_refused_by_name(kind: str | None, message: str, loha: Path, own: Path, tmp_path: Path) -> None:
    adapter = edited(loha, tmp_path / "adapter", peft_type=kind)
    done = ckpt("merge-lora", adapter, "--base", own, "-o", tmp_path / "out")
    code = 2 if kind else CorruptError.exit_code  # PEFT loads no adapter without a kind
    assert (done.code, (tmp_path / "out").exists()) == (code, False)
    assert message in done.err and (kind or "expected: LORA") in done.err


def test_a_layer_whose_tensors_are_not_all_there(loha: Path, own: Path, tmp_path: Path) -> None:
    half = edited(loha, tmp_path / "half")
    file = half / "adapter_model.safetensors"
    factors = load_file(file)
    del factors["base_model.model.second.hada_w2_b"]
    save_file(factors, file, metadata={"format": "pt"})
    done = ckpt("merge-lora", half, "--base", own, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (CorruptError.exit_code, False)
    assert "the adapter lacks a tensor in this layer" in done.err and "second.hada_w2_b" in done.err


def test_what_does_not_fit_the_base(loha: Path, own: Path, tmp_path: Path) -> None:
    names = {"first": "third"}
    other = edited(loha, tmp_path / "other", target_modules=["third", "second"])
    file = other / "adapter_model.safetensors"
    renamed = {name.replace("first", names["first"]): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    done = ckpt("merge-lora", other, "--base", own, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (LossError.exit_code, False)
    assert "does not fit this base" in done.err
    combined = ckpt("merge-lora", loha, loha, "--base", own, "--adapter-weights", "1,1", "-o", tmp_path / "out")
    assert combined.code == 2 and "peft_type LOHA" in combined.err
    twice = ckpt("merge-lora", loha, loha, "--base", own, "-o", tmp_path / "out")
    assert twice.code == 2 and "a weight adapted twice" in twice.err


def test_layers_whose_class_nothing_tells_and_weights_that_two_share(
    own: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    trained(base(own), "OFT", case("bare", **OFT), tmp_path / "oft")
    done = ckpt("merge-lora", tmp_path / "oft", "--base", own, "-o", tmp_path / "out")
    assert done.code == 2 and "unknown adapter layout in this layer" in done.err
    trained(load_base(bases["gpt2"]), "HIRA", case("wte"), tmp_path / "hira")
    done = ckpt("merge-lora", tmp_path / "hira", "--base", bases["gpt2"], "-o", tmp_path / "out", "--as-peft")
    assert done.code == 2 and "a weight shared by two layers" in done.err
    for kind, options in (("FROD", {"save_projection": False}), ("FROD", {}), ("TINYLORA", {}), ("UNILORA", {})):
        adapter = tmp_path / f"{kind}{len(options)}"
        trained(load_base(bases["gpt2"]), kind, case("lm_head", "c_attn", **options), adapter)
        done = ckpt("merge-lora", adapter, "--base", bases["gpt2"], "-o", tmp_path / "out", "--as-peft")
        assert done.code == 2 and "a weight shared by two layers" in done.err and "leave out --as-peft" in done.err
        done = ckpt("merge-lora", adapter, "--base", bases["gpt2"], "-o", tmp_path / f"{adapter.name}-merged")
        assert done.code == 0, done.err
        apart = load_base(bases["gpt2"])
        apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
        theirs = PeftModel.from_pretrained(apart, adapter).merge_and_unload().state_dict()
        ours = weights(tmp_path / f"{adapter.name}-merged")
        assert [name for name in ours if not same(ours[name], theirs[name])] == [] and "lm_head.weight" in ours


#: Kinds with tensors shared between layers. Their shape depends on the largest layer or the layers' order.
SHARED: dict[str, list[dict[str, Any]]] = {
    "FROD": [{"sparse_rate": 0.1}, {"sparse_rate": 0.1, "save_projection": False}, {"projection_prng_key": 7}],
    "PVERA": [{"r": 4}, {"r": 4, "save_projection": False}],
    "RANDLORA": [
        {"r": 4, "randlora_alpha": 1},
        {"r": 4, "randlora_alpha": 1, "sparse": True},
        {"r": 4, "randlora_alpha": 1, "very_sparse": True, "save_projection": False},
    ],
    "TINYLORA": [
        {"r": 4, "u": 8},
        {"r": 4, "u": 8, "weight_tying": 0.5},
        {"r": 4, "u": 8, "weight_tying": 0.5, "save_projection": False},
        {"r": 4, "u": 8, "weight_tying": 1.0, "projection_seed": 5},
    ],
    "UNILORA": [{"theta_d_length": 101}, {"theta_d_length": 101, "save_indices": True}],
    "VERA": [{"r": 4}, {"r": 4, "save_projection": False}],
}


def shared(kind: str, *, is_first: bool) -> list[dict[str, Any]]:
    """Return a kind's options; the sample has all of them in the first case only."""
    return SHARED[kind] if is_first else sample(SHARED[kind], lambda _: [kind])


def goes_by_order(kind: str, options: dict[str, Any]) -> bool:
    """Return True if the merge depends on the layer order and the adapter's file does not record it."""
    recorded = {"FROD": options.get("save_projection", True), "UNILORA": options.get("save_indices")}
    return kind == "TINYLORA" or not recorded.get(kind, True)


@pytest.mark.parametrize(
    ("model", "layers"), [("qwen2", ["q_proj", "v_proj", "down_proj"]), ("gpt2", ["c_attn"])], ids=["qwen2", "gpt2"]
)
@pytest.mark.parametrize("kind", SHARED)
def test_a_kind_whose_layers_share_tensors(
    kind: str, model: str, layers: list[str], bases: dict[str, Path], tmp_path: Path, tables: Any
) -> None:
    for number, options in enumerate(shared(kind, is_first=model == "qwen2")):
        folder = tmp_path / str(number)
        trained(load_base(bases[model]), kind, options | {"target_modules": layers}, folder / "adapter")
        merge_by_peft(bases[model], [folder / "adapter"], folder / "peft")
        merge([folder / "adapter"], bases[model], folder / "ours")
        equal, total, changed = compare(folder / "peft", folder / "ours", bases[model])
        tables[KINDS][kind][model] = f"{equal}/{total} ({changed})"
        assert (equal, changed) == (total, 2 * len(layers)), options


@pytest.mark.parametrize("targets", [LINEAR, ["second", "bare", "turned"]], ids=["linear", "turned"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_layers_share_takes_no_known_model_where_the_adapter_names_its_layers(
    kind: str, targets: list[str], own: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    for number, options in enumerate(shared(kind, is_first=targets == LINEAR)):
        adapter, folder = tmp_path / f"adapter{number}", tmp_path / f"merged{number}"
        trained(base(own), kind, case(*targets, **options), adapter)
        if goes_by_order(kind, options):
            done = ckpt("merge-lora", adapter, "--base", own, "-o", folder)
            assert (done.code, folder.exists()) == (2, False) and "doesn't know this base" in done.err
            continue
        expected = PeftModel.from_pretrained(base(own), adapter).merge_and_unload().state_dict()
        merge([adapter], own, folder)
        found, before = load_file(folder / "model.safetensors"), load_file(own / "model.safetensors")
        assert {name for name in found if not same(found[name], before[name])} == {f"{one}.weight" for one in targets}
        assert all(same(tensor, found[name]) for name, tensor in expected.items()), options


def test_a_layer_that_the_adapter_lacks_is_missed_in_a_model_that_is_not_known(own: Path, tmp_path: Path) -> None:
    """The largest layer determines the shape of the shared tensors."""
    trained(base(own), "VERA", case(*LINEAR, r=4, save_projection=False), tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".first." not in name}, file)
    done = ckpt("merge-lora", tmp_path / "adapter", "--base", own, "-o", tmp_path / "out")
    assert done.code == CorruptError.exit_code and "lacks a tensor in this layer" in done.err


def test_a_square_layer_between_two_classes_is_refused(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    folder = tmp_path / "base"
    folder.mkdir()
    model = nn.ModuleDict({"square": nn.Linear(8, 8), "wide": nn.Linear(8, 12), "turned": Conv1D(8, 12)})
    save_file(model.state_dict(), folder / "model.safetensors")
    trained(model, "RANDLORA", case("square", "wide", "turned", r=4, randlora_alpha=1), tmp_path / "adapter")
    done = ckpt("merge-lora", tmp_path / "adapter", "--base", folder, "-o", tmp_path / "out")
    assert done.code == 2 and "unknown class for a square layer" in done.err


def test_frequencies_that_are_not_divided_as_the_config_says_are_damage(own: Path, tmp_path: Path) -> None:
    """PEFT refuses the sizes, in layers of different sizes."""
    adapter = tmp_path / "adapter"
    trained(base(own), "WAVEFT", case(*LINEAR, n_frequency=16), adapter)
    divided = edited(adapter, tmp_path / "divided", proportional_parameters=True)
    with pytest.raises(CorruptError, match="proportional_parameters"):
        merge([divided], own, tmp_path / "out")
    merge([adapter], own, tmp_path / "out")
