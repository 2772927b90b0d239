"""Linux's own calls, taken away to stand in for macOS.

`make test-portable` runs the fast tests without them. `python -m tests.support.portable ARGS` runs `ckpt ARGS`.
"""

from __future__ import annotations

import os
import sys

#: Environment variable that takes the calls away from a test run, and from its processes if they import this module.
VARIABLE = "CKPT_TEST_PORTABLE"
CALLS = ("O_PATH", "posix_fadvise", "POSIX_FADV_WILLNEED")


def remove_linux_calls() -> None:
    """Remove the calls from `os`. Call it before `ckpt` is imported."""
    assert "ckpt" not in sys.modules, "ckpt is imported already"
    for name in CALLS:
        delattr(os, name)


if __name__ == "__main__":
    remove_linux_calls()
    from ckpt.__main__ import main

    main()
