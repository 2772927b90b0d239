"""`ckpt/runs/finding.py`: a format's step in a run, by tag or record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.base.errors import CorruptError, IncompleteError, UnsafeError
from ckpt.runs.finding import Steps, candidate_folders, find_step, newest_first


def is_step(folder: Path) -> bool:
    return (folder / "weights").exists()


def is_finished(folder: Path) -> bool:
    return (folder / "done").exists()


PLAIN = Steps(is_step)
RECORDED = Steps(is_step, record="latest")
NEEDED = replace(RECORDED, needs_record=True)
OWNED = replace(NEEDED, owns_record=True, may_be_others=lambda folder: (folder / "other").exists())
FINISHED = replace(NEEDED, is_finished=is_finished)
EVERY = (PLAIN, RECORDED, NEEDED, OWNED, FINISHED)


def write(run: Path, *names: str, latest: str | None = None) -> Path:
    """Make a run with these files; `latest` is the text of its record."""
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    if latest is not None:
        (run / "latest").write_text(latest)
    return run


@pytest.mark.parametrize("steps", EVERY)
def test_a_step_is_itself_and_a_tag_names_one(steps: Steps, tmp_path: Path) -> None:
    run = write(tmp_path / "run", "step-1/weights", "step-2/weights", "step-2/done", "step-3/x", latest="step-2")
    assert find_step(run / "step-1", None, steps) == run / "step-1"
    assert (find_step(run / "step-1", "step-1", steps) is not None) == (steps.record is not None)
    assert find_step(run, "step-1", steps) == run / "step-1"
    assert find_step(run, "step-3", steps) is None and find_step(run, "step-4", steps) is None
    assert find_step(run / "step-1", "step-2", steps) is None
    assert find_step(run / "nowhere", None, steps) is None and find_step(run / "latest", None, steps) is None
    with pytest.raises(UnsafeError):
        find_step(run, "../run/step-1", steps)
    meant_one = None if steps is PLAIN else run / "step-2"
    assert find_step(run, None, steps) == meant_one


def test_a_tag_may_stand_for_several_names(tmp_path: Path) -> None:
    steps = replace(PLAIN, of_tag=lambda tag: (tag, f"checkpoint/{tag}"))
    run = write(tmp_path, "checkpoint/step-2/weights", "step-2/x")
    assert find_step(run, "step-2", steps) == run / "checkpoint/step-2"
    assert candidate_folders(run, "step-2", steps) == [run / "step-2", run / "checkpoint/step-2"]


STEP = "step-1/weights"
#: Files, the record, and the error for RECORDED, NEEDED and OWNED, or None if nothing is found.
RECORDS: dict[str, tuple[tuple[str, ...], str | None, tuple[type[CorruptError] | None, ...]]] = {
    "nothing": ((), None, (None, None, None)),
    "no record": ((STEP,), None, (None, IncompleteError, IncompleteError)),
    "an empty record": ((STEP,), "", (CorruptError, IncompleteError, IncompleteError)),
    "an empty record alone": ((), "", (None, None, IncompleteError)),
    "a lost step": ((STEP,), "step-2", (CorruptError, CorruptError, CorruptError)),
    "the only step lost": ((), "step-2", (None, None, IncompleteError)),
    "another format's step": ((STEP, "step-2/x"), "step-2", (None, None, CorruptError)),
    "another format's, which may record it": ((STEP, "step-2/other"), "step-2", (None, None, CorruptError)),
    "another format's, and no other step": (("step-2/other",), "step-2", (None, None, None)),
}


@pytest.mark.parametrize("case", RECORDS)
@pytest.mark.parametrize("number", range(3), ids=["recorded", "needed", "owned"])
def test_what_a_record_means_that_names_no_step(case: str, number: int, tmp_path: Path) -> None:
    files, latest, expected = RECORDS[case]
    tmp_path.mkdir(exist_ok=True)
    run, error, steps = write(tmp_path, *files, latest=latest), expected[number], (RECORDED, NEEDED, OWNED)[number]
    if error is None:
        assert find_step(run, None, steps) is None
        return
    with pytest.raises(error) as caught:
        find_step(run, None, steps)
    assert type(caught.value) is error
    assert ("step-1" in str(caught.value.hint)) == (STEP in files)


def test_without_a_record_the_newest_complete_step_is_named(tmp_path: Path) -> None:
    run = write(tmp_path, "step-9/weights", "step-9/done", "step-10/weights")
    with pytest.raises(IncompleteError) as caught:
        find_step(run, None, FINISHED)
    assert caught.value.hint == "the newest complete step here is step-9: --tag step-9"


def test_the_newest_is_that_of_the_largest_number() -> None:
    names = ["global_step9", "global_step10", "a", "run2-step3"]
    assert [one.name for one in newest_first(map(Path, names))] == ["global_step10", "global_step9", "run2-step3", "a"]
