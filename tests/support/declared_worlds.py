"""A valid world of declarations, with every kind of entity, and what its ranks get from a save."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt import Policy, SaveOptions, ShardedObject, ShardedTensor, save
from megackpt.comm import Group
from megackpt.entities import ShardedBase
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld

PP, TP, DP = 2, 2, 2
RANKS = PP * TP * DP


def rank_of(pp: int, tp: int, dp: int) -> int:
    return (pp * TP + tp) * DP + dp


@dataclass
class World:
    """What each rank saves: entities by key, and common state.

    Sizes differ from seed to seed. Boxes of `uneven` and `flat` are counted by `block = pp * TP + tp`.
    """

    rng: np.random.Generator
    entities: list[dict[str, ShardedBase]]
    common: list[dict[str, object]]
    rows: int
    cols: int
    edges: list[int]
    cut: list[int]

    def tensor(self, rank: int, key: str) -> ShardedTensor:
        entity = self.entities[rank][key]
        assert isinstance(entity, ShardedTensor)
        return entity

    def spoil(self, rank: int, key: str, **fields: object) -> None:
        """Declare something else on one rank, with data that fits it."""
        changed = replace(self.tensor(rank, key), data=None, **fields)
        changed.init_data()
        self.entities[rank][key] = changed

    def mains_of(self, key: str) -> list[int]:
        return [
            rank for rank, entities in enumerate(self.entities) if key in entities and is_main(entities[key])
        ]

    def any_main(self, key: str) -> int:
        return int(self.rng.choice(self.mains_of(key)))


def is_main(entity: ShardedBase) -> bool:
    return entity.replica_id in (0, (0, 0, 0))


def valid_world(seed: int) -> World:
    rng = np.random.default_rng(seed)
    rows, cols = int(rng.integers(2, 6)), int(rng.integers(2, 6))
    edges = [0, *np.cumsum(rng.integers(2, 6, PP * TP)).tolist()]
    cut = [int(rng.integers(1, rows * cols)) for _ in range(PP * TP)]
    world = World(rng, [{} for _ in range(RANKS)], [], rows, cols, edges, cut)
    for pp, tp, dp in np.ndindex(PP, TP, DP):
        block, rank = pp * TP + tp, rank_of(pp, tp, dp)
        flat = slice(0, cut[block]) if dp == 0 else slice(cut[block], rows * cols)
        uneven = torch.zeros(edges[block + 1] - edges[block], cols)
        entities: dict[str, ShardedBase] = {
            "regular": ShardedTensor.from_rank_offsets(
                "regular", torch.zeros(rows, cols), (0, pp, PP), (1, tp, TP), replica_id=(0, 0, dp),
                prepend_axis_num=1,
            ),
            "uneven": ShardedTensor(
                "uneven", uneven, torch.float32, tuple(uneven.shape), (edges[-1], cols), (edges[block], 0),
                replica_id=(0, 0, dp),
            ),
            "flat": ShardedTensor.from_rank_offsets_flat(
                "flat", torch.zeros(flat.stop - flat.start), (rows, cols), (0, block, PP * TP),
                flattened_range=flat,
            ),
            "tied": ShardedTensor.from_rank_offsets(
                "tied", torch.zeros(rows, cols), (0, tp, TP), replica_id=(pp, 0, dp)
            ),
            "rng": ShardedObject("rng", {"seed": rank}, (RANKS,), (rank,)),
            "grid": ShardedObject("grid", [1], (PP, TP), (pp, tp), replica_id=(0, 0, dp)),
        }  # fmt: skip
        if pp == 0:
            entities["norm"] = ShardedTensor.from_rank_offsets(
                "norm", torch.zeros(cols), replica_id=(0, tp, dp)
            )
        if rank < 5:
            entities["pinwheel"] = pinwheel(rank)
        world.entities[rank] = entities
        world.common.append({"lr": 0.5, "step": 3, "names": ["a", "b"], "nan": math.nan, "none": None})
    return world


def pinwheel(part: int) -> ShardedTensor:
    """One of the five boxes that tile a 5 x 5 square in the way that no cuts from edge to edge can."""
    starts, shapes = [(0, 0), (0, 3), (3, 2), (2, 0), (2, 2)], [(2, 3), (3, 2), (2, 3), (3, 2), (1, 1)]
    shape = shapes[part]
    return ShardedTensor("pinwheel", torch.zeros(shape), torch.float32, shape, (5, 5), starts[part])


ANY_DATA = SaveOptions(sample_replicas=Policy.IGNORE)
"""What is declared is looked at here; the data of replicas is whatever memory held."""


def outcomes_of(world: World, store: MemoryStore) -> list[object]:
    def save_rank(group: Group) -> None:
        state = {"shards": world.entities[group.rank], "args": world.common[group.rank]}
        save(state, store, options=ANY_DATA, group=group)

    return SimulatedWorld(RANKS).outcomes(save_rank)
