"""Command line: `python -m train --ranks 2 --strategy zero3 --output outputs`, or the same under torchrun or srun."""

import argparse
import functools
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from train import config, ranks


def main() -> int:
    """Run one configuration, or each --jobs line in one process group. Import torch only after parsing succeeds."""
    parser = config.Parser(
        prog="python -m train",
        usage="%(prog)s [options]",
        description="Trains tiny models with real engines and saves their checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
    )
    group = parser.add_argument_group("processes and jobs")
    group.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="start N ranks on this machine; without, one or a launcher's"
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device for every process; auto: one GPU each, or the CPU if the machine has fewer GPUs than "
        "processes or DS_ACCELERATOR is cpu; not tested on a GPU yet (%(default)s)",
    )
    group.add_argument(
        "--jobs",
        metavar="FILE",
        help="run every line of a JSON-lines file in one launch: an object with options, or a list with command line "
        "words; other options except --ranks and --device are ignored",
    )
    config.add_options(parser)
    try:
        options = parser.parse_args()
        starts_ranks = ranks.are_to_be_started(options.ranks)
        jobs = config.read_jobs(Path(options.jobs)) if options.jobs else [config.parse_options(options)]
    except config.UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # each node has a LOCAL_RANK 0
            config.print_error(str(error))
        return 2
    return ranks.start(options.ranks) if starts_ranks else _run(jobs, options.device, is_file=bool(options.jobs))


def _run(jobs: Sequence[config.Config], device: str, is_file: bool) -> int:
    from train import launch, stopping
    from train.loop import run

    try:
        launch.start(device)
        stopping.listen()
        for number, job in enumerate(jobs, 1):
            start = time.perf_counter()
            run(job)
            gc.freeze()  # DeepSpeed never frees a stage 3 engine, and each collection would scan it
            if code := stopping.exit_code():
                return code
            if is_file and launch.is_first():
                print(f"job {number} of {len(jobs)}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    except launch.ERRORS as error:
        launch.tell(error)
        return 2 if isinstance(error, config.UserError) else 1
    finally:
        launch.stop()
    return 0


_EXAMPLES = """\
examples:
  python -m train --ranks 2 --strategy zero3 --steps 8
  python -m train --ranks 4 --strategy megatron --tp 2 --pp 2 --steps 8 --output megatron-outputs
"""

if __name__ == "__main__":
    sys.exit(main())
