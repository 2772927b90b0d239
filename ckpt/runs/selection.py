"""Choice of a folder's checkpoint: its own, the recorded step, or the newest complete step.

Steps are compared by number, never by file time. If no number decides, an error lists the candidates and the user
chooses with `--tag`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.base.errors import (
    CkptError,
    CorruptError,
    HalfError,
    IncompleteError,
    NotFoundError,
    SeveralRunsError,
    UsageError,
)
from ckpt.base.text import Brief
from ckpt.base.words import Keyword, Message, Note, joined, keywords_in
from ckpt.move.files import confined, is_inside_folder
from ckpt.move.listing import entries_in, folders_in, is_folder
from ckpt.plan import registry
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, Format, ReadRequest
from ckpt.runs.finding import check_all_there, free_tags, models_of, save_around, several_models, tagged
from ckpt.runs.half_checkpoints import check_is_no_optimizer, lost_weights
from ckpt.runs.search import models_of_pipeline, run_below
from ckpt.runs.source_checks import check_has_elements, check_one_save
from ckpt.runs.step_checks import check_ended
from ckpt.runs.steps import (
    RECORDS,
    STEP_PARTS,
    Run,
    Step,
    folders_beside,
    has_record,
    has_trainer_state,
    is_step,
    recorded_number,
    run_at,
    runs_inside,
    trainer_step,
)
from ckpt.runs.unread_files import holds_tensors, stray_names

#: Files that no format reads. Records like `latest_checkpointed_iteration.txt` are read.
_LOGS = (".log", ".out", ".err", ".txt", ".csv", ".yaml", ".wandb", ".png", ".html", ".md")
_LOG_PREFIXES = ("events.out.tfevents.", "wandb-")
#: The checkpoint in the folder itself.
OWN_TAG = "."
_MAX_NAMES = 8  # names per message
#: None means that no format finds a checkpoint in the step.
_Skipped = dict[Step, CkptError | None]


@dataclass(frozen=True, slots=True)
class Want:
    """Requirement: `holds` is the test, `what` its name in messages.

    With `is_newest`, a newer step wins over the folder's own checkpoint. With `prefers` (a format), that format is
    tried first, and then the first other format that finds a checkpoint decides.
    """

    what: str = "checkpoint in the requested format"
    holds: Callable[[Checkpoint], bool] = lambda _: True
    is_newest: bool = False
    prefers: str | None = None


ANY = Want()


@dataclass(frozen=True, slots=True)
class Chooser:
    formats: Sequence[Format]
    request: ReadRequest
    want: Want = ANY

    def open(self, path: Path) -> Checkpoint | None:
        """Return the checkpoint in `path`, or in the only run below it."""
        run, tag = run_at(path), self.request.tag
        if tag is None:
            check_all_there(path)
        try:
            found = self._open_in(run) if tag is None else self._open_tagged(run, tag)
            if found is None and tag is None and has_model_part(path):
                found = self._open_part(path)
                if found is None:
                    return None
        except SeveralRunsError as error:  # raised in a step
            raise SeveralRunsError(path, error.runs) from None
        except (CorruptError, HalfError) as error:
            if tag is None:
                self._hint_at_another(error, run)
            raise
        if found is not None:
            if tag is None and not models_of(path):
                self._check_one_engine(run, found)
            # an engine resumes with all models
            place = save_around(Path(found.path)) if self.want.is_newest and tag is None else Path(found.path)
            return found if place == path else _with_notes(found, [Brief(f"taking {run.name(place)}")])
        if (below := run_below(path, self._leads_to_one)) is not None:
            found = self.open(below)
            return found and _with_notes(found, [Brief(f"taking the run {run.name(below)}")])
        return None

    def _leads_to_one(self, folder: Path) -> bool:
        if not is_run(folder, self.formats, self.request.tag):
            return False
        return self.want is ANY or self.open(folder) is not None

    def _open_in(self, run: Run) -> Checkpoint | None:
        """Return the checkpoint in the run's folder itself or from its record, otherwise in the newest complete step.

        An incomplete step is skipped with a note. A damaged one is an error.
        """
        own = self._open_own(run) or self._open_pipeline(run)
        candidates: Sequence[Step] = ()
        if own is None:
            candidates = [step for step in run.steps if not self._is_ruled_out(run, step)]
        elif self.want.is_newest:
            candidates = self._rivals(run, own)
        found, skipped = self._open_newest(run, candidates)
        chosen = found or own or self._newer_last(run)
        if chosen is not None:
            return self._with_newer_named(run, chosen, skipped)
        _raise_first(skipped.values())
        return None

    def _open_own(self, run: Run, tag: str | None = None) -> Checkpoint | None:
        for one in self.formats:
            found = one.find(run.path, tag)
            if found is None or (tag is None and run.holder(found) is not None and run.record_of(found) is None):
                continue
            checkpoint = one.read(found, self.request)
            if tag is None and found == run.path and is_stray(checkpoint, self.formats):
                continue
            if self.want.holds(checkpoint):
                check_is_no_optimizer(checkpoint)
                check_one_save(checkpoint)
                check_has_elements(checkpoint)
                return checkpoint
            if self.want.prefers not in (None, one.name):
                return None
        return None

    def _open_pipeline(self, run: Run) -> Checkpoint | None:
        """Return the model of a pipeline next to steps.

        Raise SeveralRunsError for several models, IncompleteError for a missing one.
        """
        parts = models_of_pipeline(run.path) if run.steps and not self.want.is_newest else []
        if len(parts) > 1:
            raise SeveralRunsError(run.path, sorted(parts))
        found = self._open_own(run_at(parts[0])) if parts else None
        if found is None and parts and not _is_checkpoint(parts[0], _readable()):
            raise IncompleteError("the pipeline's model is missing", path=parts[0])
        return found

    def _open_newest(self, run: Run, steps: Iterable[Step]) -> tuple[Checkpoint | None, _Skipped]:
        skipped: _Skipped = {}
        for step in steps:
            try:
                check_ended(step.path)
                check_all_there(step.path)
                found = self._open_step(step.path)
            except (IncompleteError, HalfError) as error:
                skipped[step] = error
                continue
            if found is not None:
                self._check_same_count(run, step)
                return self._newer_last(run, step, found), skipped
            skipped[step] = None
        return None, skipped

    def _newer_last(self, run: Run, step: Step | None = None, found: Checkpoint | None = None) -> Checkpoint | None:
        """Return the checkpoint in a step called `last` if it is newer than `found` in `step`."""
        number = None if step is None or found is None else found.state.step if step.counts_epochs else step.number
        skipped: dict[str, IncompleteError | None] = {}
        for place in run.last:
            try:
                check_ended(place)
                last = self._open_step(place)
                of_last = recorded_number(place) if last is None or last.state.step is None else last.state.step
            except IncompleteError as error:
                skipped[_skip_note(run, place, error)] = error
                continue
            if last is None:
                skipped[f"{run.name(place)} is skipped, it holds no {self.want.what}"] = None
                continue
            if found is not None and (number is None or of_last is None):
                _ask(run, [run.name(Path(found.path)), run.name(place)])
            if found is None or (number is not None and of_last is not None and of_last > number):
                found, number = last, of_last
        if found is None:
            _raise_first(skipped.values())
            return None
        return _with_notes(found, [*skipped], [], [*skipped])

    def _open_step(self, step: Path) -> Checkpoint | None:
        """Return the checkpoint in a step's folder or its model's inner folder."""
        found = self._open_in(run_at(step))
        if found is not None or is_run(step, self.formats):
            return found
        if (found := self._open_part(step)) is not None:
            return found
        below = run_below(step, lambda folder: is_run(folder, self.formats))
        return None if below is None else self._open_in(run_at(below))

    def _open_part(self, step: Path) -> Checkpoint | None:
        return next(filter(None, (self._open_in(run_at(part)) for part in _model_parts(step))), None)

    def _open_tagged(self, run: Run, tag: str) -> Checkpoint | None:
        if tag == OWN_TAG:
            return self._open_own(run)
        named = confined(run.path, tag)
        model = tagged(named.parent, named.name)
        places = [*([named] if named.exists() else []), *([model] if model else [])]
        places += [step.path for step in run.tagged(tag)]
        for place in dict.fromkeys(places):
            if (found := self._open_step(place)) is not None:
                return found
        failure: NotFoundError | None = None
        try:
            if (found := self._open_own(run, tag)) is not None:
                return found
        except NotFoundError as error:
            failure = error
        for step in run.steps:
            try:
                if step.path.is_dir() and (found := self._open_tagged(run_at(step.path), tag)) is not None:
                    return found
            except NotFoundError:  # no such step inside this one
                continue
        if failure is not None:
            raise failure
        return None

    def _check_one_engine(self, run: Run, chosen: Checkpoint) -> None:
        """Raise UsageError if the save has other engines with different parameters, or with the same step."""
        free = free_tags(run.path)
        others = [place for place in free if place != Path(chosen.path)]
        if len(others) == len(free):
            return
        for place in others:
            found = None
            with suppress(CkptError):  # a damaged one may be another model
                found = self._open_step(place)
            if found is None or found.state.step == chosen.state.step or _shapes(found) != _shapes(chosen):
                raise several_models(run.path, free, with_tag=True)

    def _rivals(self, run: Run, own: Checkpoint) -> list[Step]:
        """Return the steps newer than `own`, and equal ones if only they have HF Trainer's record."""
        place, number = Path(own.path), _number(run, own)
        steps = [step for step in run.steps if not place.is_relative_to(step.path)]
        if number is None:
            found, _ = self._open_newest(run, steps)
            if found is not None:
                _ask(run, [OWN_TAG, run.name(Path(found.path))])
            return []
        around = (place, *(folder for folder in place.parents if folder.is_relative_to(run.path)))
        is_trainers = any(map(has_trainer_state, around))
        return [
            step
            for step in steps
            if step.number > number or (step.number == number and not is_trainers and has_trainer_state(step.path))
            if not self._is_ruled_out(run, step)
        ]

    def _is_ruled_out(self, run: Run, step: Step) -> bool:
        recorded = [] if has_record(step.path) else run.recorded()
        if not recorded or step.path in recorded:
            return False
        for one in self.formats:
            with suppress(CkptError):
                if _finds(one, step.path, None) and any(_finds(one, other, None) for other in recorded):
                    return True
        return False

    def _check_same_count(self, run: Run, step: Step) -> None:
        """Raise UsageError if the run has steps counted in epochs and others counted in steps."""
        others = [other for other in run.steps if other.counts_epochs != step.counts_epochs]
        other = next((other for other in others if self._holds_any(other)), None)
        if other is not None:
            _ask(run, [run.name(step.path), run.name(other.path)])

    def _holds_any(self, step: Step) -> bool:
        return _is_checkpoint(step.path, self.formats)

    def _with_newer_named(self, run: Run, checkpoint: Checkpoint, skipped: _Skipped) -> Checkpoint:
        place, number = Path(checkpoint.path), _number(run, checkpoint)
        holder = run.holder(place)
        of_copies = [holder.path] if holder else [one for one in run.last if place.is_relative_to(one)]
        names = [name for one in of_copies for name in run.copies(one)]
        averages = [Note("there is also the average {} ({tag} takes it)", name) for name in names]
        passed = [self._why_skipped(run, step, error) for step, error in skipped.items()]
        beside = [step for step in run.steps if step not in skipped and not place.is_relative_to(step.path)]
        if number is None:
            beside = [step for step in beside if run.record_of(step.path) is None and self._holds_any(step)]
            beside += [Step(one, 0) for one in runs_inside(run.path) if is_run(one, self.formats)]
            told = _note("using the folder's own model; also here: ", run, beside)
            is_own = place == run.path or place in models_of_pipeline(run.path)
            told = [*(told if is_own else []), *averages]
            return _with_notes(checkpoint, passed, told, [*passed, *averages])
        told, passed_here = self._beside(run, checkpoint, number, beside) if beside else ([], [])
        if holder and not self.want.is_newest:
            others_here = [Step(one, 0) for one in folders_beside(run) if self._finds_run(one)]
            told += _note("also here, not a step: ", run, others_here)
        also_passed = [*passed_here, *averages]
        return _with_notes(checkpoint, passed, [*told, *also_passed], [*passed, *also_passed])

    def _beside(
        self, run: Run, checkpoint: Checkpoint, number: int, steps: Sequence[Step]
    ) -> tuple[list[str], list[str]]:
        """Return notes on other steps: recorded ones and twins, then newer ones that were passed over."""
        place = Path(checkpoint.path)
        holder = run.holder(place)
        newer = [step for step in steps if step.number > number]
        recorded = [step for step in newer if self._is_ruled_out(run, step)]
        later = [step for step in newer if step not in recorded and self._holds_any(step)]
        others = [step for step in newer if step not in (*recorded, *later)]
        name, record = run.name(holder.path if holder else place), run.record_of(place)
        told = _note(f"{name} is recorded in `{record}`; there is also ", run, recorded)
        twins = [step for step in steps if holder and _is_twin(step, holder) and self._holds_any(step)]
        told += _note(f"also of step {number}: ", run, twins)
        passed = _note("later than the selected step: ", run, later)
        if others:
            passed += [f"skipped, newer folders have no {checkpoint.format} checkpoint: {_names(run, others)}"]
        return told, passed

    def _finds_run(self, folder: Path) -> bool:
        try:
            return not (_has_only_logs(folder) or stray_names(folder)) and is_run(folder)
        except CkptError:  # damaged
            return True

    def _why_skipped(self, run: Run, step: Step, error: CkptError | None) -> str:
        error = error or (None if _holds_any(step.path) else lost_weights(step.path))
        if error is None:
            return f"{run.name(step.path)} is skipped, it holds no {self.want.what}"
        return _skip_note(run, step.path, error)

    def _hint_at_another(self, error: CkptError, run: Run) -> None:
        """Add a hint: another usable step, or the reason if there is none."""
        damaged = run.holder(Path(error.path)) if error.path is not None else None
        at = run.steps.index(damaged) if damaged is not None else -1
        older, newer = run.steps[at + 1 :], run.steps[: max(at, 0)]
        reasons, hints = [], [error.hint] if error.hint else []
        for step in (*older, *newer)[:_MAX_NAMES]:
            option = Keyword("tag", run.name(step.path))
            try:
                check_ended(step.path)
                found = self._open_step(step.path)
            except CkptError as reason:
                reasons.append(f"{shlex.quote(run.name(step.path))}: {reason.what}")
                continue
            if found is None:
                continue
            if option not in keywords_in(error.hint):
                before = damaged if step in older else None
                what = f"the checkpoint before {run.name(before.path)}" if before else "that step instead"
                error.hint = joined("; ", [*hints, Message("{} takes {}", option, what)])
            return
        if reasons:
            all_of = (
                f"no other step can be used: {'; '.join(reasons)}; `ckpt check {shlex.quote(str(run.path))}` lists all"
            )
            error.hint = joined("; ", [*hints, all_of])


