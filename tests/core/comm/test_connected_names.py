"""Each group of the same ranks meets under a name of its own, so that none finds what an earlier one left."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megackpt.comm.torch_group import TorchGroup


def test_two_groups_of_the_same_ranks_have_different_names(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        groups = [TorchGroup(ranks=[0], timeout_s=30) for _ in range(3)]
        assert len({group._name for group in groups}) == 3
        assert [group.all_gather(b"here") for group in groups] == [[b"here"]] * 3
        for group in groups:
            group.close()
    finally:
        dist.destroy_process_group()
