"""Verification cards: tiny models' whole cards, damage on the way, and the pages in docs/cards."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import equal, lora_peer
from benchmarks.cards import __main__ as cards
from benchmarks.cards import journey as travels
from benchmarks.cards import source
from benchmarks.cards.journey import MERGE, DifferentError, Journey, Sizes, Station
from benchmarks.cards.lora import Lora
from benchmarks.cards.models import Model, models
from benchmarks.cards.page import index, page
from benchmarks.cards.windows import Window, narrowed, num_layers, part, windows
from benchmarks.measure import Run
from tests.estimate.models import PUBLIC
from tests.support.commands import ckpt
from tests.support.places import REPOSITORY

TINY = Model(
    "tiny",
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "this test",
    Sizes(tp=2, pp=2, ep=2, etp=1, vpp=2),
    "",
    Sizes(tp=1, pp=4, ep=4, etp=1),
    (4, 3),
)
ADAPTED = replace(
    models()["Llama-3-8B-LoRA"],
    name="adapted",
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    lora=Lora(4, 8, ("q_proj", "v_proj", "down_proj")),
    other=Sizes(tp=2, pp=2),
    ranks=(2, 3),
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands and modules here, because each process imports torch for seconds."""

    def timed(name: str, command: Sequence[str | Path]) -> tuple[Run, str]:
        module, *words = map(str, command[2:])
        if module == "ckpt":
            done = ckpt(*words)
            assert done.code == 0, done.err
            return Run(1.0, 2.0, 30.0), done.out
        assert module == "benchmarks.cards.source"
        kind, path, *numbers = words
        return Run(1.0, 2.0, 30.0), json.dumps(source.main(kind, Path(path), *map(int, numbers)))

    monkeypatch.setattr(travels, "timed", timed)
    monkeypatch.setattr(cards, "timed", timed)
    monkeypatch.setattr(travels, "call", lambda module, *words: str(equal.main(*words)))


def digests(kind: str, folder: Path) -> dict[str, str]:
    """Return what `ckpt hash` prints of the whole source."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY.config))
    source.main(kind, folder, 0, TINY.ranks[0])
    said = json.loads(ckpt("hash", folder, "--config", folder, "--dtype", "bf16", "--json", "-q").out)
    found: dict[str, str] = said["digests"]
    return found


@pytest.mark.slow
def test_a_card_of_a_tiny_model(tmp_path: Path) -> None:
    card = cards.made(TINY, tmp_path, disk_gb=1)
    for (journey, moved), kinds in zip(card.journeys, (1, 3), strict=True):
        assert [one.window for one in moved] == [Window(0, 4)]
        expected = digests(journey.source, tmp_path / journey.source)
        assert {kind: digest for kind, digest, _ in travels.together(moved)} == expected
        assert len(expected) == kinds
        assert all(f"`{digest}`" in page(card) for digest in expected.values())
    assert "**Weights, masters and Adam's states: whole**" in page(card) and "windows" not in page(card)
    assert not (tmp_path / TINY.name).exists()


@pytest.mark.slow
def test_digests_of_windows_are_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the whole model's, and the page names the windows."""
    journey = Journey("Masters", "zero3", (Station("zero3", ("--world-size", "3")),), "zero3")
    monkeypatch.setattr(cards, "journeys", lambda *_: (journey, journey))
    card = cards.made(TINY, tmp_path, disk_gb=0.0018)
    expected = digests("zero3", tmp_path / "whole")
    for _, moved in card.journeys:
        assert {kind: digest for kind, digest, _ in travels.together(moved)} == expected
    assert "2 windows of layers, one after another: 0 to 1, 2 to 3." in page(card)


@pytest.mark.slow
def test_a_part_is_called_a_part(tmp_path: Path) -> None:
    """It holds each kind of layer, and the page's first paragraph says how much ran."""
    many = replace(TINY, config={**TINY.config, "num_experts": 16, "vocab_size": 4200})
    card = cards.made(many, tmp_path, disk_gb=0.0018, part_only=True)
    assert page(card).splitlines()[2] == (
        "**Weights: a part, 48 % of the elements**: layers 0 to 1 of 0 to 3, the first 2,152 of 4,200 rows of the "
        "vocabulary. Moved: 71 tensors, 175,296 elements, 350,592 bytes in bf16; whole: 185 tensors, 362,848 elements, "
        "725,696 bytes in bf16. The rest was not run. **Masters and Adam's states: not run**, for lack of disk."
    )
    assert card.journeys[1][1] == ()


