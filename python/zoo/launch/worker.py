"""What each rank runs: ``python -m zoo.launch.worker [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS``.

It dies with its agent, tells the agent of an exception with its time, gives the stacks of all threads on SIGQUIT, and
is otherwise as if Python had been called with the script. Nothing but the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback

from zoo.launch.processes import die_with

AGENT, REPORT, CORES = "ZOO_LAUNCH_AGENT", "ZOO_LAUNCH_REPORT", "ZOO_LAUNCH_CORES"
"""Variables from the agent: its process, the number of the open file for reports, cores as "0,1"."""


def main() -> None:
    """Run what the command line says."""
    report = _settle()
    arguments = sys.argv[1:]
    if arguments[0] == "--no-python":
        try:
            os.execvp(arguments[1], arguments[1:])
        except OSError as error:
            sys.stderr.write(f"the program {arguments[1]!r} cannot be started: {error.strerror}\n")
            raise SystemExit(127) from None
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            if sys.path[0] != os.getcwd():
                sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(arguments)
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        _tell(error, report)
        raise SystemExit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1) from None


def _settle() -> tuple[int, int]:
    """The file for reports, and this process; children that are forked are others."""
    die_with(int(os.environ.pop(AGENT)))
    if CORES in os.environ:
        os.sched_setaffinity(0, [int(core) for core in os.environ.pop(CORES).split(",")])
    report = int(os.environ.pop(REPORT))
    os.set_inheritable(report, False)
    faulthandler.register(signal.SIGQUIT, file=report, all_threads=True)
    return report, os.getpid()


def _run_script(arguments: list[str]) -> None:
    """The script is ``__main__``, as the processes that it starts expect."""
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))  # modules are where the script is, not a link to it
    space = sys.modules["__main__"].__dict__
    builtins = space["__builtins__"]
    with open(arguments[0], "rb") as file:
        code = compile(file.read(), arguments[0], "exec", dont_inherit=True)
    space.clear()
    space.update(__builtins__=builtins, __name__="__main__", __file__=arguments[0], __cached__=None, __doc__=None)
    space.update(__spec__=None, __loader__=None, __package__=None)
    exec(code, space)


def _tell(error: BaseException, report: tuple[int, int]) -> None:
    """An exception goes to the agent, and is printed as Python does, without the frames of this file."""
    moment, trace = time.time(), error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    error.__traceback__ = trace
    if os.getpid() == report[1]:
        told = {
            "time": moment, "type": type(error).__name__, "text": str(error)[:10_000],
            "traceback": "".join(traceback.format_exception(error)),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            os.write(report[0], (json.dumps(told) + "\n").encode())
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)


_OURS = {__file__, runpy.__file__, "<frozen runpy>"}

if __name__ == "__main__":
    from zoo.launch import worker  # the names above would go with those of this __main__

    worker.main()
