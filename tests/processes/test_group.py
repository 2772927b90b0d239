"""`ckpt/processes/group.py`, `ckpt/move/file_pieces.py`: several processes write one checkpoint with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import UsageError
from ckpt.move import run
from ckpt.move.file_pieces import Share, Unit, deal
from ckpt.plan.checkpoint import Layout, TargetFile
from ckpt.processes.group import Alone, check_alike
from tests.processes.group_worker import SIZE
from tests.support.commands import contents
from tests.support.engines import forked
from tests.support.places import REPOSITORY

RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run three processes together and return the folder with their output and results."""
    folder = tmp_path_factory.mktemp("group")
    source = REPOSITORY / "fixtures" / "toy-zero3"
    ckpt.plan(ckpt.open(source), "zero3", Layout(world_size=SIZE)).run(folder / "alone")
    command = forked([(RANKS, "tests.processes.group_worker", [str(source), str(folder)])], ["ckpt.api"])
    # The others must notice the dead process at once: without notice they wait five minutes.
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode and "exit code 9" in done.stderr, done.stderr[-3000:]  # the process meant to die
    return folder


def said(folder: Path, name: str) -> list[Any]:
    """Return each process's result or error."""
    return [json.loads((folder / f"{rank}.json").read_text()).get(name) for rank in range(RANKS)]


@pytest.mark.parametrize("name", ["one node", "two nodes", "goes on"])
def test_it_is_what_one_process_writes(folder: Path, name: str) -> None:
    alone = contents(folder / "alone")
    assert len(alone) > 9 and contents(folder / name) == alone


def test_what_is_done_is_gone_on_with(folder: Path) -> None:
    first, *others = said(folder, "goes on")
    assert [first] * 2 == others and 1000 < first < 20000


def test_nobody_waits_for_one_that_has_done_something_else(folder: Path) -> None:
    first, *others = said(folder, "has ended while")
    assert "ended during the wait" in first and others == [first] * 2


def test_other_options_than_those_of_the_first_one() -> None:
    class Second(Alone):
        rank, size = 1, 2

        def gather(self, value: Any) -> Any:
            return [{"dtype": "'keep'", "resume": "True"}, value]

    check_alike({"dtype": "'keep'", "resume": "True"}, Second())
    with pytest.raises(UsageError, match="different options: resume") as caught:
        check_alike({"dtype": "'keep'", "resume": "False"}, Second())
    assert (caught.value.expected, caught.value.found) == ("True, as rank 0", "False")


@pytest.mark.parametrize("name", ["fails", "fails, and is kept"])
def test_an_error_of_one_is_the_error_of_all(folder: Path, name: str) -> None:
    first, *others = said(folder, name)
    assert others == [first] * 2
    assert first[0] == "StorageError" and f"no space on the disk (in rank {1 + (name != 'fails')} of 3" in first[1]
    assert not (folder / name).exists()


def test_what_failed_is_never_taken_for_complete(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".") == [
        "alone",
        "goes on",
        "one node",
        "two nodes",
    ]


def test_another_plan_is_refused(folder: Path) -> None:
    first, *others = said(folder, "other plan")
    assert others == [first] * 2 and "made different plans (in rank 2 of 3" in first[1]


def test_one_that_dies_is_named(folder: Path) -> None:
    first, dead, last = said(folder, "dies")
    assert dead is None and first[0] == last[0] == "StorageError"
    assert "has ended" in first[1] and "rank 1 of 3" in first[1] and "rank 1 of 3" in last[1]
    assert not (folder / "dies").exists()


FILES = tuple(TargetFile(f"f{i}", size) for i, size in enumerate((100, 100, 40, 30, 20, 0)))
#: No piece holds the first 10 bytes.
PIECES = {file.name: [(at, 10) for at in range(10, file.size, 10)] for file in FILES}