@pytest.mark.slow
def test_the_states_alone_can_be_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_stations = (Journey("Weights", "hf", (), "safetensors"), Journey("States", "zero3", (), "zero3"))
    monkeypatch.setattr(cards, "journeys", lambda *_: without_stations)
    text = page(cards.made(TINY, tmp_path, disk_gb=1, part_states=True))
    assert "**Weights: whole**" in text and "**States: a part, " in text
    assert f"python -m benchmarks.cards {TINY.name} --disk 1 --part-states\n" in text


@pytest.mark.slow
def test_a_narrow_model_is_called_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "journeys", lambda *_: (Journey("Weights", "hf", (), "safetensors"),) * 2)
    card = cards.made(TINY, tmp_path, disk_gb=1, part_only=True, narrow=2)
    assert "a part, 41 % of the elements**: layers 0 to 1 of 0 to 3, 1/2 of the heads and of the MLPs' inner width" in (
        page(card)
    )
    held = card.journeys[0][1][0].tensors
    assert held["weights", "model.layers.0.self_attn.q_proj.weight", "weight"][1] == (16, 32)


@pytest.mark.slow
def test_a_card_of_an_adapter(tmp_path: Path) -> None:
    """Its merge has the bits of PEFT's, at every station."""
    card = cards.made(ADAPTED, tmp_path, disk_gb=1)
    (merge, (merged,)), (_, (moved,)) = card.journeys
    assert [one.station.format for one in merged.stops] == [MERGE, *(one.format for one in merge.stations[1:])]
    assert (merged.equal, moved.equal) == ("21", "12")
    assert {shape for _, shape, _ in moved.tensors.values()} == {(4, 32), (4, 48), (32, 4), (16, 4)}
    assert "**Merged weights, and the adapter: whole**" in page(card)
    assert "the same as PEFT's `merge_and_unload` makes them." in page(card)
    assert "| adapter | LoRA of rank 4, alpha 8, on q_proj, v_proj, down_proj |" in page(card)


def test_a_truth_without_a_merge_stops_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ADAPTED.lora is not None
    (tmp_path / "source").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(ADAPTED.config))
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(ADAPTED.lora.config()))
    monkeypatch.setattr(lora_peer, "merge", lambda base, _, output: shutil.copytree(base, output))
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.down_proj\.weight is changed, but no target, or"):
        source.main("lora", tmp_path / "source")


def test_numbers_have_the_given_exponents() -> None:
    for dtype, kind in ((np.uint16, torch.bfloat16), (np.uint32, torch.float32)):
        values = source.bits("a", "weight", 10_000, dtype)
        few, all_below = (torch.from_numpy(source.numbers(values, *of)).view(kind) for of in ((119, 8), (0, 128)))
        assert few.isfinite().all() and few.abs().min() >= 2**-8 and few.abs().max() < 1
        assert all_below.isfinite().all() and 1 < all_below.abs().max() < 2 and all_below.abs().min() < 1e-37


