"""`converters/pytorch/trainer.py`: HF Trainer's folders match the live optimizer, and shapes prove names."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ckpt import api
from ckpt.errors import CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Layout
from converters.names.families.composites import COMPOSITES
from converters.names.families.tables import FAMILIES, knows_class, saved
from converters.names.megatron.relation import architectures
from converters.names.module_order import in_order, registered_shapes
from converters.names.transformers.order import as_registered
from converters.names.transformers.relation import build_model
from converters.pytorch.trainer import TRAINER, trainer_groups
from tests.support.describing import content
from tests.support.engines import Truth, raw
from tests.support.model_files import merge_json, rewriting, save_model
from tests.support.tiny_sizes import tiny_sizes
from tests.support.twins import TWINS

RUN = "trainer-plain"


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / RUN, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))


def truth_of(fixtures: Path) -> Truth:
    return Truth.load(fixtures / RUN / "truth" / "checkpoint-2.safetensors")


def test_equals_what_the_live_optimizer_held(fixtures: Path, run: Path) -> None:
    truth, checkpoint = truth_of(fixtures), api.open(run)
    assert (checkpoint.format, checkpoint.state.step) == ("trainer", 2)
    assert checkpoint.ties == truth.ties
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == truth.tensors
    decay, rest = checkpoint.state.param_groups
    assert list(decay.fqns) == truth.metadata["decayed"]
    assert (decay.options["weight_decay"], rest.options["weight_decay"]) == (0.1, 0.0)
    assert len(checkpoint.state.scalars["step"]) == len(decay.fqns) + len(rest.fqns)
    assert checkpoint.state.lr_scheduler["last_epoch"] == 2


@pytest.mark.parametrize("target", ["zero2", "zero3", "universal", "dcp", "full"])
def test_everything_goes_on_to_other_formats(fixtures: Path, run: Path, tmp_path: Path, target: str) -> None:
    ranks = 3 if target.startswith("zero") else None
    api.plan(api.open(run), target, Layout(world_size=ranks)).run(tmp_path / "out")
    written = api.open(tmp_path / "out", target)
    for (fqn, role), expected in truth_of(fixtures).tensors.items():
        key = (fqn, MASTER) if role == WEIGHT and (fqn, MASTER) in written.tensors else (fqn, role)
        assert content(written.tensors[key]) == expected, key


def test_weights_go_back_to_the_files_that_they_came_from(run: Path, tmp_path: Path) -> None:
    conversion = api.plan(api.open(run), "hf")
    conversion.run(tmp_path / "out")
    before, after = (api.open(folder, "hf") for folder in (run / "checkpoint-2", tmp_path / "out"))
    assert {k: content(t) for k, t in before.tensors.items()} == {k: content(t) for k, t in after.tensors.items()}
    assert any("optimizer states exp_avg" in line for line in conversion.plan.target.not_written)


def save_optimizer(run: Path, order: slice) -> None:
    """Rewrite the optimizer with each group's parameter numbers in another order."""
    path = run / "checkpoint-2" / "optimizer.pt"
    with rewriting(path) as whole:
        for group in whole["param_groups"]:
            group["params"] = group["params"][order]


def test_what_shapes_do_not_prove_is_left_out_and_said(run: Path) -> None:
    save_optimizer(run, slice(None, None, -1))
    checkpoint = api.open(run)
    assert {role for _, role in checkpoint.tensors} == {WEIGHT} and not checkpoint.state.param_groups
    assert any("left out the optimizer states" in note for note in checkpoint.notes)


def test_an_architecture_with_other_tensors_proves_nothing(run: Path) -> None:
    merge_json(run / "checkpoint-2" / "config.json", {"num_hidden_layers": 1})
    checkpoint = api.open(run)
    assert not checkpoint.optimizer_states and any("left out" in note for note in checkpoint.notes)


def test_an_optimizer_of_another_kind_is_refused(run: Path) -> None:
    torch.save([1, 2], run / "checkpoint-2" / "optimizer.pt")
    with pytest.raises(CorruptError, match="not an optimizer state"):
        api.open(run)
    assert api.open(run, "hf").format == "hf"


