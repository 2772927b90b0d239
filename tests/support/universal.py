"""DeepSpeed's own conversion to its universal checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path


def ds_to_universal(source: Path, output: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal as converter

    args = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(output),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        converter.main(args)
