"""The trainer's options: defaults for the strategy, and a one-line error for impossible ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from train import config
from train.config import STRATEGIES, Config, UserError


def parsed(*words: str) -> Config:
    parser = config.Parser()
    config.add_options(parser)
    return config.parse_options(parser.parse_args(words))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_defaults_fit_the_strategy_and_the_ranks(strategy: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With five heads, llama does not fit --tp 2: three strategies refused it by default."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    splits = strategy in ("tp-fsdp", "megatron", "megatron-deepspeed")
    found = parsed("--strategy", strategy)
    assert found.tp == (2 if splits and ranks % 2 == 0 else 1)
    assert found.model == {"tp-fsdp": "llama_even"}.get(strategy, "llama_wide" if splits else "llama")


@pytest.mark.parametrize(
    ("options", "tp"),
    [
        ({"strategy": "megatron", "model": "llama"}, 1),  # five heads
        ({"strategy": "megatron", "model": "mixtral_wide"}, 1),  # experts
        ({"strategy": "megatron", "model": "mixtral_wide", "sequence_parallel": True}, 2),
        ({"strategy": "tp-fsdp", "model": "mixtral_wide"}, 2),
        ({"strategy": "megatron", "pp": 2}, 2),
        ({"strategy": "megatron", "pp": 4}, 1),
        ({"strategy": "megatron", "tp": 4}, 4),
        ({"strategy": "zero3", "model": "llama_wide"}, 1),
    ],
)
def test_the_default_tp_fits_the_model(options: dict[str, Any], tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Config(**options).tp == tp


def test_help_shows_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    parser = argparse.ArgumentParser()
    config.add_options(parser)
    assert "(llama; tp-fsdp: llama_even; megatron*: llama_wide)" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr nan", "--lr nan: at least 0"),
        ("--lr inf", "--lr inf: at least 0"),
        ("--lr -1", "--lr -1.0: at least 0"),
        ("--weight-decay -1", "--weight-decay -1.0: at least 0"),
        ("--beat nan", "--beat nan: at least 0"),
        ("--beat 0", "--beat more than 0"),
        ("--length 1", "--length 1: at least 2"),  # there was no token to predict, and every loss was NaN
        ("--batch 0", "--batch 0: at least 1"),
        ("--accumulate 0", "--accumulate 0: at least 1"),
        ("--schedule-steps 0", "--schedule-steps 0: at least 1"),
        ("--until -1", "--until -1: at least 0"),
        ("--save-every -1", "--save-every -1: at least 0"),
        ("--layers -1", "--layers -1: at least 0"),
        ("--vocab -1", "--vocab -1: at least 0"),
        ("--lora -1", "--lora -1: at least 0"),
        ("--dropout 1", "--dropout is below 1"),
        ("--seed -1", "--seed -1: at least 0 and at most 4294967295"),
        ("--seed 4294967296", "--seed 4294967296: at least 0 and at most 4294967295"),
        ("--initial-scale-power 2000", "--initial-scale-power 2000: at least 0 and at most 127"),
        ("--strategy tp-fsdp --tp -1", "--tp -1: at least 1"),
        ("--strategy tp-fsdp --model gpt_oss_wide", "--strategy tp-fsdp takes only llama, llama_even"),
        ("--strategy tp-fsdp --model deepseek_v3_wide", "--strategy tp-fsdp takes only llama, llama_even"),
        ("--strategy tp-fsdp --lora 2", "--strategy tp-fsdp takes no --lora"),
        ("--strategy ddp --ds-config /nowhere.json", "/nowhere.json: No such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_with_the_option(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(*words.split())
    assert said in str(caught.value)


def test_a_ds_config_is_read_by_every_strategy(tmp_path: Path) -> None:
    """An unreadable config ended FSDP runs with a traceback of rank 0 after their last step."""
    (tmp_path / "ds.json").write_text("[")
    with pytest.raises(UserError, match="--ds-config"):
        parsed("--strategy", "fsdp2", "--ds-config", str(tmp_path / "ds.json"))
