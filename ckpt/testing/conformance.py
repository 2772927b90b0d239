"""Conformance suite for formats.

A sample is a checkpoint written by the format's own framework. Its truth comes from the live engine, or from the
framework's own loader. A round trip through ckpt's code alone proves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

import ckpt
from ckpt.base.errors import CkptError, CorruptError, HalfError, LossError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.compare import manifest
from ckpt.compare.manifest import MANIFEST
from ckpt.plan import registry
from ckpt.plan.checkpoint import BUFFER, HUB, MASTER, OWN, TRANSFORMERS, WEIGHT, Checkpoint, Key, Layout
from ckpt.plan.planner import check_source, make_plan
from ckpt.runs.steps import run_at
from ckpt.runs.unread_files import list_unread
from ckpt.testing.described_tensors import Content, content
from ckpt.testing.faulty_targets import forgotten, tampered

Tensors = Mapping[Key, Content]
Refusal = tuple[tuple[type[CkptError], ...], str | None]


@dataclass(frozen=True)
class Declaration:
    """A format's sample and properties.

    `make` puts the sample into an empty folder and returns its path and truth, by fqn and role. `vital` holds glob
    patterns for files that must be complete.
    """

    format: str
    make: Callable[[Path], tuple[Path, Tensors]]
    vital: tuple[str, ...]
    _: KW_ONLY
    #: The sample's container, if it is not the framework's default.
    container: str = ""
    marks: tuple[pytest.MarkDecorator, ...] = ()
    #: Patterns for large files with a head that detection must read.
    reads_head: tuple[str, ...] = ()
    #: True if vital files end in tensor data: only a comparison shows damage there.
    is_unchecked_data: bool = False
    is_known_model: bool = False
    #: For a target: it needs a number of ranks that the source lacks.
    is_sharded: bool = False
    #: For a target: a parameter without gradients gets zeros for optimizer states.
    adds_states: bool = False
    #: For a target: the expected refusal for a sample it can't store, or None.
    refuses: Callable[[Declaration, Checkpoint], Refusal | None] = lambda _, __: None


Sample = tuple[Declaration, Path, Tensors]


class Shared:
    """A sample for all tests that leave it unchanged, opened twice."""

    def __init__(self, declaration: Declaration, folder: Path) -> None:
        self.declaration, self.folder = declaration, folder
        self.path, self.truth = declaration.make(folder)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return ckpt.open(self.path, self.declaration.format)

    @cached_property
    def again(self) -> Checkpoint:
        return ckpt.open(self.path, self.declaration.format)


_SHARED: dict[int, Shared] = {}
_OPENED: list[str] | None = None


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _OPENED is not None and isinstance(arguments[0], str | os.PathLike):
        _OPENED.append(os.fspath(arguments[0]))


sys.addaudithook(_note_open)  # it can't be removed, but does nothing outside the fixture


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_byte(file: Path, position: int, byte: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        stream.write(bytes([byte]))


def mutated(checkpoint: Checkpoint, file: Path, size: int, most: int) -> Iterator[int]:
    """Yield positions in a file, but only every eighth of those in tensor elements: opening reads no elements."""
    extents = [one.extent for tensor in checkpoint.tensors.values() for one in tensor.fragments()]
    spans = [(one.offset, one.end) for one in extents if one.path == str(file)]
    for number, position in enumerate(range(0, size, max(97, size // most))):
        if number % 8 == 0 or not any(start <= position < stop for start, stop in spans):
            yield position


def check_views(conversion: ckpt.api.Conversion, written: Path) -> None:
    random = Random(conversion.format)
    for name in conversion.files:
        expected = (written / name).read_bytes()
        with conversion.open(name) as view:
            assert view.read() == expected, name
            for _ in range(12):
                start, length = random.randrange(len(expected) + 2), int(2 ** random.uniform(0, 14))
                view.seek(start)
                assert view.read(length) == expected[start : start + length], (
                    f"{pluralize(length, 'byte')} at {start} of {name}"
                )


class Conformance:
    """Conformance suite for formats.

    A subclass sets `declarations`: their samples are read, damaged, and converted to every writable format. A target
    without a declaration may refuse a sample; the test is then skipped with the error message. `containers` are samples
    in other containers: they are read, damaged and converted to `hf`. About `most_mutations` bytes of a large file are
    inverted.
    """

    declarations: ClassVar[Sequence[Declaration]] = ()
    containers: ClassVar[Sequence[Declaration]] = ()
    most_mutations: ClassVar[int] = 300

    def chosen(self, pairs: Sequence[tuple[Declaration, str]]) -> Sequence[tuple[Declaration, str]]:
        """Return the pairs of a sample and a target to test: all, or a subclass's choice."""
        return pairs

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "target" in metafunc.fixturenames:
            targets = [name for name in registry.names() if registry.get(name).writes]
            pairs = self.chosen([(one, target) for one in self.declarations for target in targets])
            cases = [pytest.param(one, to, id=f"{one.format}-{to}", marks=one.marks) for one, to in pairs]
            metafunc.parametrize(("declaration", "target"), cases)
        elif "declaration" in metafunc.fixturenames:
            requested = [*self.declarations, *self.containers]
            names = ["-".join(filter(None, (one.format, one.container))) for one in requested]
            cases = [pytest.param(one, id=name, marks=one.marks) for one, name in zip(requested, names, strict=True)]
            metafunc.parametrize("declaration", cases)

    @pytest.fixture
    def shared(self, declaration: Declaration, tmp_path_factory: pytest.TempPathFactory) -> Shared:
        if id(declaration) not in _SHARED:
            _SHARED[id(declaration)] = Shared(declaration, tmp_path_factory.mktemp("sample"))
        return _SHARED[id(declaration)]

    @pytest.fixture
    def sample(self, shared: Shared, tmp_path: Path) -> Sample:
        """Return a copy to damage."""
        folder = shutil.copytree(shared.folder, tmp_path / "sample")
        return shared.declaration, folder / shared.path.relative_to(shared.folder), shared.truth

    @pytest.fixture
    def opened(self) -> Iterator[list[str]]:
        """Yield all opened paths."""
        global _OPENED
        _OPENED = []
        yield _OPENED
        _OPENED = None

    def plan(self, declaration: Declaration, checkpoint: Checkpoint, target: str) -> ckpt.api.Conversion | None:
        """Return None after checking a declared refusal."""
        to = next((one for one in self.declarations if one.format == target), None)
        ranks = 2 if to is not None and to.is_sharded and checkpoint.world_size is None else None
        if to is not None and (refusal := to.refuses(declaration, checkpoint)) is not None:
            errors, match = refusal
            with pytest.raises(errors, match=match):
                ckpt.plan(checkpoint, target, Layout(world_size=ranks))
            return None
        if to is not None or target == "hf":
            return ckpt.plan(checkpoint, target, Layout(world_size=ranks))
        refusals = []
        for num_ranks in (None, 2):
            try:
                return ckpt.plan(checkpoint, target, Layout(world_size=num_ranks))
            except CkptError as error:
                refusals.append(str(error))
        pytest.skip(f"refused: {refusals[0]}")

    def test_finding_opens_no_large_file(self, sample: Sample, opened: list[str]) -> None:
        """Enlarge all files to a realistic size first."""
        declaration, path, _ = sample
        for file in [file for pattern in declaration.vital for file in path.glob(pattern)]:
            os.truncate(file, 2 << 20)
        opened.clear()
        found = []
        places = [path, *(step.path for step in run_at(path).steps)]
        for one in (one for one in registry.all_formats() if one.reads):
            with contextlib.suppress(CkptError):  # a similar format may explain why it does not apply
                found += [one.name] if any(one.find(place, None) for place in places) else []
        assert declaration.format in found
        large = [name for name in opened if Path(name).is_file() and Path(name).stat().st_size > 1 << 20]
        heads = [pattern for one in self.declarations for pattern in one.reads_head]
        assert [name for name in large if not any(fnmatch(Path(name).name, pattern) for pattern in heads)] == []

    def test_reads_the_truth_bit_for_bit(self, shared: Shared) -> None:
        checkpoint, truth = shared.checkpoint, shared.truth
        assert checkpoint.format == shared.declaration.format
        for key, tensor in checkpoint.tensors.items():
            check_source(tensor)
            assert content(tensor) == truth[key], key
        implied = {(fqn, WEIGHT) for fqn, role in checkpoint.tensors if role == MASTER}
        assert set(truth) - set(checkpoint.tensors) <= implied

    def test_is_recognised_without_being_named(self, shared: Shared) -> None:
        found = ckpt.open(shared.path)
        assert found.format == shared.declaration.format
        assert found.tensors.keys() == shared.checkpoint.tensors.keys()

    def test_parameters_are_counted_once(self, shared: Shared) -> None:
        expected = {fqn for fqn, role in shared.truth if role == WEIGHT}
        assert set(shared.checkpoint.parameters) == expected

    def test_reading_and_converting_leave_the_source_as_it_was(self, sample: Sample, tmp_path: Path) -> None:
        _, path, _ = sample
        before = digests(path)
        checkpoint = ckpt.open(path)
        ckpt.plan(checkpoint, "hf", Layout(names="own")).run(tmp_path / "out")
        assert ckpt.verify(checkpoint, ckpt.open(tmp_path / "out"), only="weights").equal
        assert digests(path) == before

    def test_damage_is_found(self, sample: Sample) -> None:
        declaration, path, _ = sample
        files = [file for pattern in declaration.vital for file in sorted(path.glob(pattern))]
        assert files
        for file in files:
            original = file.read_bytes()
            tail = min(64, len(original) // 2)
            for damaged in (None, b"", original[:-1], original[: len(original) // 2], original[:-tail] + bytes(tail)):
                if damaged is None:
                    file.unlink()
                else:
                    file.write_bytes(damaged)
                if declaration.is_unchecked_data and damaged is not None and len(damaged) == len(original):
                    continue
                # Without its only file, the format can't be recognised. Without the model's only file, half a
                # checkpoint is left.
                alone = (NotFoundError,) if len(files) <= 2 else ()
                kinds = (CorruptError, HalfError, *alone) if damaged is None else (CorruptError,)
                with pytest.raises(kinds) as caught:
                    ckpt.open(path, declaration.format)
                assert str(path) in str(caught.value)
            file.write_bytes(original)
        ckpt.open(path, declaration.format)

    def test_mutations_raise_only_our_errors(self, sample: Sample, shared: Shared) -> None:
        """Invert bytes in vital files: every 97th, or fewer in a large file, and few in tensor elements."""
        declaration, path, _ = sample
        outcomes = {"read": 0, "refused": 0}
        for file in [file for pattern in declaration.vital for file in sorted(path.glob(pattern))][:2]:
            original = file.read_bytes()
            same = shared.path / file.relative_to(path)
            for position in mutated(shared.checkpoint, same, len(original), self.most_mutations):
                write_byte(file, position, original[position] ^ 0xFF)
                try:
                    ckpt.open(path, declaration.format)
                    outcomes["read"] += 1
                except CkptError:
                    outcomes["refused"] += 1
                write_byte(file, position, original[position])
        assert outcomes["refused"] > 0

    def test_a_stray_file_is_not_passed_over(self, sample: Sample) -> None:
        declaration, path, _ = sample
        folder = Path(ckpt.open(path, declaration.format).path)
        if folder.is_dir():
            (folder / "optimizer_of_rank_97.x").write_bytes(b"states")
            found = list_unread(ckpt.open(path, declaration.format))
            assert [(one.name, one.kind) for one in found] == [("optimizer_of_rank_97.x", "state")]
            assert not ckpt.check(path, declaration.format).whole

    def test_converts_deterministically_as_planned_and_reads_back_equal(
        self, shared: Shared, target: str, tmp_path: Path
    ) -> None:
        declaration, checkpoint, truth = shared.declaration, shared.checkpoint, shared.truth
        one = tmp_path / "one"
        conversion = self.plan(declaration, checkpoint, target)
        again = self.plan(declaration, shared.again, target)
        if conversion is None or again is None:
            return
        conversion.run(one)
        planned = {file.name: file.size for file in conversion.plan.target.files}
        written = {str(f.relative_to(one)): f.stat().st_size for f in one.rglob("*") if f.is_file()}
        assert written.pop(MANIFEST)
        assert written == planned
        assert {*again.files} == {*planned}
        checked = manifest.check(one)
        assert checked.good and not checked.unknown
        check_views(again, one)
        back: Checkpoint = ckpt.open(one, target)
        named = conversion.plan.checkpoint
        if registry.get(target).namespace is None:  # it keeps all names
            back = replace(back, namespace=named.namespace)
        report = ckpt.verify(checkpoint, back)
        # A flattening format stores zeros for a parameter's states if it never had a gradient.
        stateless = set(checkpoint.parameters) - {
            f for f, role in checkpoint.tensors if role in checkpoint.optimizer_states
        }
        added = {result.b_fqn for result in report.results if result.status == "+"}
        adds = next((one.adds_states for one in self.declarations if one.format == target), True)
        assert report.equal or (adds and added and added <= stateless), "\n".join(report.lines())
        assert {result.status for result in report.results} <= {"=", "+"}
        spaces = {checkpoint.namespace, named.namespace}
        known, requested = ({fqn for fqn, _ in one.tensors} for one in (checkpoint, named))
        renamed = len(spaces) > 1 and (known != requested or not spaces <= {HUB, TRANSFORMERS, OWN})
        weights = {fqn for fqn, role in (named.tensors if renamed else truth) if role in (WEIGHT, BUFFER)}
        assert {fqn for fqn, _ in back.tensors} == weights

    def test_a_forgetful_writer_is_refused(self, shared: Shared, target: str) -> None:
        conversion = self.plan(shared.declaration, shared.checkpoint, target)
        if conversion is None:
            return
        plan, carries_optimizer = conversion.plan, registry.get(target).carries_optimizer
        make_plan(plan.checkpoint, plan.target, carries_optimizer=carries_optimizer)
        for _, keys in forgotten(plan.checkpoint, plan.target):
            for _, forgetful in tampered(plan.checkpoint, plan.target, keys):
                with pytest.raises((LossError, AssertionError), match=r"goes nowhere|would not be|cover|reason"):
                    make_plan(plan.checkpoint, forgetful, carries_optimizer=carries_optimizer)
