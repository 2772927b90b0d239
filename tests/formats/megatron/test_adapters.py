"""`converters/names/megatron/adapter.py`, `converters/megatron/dist/adapter_run.py`, `adapter_slots.py`, and more.

Also `adapter_write.py`: adapters from Megatron-Bridge, ms-swift and NeMo match the live model's logits.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckpt as package
from ckpt.errors import LossError
from converters.megatron.dist.keys import TensorKey
from converters.names.megatron.facts import MegatronFacts
from tests.support.adapters import load_base, weights
from tests.support.commands import ckpt
from tests.support.model_files import merge_json
from tests.support.pages import commands
from tests.support.places import FIXTURES, REPOSITORY

FIXTURE = FIXTURES / "megatron-bridge"
LOGITS = load_file(FIXTURE / "logits.safetensors") if FIXTURE.is_dir() else {}
#: Runs with a factor shared by experts. They use the other runs' base.
OUTER = FIXTURES / "megatron-bridge-outer"
OUTERS_LOGITS = load_file(OUTER / "logits.safetensors") if OUTER.is_dir() else {}
#: Runs with several adapters, and the option that selects each claimed slot, by name of its logits.
MULTI = FIXTURES / "megatron-bridge-multi"
MULTIS_LOGITS = load_file(MULTI / "logits.safetensors") if MULTI.is_dir() else {}
SLOTS = {"0": "0:5:10", "1": "1:2:3"}
SWIFT = FIXTURES / "ms-swift"
SWIFTS_LOGITS = load_file(SWIFT / "logits.safetensors") if SWIFT.is_dir() else {}
NEMO = FIXTURES / "nemo-lora"
NEMOS_LOGITS = load_file(NEMO / "logits.safetensors") if NEMO.is_dir() else {}
RUNS = sorted(LOGITS.keys() - {"ids"})
#: Runs whose trainer computed something else than the adapter says, or a result that no single model computes.
WRONG = {"experts-etp2", "dora-tp2-columns"}


def base_of(run: str) -> Path:
    return FIXTURE / ("experts" if run.startswith("experts") else "dense")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = model(input_ids=LOGITS["ids"]).logits
    return computed


def as_peft(run: str, folder: Path) -> Path:
    outcome = ckpt("convert", "megatron-dist", "peft", FIXTURE / run, "-o", folder, "--config", base_of(run))
    assert outcome.code == 0, outcome.err
    return folder


# -- the trainer's result -------------------------------------------------------------------------------------
@pytest.mark.parametrize("run", sorted(set(RUNS) - WRONG))
def test_the_merged_model_computes_what_the_trained_one_did(run: str, tmp_path: Path) -> None:
    outcome = ckpt("merge-lora", FIXTURE / run, "--base", base_of(run), "-o", tmp_path / "merged")
    assert outcome.code == 0, outcome.err
    torch.testing.assert_close(logits(load_base(tmp_path / "merged")), LOGITS[run], rtol=0, atol=1e-5)
    assert (logits(load_base(base_of(run))) - LOGITS[run]).abs().max() > 0.1


@pytest.mark.parametrize(
    "run", [FIXTURE / "lora-tp2-pp2", FIXTURE / "experts-ep2", OUTER / "ep2"], ids=lambda run: run.name
)
def test_verify_takes_the_names_of_a_megatron_adapter_from_the_base(run: Path, tmp_path: Path) -> None:
    base = base_of("dense" if "lora" in run.name else "experts")
    package.merge_lora(run, tmp_path / "merged", base=base)
    proved = ckpt("verify", base, tmp_path / "merged", "--adapter", run)
    assert proved.code == 0, proved.err
    assert "as the adapter says" in proved.out
    unmerged = ckpt("verify", base, base, "--adapter", run)
    assert unmerged.code == 1 and "equal to the base" in unmerged.out


@pytest.mark.parametrize("run", ["lora-tp2-pp2", "canonical-tp2", "dora-tp2"])
def test_peft_loads_the_converted_adapter_and_computes_the_same(run: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base_of(run)), as_peft(run, tmp_path / "peft"))
    torch.testing.assert_close(logits(model.eval()), LOGITS[run], rtol=0, atol=1e-5)


def test_a_base_in_megatrons_format_gives_the_same_bits(tmp_path: Path) -> None:
    run, base = "canonical-tp2", base_of("canonical-tp2")
    package.convert(base, "megatron-dist", tmp_path / "base", tp=2)
    for number, given in enumerate((base, tmp_path / "base")):
        package.merge_lora(FIXTURE / run, tmp_path / str(number), base=given)
    first, second = (weights(tmp_path / str(number)) for number in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_base_without_a_config_takes_the_one_given(tmp_path: Path) -> None:
    run, base, given = FIXTURE / "lora-tp2-pp2", base_of("lora-tp2-pp2"), tmp_path / "base"
    package.convert(base, "megatron-dist", given, tp=2)
    (given / "config.json").unlink()
    bare = ckpt("merge-lora", run, "--base", given, "-o", tmp_path / "merged")
    assert bare.code == 3 and "--config" in bare.err
    done = ckpt("merge-lora", run, "--base", given, "--config", base, "-o", tmp_path / "merged")
    assert done.code == 0, done.err
    package.merge_lora(run, tmp_path / "expected", base=base)
    first, second = (weights(tmp_path / name) for name in ("merged", "expected"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    proved = ckpt("verify", given, tmp_path / "merged", "--adapter", run, "--config", base)
    assert proved.code == 0, proved.err


@pytest.mark.parametrize(("etp", "is_said"), [(2, True), (1, False)])
def test_it_is_said_before_an_expert_tensor_parallel_size_makes_it_wrong(
    etp: int, is_said: bool, tmp_path: Path
) -> None:
    peft, sizes = as_peft("experts-ep2", tmp_path / "peft"), ("--tp", "2", "--etp", str(etp))
    command = ("convert", "peft", "megatron-dist", peft, "-o", tmp_path / "run", "--config", base_of("experts"))
    outcome = ckpt(*command, *sizes)
    assert outcome.code == 0, outcome.err
    assert ("Megatron-Bridge#5634" in outcome.err) == is_said


def test_what_an_expert_tensor_parallel_size_makes_wrong_is_said(tmp_path: Path) -> None:
    run = "experts-etp2"
    outcome = ckpt("merge-lora", FIXTURE / run, "--base", base_of(run), "-o", tmp_path / "merged")
    assert outcome.code == 0
    assert "Megatron-Bridge#5634" in outcome.err
    difference = (logits(load_base(tmp_path / "merged")) - LOGITS[run]).abs().max()
    assert difference > 0.01, "the trainer computes what the adapter says: nothing is wrong any more"


def test_layers_that_no_adapter_is_for_keep_their_bits(tmp_path: Path) -> None:
    """Canonical adapters for only queries and values: keys and other layers keep the base's bits."""
    adapter = as_peft("canonical-tp2", tmp_path / "peft")
    tensors = load_file(adapter / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "q_proj" in name or "v_proj" in name}
    from safetensors.torch import save_file

    save_file(kept, adapter / "adapter_model.safetensors")
    merge_json(adapter / "adapter_config.json", {"target_modules": ["q_proj", "v_proj"]})
    run, base = tmp_path / "run", base_of("canonical-tp2")
    outcome = ckpt("convert", "peft", "megatron-dist", adapter, "-o", run, "--config", base)
    assert outcome.code == 0, outcome.err
    package.merge_lora(run, tmp_path / "merged", base=base)
    before, after = weights(base), weights(tmp_path / "merged")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "v_proj" in name}


