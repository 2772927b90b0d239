"""What the command `ckpt` runs, and `python -m ckpt`."""

import sys


def main() -> None:
    """The command line.  Ctrl-C ends it without a traceback, from its first import on."""
    try:
        from ckpt.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
