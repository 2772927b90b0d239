"""`converters/names/transformers/transformers_source.py`, `relation.py`, `tables.py`, `tracing.py`, `rules.py`: models.

A tiny model of every architecture in transformers is compared with `save_pretrained`, both with ckpt's tables alone and
with transformers. `make test` takes those that differ in a rule for names, or in what they tie.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt
from ckpt.errors import LossError, UsageError
from ckpt.plan.checkpoint import Layout
from converters.names.transformers import relation as relations
from converters.names.transformers import transformers_source
from converters.names.transformers.relation import relation
from converters.names.transformers.tables import declared, rules_of
from converters.names.transformers.transformers_source import converted_identifiers, model_folder
from tests.support import sampling
from tests.support.architectures import MAPPINGS, auto, model_class, model_types, numbered, tiny_config
from tests.support.loaded import save_loaded

transformers = pytest.importorskip("transformers", minversion="5.23")

MAX_PARAMETERS = 30_000_000
#: Model types that can't be built here: transformers rejects the shrunk config, a package is missing, or the model
#: stays large.
NOT_BUILT = set(
    """
    blt chameleon cohere_compass cohere_compass_text dbrx deepseek_ocr2 dots3_note dots3_note_text emu3 ernie4_5_vl_moe
    evolla fast_vlm florence2 gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified_assistant
    glm5_next granite4_vision granite_docling inkling2 inkling_mm_model janus muse_glimmer muse_spark musicgen
    musicgen_melody nemotron_h_omni perception_lm pi0 reformer t5gemma2 unlimited_ocr
    """.split()  # noqa: SIM905
)
#: Model types missing from ckpt's tables. They need transformers.
NOT_IN_TABLES = set(
    """
    deepseek_v4 diffusion_gemma hrm_text hunyuan_vl hy_v4 inkling2_text kimi_k25 mistral_large4 molmo2 qianfan_ocr
    qwen4_exp qwen4_exp_text shieldgemma2 step3p7 vision-encoder-decoder
    """.split()  # noqa: SIM905
)
#: Model types with a path of their own: positions of some layers alone or of unknown kinds, experts of several sizes,
#: names split by sizes, a part without a type, names that another trainer has too.
APART = {"beam", "deepseek_v4", "longcat_flash", "molmo2", "mpt", "olmo2"}
#: The causal map names a class of another model, so the saved names don't load.
NOT_EQUAL = {"shieldgemma2"}

Tensors = Mapping[str, torch.Tensor]


class Sample:
    """A tiny model with distinct elements: its state dict as stored by a training script, and its saved files."""

    def __init__(self, config: Any, folder: Path) -> None:
        model = numbered(model_class(config)(config))
        self.folder, self.stored, self.saved = folder, folder / "stored", folder / "saved"
        save_loaded(model, self.saved)
        self.stored.mkdir()
        torch.save(model.state_dict(), self.stored / "pytorch_model.bin")
        shutil.copy(self.saved / "config.json", self.stored)
        self.config: dict[str, Any] = json.loads((self.saved / "config.json").read_text())
        self.memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._written: tuple[Any, ...] = ()
        self._found: list[str] = []

    def faults(self, **options: str) -> list[str]:
        """Compare `ckpt convert full hf` with `save_pretrained`, and memory with the model. Return the differences."""
        conversion = ckpt.plan(ckpt.open(self.stored, "full"), "hf", Layout(options=options))
        moved = conversion.plan.target.files, conversion.plan.checkpoint.tensors
        saved = tensors(self.saved)
        if moved != self._written:
            out = self.folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            conversion.run(out, manifest=False)
            written = tensors(out)
            found = [f"{name}: written, not saved" for name in written.keys() - saved.keys()]
            found += [f"{name}: saved, not written" for name in saved.keys() - written.keys()]
            found += [name for name in written.keys() & saved.keys() if not same(written[name], saved[name])]
            self._written, self._found = moved, found
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        back = relation(self.config, shapes, "to_memory")
        read = shapes if back is None else back.b_shapes
        return self._found + [
            f"{name}: not in memory" for name, shape in read.items() if self.memory.get(name) != shape
        ]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def known_from(config: Mapping[str, Any]) -> str | None:
    """Return the source that maps this model's names between memory and the Hub, or None.

    `tables` are ckpt's own. `transformers` is the installed package, if it is release 5 or later and has the model
    type.
    """
    if declared(config) is not None:
        return "tables"
    whole = next(transformers_source.model_types(config), None)
    if whole is None or converted_identifiers() is None or model_folder(whole) is None:
        return None
    return "transformers"


def forget() -> None:
    """Clear the caches of transformers' source code."""
    for cached in (
        transformers_source.converted_identifiers,
        transformers_source.model_folder,
        transformers_source._source,
        transformers_source._classes,
    ):
        cached.cache_clear()


