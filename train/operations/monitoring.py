"""Work in the training loop besides training. docs/operations.md describes its files."""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.training.heartbeat import Heart
from ckpt.training.spikes import SpikeWatch
from train import data, folders, launch
from train.config import Config, UserError
from train.operations import records, state, tracking


def require_free(config: Config) -> None:
    """Raise UserError, on all ranks, if --output holds another run or the tracker's package is missing."""
    tracking.require(config.track)
    if config.resume is None and (names := launch.gather_objects(folders.existing_checkpoints(Path(config.output)))[0]):
        raise UserError(
            f"--output {config.output}: a run has left {', '.join(names)} there\n"
            f"hint: use --resume {config.output} to continue it, or another --output for a new run"
        )


class Operations:
    """One run's operations. All ranks call each method together."""

    def __init__(self, config: Config) -> None:
        self.config, self.output = config, Path(config.output)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        started = launch.gather_objects(time.time())[0]
        try:
            self.heart = Heart(self.output, self.rank, self.world_size, config.beat, started)
        except OSError as error:
            raise UserError(f"--output {self.output}: {error.filename}: {error.strerror}") from None
        self.skipped: list[list[int]] = []
        self.spikes = SpikeWatch()
        self.tracker: Any = None
        self.engine: Any = None
        self.line: dict[str, Any] = {}

    def __enter__(self) -> "Operations":
        self.heart.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        if self.tracker:
            self.tracker.finish()
        self.heart.__exit__(*reason)

    def steps_to_take(self, done: int) -> int:
        config = self.config
        if config.until and config.until <= done:
            _say(f"note: --until {config.until}: the run is at step {done} already, and trains and saves nothing")
        return max(config.until - done, 0) if config.until else config.steps

    def ended(self) -> None:
        self.enter("closing")
        self.engine = None

    def enter(self, phase: str) -> None:
        self.heart.enter(phase, self.engine.step if self.engine else self.heart.facts["step"])

    def started(self, engine: Any, resumed: tuple[Path, str] | None) -> None:
        self.engine = engine
        if resumed:
            self._take_up(Path(*resumed))
        elif self.config.dropout:  # all ranks share one seed, and ranks with different data need different dropout
            torch.manual_seed(self.config.seed + engine.data_shard[0])
        if self.config.skip_batches:
            self._skip(self.config.skip_batches)
        if self.rank == 0:
            self.tracker = tracking.open_tracker(self.config)
        if launch.on_gpu():  # measure a step's peak, without building the model
            torch.cuda.reset_peak_memory_stats()

    def next_batch(self) -> torch.Tensor:
        """Return token ids with shape (sequences, tokens)."""
        self.enter("data")
        config, begin = self.config, time.perf_counter()
        first = data.position(self.engine.sequences, self.skipped)
        batch = data.batch(first, config.batch, config.length, config.seed)
        self.line = {
            "begin": begin,
            "lr": float(self.engine.optimizer.param_groups[0]["lr"]),
            "batch": first // config.batch + 1,
            "sequences": [first, first + config.batch],
            "data": state.digest(batch),
        }
        self.enter("training")
        return batch

    def after_step(self, loss: float, own_loss: float) -> None:
        """`loss` is the mean over all ranks."""
        seconds = time.perf_counter() - self.line.pop("begin")
        mine = torch.tensor([seconds, _peak_memory(), own_loss], dtype=torch.float64, device=launch.device())
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        columns = torch.stack(everyone).T.tolist()
        norm = self.engine.grad_norm
        line = {"step": self.engine.step, "loss": loss, "grad_norm": None if norm is None else float(norm)}
        line |= self.line | {
            "tokens_per_second": self.config.batch * self.config.length / max(columns[0]),
            "time": time.time(),
            "ranks": dict(zip(("step_seconds", "memory_bytes", "loss"), columns, strict=True)),
        }
        if self.rank == 0:
            _append(self.output / "metrics.jsonl", line)
            if self.tracker:
                self.tracker.log(tracking.flat(line), step=line["step"])
        if self.config.on_spike != "off":
            self._look_for_spike(line)

    def saved(self, checkpoint: Path) -> None:
        """Record a checkpoint, and delete old checkpoints beyond --keep."""
        ranks = launch.gather_objects(state.live(self.engine))
        if self.rank == 0:
            layout = {name: getattr(self.config, name) for name in ("strategy", "tp", "pp", "vpp", "ep", "etp")}
            facts = {
                "step": self.engine.step,
                "sequences": self.engine.sequences,
                "skipped": self.skipped,
                "world_size": self.world_size,
                "layout": layout,
                "settings": state.settings(self.config),
                "calm": self.spikes.first is None,
                "losses": self.spikes.history,
                "ranks": ranks,
            }
            records.write(self.output, checkpoint, facts)
            if self.config.keep:
                for deleted in records.keep(self.output, self.config.keep):
                    _say(f"deleted {deleted}: --keep {self.config.keep}")

    def _take_up(self, checkpoint: Path) -> None:
        """Use --output's record for a converted checkpoint."""
        home, step = checkpoint.parent, self.engine.step
        homes = [home.parent if home.name.startswith("checkpoint-") else home, self.output]
        found = next((record for home in homes if (record := records.read(home, step))), None)
        if found is None:
            return
        self.skipped = [list(span) for span in found.facts["skipped"]]
        self.spikes = SpikeWatch(list(found.facts["losses"]))
        dist.barrier()  # wait until all ranks have read it
        if found.output.resolve() == self.output.resolve() and self.rank == 0:
            for later in records.abandon_after(self.output, step):
                _say(
                    f"note: {later} is from the previous run; `ckpt resume` takes it because it is newer, "
                    "until it is removed"
                )

    def _skip(self, words: str) -> None:
        first, last = data.parse_batches(words)
        span = [(first - 1) * self.config.batch, last * self.config.batch]
        done = data.position(self.engine.sequences, self.skipped)
        if self.engine.sequences % self.config.batch:
            raise UserError(f"--skip-batches {words}: the run's batch size was not always {self.config.batch}")
        if span[0] < done:
            raise UserError(
                f"--skip-batches {words}: batches up to {done // self.config.batch} are trained already\n"
                "hint: --resume a checkpoint from before them"
            )
        self.skipped = data.merged([*self.skipped, span])

    def _look_for_spike(self, line: dict[str, Any]) -> None:
        limit, before = self.spikes.limit(), self.spikes.first
        if not self.spikes.is_spike(line["batch"], line["loss"]):
            return
        good = records.last_good(self.output)
        resume = f"--resume {good.checkpoint} " if good else ""
        way_out = f"{resume}--skip-batches {self.spikes.first}:{line['batch']}"
        if self.rank == 0:
            found = {"step": line["step"], "batch": line["batch"], "loss": line["loss"], "limit": limit}
            _append(self.output / "spikes.jsonl", found | {"last_good": str(good.checkpoint) if good else None})
        text = f"the loss spiked in step {line['step']}: {line['loss']:.4f}, and {limit:.4f} would be usual"
        if self.config.on_spike == "stop":
            raise UserError(f"{text}\nhint: {way_out}")
        if before is None:
            _say(f"warning: {text}; to leave the batch out: {way_out}")


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _peak_memory() -> int:
    """Return bytes: tensors on the GPU, or this process on the CPU."""
    if launch.on_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _say(text: str) -> None:
    if launch.is_first():
        print(text, file=sys.stderr, flush=True)