def is_run(folder: Path, formats: Sequence[Format] | None = None, tag: str | None = None) -> bool:
    """Return True if `folder` is a checkpoint in any of the formats (None: all), or a run folder with one.

    Raise CorruptError for a checkpoint too damaged to identify its format.
    """
    formats = _readable() if formats is None else formats
    run = run_at(folder)
    if any(_finds(one, folder, tag) for one in formats):
        return True
    if steps := run.steps if tag is None else run.tagged(tag):
        return any(_holds(step.path, formats) for step in steps)
    if tag is None and run.last:
        return any(_holds(place, formats) for place in run.last)
    return tag is not None and any(_finds(one, step.path, tag) for step in run.steps for one in formats)


def is_stray(checkpoint: Checkpoint, formats: Sequence[Format] | None = None) -> bool:
    """Return True for a lone tensor file with an unusual name, such as a value head next to a step."""
    folder = Path(checkpoint.path)
    if checkpoint.optimizer_states:
        return False
    strays = {str(folder / name) for name in stray_names(folder)} if folder.is_dir() else set()
    if not strays or not {file.path for file in checkpoint.files if holds_tensors(file.path)} <= strays:
        return False
    formats = _readable() if formats is None else formats
    run = run_at(folder)
    inside = dict.fromkeys([*(step.path for step in run.steps), *run.recorded(), *folders_in(folder)])
    return any(_is_checkpoint(place, formats) for place in inside)


