"""Opens damaged model files one after the other, in a process of its own that may die.

usage: open_damaged.py inspect|load FILE...    prints a JSON line [file, exit code, error text, seconds] for each, then
                                               the most memory the process had, in MiB
"""

import contextlib
import io
import json
import re
import resource
import sys
import time
from pathlib import Path

from pykvq import Llama, PykvqError
from pykvq.cli import inspect


def run_inspect(path: str) -> tuple[int, str]:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = inspect.main([path])
    return code, errors.getvalue()


def run_load(path: str) -> tuple[int, str]:
    try:
        with Llama(path, n_ctx=256, n_threads=1) as llm:
            llm.eval([5, 6, 7])
        return 0, ""
    except PykvqError as error:
        return 1, f"{error}\n"


def most_memory() -> float:
    """The most memory of this process in MiB. ru_maxrss would begin with that of the process that started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1024


def main(action: str, *paths: str) -> None:
    run = {"inspect": run_inspect, "load": run_load}[action]
    for path in paths:
        started = time.perf_counter()
        code, text = run(path)
        print(json.dumps([path, code, text, time.perf_counter() - started]), flush=True)
    print(json.dumps(most_memory()))


main(*sys.argv[1:])