class TestDealing:
    def dealt(self, nodes: list[Hashable]) -> list[list[Share]]:
        return [deal(FILES, PIECES, PIECES, nodes, rank) for rank in range(len(nodes))]

    @pytest.mark.parametrize("nodes", [["a"], ["a"] * 4, ["a", "b"], ["a", "a", "b"], ["a", "b"] * 4, ["a"] * 50])
    def test_everything_is_dealt_out_once(self, nodes: list[Hashable]) -> None:
        shares = self.dealt(nodes)
        for file in FILES:
            found = [part for share in shares for part in share if part.file is file]
            assert sum(part.is_owner for part in found) == 1, file.name
            assert sorted(piece for part in found for piece in part.todo) == PIECES[file.name]
            ranges = sorted(one for part in found for one in part.ranges)
            assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), file.size], file.name
        sizes = [sum(10 * (len(part.todo) + part.is_owner) for part in share) for share in shares]
        assert max(sizes) <= 290 / len(nodes) + 30

    @pytest.mark.parametrize("nodes", [[0] * 48, [rank // 8 for rank in range(48)]])
    def test_many_processes_get_equal_shares(self, nodes: list[Hashable]) -> None:
        files = [TargetFile(f"f{i}", 400) for i in range(96)]
        pieces = {file.name: [(at, 10) for at in range(0, 400, 10)] for file in files}
        todo = {name: {*inside} for name, inside in pieces.items()}
        shares = [deal(files, pieces, todo, nodes, rank) for rank in range(48)]
        sizes = [sum(10 * len(part.todo) for part in share) for share in shares]
        assert max(sizes) * 48 <= 1.05 * sum(sizes)

    @pytest.mark.parametrize(("kind", "shares"), [("lustre", True), ("gpfs", True), ("nfs4", False), ("", False)])
    def test_only_nodes_with_coherent_caches_share_a_file(
        self, kind: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run, "_file_system", lambda _: kind)
        keys = []
        for node in "ab":
            monkeypatch.setattr(run, "_node", lambda node=node: node)
            keys.append(run._page_cache(tmp_path))
        assert (keys[0] == keys[1]) == shares

    @pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="Linux")
    def test_a_file_system_has_its_name(self) -> None:
        assert run._file_system(os.stat("/proc").st_dev) == "proc"
        assert run._file_system(os.makedev(4095, 1)) == ""

    def test_nodes_share_no_file(self) -> None:
        of_a, of_b = self.dealt(["a", "b"])
        assert not {part.file.name for part in of_a} & {part.file.name for part in of_b}

    def test_a_merged_piece_has_its_known_bytes(self) -> None:
        """Another process may write them too late: the piece is hashed once its tensors are there."""
        known = ((0, b"abcdefghij"), (30, b"klm"), (95, b"nopqr"))
        file, pieces = TargetFile("a", 100, known, zeros=((33, 2), (80, 15))), {"a": [(10, 40), (50, 40)]}
        shares = [part for rank in range(2) for part in deal([file], pieces, pieces, ["a", "a"], rank)]
        assert [(part.is_owner, *part.todo) for part in shares] == [(True, (10, 40)), (False, (50, 40))]
        assert [[(at, bytes(data)) for at, data in part.literals()] for part in shares] == [[*known], []]
        assert [[*part.zeros()] for part in shares] == [[(33, 2), (90, 5)], [(80, 10)]]
        continued = Share(file, pieces["a"], [(10, 40)], is_owner=False)
        assert [(at, bytes(data)) for at, data in continued.literals()] == [(30, b"klm")]

    def test_a_computation_is_done_once_and_costs_more(self) -> None:
        file, pieces = TargetFile("a", 200), [(0, 10), (10, 10), (20, 60), (80, 60), (140, 60)]
        units = [Unit([(0, 10), (20, 60)], is_computed=True), Unit([(10, 10), (80, 60)]), Unit([(140, 60)])]
        for todo in (pieces, pieces[1:]):
            shares = [deal([file], {"a": pieces}, {"a": todo}, "nn", rank, {"a": units}) for rank in range(2)]
            first, second = ({piece for part in share for piece in part.todo} for share in shares)
            assert first == {*units[0].pieces} & {*todo} and second == {*todo} - first

    def test_only_what_is_to_be_done(self) -> None:
        todo = {name: [] for name in PIECES} | {"f1": [(50, 10), (60, 10)]}
        shares = [deal(FILES, PIECES, todo, ["a", "a"], rank) for rank in range(2)]
        assert [piece for share in shares for part in share for piece in part.todo] == [(50, 10), (60, 10)]
