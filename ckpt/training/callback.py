"""`ckpt.TrainerCallback` for HF Trainer, TRL and Axolotl."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import ckpt
from ckpt.base.errors import NotFoundError, UsageError
from ckpt.training.after_save import AfterSave

if TYPE_CHECKING:
    from transformers import TrainerCallback as _Base
else:
    _Base = object

_LOG = logging.getLogger("ckpt.training")


class TrainerCallback(_Base):  # type: ignore[misc]
    """Check, convert, verify and push each checkpoint saved by a Trainer, in a separate process.

        Trainer(..., callbacks=[ckpt.TrainerCallback(push="org/name", dtype="bf16")])

    Conversions go to `OUTPUT_DIR-TO/checkpoint-N`, next to the run folder. The pushed repository's main branch becomes
    the newest checkpoint. `options` are checked at once.

    The first rank queues each checkpoint, and the work runs one process at a time. Only the end of training waits for
    the queue. A failure is a warning in the log `ckpt.training` and stops nothing, for example if `save_total_limit`
    has already removed the checkpoint.

    Args:
        check: Test each checkpoint for completeness.
        to: The format to write; None for no conversion.
        output: The folder for conversions; None for `OUTPUT_DIR-TO`.
        verify: Compare every written bit.
        push: The repository on the Hub, `ORG/NAME`.
        keep: Number of newest conversions to keep; None for all.
        **options: Options of `ckpt.convert`.
    """

    def __new__(cls, *_: Any, **__: Any) -> TrainerCallback:
        try:
            from transformers import TrainerCallback as Theirs
        except ImportError:
            what, hint = "ckpt.TrainerCallback needs transformers, but it is not installed", "pip install transformers"
            raise UsageError(what, hint=hint) from None
        # Trainer requires its own base class. It is added only here, because `import ckpt` imports no framework.
        return object.__new__(cls if issubclass(cls, Theirs) else type(cls.__name__, (cls, Theirs), {}))

    def __init__(
        self,
        *,
        check: bool = True,
        to: str | None = "hf",
        output: str | os.PathLike[str] | None = None,
        verify: bool = True,
        push: str | None = None,
        keep: int | None = None,
        **options: Any,
    ) -> None:
        if push and to is None:
            raise UsageError("push needs a conversion", expected="to='hf'", found="to=None")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise UsageError("keep must be a positive integer", expected="1 or more", found=repr(keep))
        _check_options(to, options)
        self._keep = keep
        self._converted: list[str] = []
        self._asked: dict[str, Any] = {"check": check, "to": to, "verify": verify, "push": push, "options": options}
        self._output = None if output is None else os.fspath(output)
        self._saved: list[AfterSave] = []
        self._queue: Queue[AfterSave] = Queue()
        self._worker: threading.Thread | None = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record a saved checkpoint, in each rank that has saved."""
        if state.is_world_process_zero:
            name, run = f"checkpoint-{state.global_step}", Path(args.output_dir)
            output = Path(self._output or f"{os.path.normpath(run)}-{self._asked['to']}") / name
            self._saved.append(AfterSave(str(run / name), str(output), **self._asked))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Queue the recorded checkpoints: all ranks have saved by now."""
        self._hand_over()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hand_over()
        self._queue.join()

    def _hand_over(self) -> None:
        for work in self._saved:
            self._queue.put(work)
        self._saved.clear()
        if self._worker is None and not self._queue.empty():
            self._worker = threading.Thread(target=self._serve, name="ckpt.TrainerCallback", daemon=True)
            self._worker.start()

    def _serve(self) -> None:
        while True:
            work = self._queue.get()
            try:
                if _run(work) and work.to is not None:
                    self._converted.append(work.output)
                    self._remove_old()
            except Exception as error:  # training must go on
                _LOG.warning("ckpt: nothing was done with %s: %s", work.path, error)
            finally:
                self._queue.task_done()

    def _remove_old(self) -> None:
        while self._keep is not None and len(self._converted) > self._keep:
            shutil.rmtree(self._converted.pop(0))


def _check_options(to: str | None, options: dict[str, Any]) -> None:
    """Raise UsageError for a format or option that `ckpt.convert` does not accept.

    The source does not exist, so a valid call ends with NotFoundError.
    """
    missing = os.path.join(os.devnull, "checkpoint")
    with contextlib.suppress(NotFoundError):
        ckpt.convert(missing, "hf" if to is None else to, f"{missing}-out", **options)


def _run(work: AfterSave) -> bool:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ckpt.training.after_save", work.to_json()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        _LOG.info("ckpt: %s", line)
    if done.returncode:
        _LOG.warning("ckpt: %s: exit code %d: %s", work.path, done.returncode, done.stderr.strip()[-4000:])
    return not done.returncode
