"""How long `import megackpt` takes beyond torch, and the first use of its names.

`python tests/benchmarks/bench_import.py [--runs 7]`; .ci/wheel runs it with the wheel. Each run is a new
process that imports torch first. Medians of CPU seconds, and of wall-clock seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = """
import time
def now():
    return time.process_time(), time.perf_counter()
times = [now()]
import torch
times.append(now())
import megackpt
times.append(now())
megackpt.ShardedTensor, megackpt.save, megackpt.load, megackpt.Checkpointer
times.append(now())
for before, after in zip(times, times[1:]):
    print(after[0] - before[0], after[1] - before[1])
"""
STEPS = ("import torch", "import megackpt", "first use of ShardedTensor, save, load and Checkpointer")


def measure() -> list[tuple[float, float]]:
    """Return CPU and wall-clock seconds of each step in a new process."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    cpu_and_wall = [line.split() for line in run.stdout.splitlines()]
    return [(float(cpu), float(wall)) for cpu, wall in cpu_and_wall]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = [measure() for _ in range(parser.parse_args().runs)]
    torch_cpu = statistics.median(run[0][0] for run in runs)
    for number, step in enumerate(STEPS):
        cpu, wall = (statistics.median(run[number][kind] for run in runs) for kind in (0, 1))
        print(f"{step}: {cpu:.3f} s of CPU ({cpu / torch_cpu:.2f} of torch's), {wall:.3f} s")


if __name__ == "__main__":
    main()
