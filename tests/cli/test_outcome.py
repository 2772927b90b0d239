"""Printed outcome after a conversion.

`ckpt/options/printing.py`, `ckpt/runs/plan_lines.py`, `ckpt/plan/load_check.py`, `converters/names/hub/loading.py`:
lines and warnings.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import ckpt
from ckpt.base.text import Brief, note_lines, pluralize
from ckpt.options import printing as text
from ckpt.plan.load_check import LoadCheck
from converters.huggingface.hf import NO_CONFIG
from converters.names.hub import loading
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import ckpt_in_order
from tests.support.sampling import sample

#: One sample per framework: ZeRO, FSDP, Megatron, GPT-NeoX, HF Trainer, a LoRA run.
PLAIN = ("moe-zero3", "toy-zero1", "local-flat", "megatron-0.17-dp", "neox-zero1", "trainer-zero2", "autotp-zero0")
#: A folder with one run, and conversions to other formats.
OTHERS = (
    ("trl-zero3/outputs", "hf"),
    ("trainer-plain", "hf"),
    ("toy-zero3", "zero3 --world-size 2"),
    ("trainer-zero2", "zero3 --world-size 2"),
    ("trainer-plain", "megatron --tp 1"),
)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_success_has_at_most_five_lines(fixtures: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    done = run_ckpt("convert", "auto", "hf", fixtures / name, "-o", out)
    lines = [*done.err.splitlines(), *done.out.splitlines()]
    assert done.code == 0 and len(lines) <= 5, done.err
    report = json.loads(run_ckpt("convert", "auto", "hf", fixtures / name, "--dry-run", "--json", "-o", out / "x").out)
    long = run_ckpt("convert", "auto", "hf", fixtures / name, "-o", tmp_path / "long", "-v").err
    for one in report["left_out"]:
        assert f"not written: {one}" in long, "with -v nothing is shortened"
    assert all(f"note: {note}" in long for note in report["notes"])
    assert len(report["left_out"]) < 2 or "(-v: all of it)" in done.err


@pytest.mark.parametrize(("name", "target"), OTHERS)
def test_other_plain_successes_have_at_most_five_lines(fixtures: Path, tmp_path: Path, name: str, target: str) -> None:
    done = ckpt_in_order("convert", "auto", *target.split(), fixtures / name, "-o", tmp_path / "out")
    source, *_ = lines = done.out.splitlines()
    assert done.code == 0 and len(lines) <= 5, done.out
    assert source.startswith(f"{fixtures / name}") and ", step 2" in source, source
    assert any(line.startswith("wrote ") for line in lines) and f"{tmp_path / 'out'}" in lines, done.out


def _of_kind(lines: list[str], *starts: str) -> list[str]:
    return [line for line in lines if line.startswith(starts)]


def test_every_fixture_is_converted_in_few_lines(fixtures: Path, tmp_path: Path) -> None:
    """Each kind of warning has its own line; -v says at least as much, in --dry-run too."""
    folders = sorted(one for one in fixtures.iterdir() if one.is_dir())
    words = {"fsdp-ranks": 0, "hf": 0, "zero1": 0}
    cases = [(folder, list(words)[number % len(words)]) for number, folder in enumerate(folders)]
    for folder, target in sample(cases, lambda case: case[0].name.split("-")):
        convert = ("convert", "auto", target, folder, "-o", tmp_path / "out", "--overwrite")
        done = ckpt_in_order(*convert)
        if done.code:
            continue
        words[target] += 1
        lines = done.out.splitlines()
        notes = _of_kind(lines, "note: ", "notes: ")
        warnings = [*notes, *_of_kind(lines, "not written: "), *_of_kind(lines, "not read: ")]
        assert len(lines) - len(warnings) <= 5 and len(notes) <= 2 and len(warnings) <= 4, done.out
        assert len(lines) <= 5 or len(warnings) > 1, done.out
        if notes:
            left = "".join(re.sub(r"^notes?: | \(-v: a line each\)$", "", line) for line in notes)
            long = _of_kind(ckpt_in_order(*convert, "-v", "--dry-run").out.splitlines(), "note: ")
            for line in sorted(long, key=len, reverse=True):
                left = left.replace(line.removeprefix("note: "), "")
            assert not re.sub(r"\(\d\)|; ", "", left).strip(), left
    assert all(words.values())


def test_several_notes_have_one_line_without_verbose() -> None:
    notes = ["one thing", Brief("known"), Brief("a long story", "short")]
    assert note_lines(notes) == ["notes: (1) one thing; (2) short (-v: a line each)"]
    assert note_lines(notes, verbose=True) == ["note: one thing", "note: known", "note: a long story"]
    assert note_lines(notes[:2]) == ["note: one thing"] and note_lines([]) == []


def test_last_line_is_proved_by_transformers(fixtures: Path, tmp_path: Path) -> None:
    """The last line's promise or denial is checked against transformers itself."""
    from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

    run = Path(shutil.copytree(fixtures / "moe-zero3", tmp_path / "run"))
    done = run_ckpt("convert", "auto", "hf", run, "-o", tmp_path / "good")
    call = f"Qwen3MoeForCausalLM.from_pretrained('{tmp_path}/good')"
    assert done.err.splitlines()[-1] == f"from_pretrained can load this folder: {call}"
    _, told = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "good", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    (run / "config.json").unlink()
    done = run_ckpt("convert", "auto", "hf", run, "-o", tmp_path / "bad")
    assert done.err.splitlines()[-1].startswith("from_pretrained cannot load this folder: config.json is missing. Run")
    with pytest.raises(ValueError, match="model_type"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "bad")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "no model_type"),
        ({"hidden_size": 8}, "no model_type"),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8},
            "names or shapes don't match",
        ),
    ],
)
def test_what_cannot_be_loaded_is_never_promised(config: dict[str, object], why: str) -> None:
    sizes = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    loads = loading.unproved(config if "model_type" not in config else sizes | config, {"w": (1,)})
    assert loads.can is False and why in loads.sentence("out")
    assert NO_CONFIG.can is False and "config.json is missing" in NO_CONFIG.sentence("out")