@pytest.mark.slow
def test_a_flipped_bit_stops_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = travels.timed

    def damaging(name: str, command: Sequence[str | Path]) -> tuple[Run, str]:
        done = timed(name, command)
        for file in tmp_path.glob("work/1-hf/*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        return done

    monkeypatch.setattr(travels, "timed", damaging)
    journey = Journey("Weights", "hf", (Station("hf", (), ("weights",)),), "safetensors")
    with pytest.raises(DifferentError, match=r"station 1, hf *: 1 tensors differ\nweights .* expected .*, found"):
        travels.travel(journey, TINY.config, Window(0, 4), tmp_path / "work", 4)


@pytest.mark.slow
def test_bits_that_differ_from_the_generator_stop_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is compared with the generator's digests too, not only with itself."""
    monkeypatch.setattr(source, "rounded", lambda values: (values >> np.uint32(16)).astype(np.uint16))
    journey = Journey("Masters", "zero3", (), "zero3")
    with pytest.raises(DifferentError, match=r"the source: \d+ tensors differ"):
        travels.travel(journey, TINY.config, Window(0, 4), tmp_path / "work", 4)


def test_windows_that_miss_a_tensor_stop_the_card() -> None:
    held = {("weights", "a", "weight"): ("bfloat16", (2,), "00")}
    moved = [travels.Moved(Window(0, 4), Run(1, 1, 1), held, (), "1")]
    cards.check_held(moved, TINY.config, {"a": (2,)}, True)
    for shapes in ({"a": (3,)}, {"a": (2,), "b": (1,)}, {}):
        with pytest.raises(RuntimeError, match="missing or have another shape"):
            cards.check_held(moved, TINY.config, shapes, True)
    more = {"a": (2,), "model.layers.4.a": (2,)}
    cards.check_held(moved, TINY.config, more, False)
    with pytest.raises(RuntimeError, match="in no window"):
        cards.check_held(moved, TINY.config, more, True)


def test_the_bits_hold_every_kind_of_number() -> None:
    narrow, wide = (source.bits("a", "weight", 100_000, dtype) for dtype in (np.uint16, np.uint32))
    for values, kind in ((narrow, torch.bfloat16), (wide, torch.float32)):
        numbers = torch.from_numpy(values.copy()).view(kind)
        assert numbers.isnan().any() and numbers.isposinf().any() and numbers.isneginf().any()
        assert ((numbers == 0) & numbers.signbit()).any()
        assert np.unique(values).size > 50_000
        assert np.array_equal(values, source.bits("a", "weight", 100_000, values.dtype))
        assert not np.array_equal(values, source.bits("b", "weight", 100_000, values.dtype))
    assert np.array_equal(source.rounded(narrow.astype(np.uint32) << np.uint32(16)), narrow)
    numbers = torch.from_numpy(wide.copy()).view(torch.float32)
    same = torch.from_numpy(source.rounded(wide)).view(torch.bfloat16)
    assert torch.equal(same[~numbers.isnan()], numbers.to(torch.bfloat16)[~numbers.isnan()])
    assert torch.equal(same.isnan(), numbers.isnan())


@pytest.mark.parametrize("name", models())
def test_windows_cover_a_model(name: str) -> None:
    config = models()[name].config
    layers = num_layers(config)
    shapes = {f"model.layers.{layer}.a": (10,) for layer in range(layers)} | {"model.embed_tokens.weight": (5,)}
    (whole,) = windows(config, shapes, 10**6)
    assert whole == Window(0, layers) and whole.config(config) == config
    made = windows(config, shapes, 5 + 70)
    assert [one.start for one in made[1:]] == [one.stop for one in made[:-1]]
    assert (made[0].start, made[-1].stop) == (0, layers) and max(one.stop - one.start for one in made) <= 7
    assert sum(num_layers(one.config(config)) for one in made) == layers
    with pytest.raises(ValueError, match="15 elements, more than 14"):
        windows(config, shapes, 14)


def test_configs_agree_with_those_of_the_estimates() -> None:
    shared = models().keys() & PUBLIC.keys()
    assert len(shared) >= 6
    for name in shared:
        config, public = models()[name].config, {**PUBLIC[name][1]}
        public.pop("num_nextn_predict_layers", None)  # transformers has no multi-token prediction
        assert {key: config.get(key) for key in public} == public, name


def test_a_window_keeps_each_layer_s_kind() -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 6,
        "layer_types": list("abcdef"),
        "first_k_dense_replace": 3,
        "mlp_only_layers": [1, 4],
    }
    assert Window(2, 5).config(config) == {
        "num_hidden_layers": 3,
        "layer_types": list("cde"),
        "first_k_dense_replace": 1,
        "mlp_only_layers": [2],
    }
    assert (
        Window(2, 5).name("model.layers.0.mlp.experts.1.up_proj.weight")
        == "model.layers.2.mlp.experts.1.up_proj.weight"
    )
    with pytest.raises(ValueError, match="can't start at layer 3"):
        Window(3, 6).config({**config, "full_attention_interval": 2})


