"""`ckpt/containers/sources.py`: each file's stat and content are read once, and missing files are reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt.containers.sources import Sources, check_all_there, structure
from ckpt.errors import CorruptError, NotFoundError


def test_a_file_is_remembered_as_it_was_before_it_was_parsed(tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    torch.save({"step": 2}, path)
    sources = Sources()
    assert sources.of_rank(path, 3, "file of ranks").need("step") == 2
    assert [file.path for file in sources.files] == [str(path)]
    sources.root(path)
    assert len(sources.files) == 1
    sources.files[0].check_unchanged()
    os.utime(path, ns=(0, 0))
    sources.root(path)  # the first stat must stay
    with pytest.raises(CorruptError, match="replaced"):
        sources.files[0].check_unchanged()


def test_a_file_that_is_rewritten_with_its_time_put_back(tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    path.write_bytes(b"before")
    sources = Sources()
    before = sources.add(path)
    path.write_bytes(b"behind")
    os.utime(path, ns=(before.mtime_ns, before.mtime_ns))
    assert path.stat().st_mtime_ns == before.mtime_ns
    with pytest.raises(CorruptError, match="replaced"):
        before.check_unchanged()


def test_what_is_no_dict_and_what_is_not_there(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    sources = Sources()
    with pytest.raises(CorruptError, match="this is not a state dict") as caught:
        sources.of_rank(tmp_path / "list.pt", 3, "state dict")
    assert (caught.value.rank, caught.value.found) == (3, "list")
    with pytest.raises(NotFoundError):
        sources.root(tmp_path / "gone.pt")
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(CorruptError, match="an entry is missing"):
        sources.of_rank(tmp_path / "empty.pt", 0, "state dict").need("module")


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, TypeError, ValueError])
def test_errors_of_an_unknown_structure_are_told_as_such(error: type[Exception]) -> None:
    with pytest.raises(CorruptError, match="of no known version") as caught, structure("of no known version", "a.pt"):
        raise error("why")
    assert error.__name__ in str(caught.value.found) and "why" in str(caught.value.found)
    with pytest.raises(ZeroDivisionError), structure("of no known version", "a.pt"):
        raise ZeroDivisionError


def test_missing_ranks_are_named_be_they_ever_so_many() -> None:
    check_all_there("files are missing", {0: "a", 1: "b"}, 2, Path())
    with pytest.raises(CorruptError) as caught:
        check_all_there("files are missing", {0: "a", 2: "c"}, 4, Path(), "rank_1.pt")
    assert (caught.value.rank, caught.value.expected) == ("1, 3", "4 files, among them rank_1.pt")
    with pytest.raises(CorruptError) as caught:
        check_all_there("files are missing", {0: "a"}, 10**30, Path())
    assert str(caught.value.rank).endswith("15, 16 and others")
