"""`converters/deepspeed/dealt_experts.py`, `experts.py`: DeepSpeed loads MoE layers on other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt import api
from ckpt.errors import LossError, UsageError
from ckpt.plan.checkpoint import Layout
from converters.deepspeed.facts import DeepSpeedFacts
from tests.formats.deepspeed.expert_runs import RUNS
from tests.support.engines import DEEPSPEED, fork_once, raw
from tests.support.sampling import sample

STEP = "global_step2"
#: ep_size and ranks.
TARGETS = ((2, 4), (4, 4), (1, 4), (2, 2), (1, 2), (1, 1))
#: Each target, and each run to each ep_size.
CASES = sample(((*target, name) for target in TARGETS for name in RUNS), lambda case: [case[:2], case[::2]])


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state of each engine when it saved, and of engines on other ranks after loading."""
    folder = tmp_path_factory.mktemp("experts")
    worker = "tests.formats.deepspeed.expert_runs"
    fork_once(folder, [(4, worker, ["save", str(folder)])], DEEPSPEED)
    for size, ranks, name in CASES:
        plan = api.plan(api.open(folder / name), name, Layout(world_size=ranks, ep_size=size))
        plan.run(folder / f"{name}-ep-{size}-on-{ranks}")
    numbers = dict.fromkeys(ranks for _, ranks in TARGETS)
    fork_once(folder, [(ranks, worker, ["load", str(folder)]) for ranks in numbers], DEEPSPEED)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ranks", "name"), CASES)
def test_the_engine_has_what_was_saved_and_goes_on_as_it_would_have(
    loaded: Path, size: int, ranks: int, name: str
) -> None:
    found = load_file(loaded / f"{name}-ep-{size}-on-{ranks}-before.safetensors")
    truth = load_file(loaded / f"{name}-before.safetensors")
    assert found.keys() == truth.keys() and {fqn for fqn in truth if fqn.startswith("exp_avg_sq/")}
    assert [fqn for fqn in truth if raw(found[fqn]) != raw(truth[fqn])] == []
    after = load_file(loaded / f"{name}-ep-{size}-on-{ranks}-after.safetensors")
    unbroken = load_file(loaded / f"{name}-after.safetensors")
    for fqn, tensor in unbroken.items():
        if fqn.startswith("master/"):
            assert not torch.equal(tensor, truth[fqn]), fqn
            torch.testing.assert_close(after[fqn], tensor, rtol=0, atol=2e-3 if name == "zero2" else 1e-6, msg=fqn)


def contents(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in sorted(folder.iterdir())}


def same(ours: Any, theirs: Any, at: str) -> list[str]:
    """Return the paths of differences. Only lists and `param_shapes` must keep their order."""
    if isinstance(theirs, torch.Tensor):
        return [] if isinstance(ours, torch.Tensor) and raw(ours) == raw(theirs) else [at]
    if isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        ordered = "param_shapes" in at and list(ours) != list(theirs)
        return [at] * ordered + [one for key in theirs for one in same(ours[key], theirs[key], f"{at}.{key}")]
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        return [one for a, b in zip(ours, theirs, strict=True) for one in same(a, b, at)]
    same_value = (
        vars(ours) == vars(theirs) if hasattr(theirs, "__dict__") and hasattr(ours, "__dict__") else ours == theirs
    )
    return [] if same_value else [f"{at}: {ours}, {theirs}"]


def test_the_same_layout_is_written_as_it_was(fixtures: Path, tmp_path: Path) -> None:
    """DeepSpeed's files have `use_data_before_expert_parallelism` and experts in two param groups."""
    api.plan(api.open(fixtures / "experts-zero1"), "zero1").run(tmp_path / "out")
    ours, theirs = contents(tmp_path / "out" / STEP), contents(fixtures / "experts-zero1" / STEP)
    assert ours.keys() == theirs.keys()
    assert [one for name in theirs for one in same(ours[name], theirs[name], name)] == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layers_of_several_sizes_get_the_one_that_is_asked_for(fixtures: Path, tmp_path: Path, size: int) -> None:
    source = api.open(fixtures / "experts-zero2")
    with pytest.raises(UsageError, match="several ep_size"):
        api.plan(source, "zero2")
    api.plan(source, "zero2", Layout(ep_size=size)).run(tmp_path / "out")
    assert api.verify(source, api.open(tmp_path / "out")).equal


REFUSED: dict[str, tuple[str, str, dict[str, int], type[Exception], str]] = {
    "ranks": ("experts-zero1", "zero1", {"world_size": 3}, UsageError, "does not divide the experts"),
    "experts": ("experts-zero1", "zero2", {"world_size": 3, "ep_size": 3}, UsageError, "does not divide"),
    "split groups": ("experts-zero1", "zero1", {"ep_size": 4}, LossError, "in several param groups"),
    "no experts": ("toy-zero1", "zero1", {"ep_size": 2}, UsageError, "no experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_engine_would_load_is_refused(fixtures: Path, case: str) -> None:
    name, target, asked, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        api.plan(api.open(fixtures / name), target, Layout(**asked))


def test_groups_that_no_engine_makes_are_refused(fixtures: Path) -> None:
    source = api.open(fixtures / "experts-zero1")
    shared, experts, *others = source.state.param_groups
    mixed = replace(shared, fqns=(*shared.fqns, *experts.fqns))
    odd = replace(source, state=replace(source.state, param_groups=(mixed, *others)))
    with pytest.raises(LossError, match="mixes experts with other parameters"):
        api.plan(odd, "zero1")
    with pytest.raises(UsageError, match="from separate files"):
        api.plan(replace(source, facts=DeepSpeedFacts(own_module_order=True)), "zero1")


def test_without_the_optimizers_groups_nothing_is_written(fixtures: Path, tmp_path: Path) -> None:
    api.plan(api.open(fixtures / "experts-zero2"), "full").run(tmp_path / "full")
    with pytest.raises(UsageError, match="from separate files"):
        api.plan(api.open(tmp_path / "full"), "zero2", Layout(world_size=2, ep_size=2))


def test_experts_of_a_run_without_zero_become_partitions(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "experts-zero0")
    api.plan(source, "zero1", Layout(world_size=4)).run(tmp_path / "out")
    assert api.verify(source, api.open(tmp_path / "out")).equal
