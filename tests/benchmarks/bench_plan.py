"""How near the estimates of `megackpt plan` are: seconds estimated over seconds measured, on four ranks.

Run by hand: `torchrun --nproc-per-node 4 tests/benchmarks/bench_plan.py --dir DIR [--saves 5] [--layers 6]`.
Each turn first measures the bandwidths that the estimate is given, of all ranks at once: files of the same
size as those of a save, and a copy to memory that has been touched. Then it saves with the plan of an earlier
save, and asynchronously. So what else the machine does is in both. The goal is medians from 0.7 to 1.3.
"""

from __future__ import annotations

import os
import shutil
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

import megackpt
from megackpt import Checkpointer, Policy, SaveOptions
from megackpt.cli.benchmark.measure import timed
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.simulation import Cluster, ModelSizes, build_model, estimate, simulate_save
from megackpt.cli.simulation.replicas import BUCKET_SIZE
from megackpt.run import PlanCache
from megackpt.training.parallel import ParallelLayout
from tests.benchmarks.measuring import as_rank, emptied, options
from tests.support.checkpoints import real_state

GB = 1e9
LAYOUT = ParallelLayout(tp=2, dp=2)
REPLICAS = SaveOptions(sample_replicas=Policy.IGNORE)  # models that are built separately differ


def main() -> None:
    """Print the ratios of each turn, and their medians."""
    arguments = options(__doc__, dir=Path, saves=5, layers=6)
    sizes = ModelSizes(
        vocab_size=8192, hidden_size=512, num_layers=arguments.layers, num_heads=8, ffn_size=1408
    )
    with as_rank() as rank:
        ranks = dist.get_world_size()
        assert ranks == LAYOUT.world_size, f"start {LAYOUT.world_size} ranks"
        planned, _ = simulate_save(build_model(sizes), LAYOUT)
        # Estimates are for ranks with a processor each.
        shared_by = max(1.0, ranks / (os.cpu_count() or 1))
        planned = replace(planned, describe_s=planned.describe_s * shared_by)
        state = real_state(sizes, LAYOUT, rank, bucket_size=BUCKET_SIZE)
        files = RawFiles(emptied(arguments.dir) / "raw", planned.total_nbytes, rank=rank, ranks=ranks)
        source = np.ones(int(planned.nbytes.max()), np.uint8)
        target = np.zeros_like(source)
        plans = PlanCache()
        background = Checkpointer(
            arguments.dir / "async", keep_last=1, async_save=True, save_options=REPLICAS
        )
        background.warm_up(state)
        rows = []
        for turn in range(arguments.saves + 1):
            if rank == 0:
                arguments.dir.mkdir(exist_ok=True)
            written_s = min(timed(lambda is_direct=d: files.write(direct=is_direct)) for d in (True, False))
            copied_s = timed(partial(np.copyto, target, source))
            cluster = Cluster(
                ranks_per_node=ranks,
                write=ranks * files.nbytes / written_s / GB,
                stage=source.nbytes / copied_s / GB,
            )
            times = estimate(planned, None, cluster)
            directory = arguments.dir / f"sync-{turn}"
            saved_s = timed(lambda to=directory: megackpt.save(state, to, options=REPLICAS, plans=plans))
            stall_s = timed(partial(background.save, turn, state))
            background.wait()
            if rank == 0:
                shutil.rmtree(directory)
            if turn:  # the first save has no plan of an earlier one
                rows.append((times.later_save, saved_s, times.async_stall, stall_s))
        background.close()
        if rank == 0:
            print(f"{planned.total_nbytes / GB:.2f} GB on {ranks} ranks")
            for later_s, saved_s, waits_s, stall_s in rows:
                print(
                    f"save {later_s:.3f} of {saved_s:.3f} s: {later_s / saved_s:.2f}; "
                    f"stall {waits_s:.3f} of {stall_s:.3f} s: {waits_s / stall_s:.2f}"
                )
            later, stall = (statistics.median(row[i] / row[i + 1] for row in rows) for i in (0, 2))
            print(f"medians: save {later:.2f}, stall {stall:.2f}")
        emptied(arguments.dir)


if __name__ == "__main__":
    main()
