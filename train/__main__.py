"""Command line: `torchrun --nproc-per-node 4 -m train --strategy zero3 --model llama --output outputs`."""

import sys
import time
from pathlib import Path

from train import config, launch, stopping
from train.loop import run


def main() -> int:
    """Runs one configuration, or every one of --jobs in turn inside one process group."""
    parser = config.Parser(
        prog="train", description="Trains tiny models with real engines and saves their checkpoints."
    )
    parser.add_argument(
        "--jobs",
        metavar="FILE",
        help="run every line of a JSON-lines file, each an object of options or a list of command line words, "
        "in one launch; all other options but --device are ignored",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what every process computes on; auto: a GPU each, and the CPU where a machine has fewer GPUs than "
        "processes or DS_ACCELERATOR is cpu; nothing here has run on a GPU yet (%(default)s)",
    )
    config.add_options(parser)
    try:
        options = parser.parse_args()
        jobs = config.read_jobs(Path(options.jobs)) if options.jobs else [config.parse_options(options)]
        launch.start(options.device)
        stopping.listen()
        for number, job in enumerate(jobs, 1):
            start = time.perf_counter()
            run(job)
            if code := stopping.exit_code():
                return code
            if options.jobs and launch.is_first():
                print(f"job {number} of {len(jobs)}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    except config.UserError as error:
        launch.tell(error)
        return 2
    finally:
        launch.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