@pytest.mark.parametrize(
    ("key", "num_dims", "name"),
    [
        ("linear_in.weight", 4, "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.adapter."),
        ("linear_in.weight", 3, "decoder.layers.{layer}.mlp.experts.linear_fc1.adapter."),
        (
            "adapter_up.linear_out.weight",
            4,
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.adapter.",
        ),
    ],
)
def test_a_factor_has_a_dim_of_experts_or_they_share_it(key: str, num_dims: int, name: str) -> None:
    """Grouped experts need Transformer Engine, so these keys come from Megatron-Bridge's code."""
    parsed = TensorKey.parse(f"decoder.layers.mlp.experts.experts.linear_fc1.adapter.{key}", num_dims)
    assert (parsed.name, parsed.num_dims) == (name + key, num_dims - 2)


def test_an_adapter_that_experts_share_is_each_ones(tmp_path: Path) -> None:
    """With one expert parallel rank, nothing is lost."""
    checkpoint = package.open(FIXTURE / "experts-ep2", config=base_of("experts-ep2"))
    facts = checkpoint.facts_of(MegatronFacts)
    assert facts.adapter is not None
    tensors = {
        (name, role): tensor.renamed(name)
        for (fqn, role), tensor in checkpoint.tensors.items()
        if ".local_experts." not in (name := fqn.replace("local_experts.0.", ""))
    }
    shared = replace(checkpoint, tensors=tensors, facts=replace(facts, adapter=replace(facts.adapter, ep=1)))
    package.plan(shared, "peft").run(tmp_path / "shared")
    package.plan(checkpoint, "peft").run(tmp_path / "single")
    ours, single = weights(tmp_path / "shared"), weights(tmp_path / "single")
    assert ours.keys() == single.keys()
    assert all(torch.equal(ours[name], single[name.replace("experts.1.", "experts.0.")]) for name in ours)