def test_a_narrow_model_keeps_its_hidden_size_and_heads_size() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96}
    vision = {"depth": 24, "intermediate_size": 40, "deepstack_visual_indexes": [5, 11, 17]}
    both = narrowed({"text_config": config, "vision_config": vision}, 4)
    assert both["vision_config"] == {"depth": 6, "intermediate_size": 10, "deepstack_visual_indexes": [1, 2, 4]}
    assert both["text_config"] == {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "head_dim": 8,
    }
    with pytest.raises(ValueError, match="5 does not divide"):
        narrowed(config, 5)


def test_gated_norms_survive_one_less() -> None:
    for dtype, kind in ((np.uint16, torch.bfloat16), (np.uint32, torch.float32)):
        values = source.bits("layers.0.linear_attn.norm.weight", "weight", 1000, dtype)
        numbers = torch.from_numpy(values).view(kind)
        assert torch.equal(numbers.bfloat16().sub(1).add(1).to(kind), numbers)
        assert numbers.min() < 0.6 and numbers.max() > 1.9


def test_a_window_has_as_many_ranks_as_divide_it() -> None:
    config = {"num_hidden_layers": 24, "num_experts": 32}
    sizes = Sizes(tp=2, pp=6, ep=8, etp=1, vpp=2, options=("--account-for-loss-in-pipeline-split",))
    assert sizes.fitted(config, Window(0, 24)) == sizes
    assert sizes.fitted(config, Window(0, 8)) == Sizes(tp=2, pp=2, ep=8, etp=1, vpp=2)
    assert sizes.fitted(config, Window(5, 10, experts=4)) == Sizes(tp=2, pp=1, ep=4, etp=1)


def test_a_part_has_each_kind_of_layer_and_as_many_experts_as_fit() -> None:
    config = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 5000}
    layers = [f"model.layers.{layer}." for layer in range(6)]
    shapes = {f"{layer}mlp.experts.{number}.up.weight": (100, 10) for layer in layers[2:] for number in range(8)}
    shapes |= {f"{layer}mlp.gate.weight": (8, 10) for layer in layers[2:]}
    shapes |= {f"{layer}mlp.up.weight": (9, 10) for layer in layers[:2]} | {"embed.weight": (5000, 10)}
    assert part(config, shapes, 100_000) == [Window(1, 3)]
    assert part(config, shapes, 50_000) == [Window(1, 3, rows=2952)]
    assert part(config, shapes, 2952 * 10 + 5_000) == [Window(1, 3, experts=4, rows=2952)]
    assert part(config, shapes, 2952 * 10 + 2_100) == [Window(0, 1, 2, 2952), Window(2, 3, 2, 2952)]
    with pytest.raises(ValueError, match="29,610 elements is more than 30,000"):
        part(config, shapes, 30_000)


def test_written_cards_are_current() -> None:
    """Each card's config and stations are still the model's."""
    folder = REPOSITORY / "docs/cards"
    written = sorted(path for path in folder.glob("*.md") if path.stem != "index")
    assert not written or (folder / "index.md").read_text() == index(folder, models())
    for path in written:
        model, text = models()[path.stem], path.read_text()
        assert model.source in text
        assert json.loads(text.partition("## Config\n")[2]) == model.config
        for journey in travels.journeys(model.trained, model.other, model.ranks, model.lora):
            if f"{journey.title}: not run" in text:
                continue
            shown = text.partition(f"## {journey.title}\n")[2].partition("\n## ")[0]
            commands = [shlex.split(line)[2:4] for line in shown.splitlines() if line.startswith("    ckpt convert ")]
            formats = [journey.source, *(station.format for station in journey.stations)]
            formats = ["hf", *formats[2:]] if MERGE in formats else formats
            assert commands == [list(pair) for pair in pairwise(formats)], path.stem
            if ": a part, " not in text and "windows of layers" not in shown:
                for station in journey.stations:
                    assert f"`{' '.join([station.format, *station.options])}`" in shown, path.stem