@pytest.fixture
def hide_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    package = transformers_source.package

    def hide(hidden: bool) -> None:
        for module in (transformers_source, relations):
            monkeypatch.setattr(module, "package", (lambda: None) if hidden else package)
        forget()

    yield hide
    forget()


def facets(model_type: str) -> Iterator[object]:
    """Yield an architecture's rules, and what transformers ties in it."""
    rules = rules_of(model_type)
    names = [mapping[model_type] for mapping in MAPPINGS if model_type in mapping]
    yield rules is None, len(names)
    yield model_type if model_type in APART else None
    yield from rules or ()
    yield repr(transformers_source.all_tied_weights({"model_type": model_type, "architectures": names[-1:]}))


@pytest.mark.slow
def test_every_architecture_is_written_as_save_pretrained_writes_it(
    tmp_path: Path,
    hide_transformers: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "disabled", True)
    types = sampling.sample(model_types(), facets)
    assert set(types) >= APART
    not_built: set[str] = set()
    unknown: set[str] = set()
    unproved: dict[bool, set[str]] = {True: set(), False: set()}
    refused: dict[bool, set[str]] = {True: set(), False: set()}
    wrong: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    for model_type in types:
        folder = tmp_path / model_type
        try:
            config = tiny_config(model_type)
            with torch.device("meta"):
                model = model_class(config)(config)
            if sum(parameter.numel() for parameter in model.parameters()) > MAX_PARAMETERS:
                raise ValueError("large")
            sample = Sample(config, folder)
        except Exception:
            not_built.add(model_type)
            continue
        for hidden in (True, False):
            hide_transformers(hidden)
            if known_from(sample.config) is None:
                assert hidden
                unknown.add(model_type)
                continue
            try:
                faults = sample.faults()
            except (LossError, UsageError) as error:  # the model is unknown or known differently
                (refused if isinstance(error, LossError) else unproved)[hidden].add(model_type)
                faults = sample.faults(names="own")
            if faults:
                wrong[hidden][model_type] = faults
        shutil.rmtree(folder)
    built = len(types) - len(not_built)
    known = built - len(unknown)
    with capsys.disabled():
        print(f"\n{len(types)} architectures, {built} built")
        for hidden, number in ((True, known), (False, built)):
            equal, proved = number - len(wrong[hidden]), number - len(unproved[hidden] | refused[hidden])
            print(
                f"{'tables alone' if hidden else 'with transformers'}: {number} known, {equal} equal, {proved} proved"
            )
    assert not_built == NOT_BUILT.intersection(types)
    assert unknown == NOT_IN_TABLES.intersection(types)
    assert unproved[False] == set()
    assert refused == {True: set(), False: set()}
    assert wrong[True] == {}
    assert wrong[False].keys() == NOT_EQUAL.intersection(types), wrong[False]


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "mixtral", "granitemoe", "qwen3_vl_moe", "gemma3", "qwen2_5_vl", "gpt_neox"]
)
def test_an_architecture_is_written_as_save_pretrained_writes_it(
    tmp_path: Path, hide_transformers: Callable[[bool], None], model_type: str
) -> None:
    sample = Sample(tiny_config(model_type), tmp_path)
    hide_transformers(True)
    assert known_from(sample.config) == "tables"
    assert sample.faults(names="own") == []


@pytest.mark.parametrize("model_type", ["bart", "m2m_100", "prophetnet", "ibert"])
def test_a_tensor_that_an_inner_model_ties_is_written_once(tmp_path: Path, model_type: str) -> None:
    """DCP stores the tensor under three names. I-BERT declares the kept name as a pattern."""
    config = tiny_config(model_type)
    classes = auto.MODEL_FOR_MASKED_LM_MAPPING if model_type == "ibert" else auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    assert from_dcp(classes[type(config)](config), tmp_path) == set()


def chosen_inside(kind: str) -> transformers.PreTrainedModel:
    """Return a model whose inner model's class depends on the inner config."""
    sizes = {"vocab_size": 37, "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 12}
    sizes |= {"intermediate_size": 10, "max_position_embeddings": 16}
    bert = transformers.BertConfig(**sizes)
    if kind.startswith("blip-2"):
        t5 = {"vocab_size": 37, "d_model": 12, "d_kv": 6, "num_layers": 2, "num_heads": 2, "d_ff": 10}
        opt = {**sizes, "ffn_dim": 10, "word_embed_proj_dim": 12}
        texts = {"blip-2 of T5": {"model_type": "t5", **t5}, "blip-2 of OPT": {"model_type": "opt", **opt}}
        qformer = {**sizes, "encoder_hidden_size": 12}
        vision = {**sizes, "image_size": 16, "patch_size": 8}
        config = transformers.Blip2Config(vision_config=vision, qformer_config=qformer, text_config=texts[kind])
        return transformers.Blip2ForConditionalGeneration(config)
    gpt2 = transformers.GPT2Config(vocab_size=37, n_embd=12, n_layer=2, n_head=2, n_positions=16)
    untied = transformers.BertConfig(**sizes, tie_word_embeddings=False)
    decoder = {"BERT to GPT-2": gpt2, "BERT to BERT": bert, "BERT to an untied one": untied}[kind]
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, decoder)
    return transformers.EncoderDecoderModel(both)


