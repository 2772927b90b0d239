"""Start-up hook for the torch.cuda double in `python -m train` processes.

`python -m tests.gpu_check --double 2` adds this folder to PYTHONPATH.
"""

import sys

if "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "train":
    import tests.support.fake_cuda  # noqa: F401
