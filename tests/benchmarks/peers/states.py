"""States that only comparisons with other libraries have: a small one, and one that training has changed."""

from __future__ import annotations

from megackpt.cli.benchmark.state import ModelArray, RankState, as_bytes


def make_small_model() -> list[ModelArray]:
    """A model whose state is 200 arrays of 1 KiB, if parameters are float32; equal on all ranks. Pure."""
    return [ModelArray(f"layers.{i}.bias", (256,), None, i) for i in range(50)]


def invert(state: RankState) -> None:
    """Invert every bit that a rank holds, as training would change it; twice is as before."""
    for shard in state.shards:
        as_bytes(shard.data).bitwise_not_()
