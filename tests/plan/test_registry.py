"""`ckpt/plan/registry.py`, `namespace.py`: other packages' formats, before ours."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import ckpt
from ckpt.errors import NotFoundError, UsageError
from ckpt.plan import registry
from ckpt.plan.checkpoint import HUB, OWN, Checkpoint
from ckpt.plan.namespace import Namespace
from ckpt.plan.relation import Link, Relation, translate
from ckpt.state.naming import to_namespace
from converters.huggingface.hf import HuggingFace

LOUD = "loud"


def spelled(checkpoint: Checkpoint, loud: bool) -> Checkpoint:
    shapes = {fqn: tensor.shape for (fqn, _), tensor in checkpoint.tensors.items()}
    names = {fqn: fqn.upper() if loud else fqn.lower() for fqn in shapes}
    links = tuple(Link.rename(fqn, new, shapes[fqn]) for fqn, new in names.items())
    relation = Relation(links, shapes, {names[fqn]: shape for fqn, shape in shapes.items()})
    return translate(checkpoint, relation, LOUD if loud else HUB)


class LoudFolder(HuggingFace):
    name = LOUD
    namespace = LOUD


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Register a package with its own format, and return its names."""
    module = ModuleType("loud_of_tests")
    vars(module).update(
        FORMAT=LoudFolder(), NAMES=Namespace(lambda found: spelled(found, False), lambda found, _: spelled(found, True))
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = {"ckpt.formats": {LOUD: "loud_of_tests:FORMAT"}, "ckpt.namespaces": {LOUD: "loud_of_tests:NAMES"}}
    monkeypatch.setattr(registry, "entries", lambda group: found.get(group, {}))
    return found


def small(folder: Path, config: str = '{"model_type": "bert"}') -> Checkpoint:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({"pooler.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    return ckpt.open(folder, "hf")


def test_names_of_another_package(entries: dict[str, dict[str, str]], tmp_path: Path) -> None:
    source = small(tmp_path / "hf")
    assert source.namespace == HUB
    conversion = ckpt.plan(source, LOUD)
    assert conversion.plan.checkpoint.namespace == LOUD
    conversion.run(tmp_path / "out")
    written = replace(ckpt.open(tmp_path / "out", LOUD), namespace=LOUD)
    assert [fqn for fqn, _ in written.tensors] == ["POOLER.WEIGHT"]
    assert ckpt.verify(source, written).equal
    assert ckpt.verify(written, written).equal
    assert [fqn for fqn, _ in to_namespace(written, HUB).tensors] == ["pooler.weight"]


def test_names_that_nothing_relates(entries: dict[str, dict[str, str]], tmp_path: Path) -> None:
    source = small(tmp_path / "hf")
    with pytest.raises(UsageError, match="unknown naming scheme 'quiet'"):
        to_namespace(source, "quiet")
    own = replace(source, namespace=OWN, config=None)
    with pytest.raises(NotFoundError, match=r"it needs the model's config.json"):
        to_namespace(own, LOUD)


def test_another_package_is_asked_before_ours(entries: dict[str, dict[str, str]], tmp_path: Path) -> None:
    """Another package's folders may be a special kind of ours."""
    small(tmp_path / "hf")
    assert registry.names()[0] == LOUD
    assert ckpt.open(tmp_path / "hf").format == LOUD


def test_a_name_of_ours_cannot_be_taken(entries: dict[str, dict[str, str]], tmp_path: Path) -> None:
    entries["ckpt.formats"]["zero3"] = "loud_of_tests:FORMAT"
    with pytest.raises(UsageError, match="this name belongs to ckpt") as caught:
        ckpt.open(tmp_path)
    assert caught.value.hint == "uninstall that package"


def test_an_alias_means_its_format_and_one_that_is_shared_all_of_them() -> None:
    assert {word: registry.get(word).name for word in ("fsdp", "fsdp2", "torch", "huggingface", "safetensors")} == {
        "fsdp": "dcp",
        "fsdp2": "dcp",
        "torch": "full",
        "huggingface": "hf",
        "safetensors": "hf",
    }
    assert [registry.get(word).name for word in ("lora", "adapter")] == ["peft", "peft"]
    family = {one.name for one in registry.named("deepspeed")}
    assert family == {"zero0", "zero1", "zero2", "zero3", "universal", "megatron-deepspeed"}
    assert registry.named("ds") == registry.named("deepspeed")
    with pytest.raises(UsageError, match="means several formats"):
        registry.get("ds")
    assert set(registry.names()).isdisjoint(alias for one in registry.all_formats() for alias in one.aliases)


@pytest.mark.parametrize(
    ("fixture", "format"),
    [("toy-zero3", "zero3"), ("trl-zero2/outputs", "zero2"), ("toy-zero0", "zero0"), ("lora-zero3", "zero3")],
)
def test_what_is_deepspeeds_is_read_as_auto_reads_it(fixtures: Path, fixture: str, format: str) -> None:
    run = fixtures / fixture
    found, usual = ckpt.open(run, "deepspeed"), ckpt.open(run)
    assert (found.format, found.path, found.notes) == (usual.format, usual.path, usual.notes)
    assert found.format == format


def test_what_is_not_deepspeeds_is_not_found_as_that(fixtures: Path) -> None:
    with pytest.raises(NotFoundError, match="no ds checkpoint here") as caught:
        ckpt.open(fixtures / "dcp-fsdp2", "ds")
    assert caught.value.hint == "this looks like dcp"
