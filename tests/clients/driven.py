"""Run a program with real DeepSpeed on CPUs, where Accelerate has to be told that there are several processes.

torchrun --nproc-per-node=2 tests/clients/driven.py PROGRAM [ARGUMENTS]
"""

import runpy
import sys

from accelerate import PartialState

if __name__ == "__main__":
    PartialState(backend="gloo")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