@pytest.mark.parametrize("run", sorted(OUTERS_LOGITS.keys() - {"ids"}))
def test_a_factor_that_experts_share_is_each_ones(run: str, tmp_path: Path) -> None:
    base, expected = base_of("experts"), OUTERS_LOGITS[run]
    outcome = ckpt("merge-lora", OUTER / run, "--base", base, "-o", tmp_path / "merged")
    assert outcome.code == 0, outcome.err
    torch.testing.assert_close(logits(load_base(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    assert (logits(load_base(base)) - expected).abs().max() > 0.1
    package.convert(OUTER / run, "peft", tmp_path / "peft", config=base)
    factors = weights(tmp_path / "peft")
    name = "base_model.model.model.layers.0.mlp.experts.{}.{}.weight"
    modules = ("gate_proj", "up_proj", "down_proj")
    alike = {
        one
        for one in (f"{module}.lora_{factor}" for module in modules for factor in "AB")
        if torch.equal(factors[name.format(0, one)], factors[name.format(1, one)])
    }
    assert alike == {"gate_proj.lora_A", "up_proj.lora_A", "down_proj.lora_B"}


@pytest.mark.parametrize("run", sorted(OUTERS_LOGITS.keys() - {"ids"}))
def test_a_factor_that_experts_share_is_written_as_it_was_stored(run: str, tmp_path: Path) -> None:
    outcome = ckpt("convert", "megatron-dist", "megatron-dist", OUTER / run, "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    (theirs, their_states), (ours, our_states) = stored(OUTER / run), stored(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert our_states == {key for key in their_states if "_extra_state" in key}
    for number, folder in enumerate((OUTER / run, tmp_path / "out")):
        package.convert(folder, "peft", tmp_path / str(number), config=base_of("experts"))
    first, second = (weights(tmp_path / str(number)) for number in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- several adapters ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(MULTIS_LOGITS.keys() - {"ids"}))
def test_the_adapter_of_a_slot_is_merged_as_the_live_model_computed(name: str, tmp_path: Path) -> None:
    run, _, slot = name.partition(".")
    base, expected = base_of(run), MULTIS_LOGITS[name]
    taken = ("--adapter-slot", SLOTS[slot])
    outcome = ckpt("merge-lora", MULTI / run, "--base", base, "-o", tmp_path / "merged", *taken)
    assert outcome.code == 0, outcome.err
    torch.testing.assert_close(logits(load_base(tmp_path / "merged"))[:1], expected, rtol=0, atol=1e-5)
    assert (logits(load_base(base))[:1] - expected).abs().max() > 0.1
    outcome = ckpt("convert", "megatron-dist", "peft", MULTI / run, "-o", tmp_path / "peft", "--config", base, *taken)
    assert outcome.code == 0, outcome.err
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert ":".join(map(str, (slot, settings["r"], settings["lora_alpha"]))) == SLOTS[slot]
    ranks = {tensor.shape["lora_B" in name] for name, tensor in weights(tmp_path / "peft").items()}
    assert ranks == {settings["r"]}
    assert ckpt("verify", base, tmp_path / "merged", "--adapter", tmp_path / "peft").code == 0


def test_python_takes_a_slot_as_the_commands_do(tmp_path: Path) -> None:
    run, base = MULTI / "experts-ep2", base_of("experts-ep2")
    package.merge_lora(run, tmp_path / "merged", base=base, adapter_slot="1:2:3")
    package.convert(run, "peft", tmp_path / "peft", config=base, adapter_slot="1:2:3")
    opened = package.open(run, config=base, adapter_slot="1:2:3")
    assert package.verify(opened, tmp_path / "peft").outcome.startswith("equal")
    assert package.verify(base, tmp_path / "merged").exit_code == 1
    with pytest.raises(package.errors.UsageError) as refused:
        package.open(run, config=base)
    assert "adapter_slot='0:5:ALPHA'" in str(refused.value)


def test_one_slot_of_a_run_becomes_a_run_of_one_adapter(tmp_path: Path) -> None:
    """The rows of Megatron-Bridge's LoRA are ordered by the two ranks."""
    run, base = MULTI / "dense-tp2", base_of("dense-tp2")
    outcome = ckpt("convert", "megatron-dist", "megatron-dist", run, "-o", tmp_path / "run", "--adapter-slot", "0:5:10")
    assert outcome.code == 0, outcome.err
    ours, theirs = stored(tmp_path / "run")[0], stored(run)[0]
    assert ours.keys() == {key.replace(".adapters.0.", ".adapter.") for key in theirs if ".adapters.0." in key}
    for key, tensor in ours.items():
        before = theirs[key.replace(".adapter.", ".adapters.0.")]
        assert torch.equal(tensor, before[..., :5] if "linear_out" in key else before[:, :5])
    outcome = ckpt("merge-lora", tmp_path / "run", "--base", base, "-o", tmp_path / "merged")
    assert outcome.code == 0, outcome.err
    expected = MULTIS_LOGITS["dense-tp2.0"]
    torch.testing.assert_close(logits(load_base(tmp_path / "merged"))[:1], expected, rtol=0, atol=1e-5)


def test_a_slot_that_was_not_claimed_changes_nothing_and_is_said_to(tmp_path: Path) -> None:
    run, base = MULTI / "experts-ep1", base_of("experts-ep1")
    outcome = ckpt("merge-lora", run, "--base", base, "-o", tmp_path / "merged", "--adapter-slot", "2:8:16")
    assert outcome.code == 0 and "zero" in outcome.err
    before, after = weights(base), weights(tmp_path / "merged")
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- written for Megatron-Bridge -----------------------------------------------------------------------------
def stored(run: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return an iteration's tensors as read by torch, and all other keys except random states."""
    folder = next(path.parent for path in run.glob("*/.metadata"))
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    found: dict[str, Any] = {key: torch.zeros(entry.size) for key, entry in shapes.items()}
    dcp.load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return found, entries.keys() - shapes.keys()


@pytest.mark.parametrize(("run", "tp"), [("canonical-tp2", 2), ("experts-tp2-ep2", 2)])
def test_what_is_written_is_what_megatron_bridge_saves(run: str, tp: int, tmp_path: Path) -> None:
    sizes = ("--tp", tp, "--ep", 2, "--etp", 1) if run.startswith("experts") else ("--tp", tp)
    peft = as_peft(run, tmp_path / "peft")
    outcome = ckpt("convert", "peft", "megatron-dist", peft, "-o", tmp_path / "run", "--config", base_of(run), *sizes)
    assert outcome.code == 0, outcome.err
    (theirs, their_states), (ours, our_states) = stored(FIXTURE / run), stored(tmp_path / "run")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert our_states == {key for key in their_states if "_extra_state" in key}
    back = package.verify(tmp_path / "run", peft, config=base_of(run))
    assert back.outcome.startswith("equal")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_rows_of_gate_and_up_are_in_the_order_of_the_ranks_asked_for(tp: int, tmp_path: Path) -> None:
    peft = as_peft("canonical-tp2", tmp_path / "peft")
    base = base_of("canonical-tp2")
    outcome = ckpt("convert", "peft", "megatron-dist", peft, "-o", tmp_path / "run", "--config", base, "--tp", tp)
    assert f"tensor parallel size {tp}" in outcome.err
    gate = weights(peft)["base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight"]
    found = stored(tmp_path / "run")[0]["decoder.layers.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight"][0]
    parts = torch.stack(gate.chunk(2 * tp))
    assert torch.equal(found, torch.cat([*parts[::2], *parts[1::2]]))


# -- inspection ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("trainer", "run", "name", "number"),
    [
        ("Megatron-Bridge", FIXTURE / "canonical-tp2", "run", 3),
        ("NeMo 2", NEMO / "dora-tp2", "run", 2),
        ("ms-swift", SWIFT / "dense-tp2-pp2", ".", 2),
    ],
)
def test_the_commands_of_the_page(
    trainer: str, run: Path, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs/merge-lora.md").read_text()
    known = [one for one in commands(page) if one.heading == f"Adapters of {trainer}"]
    assert len(known) == number
    shutil.copytree(run, tmp_path / name, dirs_exist_ok=True)
    shutil.copytree(NEMO / "base" if trainer == "NeMo 2" else base_of("canonical-tp2"), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for command in known:
        done = ckpt(*command.words[1:])
        assert done.code == 0, f"{command.text}\n{done.err}"


def test_inspect_check_and_verify_say_what_it_is() -> None:
    run = FIXTURE / "canonical-tp2"
    assert "Megatron-Bridge" in ckpt("inspect", run).out
    checked = ckpt("check", run)
    assert checked.code == 0
    assert "whole (megatron-dist" in checked.out
    assert "full" not in checked.out, "the file with the run's counters is taken for a model"
    assert package.verify(run, run, config=base_of("canonical-tp2")).outcome.startswith("equal")
    assert ckpt("hash", run, "--config", base_of("canonical-tp2")).code == 0


# -- bad input -----------------------------------------------------------------------------------------------


def section_of(config: str) -> str | None:
    return {"run_config.yaml": "model", "model.yaml": "config"}.get(config)


@pytest.mark.parametrize(
    ("run", "config", "base"),
    [
        (FIXTURE / "lora-tp2-pp2", "run_config.yaml", FIXTURE / "dense"),
        (NEMO / "lora-tp2", "model.yaml", NEMO / "base"),
        (SWIFT / "dense-tp2-pp2", "args.json", FIXTURE / "dense"),
    ],
    ids=["Megatron-Bridge", "NeMo", "ms-swift"],
)
def test_the_model_of_an_adapters_run_is_compared_with_the_config(
    run: Path, config: str, base: Path, tmp_path: Path
) -> None:
    """Two head sizes can have equal shapes, but other rows for queries, keys and values."""
    import yaml

    from ckpt.runs.yaml_files import read_run_config

    shutil.copytree(run, tmp_path / "run")
    file = next((tmp_path / "run").rglob(config))
    recorded = dict(read_run_config(file))
    sizes = json.loads((base / "config.json").read_text())
    heads = {"num_attention_heads": sizes["num_attention_heads"], "num_query_groups": sizes["num_key_value_heads"]}

    def merged(name: str, *options: str, **settings: Any) -> Any:
        section = section_of(config)
        changed = {**(recorded[section] if section else recorded), "kv_channels": sizes["head_dim"], **settings}
        file.write_text(yaml.safe_dump({**recorded, section: changed}) if section else json.dumps(changed))
        return ckpt("merge-lora", tmp_path / "run", "--base", base, "-o", tmp_path / name, *options)

    assert merged("whole", **heads).code == 0
    halved = {name: number // 2 for name, number in heads.items()}
    other = merged("other", **halved, kv_channels=2 * sizes["head_dim"])
    assert (
        other.code == 4 and f"expected: num_attention_heads {halved['num_attention_heads']}, recorded by" in other.err
    )
    unknown = merged("unknown", softmax_type="off-by-one")
    assert unknown.code == 6 and "--accept-setting softmax_type" in unknown.err
    done = merged("accepted", "--accept-setting", "softmax_type", softmax_type="off-by-one")
    assert done.code == 0 and "ignored (--accept-setting)" in done.err
    first, second = (weights(tmp_path / name) for name in ("whole", "accepted"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    stranger = merged("stranger", nobody_has_heard_of_it=3)
    assert stranger.code == (0 if config == "args.json" else 6)  # ms-swift records much besides the model
    if section_of(config):
        own = merged("own", transformer_layer_spec={"_target_": "my.layers", "_call_": False})
        assert own.code == 6 and "transformer_layer_spec my.layers" in own.err
    assert not (tmp_path / "other").exists() and not (tmp_path / "unknown").exists()


def test_a_missing_factor_is_named() -> None:
    checkpoint = package.open(FIXTURE / "lora-tp2-pp2", config=base_of("lora-tp2-pp2"))
    name = "decoder.layers.1.mlp.linear_fc2.adapter.linear_out.weight"
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] != name}
    with pytest.raises(package.errors.CorruptError, match="lacks a LoRA factor for a layer"):
        package.plan(replace(checkpoint, tensors=tensors), "peft")


def test_a_factor_that_experts_share_does_not_stand_in_for_those_that_are_missing() -> None:
    checkpoint = package.open(OUTER / "ep1", config=base_of("experts"))
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if ".local_experts.1." not in key[0]}
    with pytest.raises(package.errors.CorruptError, match="lacks a LoRA factor for a layer"):
        package.plan(replace(checkpoint, tensors=tensors), "peft")


def test_the_adapter_of_one_rank_of_experts_is_refused(tmp_path: Path) -> None:
    """Megatron-Bridge 0.3 saves an adapter shared by a rank's experts only on the first rank, and loses the others."""
    checkpoint = package.open(FIXTURE / "experts-ep2", config=base_of("experts-ep2"))
    tensors = {
        (name, role): tensor.renamed(name)
        for (fqn, role), tensor in checkpoint.tensors.items()
        if (name := fqn.replace("local_experts.0.", "")) and ".local_experts." not in name
    }
    with pytest.raises(LossError, match="only the first rank's adapter"):
        package.plan(replace(checkpoint, tensors=tensors), "peft")


def test_the_adapter_of_a_text_model_with_images_has_the_names_in_memory(tmp_path: Path) -> None:
    """PEFT ignores other names and would leave the adapter untrained."""
    from peft import PeftModel
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    run, base, folder = "lora-tp2-pp2", tmp_path / "base", tmp_path / "peft"
    tower = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", **tower, "image_size": 8, "patch_size": 4}
    text = json.loads((base_of(run) / "config.json").read_text())
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision)).eval()
    outside, inside = load_base(base_of(run)), model.model.language_model
    inside.load_state_dict(outside.model.state_dict())
    model.lm_head.load_state_dict(outside.lm_head.state_dict())
    model.save_pretrained(base)
    outcome = ckpt("convert", "megatron-dist", "peft", FIXTURE / run, "-o", folder, "--config", base)
    assert outcome.code == 0, outcome.err
    adapted = PeftModel.from_pretrained(model, folder).eval()
    torch.testing.assert_close(logits(adapted), LOGITS[run], rtol=0, atol=1e-5)
    package.merge_lora(FIXTURE / run, tmp_path / "merged", base=base)
    merged = LlavaForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), LOGITS[run], rtol=0, atol=1e-5)
    outcome = ckpt("convert", "peft", "megatron-dist", folder, "-o", tmp_path / "out", "--config", base)
    assert outcome.code == LossError.exit_code and "models with images" in outcome.err


# -- ms-swift ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", sorted(SWIFTS_LOGITS.keys() - {"ids"}))
def test_an_adapter_of_ms_swift_is_merged_as_the_live_model_computed(run: str, tmp_path: Path) -> None:
    base = base_of(run)
    outcome = ckpt("merge-lora", SWIFT / run, "--base", base, "-o", tmp_path / "merged")
    assert outcome.code == 0, outcome.err
    found, before = (logits(load_base(folder)) for folder in (tmp_path / "merged", base))
    torch.testing.assert_close(found, SWIFTS_LOGITS[run], rtol=0, atol=1e-5)
    assert (before - SWIFTS_LOGITS[run]).abs().max() > 0.1
    assert ckpt("convert", "auto", "peft", SWIFT / run, "-o", tmp_path / "peft", "--config", base).code == 0
    assert ckpt("verify", base, tmp_path / "merged", "--adapter", tmp_path / "peft").code == 0


# -- NeMo 2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", sorted(NEMOS_LOGITS.keys() - {"ids"}))
def test_an_adapter_of_nemo_is_merged_as_the_live_model_computed(run: str, tmp_path: Path) -> None:
    base, expected = NEMO / "base", NEMOS_LOGITS[run]
    outcome = ckpt("merge-lora", NEMO / run, "--base", base, "-o", tmp_path / "merged")
    assert outcome.code == 0, outcome.err
    torch.testing.assert_close(logits(load_base(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    assert (logits(load_base(base)) - expected).abs().max() > 0.1
    outcome = ckpt("convert", "megatron-dist", "peft", NEMO / run, "-o", tmp_path / "peft", "--config", base)
    assert outcome.code == 0, outcome.err
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base), tmp_path / "peft").eval()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