def _is_checkpoint(place: Path, formats: Sequence[Format]) -> bool:
    try:
        return _holds(place, formats)
    except CkptError:  # damaged, but a checkpoint
        return True


def _raise_first(reasons: Iterable[CkptError | None]) -> None:
    """Raise the first error. None is a step of another format."""
    error = next(filter(None, reasons), None)
    if error is not None:
        raise error


def _holds_any(step: Path) -> bool:
    return _is_checkpoint(step, _readable())


def _has_only_logs(folder: Path) -> bool:
    """Return True if no format needs to be loaded to see that this is no checkpoint.

    A link may lead to a checkpoint, but not one inside the folder, like wandb's `latest-run`.
    """
    with suppress(CkptError):  # formats may not list the folder that can't be listed
        return all(
            _has_only_logs(folder / name)
            if entry.is_dir(follow_symlinks=False)
            else is_inside_folder(folder / name, folder)
            if is_folder(entry)
            else _is_log(name)
            for name, entry in entries_in(folder).items()
        )
    return False


def _is_log(name: str) -> bool:
    return name not in RECORDS and (name.endswith(_LOGS) or name.startswith(_LOG_PREFIXES))


def _readable() -> list[Format]:
    return [one for one in registry.all_formats() if one.reads]


def _holds(step: Path, formats: Sequence[Format]) -> bool:
    inside = folders_in(step) if step.is_dir() else []
    return any(is_run(place, formats) for place in (step, *_model_parts(step), *inside))