def test_class_that_was_proved_is_called_if_the_config_names_none(fixtures: Path, tmp_path: Path) -> None:
    """AutoModel would load the model without its head."""
    run = Path(shutil.copytree(fixtures / "moe-zero3", tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    del config["architectures"]
    (run / "config.json").write_text(json.dumps(config))
    said = run_ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out").err.splitlines()[-1]
    assert "can load this folder: Qwen3MoeForCausalLM.from_pretrained" in said


def test_names_that_were_not_compared_are_not_promised() -> None:
    loads = loading.unproved({"model_type": "nobodys"}, {"w": (1,)})
    assert loads.can is None and loads.sentence("out").startswith("not checked: if from_pretrained can load")


def test_modules_of_sentence_transformers() -> None:
    module = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    files = {"modules.json": json.dumps([module]).encode(), "tokenizer.json": b"{}"}
    good = LoadCheck(True, "BertModel.from_pretrained")
    said = "SentenceTransformer cannot load this folder: modules.json lists missing files: 1_Pooling"
    assert said in loading.with_files(good, files).sentence("out")
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    more = {"modules.json": json.dumps([dense]).encode(), "2_Dense/config.json": b"{}", "tokenizer.json": b"{}"}
    assert "lists missing files: 2_Dense/model.safetensors" in loading.with_files(good, more).sentence("out")
    sizes, own = b'{"in_features": 3, "out_features": 2, "bias": true}', {"linear.weight": (2, 3), "linear.bias": (2,)}
    sized = {**more, "2_Dense/config.json": sizes}
    assert loading.with_files(good, sized, {"2_Dense": own}).can
    for wrong in ({"linear.bias": (2,)}, own | {"linear.weight": (3, 2)}, own | {"more": (2,)}):
        assert loading.with_files(good, sized, {"2_Dense": wrong}).can is False
    assert loading.with_files(good, more, {"2_Dense": own}).can is None
    assert loading.with_files(good, {**files, "modules.json": b"[]"}).can is False
    own = {"modules.json": json.dumps([{"type": "nobody.X", "path": ""}]).encode()}
    assert loading.with_files(good, own).can is None
    whole = loading.with_files(good, {**files, "1_Pooling/config.json": b"{}"})
    assert whole.sentence("out") == "SentenceTransformer can load this folder: SentenceTransformer('out')"
    assert loading.with_files(good, {**files, "modules.json": b"{"}).can is False
    assert loading.with_files(good, {}).sentence("out").endswith("; it has no tokenizer or processor")


def test_printed_result_in_python_is_the_same(fixtures: Path, tmp_path: Path) -> None:
    done = ckpt.convert(fixtures / "moe-zero3", "hf", tmp_path / "out")
    assert "from_pretrained can load this folder" in str(done).splitlines()[-1] and len(str(done).splitlines()) <= 4
    assert "optimizer states exp_avg" in "\n".join(done.lines(verbose=True))


def test_what_matters_is_in_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "coloured", lambda stream: True)
    assert text.in_colour("wrote 1 file").startswith("\x1b[32m") and "\x1b[1m" in text.in_colour("not read: a.pt")
    assert text.in_colour("from_pretrained cannot load this folder: x").startswith("\x1b[33m\x1b[1m")
    assert text.in_colour("anything else") == "anything else"
    monkeypatch.setattr(text, "coloured", lambda stream: False)
    assert text.in_colour("wrote 1 file") == "wrote 1 file"


def test_pages_and_pictures_say_where_they_are(fixtures: Path, tmp_path: Path) -> None:
    run = fixtures / "moe-zero3"
    for words in (("inspect", run), ("verify", run, run), ("diff", run, run)):
        page = tmp_path / f"{words[0]}.html"
        assert f"wrote {page}\n" in run_ckpt(*words, "--html", page).err
        assert "wrote" not in run_ckpt(*words, "--html", page, "--overwrite", "-q").err


def test_one_of_a_kind_is_no_plural(fixtures: Path, tmp_path: Path) -> None:
    assert [pluralize(1, one) for one in ("rank", "copy", "process")] == ["1 rank", "1 copy", "1 process"]
    assert [pluralize(2, one) for one in ("rank", "copy", "process", "day")] == [
        *("2 ranks", "2 copies", "2 processes", "2 days")
    ]
    done = run_ckpt(
        "convert", "auto", "zero3", fixtures / "moe-zero3", "--world-size", "1", "-o", tmp_path / "out", "-v"
    )
    said = done.err + run_ckpt("inspect", tmp_path / "out").out + repr(ckpt.open(tmp_path / "out"))
    assert "ZeRO-3 for 1 rank, from 2" in said and not re.search(r"\b1 (ranks|files|tensors|layers|parameters)\b", said)
    again = run_ckpt("convert", "auto", "zero3", fixtures / "moe-zero3", "-o", tmp_path / "out", "--overwrite").err
    assert " 0 B/s" not in again


def test_long_lines_are_folded_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "  found: " + "word " * 40 + "/a/path/that/stays/in/one/piece/" + "x" * 60
    assert text.folded(line) == line, "a file or a pipe gets whole lines"
    monkeypatch.setattr(text.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = text.folded(line).split("\n")
    assert max(map(len, lines[:-1])) <= 60 and " ".join("\n".join(lines).split()) == " ".join(line.split())
    assert lines[-1].endswith("x" * 60)
