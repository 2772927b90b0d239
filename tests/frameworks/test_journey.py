"""`converters/megatron/dist/`: LLM-jp v4's layout moves from 48 ranks to 24 and to the Hub, bit for bit.

Megatron-LM alone can't load the run on 24 ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.frameworks.runs import DISTRIBUTED, Held, Job, run
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

pytestmark = pytest.mark.slow

SMALL = """
    --global-batch-size 48 --hidden-size 16 --num-attention-heads 4 --moe-ffn-hidden-size 8 --ffn-hidden-size 32
    --vocab-size 64
"""
RUN = Job("run", 48, f"{DISTRIBUTED} {SMALL}", pp=6, ep=8, vpp=2, steps=2)
HALF = replace(RUN, name="half", ranks=24, pp=3, vpp=4, steps=0)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journey")


@pytest.fixture(scope="session")
def trained(home: Path) -> dict[str, Held]:
    return run([replace(RUN, save=home / "run"), replace(HALF, load=home / "run", fails=True)], home / "trained")


@pytest.fixture(scope="session")
def moved(home: Path, trained: dict[str, Held]) -> dict[str, Held]:
    done = ckpt("resume", home / "run", "--world-size", "24", "--pp", "3", "--vpp", "4", "-q")
    assert done.code == 0, done.err
    return run([replace(HALF, load=Path(done.out.strip()))], home / "moved")


def test_megatron_lm_alone_does_not_load_it(trained: dict[str, Held]) -> None:
    assert "not supported for DistributedOptimizer" in trained["half"].facts["error"]


def test_every_bit_is_there_on_half_of_the_ranks(trained: dict[str, Held], moved: dict[str, Held]) -> None:
    known, found = trained["run"], moved["half"]
    assert {role for _, role in known.tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert found.tensors.keys() == known.tensors.keys()
    assert [key for key in known.tensors if found.tensors[key] != known.tensors[key]] == []
    for name in ("consumed", "scheduler", "steps", "groups"):
        assert found.facts[name] == known.facts[name], name
    assert found.facts["iteration"] == 2


def test_it_is_a_model_of_the_hub(home: Path, trained: dict[str, Held]) -> None:
    """The model needs only config.json and the tokenizer."""
    hub = FIXTURES / "megatron-llm-jp" / "llm-jp" / "llm-jp-4-moe"
    config = home / "hub"
    config.mkdir()
    for file in hub.iterdir():
        (config / file.name).write_bytes(file.read_bytes())
    sizes = json.loads((hub / "config.json").read_text()) | {"num_experts": 8}
    (config / "config.json").write_text(json.dumps(sizes))
    done = ckpt("convert", "auto", "hf", home / "run", "--config", config, "-o", home / "hf")
    assert done.code == 0, done.err
    assert "names and shapes match Qwen3MoeForCausalLM" in done.err
