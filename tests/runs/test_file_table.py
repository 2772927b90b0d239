"""`ckpt/runs/file_table.py`: one row for each name of a file next to tensors."""

from __future__ import annotations

import pytest

from ckpt.runs.file_table import FILES, TRAINING_STATE, FileKind, fits, is_of


def test_each_name_has_one_row() -> None:
    patterns = [file.pattern for file in FILES]
    assert len(patterns) == len({*patterns})
    exact = [pattern for pattern in patterns if "*" not in pattern]
    assert [name for name in exact if sum(fits(name, (one,)) for one in patterns) > 1] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tokenizer.json", FileKind.TOKENIZER),
        ("o200k.tiktoken", FileKind.TOKENIZER),
        ("processor_config.json", FileKind.PROCESSOR),
        ("scheduler_1.bin", FileKind.RUN),
        ("rng_state_7.pth", FileKind.RANK),
        ("optimizer.bin", FileKind.OPTIMIZER),
        ("latest", FileKind.RECORD),
        ("latest_train_state.pt", FileKind.COUNTER),
        ("events.out.tfevents.1.host", FileKind.LOG),
    ],
)
def test_a_name_has_one_kind(name: str, kind: FileKind) -> None:
    assert [one for one in FileKind if is_of(name, one)] == [kind]
    assert is_of(name, *TRAINING_STATE) == (kind in TRAINING_STATE)
    assert not is_of(f"{name}.orig", kind) or kind is FileKind.LOG
