"""Compile first, by several processes side by side: one after the other, compiling takes longer than measuring."""

import os
import subprocess
import sys
import time


def side_by_side(program: str, processes: int) -> None:
    """Run `program --compile n processes` for each n; what they compile stays in the compiler's cache on disk."""
    start, environment = time.time(), os.environ | {"OMP_NUM_THREADS": "1"}
    parts = [
        subprocess.Popen([sys.executable, program, "--compile", str(n), str(processes)], env=environment)
        for n in range(processes)
    ]
    codes = [part.wait() for part in parts]
    if any(codes):
        raise RuntimeError(f"a process that compiles failed: exit codes {codes}")
    print(f"compiled in {time.time() - start:.0f} s", flush=True)


PROCESSES = min(14, os.cpu_count() or 1)
