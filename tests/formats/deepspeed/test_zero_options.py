"""`converters/deepspeed/zero.py`, `flat_groups.py`: one run per DeepSpeed option matches the live engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Layout
from tests.support.describing import assert_equals_truth
from tests.support.engines import Truth, launch
from tests.support.sampling import sample
from tests.support.stored import stored

WORLD_SIZE = 3
STEPS = 2

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Scenario:
    """A run: trainer options, and changes to DeepSpeed's config."""

    name: str
    strategy: str
    model: str = "toy"
    options: dict[str, Any] = field(default_factory=dict)
    ds_config: dict[str, Any] = field(default_factory=dict)

    @property
    def option(self) -> str:
        return self.name.removesuffix(f"_{self.strategy}")


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


CPU_OFFLOAD = zero(offload_optimizer={"device": "cpu"})

ALL_SCENARIOS = [
    Scenario("sub_groups", "zero3", ds_config=zero(sub_group_size=40)),
    Scenario("sub_groups_llama", "zero3", "llama", ds_config=zero(sub_group_size=1000)),
    Scenario("all_persistent", "zero3", ds_config=zero(stage3_param_persistence_threshold=10**9)),
    Scenario("none_persistent", "zero3", ds_config=zero(stage3_param_persistence_threshold=0)),
    *(Scenario(f"round_robin_{s}", s, "llama", ds_config=zero(round_robin_gradients=True)) for s in ("zero1", "zero2")),
    *(Scenario(f"aligned_{s}", s, ds_config=zero(parameter_alignment=True)) for s in ("zero1", "zero2")),
    Scenario("aligned_round_robin", "zero2", ds_config=zero(parameter_alignment=True, round_robin_gradients=True)),
    *(Scenario(f"elastic_{s}", s, "llama", ds_config=zero(elastic_checkpoint=True)) for s in ("zero1", "zero2")),
    Scenario("bf16_optimizer", "zero1", "llama", ds_config={"data_types": {"grad_accum_dtype": "fp32"}}),
    *(Scenario(f"cpu_offload_{s}", s, "llama", ds_config=CPU_OFFLOAD) for s in ("zero2", "zero3")),
    *(
        Scenario(f"{name}_{s}", s, options={"optimizer": name})
        for name in ("sgd", "momentum", "lion")
        for s in ("zero1", "zero2", "zero3")
    ),
    *(
        Scenario(f"never_stepped_{s}", s, options={"dtype": "fp16", "initial_scale_power": 40})
        for s in ("zero1", "zero2", "zero3")
    ),
    *(Scenario(f"frozen_{s}", s, "qwen2", {"freeze": r"embed|layers\.0\."}) for s in ("zero1", "zero2", "zero3")),
    *(Scenario(f"lora_{s}", s, "llama", {"lora": 3}) for s in ("zero1", "zero2", "zero3")),
    *(Scenario(f"trainer_folder_{s}", s, "qwen3", {"through": "trainer"}) for s in ("zero2", "zero3")),
    Scenario("accumulated", "zero3", options={"accumulate": 2}),
    Scenario("torch_scheduler", "zero2", options={"scheduler": "torch"}),
    Scenario("old_torch_files_2", "zero2", ds_config={"checkpoint": {"checkpoint_serialization": False}}),
    Scenario("old_torch_files_3", "zero3", ds_config={"checkpoint": {"checkpoint_serialization": False}}),
    Scenario("every_step", "zero3", options={"save_every": 1}),
]
#: Stages 1 and 2 share their files' layout.
SCENARIOS = sample(ALL_SCENARIOS, lambda s: [(s.option, s.strategy == "zero3")])


@pytest.fixture(scope="session")
def scenario_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenarios")
    jobs = []
    for scenario in SCENARIOS:
        job = {"strategy": scenario.strategy, "model": scenario.model, "steps": STEPS, "truth": True}
        job |= {"output": str(folder / scenario.name)} | scenario.options
        if scenario.ds_config:
            file = folder / f"{scenario.name}.json"
            file.write_text(json.dumps(scenario.ds_config))
            job["ds_config"] = str(file)
        jobs.append(job)
    launch(jobs, WORLD_SIZE, folder, "tests.support.hf_trainer")
    return folder


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_option(scenario: Scenario, scenario_runs: Path, tmp_path: Path, tables: Any) -> None:
    run = scenario_runs / scenario.name
    tag = "checkpoint-" if "through" in scenario.options else "global_step"
    truth = Truth.load(run / "truth" / f"{tag}{STEPS}.safetensors")
    checkpoint = api.open(run, scenario.strategy)
    count = assert_equals_truth(checkpoint, truth)
    roles = sorted({role for _, role in checkpoint.tensors} - {WEIGHT, MASTER, BUFFER})
    assert roles == sorted({role for _, role in truth.tensors} - {WEIGHT, MASTER, BUFFER})
    assert checkpoint.ties == truth.ties
    # The optimizer's own order applies, whatever the order of elements. Stages 1 and 2 have no empty parameters.
    masters = {fqn for fqn, role in checkpoint.tensors if role == MASTER}
    named = [[fqn for fqn in group["names"] if fqn in masters] for group in truth.metadata["param_groups"]]
    assert [list(group.fqns) for group in checkpoint.state.param_groups] == named

    # A LoRA run in training can only be written under its own names. merge-lora writes the hf model.
    layout = Layout(options={"names": "own"}) if "lora" in scenario.options else None
    api.plan(checkpoint, "hf", layout).run(tmp_path / "hf")
    written = stored(tmp_path / "hf")
    for fqn, value in written.items():
        live = truth.tensors.get((fqn, WEIGHT)) or truth.tensors[fqn, BUFFER]
        assert value == live, fqn
    kept = {fqn for fqn, role in truth.tensors if role in (WEIGHT, BUFFER)} - set(truth.ties)
    assert set(written) == kept
    tables["DeepSpeed options, 3 ranks: tensors bit for bit equal to the live engine"][scenario.name] = {
        "stage": scenario.strategy,
        "read": str(count),
        "to hf": str(len(written)),
        "optimizer states": " ".join(roles) or "none",
    }


def test_newest_recorded_step_is_taken_and_a_tag_takes_another(scenario_runs: Path) -> None:
    run = scenario_runs / "every_step"
    assert api.open(run).state.step == STEPS
    assert api.open(run, tag="global_step1").state.step == 1
    truth = Truth.load(run / "truth" / "global_step1.safetensors")
    assert_equals_truth(api.open(run, tag="global_step1"), truth)


def test_the_checker_sees_one_flipped_bit(scenario_runs: Path) -> None:
    """The test flips a bit in one rank's file to prove that comparisons with the truth can fail."""
    run = scenario_runs / "accumulated"
    truth = Truth.load(run / "truth" / f"global_step{STEPS}.safetensors")
    checkpoint = api.open(run)
    fragment = next(checkpoint.tensors["down.weight", "exp_avg"].fragments())
    path = Path(fragment.extent.path)
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[fragment.extent.offset] ^= 1
    try:
        path.write_bytes(damaged)
        with pytest.raises(AssertionError, match=r"down\.weight"):
            assert_equals_truth(api.open(run), truth)
    finally:
        path.write_bytes(original)
