"""`converters/pytorch/trainer.py`: run the recipe in docs/resume.md, as shown in docs/testing.md.

FSDP uses `tests.support.hf_trainer`, because Accelerate expects GPUs for it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ckpt, process
from tests.support.engines import DEEPSPEED, fork, launch, launch_in_turn
from tests.support.pages import Command, blocks, commands, differences, row_differs
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

pytestmark = pytest.mark.slow

RECIPE = (REPOSITORY / "docs" / "testing.md").read_text()
SCRIPT = REPOSITORY / "examples" / "trainer" / "finetune.py"
WORKER = "tests.support.hf_trainer"
TITLE = "HF Trainer resumed on other processes: loss of each step"


def run(command: Command, folder: Path) -> None:
    """Run a command from the page in `folder` and compare its output with the page."""
    printed = output(command.words, folder)
    different = differences(command.printed or [], printed)
    assert not different, f"{command.text}\n{different}"


def output(words: list[str], folder: Path) -> str:
    if words[0] == "ckpt":
        done = process(*words[1:], cwd=folder)
        assert done.code == 0, done.err
        return done.err + done.out
    assert words[:2] == ["torchrun", "--nproc-per-node"]
    (folder / words[4]).mkdir(exist_ok=True)
    # Importing transformers and DeepSpeed in each rank would dominate the run time.
    watched = ["0", str(folder), *words[3:]]
    return fork([(int(words[2]), "tests.support.user_script", watched)], ["tests.support.hf_trainer", *DEEPSPEED])


def history(step: Path) -> dict[int, dict[str, Any]]:
    """Return Trainer's log of each step up to a checkpoint."""
    return {line["step"]: line for line in json.loads((step / "trainer_state.json").read_text())["log_history"]}


def rows(folder: Path) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for file in folder.glob("rows-*.jsonl"):
        for line in file.read_text().splitlines():
            step, batch = json.loads(line)
            found.setdefault(step, []).extend(batch)
    return {step: sorted(batch) for step, batch in found.items()}


def test_deepspeed_goes_on_as_the_document_says(tmp_path: Path, tables: Any) -> None:
    shutil.copy(SCRIPT, tmp_path)
    first, *others = (one for one in commands(RECIPE) if one.heading == "HF Trainer on other processes")
    assert [command.text.split()[0] for command in others] == ["ckpt", "torchrun"] * 2
    run(first, tmp_path)  # run all steps for comparison; a run stopped after step 4 would write the same first half
    unbroken, consumed = history(tmp_path / "outputs" / "checkpoint-8"), rows(tmp_path / "outputs")
    shutil.rmtree(tmp_path / "outputs" / "checkpoint-8")
    for command in others:
        run(command, tmp_path)
    for n in (2, 3):
        resumed = history(tmp_path / f"outputs-{n}" / "checkpoint-8")
        assert list(resumed) == list(unbroken) == list(range(1, 9))
        assert rows(tmp_path / f"outputs-{n}") == {step: consumed[step] for step in range(5, 9)}
        for step, line in resumed.items():
            assert (line["learning_rate"], line["epoch"]) == (unbroken[step]["learning_rate"], unbroken[step]["epoch"])
            assert math.isclose(line["loss"], unbroken[step]["loss"], rel_tol=1e-4), step
            assert math.isclose(line["grad_norm"], unbroken[step]["grad_norm"], rel_tol=1e-2), step
            tables[TITLE][f"zero3 on {n}, from 4"][str(step)] = f"{line['loss']:.6f}"
    tables[TITLE]["zero3 on 4, unbroken"] = {str(step): f"{line['loss']:.6f}" for step, line in unbroken.items()}
    for name in ("on 4, unbroken", "on 2, from 4", "on 3, from 4"):
        cells = {step: cell for step, cell in tables[TITLE][f"zero3 {name}"].items() if int(step) > 4}
        assert not (different := row_differs(RECIPE, name, cells)), different


def test_the_error_on_the_page_is_deepspeeds() -> None:
    import deepspeed.runtime.engine

    source = Path(deepspeed.runtime.engine.__file__).read_text()
    raised = source[source.index('ZeRORuntimeException("The checkpoint being loaded') :].partition(")\n")[0]
    words = "".join(re.findall(r'"([^"]*)"', raised))
    said = re.sub(r"\{[^}]*loaded[^}]*\}", "4", words)
    page = (REPOSITORY / "docs" / "resume.md").read_text()
    (shown,) = (" ".join(one.lines) for one in blocks(page) if one.lines[0].startswith("deepspeed.runtime"))
    assert shown == f"deepspeed.runtime.zero.utils.ZeRORuntimeException: {re.sub(r'{[^}]*}', '2', said)}"


def test_fsdp_goes_on(tmp_path: Path, tables: Any) -> None:
    """SHARDED_STATE_DICT resumes on other numbers of processes. FULL_STATE_DICT is the way out for FSDP1."""

    def job(strategy: str, output: str, **options: Any) -> dict[str, Any]:
        common = {"strategy": strategy, "through": "trainer", "dtype": "fp32", "scheduler": "torch"}
        return common | {"output": str(tmp_path / output)} | options

    launch([job(s, s, save="dcp", steps=8, save_every=4) for s in ("fsdp1", "fsdp2")], 4, tmp_path, WORKER)
    ways = sample(
        [(3, "fsdp2", "dcp"), (2, "fsdp2", "full"), (2, "fsdp1", "full"), (2, "fsdp2", "dcp")], lambda way: [way[1:]]
    )
    starts: dict[int, list[dict[str, Any]]] = {}
    for n, strategy, to in ways:
        folder = tmp_path / f"{strategy}-{to}-{n}"
        done = ckpt("convert", "dcp", to, tmp_path / strategy / "checkpoint-4", "--world-size", str(n), "-o", folder)
        assert done.code == 0, done.err
        starts.setdefault(n, []).append(job(strategy, f"{folder}-on", save=to, steps=4, resume=str(folder)))
    launch_in_turn(starts.items(), tmp_path, WORKER)
    for n, strategy, to in ways:
        unbroken = history(tmp_path / strategy / "checkpoint-8")
        resumed = history(tmp_path / f"{strategy}-{to}-{n}-on" / "checkpoint-8")
        title = f"{strategy} on {n}, from 4" + (" by way of full" if to == "full" else "")
        for row, lines in ((f"{strategy} on 4, unbroken", unbroken), (title, resumed)):
            tables[TITLE][row] = {str(step): f"{line['loss']:.6f}" for step, line in lines.items()}
        for step, line in resumed.items():
            assert line["learning_rate"] == unbroken[step]["learning_rate"]
            assert math.isclose(line["loss"], unbroken[step]["loss"], rel_tol=1e-5), (title, step)
