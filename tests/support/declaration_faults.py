"""A valid world of declarations, with every kind of entity, and the faults that spoil it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from megackpt import (
    CheckpointError,
    CoverageError,
    DeclarationError,
    MismatchError,
    Policy,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    save,
)
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


@dataclass(frozen=True)
class ExpectedError:
    """What an error has to be and say."""

    error: type[CheckpointError]
    message: tuple[str, ...]


Fault: TypeAlias = Callable[[World], ExpectedError]
"""Spoils a valid world, and returns the error that a save has to raise."""


def not_covered(*message: str) -> ExpectedError:
    return ExpectedError(CoverageError, message)


def differs(*message: str) -> ExpectedError:
    return ExpectedError(MismatchError, message)


def element_of_flat(w: World, block: int, position: int) -> str:
    row, col = divmod(position, w.cols)
    return f"'flat': elements [{block * w.rows + row}:{block * w.rows + row + 1}, {col}:{col + 1}]"


class Faults:
    """Functions that spoil a valid world, each in its own way; they return the error of the save."""

    # --- whole ranks and keys

    def a_rank_declares_nothing(w: World) -> ExpectedError:
        rank = rank_of(1, int(w.rng.integers(0, TP)), 0)
        key = f"object 'rng/shard_{rank}_{RANKS}' is saved by no rank"
        w.entities[rank] = {}
        return not_covered(
            "'regular': elements [", "'uneven': elements [", f"ranks {rank + 1} declare replicas", key
        )

    def a_key_is_misspelt_on_one_rank(w: World) -> ExpectedError:
        rank = w.any_main("uneven")
        w.entities[rank]["uneven"] = replace(w.tensor(rank, "uneven"), key="unevn")
        return not_covered(
            "'unevn': elements [", f"ranks {rank} declare other chunks", f"ranks {rank + 1} declare replicas"
        )

    def a_rank_gives_another_global_shape(w: World) -> ExpectedError:
        rank = w.any_main("uneven")
        shape = (w.edges[-1] + 1, w.cols)
        others = ", ".join(str(r) for r in range(RANKS) if r != rank)
        w.spoil(rank, "uneven", global_shape=shape)
        return differs("'uneven': ", f"float32 {shape} on ranks {rank}", f"on ranks {others}")

    def a_rank_gives_another_number_of_axes(w: World) -> ExpectedError:
        rank = int(w.rng.integers(0, PP * TP))
        w.spoil(rank, "norm", global_shape=(w.cols, 1), global_offset=(0, 0), local_shape=(w.cols, 1),
                axis_fragmentations=None)  # fmt: skip
        return differs(f"float32 ({w.cols}, 1) on ranks {rank}", f"float32 ({w.cols},) on ranks")

    def a_rank_thinks_that_there_are_more_fragments(w: World) -> ExpectedError:
        rank = int(w.rng.integers(0, RANKS))
        data = torch.zeros(w.rows, w.cols)
        w.entities[rank]["tied"] = ShardedTensor.from_rank_offsets("tied", data, (0, 0, TP + 1))
        return differs("'tied': ", f"float32 ({w.rows * (TP + 1)}, {w.cols}) on ranks {rank}")

    def a_rank_gives_another_dtype(w: World) -> ExpectedError:
        rank = w.any_main("flat")
        w.spoil(rank, "flat", dtype=torch.bfloat16)
        return differs("'flat': ", f"bfloat16 ({w.rows * PP * TP}, {w.cols}) on ranks {rank}")

    def one_key_is_a_tensor_here_and_an_object_there(w: World) -> ExpectedError:
        rank = int(w.rng.integers(0, PP * TP))
        w.entities[rank]["norm"] = ShardedObject("norm", 1, (w.cols,), (0,))
        return differs("'norm': ", f"object ({w.cols},) on ranks {rank}")

    # --- objects

    def an_object_is_missing(w: World) -> ExpectedError:
        rank = int(w.rng.integers(0, RANKS))
        del w.entities[rank]["rng"]
        return not_covered(f"object 'rng/shard_{rank}_{RANKS}' is saved by no rank", "declare other chunks")

    def an_object_is_given_twice(w: World) -> ExpectedError:
        here, there = sorted(w.rng.choice(RANKS, 2, replace=False).tolist())
        w.entities[there]["rng"] = ShardedObject("rng", 0, (RANKS,), (here,))
        both = f"(ranks {here}, {there})"
        return not_covered(
            f"object 'rng/shard_{here}_{RANKS}' is saved by more than one main replica {both}",
            f"object 'rng/shard_{there}_{RANKS}' is saved by no rank",
        )

    def an_object_has_two_main_replicas(w: World) -> ExpectedError:
        rank = w.any_main("grid")
        w.entities[rank + 1]["grid"] = replace(w.entities[rank + 1]["grid"], replica_id=0)
        pp, tp = divmod(rank // DP, TP)
        name = f"object 'grid/shard_{pp}.{tp}_{PP}.{TP}'"
        return not_covered(f"{name} is saved by more than one main replica (ranks {rank}, {rank + 1})")

    def an_object_has_no_main_replica(w: World) -> ExpectedError:
        rank = w.any_main("grid")
        w.entities[rank]["grid"] = replace(w.entities[rank]["grid"], replica_id=(0, 1, 0))
        pp, tp = divmod(rank // DP, TP)
        name = f"object 'grid/shard_{pp}.{tp}_{PP}.{TP}'"
        return not_covered(f"{name} is saved by no rank; ranks {rank}, {rank + 1} declare replicas")

    def an_array_of_objects_has_another_shape_on_one_rank(w: World) -> ExpectedError:
        rank = int(w.rng.integers(0, RANKS))
        w.entities[rank]["rng"] = ShardedObject("rng", 0, (RANKS + 1,), (rank,))
        return differs("'rng': ", f"object ({RANKS + 1},) on ranks {rank}")

    # --- a declaration that contradicts itself, made inside the save

    def a_box_lies_outside_of_its_array(w: World) -> ExpectedError:
        tensor = w.tensor(0, "uneven")
        w.entities[0]["uneven"] = ShardedTensorFactory(
            "uneven",
            torch.zeros(1),
            lambda *_: [replace(tensor, global_offset=(w.edges[-1] - 1, 0))],
            lambda parts: parts[0],
        )
        return ExpectedError(DeclarationError, ("'uneven'", "ank 0"))

    # --- common state

    def common_values_differ_on_the_first_rank(w: World) -> ExpectedError:
        w.common[0]["lr"] = 0.25
        return differs("'args.lr' on rank(s) 1, 2, 3, 4, 5, 6, 7\n")

    def a_common_value_is_missing(w: World) -> ExpectedError:
        rank = int(w.rng.integers(1, RANKS))
        del w.common[rank]["none"]
        return differs(f"'args.none' on rank(s) {rank} (missing there)")

    def a_common_zero_is_negative(w: World) -> ExpectedError:
        for rank in range(RANKS):
            w.common[rank]["lr"] = -0.0 if rank == 5 else 0.0
        return differs("'args.lr' on rank(s) 5\n")

    # --- boxes

    def a_box_begins_one_row_early(w: World) -> ExpectedError:
        block = int(w.rng.integers(1, PP * TP))
        rank, at = block * DP, w.edges[block]
        shape = (w.edges[block + 1] - at + 1, w.cols)
        w.spoil(rank, "uneven", global_offset=(at - 1, 0), local_shape=shape)
        both = f"(ranks {rank - DP}, {rank})"
        return not_covered(f"'uneven': elements [{at - 1}:{at}, 0:{w.cols}] are saved by more than one", both)

    def a_box_ends_one_row_early(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        rank, at = block * DP, w.edges[block + 1]
        w.spoil(rank, "uneven", local_shape=(at - w.edges[block] - 1, w.cols))
        return not_covered(
            f"'uneven': elements [{at - 1}:{at}, 0:{w.cols}] are saved by no rank",
            f"ranks {rank + 1} declare replicas, but no rank has the main one",
        )

    def a_box_lacks_its_last_column(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        low, high = w.edges[block : block + 2]
        w.spoil(block * DP, "uneven", local_shape=(high - low, w.cols - 1))
        return not_covered(f"'uneven': elements [{low}:{high}, {w.cols - 1}:{w.cols}] are saved by no rank")

    def a_box_is_declared_by_nobody(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        for dp in range(DP):
            del w.entities[block * DP + dp]["uneven"]
        others = ", ".join(str(r) for r in range(RANKS) if r // DP != block)
        low, high = w.edges[block : block + 2]
        return not_covered(
            f"'uneven': elements [{low}:{high}, 0:{w.cols}] are saved by no rank (global shape "
            f"({w.edges[-1]}, {w.cols})); ",
            f"ranks {others} declare other chunks",
        )

    def a_box_has_no_main_replica(w: World) -> ExpectedError:
        rank = w.any_main("regular")
        w.spoil(rank, "regular", replica_id=(0, 0, 5))
        return not_covered(
            "'regular': elements [", "are saved by no rank", f"ranks {rank}, {rank + 1} declare replicas"
        )

    def a_box_has_two_main_replicas(w: World) -> ExpectedError:
        rank = w.any_main("regular")
        w.spoil(rank + 1, "regular", replica_id=0)
        return not_covered("'regular': elements [", f"more than one main replica (ranks {rank}, {rank + 1})")

    def every_replica_is_a_main_one(w: World) -> ExpectedError:
        for rank in range(PP * TP):
            w.spoil(rank, "norm", replica_id=(0, 0, 0))
        return not_covered(
            f"'norm': elements [0:{w.cols}] are saved by more than one main replica (ranks 0, 1, 2, 3)"
        )

    def the_tied_copy_is_a_main_replica_too(w: World) -> ExpectedError:
        tp = int(w.rng.integers(0, TP))
        first, last = rank_of(0, tp, 0), rank_of(1, tp, 0)
        w.spoil(last, "tied", replica_id=(0, 0, 0))
        return not_covered("'tied': elements [", f"more than one main replica (ranks {first}, {last})")

    def a_rank_declares_a_box_twice(w: World) -> ExpectedError:
        rank = w.any_main("regular")
        w.entities[rank]["again"] = replace(w.tensor(rank, "regular"))
        return not_covered("'regular': elements [", f"more than one main replica (all of rank {rank})")

    def a_box_has_the_position_of_another(w: World) -> ExpectedError:
        tp = int(w.rng.integers(0, TP))
        here, there = rank_of(0, tp, 0), rank_of(0, 1 - tp, 0)
        w.spoil(there, "regular", global_offset=w.tensor(here, "regular").global_offset)
        low, high = (1 - tp) * w.rows, (2 - tp) * w.rows
        return not_covered(
            f"more than one main replica (ranks {min(here, there)}, {max(here, there)})",
            f"'regular': elements [0:1, {low}:{high}, 0:{w.cols}] are saved by no rank",
        )

    def a_prepended_offset_is_wrong(w: World) -> ExpectedError:
        tp = int(w.rng.integers(0, TP))
        here, there = rank_of(0, tp, 0), rank_of(1, tp, 0)
        w.spoil(there, "regular", global_offset=(0, tp * w.rows, 0))
        rest, both = f"{tp * w.rows}:{(tp + 1) * w.rows}, 0:{w.cols}]", f"(ranks {here}, {there})"
        return not_covered(
            f"'regular': elements [0:1, {rest} are saved by more than one main replica {both}",
            f"'regular': elements [1:2, {rest} are saved by no rank",
        )

    def the_middle_of_a_pinwheel_is_missing(w: World) -> ExpectedError:
        del w.entities[4]["pinwheel"]
        return not_covered(
            "'pinwheel': elements [2:3, 2:3] are saved by no rank", "ranks 0, 1, 2, 3 declare other chunks"
        )

    def a_wing_of_a_pinwheel_is_a_row_too_long(w: World) -> ExpectedError:
        w.spoil(0, "pinwheel", local_shape=(3, 3))
        return not_covered("'pinwheel': elements [2:3, 0:3] are saved by more than one", "(ranks 0, 3, 4)")

    def a_box_of_as_many_elements_lies_crosswise(w: World) -> ExpectedError:
        w.spoil(0, "pinwheel", local_shape=(3, 2))  # 6 elements as before: the volumes still add up
        return not_covered(
            "'pinwheel': elements [0:2, 2:3] are saved by no rank",
            "'pinwheel': elements [2:3, 0:2] are saved by more than one main replica (ranks 0, 3)",
        )

    # --- flat ranges

    def flat_ranges_leave_a_gap(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        w.spoil(block * DP, "flat", flattened_range=slice(0, w.cut[block] - 1))
        return not_covered(f"{element_of_flat(w, block, w.cut[block] - 1)} are saved by no rank")

    def flat_ranges_overlap(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        rank = block * DP
        w.spoil(rank + 1, "flat", flattened_range=slice(w.cut[block] - 1, w.rows * w.cols))
        element = element_of_flat(w, block, w.cut[block] - 1)
        return not_covered(f"{element} are saved by more than one main replica (ranks {rank}, {rank + 1})")

    def a_flat_range_is_shifted(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        rank, cut = block * DP, w.cut[block]
        w.spoil(rank, "flat", flattened_range=slice(1, cut + 1))
        twice = f"{element_of_flat(w, block, cut)} are saved by more than one main replica"
        return not_covered(
            f"{element_of_flat(w, block, 0)} are saved by no rank", f"{twice} (ranks {rank}, {rank + 1})"
        )

    def the_last_flat_range_is_short(w: World) -> ExpectedError:
        block, numel = int(w.rng.integers(0, PP * TP)), w.rows * w.cols
        if w.cut[block] == numel - 1:
            w.spoil(block * DP + 1, "flat", flattened_range=slice(numel, numel))
        else:
            w.spoil(block * DP + 1, "flat", flattened_range=slice(w.cut[block], numel - 1))
        return not_covered(f"{element_of_flat(w, block, numel - 1)} are saved by no rank")

    def a_flat_range_is_empty(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        w.spoil(block * DP, "flat", flattened_range=slice(0, 0))
        return not_covered("'flat': elements [", "are saved by no rank")

    def a_rank_declares_the_block_instead_of_its_range(w: World) -> ExpectedError:
        block = int(w.rng.integers(0, PP * TP))
        rank = block * DP
        w.spoil(rank, "flat", flattened_range=None)
        return not_covered("'flat': elements [", f"more than one main replica (ranks {rank}, {rank + 1})")

    def flat_ranges_belong_to_the_wrong_block(w: World) -> ExpectedError:
        low, high = w.tensor(0, "flat").global_offset, w.tensor(6, "flat").global_offset
        w.spoil(0, "flat", global_offset=high)
        assert low != high
        return not_covered(
            "'flat': elements [0:", "are saved by no rank", "more than one main replica (ranks 0, 6"
        )


COMMON: dict[str, tuple[str, object, tuple[str, ...]]] = {
    "a_common_value_differs": ("lr", math.nextafter(0.5, 1), ("'args.lr' on rank(s) {}\n",)),
    "a_common_value_has_another_type": ("step", 3.0, ("'args.step' on rank(s) {}\n",)),
    "a_common_list_is_a_tuple": (
        "names",
        ("a", "b"),
        ("'args.names[0]' on rank(s) {} (missing there)", "'args.names' on rank(s) {} (missing on"),
    ),
    "a_common_value_is_extra": ("more", None, ("'args.more' on rank(s) {} (missing on rank 0)",)),
    "a_common_value_is_a_number_where_others_have_nan": ("nan", 0.0, ("'args.nan' on rank(s) {}\n",)),
}
"""An entry of common state that one rank has otherwise than the first, its value there, and the messages."""


def changed(w: World, *, entry: str, value: object, messages: tuple[str, ...]) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    w.common[rank][entry] = value
    return differs(*(message.format(rank) for message in messages))


FAULTS: dict[str, Fault] = {
    **{name: fault for name, fault in vars(Faults).items() if not name.startswith("_")},
    **{
        name: partial(changed, entry=entry, value=value, messages=messages)
        for name, (entry, value, messages) in COMMON.items()
    },
}