@pytest.mark.parametrize("model_type", sorted({*architectures()} - {*TWINS}))  # transformers has no class for a twin
def test_tables_have_the_order_in_which_transformers_registers(model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    family = FAMILIES.get(model_type)
    bases = filter(knows_class, [MODEL_MAPPING_NAMES[model_type]])
    for cls in [family.stem + family.causal, *bases] if family else [COMPOSITES[model_type].cls]:
        model = build_model({"model_type": model_type, "architectures": [cls], **tiny_sizes(model_type)}, {})
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert as_registered(sorted(shapes), model_type) == list(shapes)
        config = {**json.loads(json.dumps(model.config.to_dict(), default=str)), "architectures": [cls]}
        assert list(registered_shapes(config).items()) == list(shapes.items())


@pytest.mark.parametrize("model_type", sorted(name for name, family in FAMILIES.items() if family.own_code))
def test_order_of_a_model_with_its_own_code_is_unknown(tmp_path: Path, model_type: str) -> None:
    """EXAONE's own code registers k before v and q, unlike its twin in transformers."""
    twin = TWINS[model_type]
    built = AutoConfig.for_model(twin.model_type, **tiny_sizes(model_type)).to_dict()
    config = json.loads(json.dumps(twin.config(model_type, built)))
    found = saved(config)
    assert found is not None
    save_model(tmp_path, {fqn: torch.zeros(shape) for fqn, shape in found.required.items()}, config)
    hub = api.open(tmp_path, "hf")
    assert in_order(hub, hub) is None and registered_shapes(config) == {}


# -- written files -------------------------------------------------------------------------------------------
def write(source: Path, out: Path, **more: object) -> Path:
    api.plan(api.open(source), "trainer", Layout(**more)).run(out)
    return out


def same_optimizer(a: Path, b: Path) -> bool:
    one, other = torch.load(a), torch.load(b)
    states = {(number, name): raw(value) for number, held in one["state"].items() for name, value in held.items()}
    found = {(number, name): raw(value) for number, held in other["state"].items() for name, value in held.items()}
    for group in other["param_groups"]:
        assert group.pop("bias_correction", True) is True  # ZeRO files have it for DeepSpeed's own Adam
    return one["param_groups"] == other["param_groups"] and states == found and len(states) > 0


@pytest.mark.parametrize("between", [None, "zero2", "zero3", "dcp"])
def test_the_optimizer_is_written_as_trainer_wrote_it(run: Path, tmp_path: Path, between: str | None) -> None:
    """Numbers, groups, states and steps match HF Trainer's file, also after conversion through other formats."""
    source = run
    if between is not None:
        source = tmp_path / "between"
        api.plan(api.open(run), between, Layout(world_size=2)).run(source)
    out = write(source, tmp_path / "out")
    assert same_optimizer(run / "checkpoint-2" / "optimizer.pt", out / "optimizer.pt")
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2
    before, after = api.open(run), api.open(out)
    assert {k: content(t) for k, t in before.tensors.items()} == {k: content(t) for k, t in after.tensors.items()}


@pytest.mark.slow
def test_trainer_resumes_from_what_is_written(fixtures: Path, run: Path, tmp_path: Path) -> None:
    """HF Trainer resumes a model with other weights, and starts with the live run's weights and states."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    api.plan(api.open(run), "zero3", Layout(world_size=2)).run(tmp_path / "zero3")
    out, truth, seen = write(tmp_path / "zero3", tmp_path / "out" / "checkpoint-2"), truth_of(fixtures).tensors, {}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)

    class Look(TrainerCallback):
        def on_step_begin(self, args: object, state: object, control: object, **held: Any) -> None:
            names = {id(p): fqn for fqn, p in held["model"].named_parameters()}
            seen.update({(fqn, WEIGHT): raw(p) for fqn, p in held["model"].named_parameters()})
            for parameter, states in held["optimizer"].optimizer.state.items():
                seen.update({(names[id(parameter)], n): raw(v) for n, v in states.items() if n != "step"})

    rows = [{"input_ids": torch.arange(2, 11), "labels": torch.arange(2, 11)}] * 8
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(tmp_path / "go"), save_strategy="no", **options)
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[Look()])
    trainer.train(resume_from_checkpoint=str(out))
    assert trainer.state.global_step == 3 and seen == truth


def test_one_group_becomes_the_two_of_trainer(run: Path, tmp_path: Path) -> None:
    source = api.open(run)
    decay, others = source.state.param_groups
    only = replace(decay, fqns=(*others.fqns, *decay.fqns))
    conversion = api.plan(replace(source, state=replace(source.state, param_groups=(only,))), "trainer")
    conversion.run(tmp_path / "out")
    written = torch.load(tmp_path / "out" / "optimizer.pt")["param_groups"]
    assert [len(group["params"]) for group in written] == [len(decay.fqns), len(others.fqns)]
    assert {group["weight_decay"] for group in written} == {only.options["weight_decay"]}
    assert any("split the source's param group into two" in note for note in conversion.plan.target.notes)
    assert [group.fqns for group in api.open(tmp_path / "out").state.param_groups] == [decay.fqns, others.fqns]


def test_what_trainer_would_take_for_something_else_is_refused(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "trainer-plain" / "checkpoint-2")
    decay, others = source.state.param_groups
    moved = (replace(decay, fqns=decay.fqns[:-1]), replace(others, fqns=(*others.fqns, decay.fqns[-1])))
    for groups in (moved, (decay, replace(others, fqns=others.fqns[:2]), replace(others, fqns=others.fqns[2:]))):
        with pytest.raises(LossError, match="two param groups"):
            TRAINER.lay_out(replace(source, state=replace(source.state, param_groups=groups)), Layout())
    assert trainer_groups((others, decay), [*decay.fqns, *others.fqns]) == ([decay, others], [])
    with pytest.raises(UsageError, match="no optimizer"):
        TRAINER.lay_out(replace(source, state=replace(source.state, param_groups=())), Layout())
    with pytest.raises(LossError, match="parameter order is unknown") as caught:
        TRAINER.lay_out(replace(source, config=None), Layout())
    assert "--config" in str(caught.value.hint)


def test_norms_that_trainer_tells_by_their_class(tmp_path: Path) -> None:
    """GPT-2's `ln_1.weight` gets no weight decay because of its class nn.LayerNorm. The name doesn't show it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    run, args = tmp_path / "run" / "checkpoint-2", TrainingArguments(str(tmp_path), weight_decay=0.1, use_cpu=True)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=5, n_embd=4, n_layer=1, n_head=2))
    optimizer = Trainer(model=model, args=args).create_optimizer()
    model(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    optimizer.step()
    model.save_pretrained(run)
    torch.save(optimizer.state_dict(), run / "optimizer.pt")
    (run / "trainer_state.json").write_text('{"global_step": 2}')
    api.plan(api.open(run), "dcp", Layout()).run(tmp_path / "dcp")
    assert same_optimizer(run / "optimizer.pt", write(tmp_path / "dcp", tmp_path / "out") / "optimizer.pt")
    source = api.open(tmp_path / "dcp")
    decay, others = source.state.param_groups
    only = replace(decay, fqns=(*decay.fqns, *others.fqns))
    with pytest.raises(LossError, match=r"nn\.LayerNorm"):
        TRAINER.lay_out(replace(source, state=replace(source.state, param_groups=(only,))), Layout())
    bare = replace(only, fqns=tuple(fqn for fqn in only.fqns if fqn.endswith("weight")))
    with pytest.raises(LossError, match=r"nn\.LayerNorm"):  # without biases, one group may hold all weights
        trainer_groups((bare,), bare.fqns, {fqn for fqn in bare.fqns if ".ln_" in fqn})


def test_shards_have_an_index(run: Path, tmp_path: Path) -> None:
    out = write(run, tmp_path / "out", max_shard_size=2000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in out.glob("*.safetensors")}
    assert not (out / "model.safetensors").exists() and api.open(out).optimizer_states


@pytest.mark.slow
def test_trainer_goes_on_with_muon(tmp_path: Path) -> None:
    """HF Trainer gets torch's Muon through `optimizers`. After a conversion through DCP, it has its own momentum."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    config = AutoConfig.for_model("llama", **tiny_sizes("llama"))
    rows = [{"input_ids": torch.arange(2, 11), "labels": torch.arange(2, 11)}] * 8

    def train(steps: int, seed: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the run's state before its last step and at its end."""
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        muon = torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def held() -> dict[str, Any]:
            states = {fqn: muon.state[p]["momentum_buffer"] for fqn, p in model.named_parameters() if p in muon.state}
            return {fqn: raw(p) for fqn, p in model.named_parameters()} | {f"{k}/m": raw(v) for k, v in states.items()}

        class Look(TrainerCallback):
            def on_step_begin(self, args: object, state: object, control: object, **_: Any) -> None:
                begun.update(held())

        begun: dict[str, Any] = {}
        options = {"save_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": []}
        args = TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=steps, disable_tqdm=True, **options)
        both = (muon, torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 1.0))
        Trainer(model=model, args=args, train_dataset=rows, optimizers=both, callbacks=[Look()]).train(**more)
        return begun, held()

    _, known = train(2, seed=0)
    api.plan(api.open(tmp_path / "run"), "dcp", Layout(world_size=3)).run(tmp_path / "dcp")
    out = write(tmp_path / "dcp", tmp_path / "out" / "checkpoint-2")
    begun, _ = train(3, seed=1, resume_from_checkpoint=str(out))
    assert begun == known and any(name.endswith("/m") for name in known)