@pytest.mark.parametrize(
    "kind", ["BERT to BERT", "BERT to an untied one", "BERT to GPT-2", "blip-2 of T5", "blip-2 of OPT"]
)
def test_what_a_model_chosen_by_an_inner_config_ties_is_written_once(tmp_path: Path, kind: str) -> None:
    assert from_dcp(chosen_inside(kind), tmp_path) == set()


@pytest.mark.parametrize("shared", [True, False])
def test_what_marian_ties_by_its_config_is_written_once(tmp_path: Path, shared: bool) -> None:
    """A checkpoint contains Marian's computed positions, but `save_pretrained` omits them."""
    config = tiny_config("marian")
    config.share_encoder_decoder_embeddings = shared
    positions = {f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")}
    assert from_dcp(transformers.MarianMTModel(config), tmp_path) == positions


def from_dcp(model: transformers.PreTrainedModel, folder: Path) -> set[str]:
    """Return extra names that `ckpt` writes from a DCP checkpoint. All saved tensors must have equal bytes."""
    model = numbered(model)
    model.save_pretrained(folder / "saved")
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "stored"), no_dist=True)
    shutil.copy(folder / "saved" / "config.json", folder / "stored")
    ckpt.plan(ckpt.open(folder / "stored", "dcp"), "hf").run(folder / "out")
    written, saved = tensors(folder / "out"), tensors(folder / "saved")
    assert all(same(written[name], saved[name]) for name in saved)
    return written.keys() - saved.keys()


def test_a_class_that_serves_two_model_types_is_proved(tmp_path: Path) -> None:
    """InternLM3's configs name Llama's class, as in transformers' maps."""
    assert Sample(tiny_config("internlm3"), tmp_path).faults() == []


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "mixtral", "phimoe", "ernie4_5_moe", "granitemoe", "llava", "qwen2_vl", "nemotron_h"]
)
def test_the_tables_link_as_transformers_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Tables in ckpt and code in transformers give the same links in both directions."""
    sample = Sample(tiny_config(model_type), tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in tensors(sample.saved).items()}
    memory = sample.memory
    ours = relation(sample.config, memory, "to_hub"), relation(sample.config, saved, "to_memory")
    monkeypatch.setattr(relations, "declared", lambda config: None)
    theirs = relation(sample.config, memory, "to_hub"), relation(sample.config, saved, "to_memory")
    for our, their in zip(ours, theirs, strict=True):
        assert our is not None and their is not None
        assert set(our.links) == set(their.links)
        assert our.b_shapes == their.b_shapes


def test_experts_of_files_that_have_them_transposed_are_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's own Qwen3-VL-MoE files store [experts, in, out], but `save_pretrained` keeps the memory layout."""
    sample = Sample(tiny_config("qwen3_vl_moe"), tmp_path)
    stored = {
        name: (shape[0], shape[2], shape[1]) if ".experts." in name else shape for name, shape in sample.memory.items()
    }
    ours = relation(sample.config, stored, "to_memory")
    assert ours is not None and ours.b_shapes == sample.memory
    monkeypatch.setattr(relations, "declared", lambda config: None)
    theirs = relation(sample.config, stored, "to_memory")
    assert theirs is not None and set(ours.links) == set(theirs.links)


def test_who_knows_the_names(hide_transformers: Callable[[bool], None]) -> None:
    llava = {"model_type": "llava", "text_config": {"model_type": "qwen3_moe"}}
    strange = {"model_type": "llava", "text_config": {"model_type": "no_such_model"}}
    hide_transformers(False)
    assert (
        known_from({"model_type": "qwen3_moe"}) == known_from({"model_type": "llama"}) == known_from(llava) == "tables"
    )
    assert known_from({"model_type": "deepseek_v4"}) == known_from({"model_type": "t5"}) == "transformers"
    assert known_from({"model_type": "llava", "architectures": ["LlavaModel"]}) == "transformers"
    hide_transformers(True)
    assert known_from({"model_type": "qwen3_moe"}) == known_from(llava) == "tables"
    for config in (strange, {"model_type": "deepseek_v4"}, {"model_type": "no_such_model"}, {"model_type": 7}, {}):
        assert known_from(config) is None
