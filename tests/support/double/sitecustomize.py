"""Where this folder is in PYTHONPATH, processes of `python -m train` begin with the double of torch.cuda.

`python -m tests.gpu_check --double 2` puts it there.
"""

import sys

if "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "train":
    import tests.support.fake_cuda  # noqa: F401