def has_model_part(folder: Path) -> bool:
    return is_step(folder) and any(map(is_run, _model_parts(folder)))


def _model_parts(step: Path) -> list[Path]:
    return [confined(step, part) for part in STEP_PARTS if (step / part).is_dir()]


def _finds(one: Format, folder: Path, tag: str | None) -> bool:
    try:
        return one.find(folder, tag) is not None
    except NotFoundError:  # or a tag for another format
        return False


def _number(run: Run, checkpoint: Checkpoint) -> int | None:
    holder, step = run.holder(Path(checkpoint.path)), checkpoint.state.step
    if holder is not None:
        return holder.number
    return trainer_step(Path(checkpoint.path)) if step is None else step


def _is_twin(step: Step, chosen: Step) -> bool:
    """Return True if only the names differ, like `checkpoint-2` and `checkpoint_2`."""
    same = (step.number, step.counts_epochs) == (chosen.number, chosen.counts_epochs)
    return same and has_trainer_state(step.path) == has_trainer_state(chosen.path)


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {fqn: tensor.shape for (fqn, role), tensor in checkpoint.tensors.items() if role in MODEL_ROLES}


def _skip_note(run: Run, place: Path, error: CkptError) -> str:
    return f"{run.name(place)} is skipped, it is not complete: {error.what}"


def _note(what: str, run: Run, steps: Sequence[Step]) -> list[str]:
    return [Note("{}{} ({tag} takes it)", what, _names(run, steps))] if steps else []


def _names(run: Run, steps: Sequence[Step]) -> str:
    return ", ".join(run.name(step.path) for step in steps[:_MAX_NAMES])


def _with_notes(
    checkpoint: Checkpoint, first: Sequence[str], last: Sequence[str] = (), passed_over: Sequence[str] = ()
) -> Checkpoint:
    notes = (*first, *checkpoint.notes, *last)
    return replace(checkpoint, notes=notes, passed_over=(*passed_over, *checkpoint.passed_over))


def _ask(run: Run, names: Sequence[str]) -> None:
    raise UsageError(
        "ambiguous: nothing records the newest checkpoint here",
        path=run.path,
        found=", ".join(names),
        hint=joined(" or ", (Message("{tag}", tag=name) for name in names)),
    )
