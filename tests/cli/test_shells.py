"""`ckpt/options/completion.py`: completion in real bash, zsh and fish, installed like a user would."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

_LIMIT = 60.0  # seconds
_PROMPT = rb"READY"


def read_until(terminal: int, pattern: bytes) -> bytes:
    """Return a shell's output up to `pattern`. The terminal answers the shell's queries."""
    shown, end = b"", time.monotonic() + _LIMIT
    while not re.search(pattern, shown):
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += (part := os.read(terminal, 65536))
            if b"\x1b[c" in part or b"\x1b[0c" in part:
                os.write(terminal, b"\x1b[?62;c")
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_one_tab_completes(fixtures: Path, tmp_path: Path, shell: str) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "bin/ckpt"
    command.parent.mkdir()
    script = "import sys; sys.argv[0] = 'ckpt'; from ckpt.__main__ import main; main()"  # like the entry point
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(script)} "$@"\n')
    command.chmod(0o755)
    (tmp_path / "outputs").symlink_to(fixtures / "toy-zero3")
    path = f"{command.parent}:/usr/bin:/bin"
    env = {"HOME": str(tmp_path), "PATH": path, "TERM": "xterm", "LANG": "C.UTF-8", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [program, "-c", "ckpt --install-completion; true"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert f"{shell} completion installed" in done.stdout, done.stderr
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        os.execve(program, [shell, "-i"], env)
    try:
        os.write(terminal, b"echo REA''DY\n")
        read_until(terminal, _PROMPT)
        for typed, expected in (
            (b"ckpt convert auto uni", rb"universal|versal"),
            (b"ckpt inspect outputs --tag glo", rb"global_step2|bal_step2"),
            (b"ckpt inspect outputs --tensor embed", rb"embed\.weight|\.weight"),
            (b"ckpt check outp", rb"outputs|uts"),
        ):
            os.write(terminal, typed + b"\t")
            read_until(terminal, expected)
            os.write(terminal, b"\x15")  # Ctrl-U: the line is gone
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
