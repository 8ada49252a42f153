"""Faults of whole ranks, keys, objects and common state: each spoils a valid world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from megackpt import (
    DeclarationError,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.mapping import ShardedBase
from tests.support.declared_worlds import DP, PP, RANKS, TP, World, rank_of
from tests.support.fault_registry import ExpectedError, FaultRegistry, differs, not_covered

FAULTS = FaultRegistry()


# --- whole ranks and keys


@FAULTS.add
def a_rank_declares_nothing(w: World) -> ExpectedError:
    rank = rank_of(1, int(w.rng.integers(0, TP)), 0)
    key = f"object 'rng/shard_{rank}_{RANKS}' is saved by no rank"
    w.entities[rank] = {}
    return not_covered(
        "'regular': elements [", "'uneven': elements [", f"ranks {rank + 1} declare replicas", key
    )


@FAULTS.add
def a_key_is_misspelt_on_one_rank(w: World) -> ExpectedError:
    rank = w.any_main("uneven")
    w.entities[rank]["uneven"] = replace(w.tensor(rank, "uneven"), key="unevn")
    return not_covered(
        "'unevn': elements [", f"ranks {rank} declare other chunks", f"ranks {rank + 1} declare replicas"
    )


@FAULTS.add
def a_rank_gives_another_global_shape(w: World) -> ExpectedError:
    rank = w.any_main("uneven")
    shape = (w.edges[-1] + 1, w.cols)
    others = ", ".join(str(r) for r in range(RANKS) if r != rank)
    w.spoil(rank, "uneven", global_shape=shape)
    return differs("'uneven': ", f"float32 {shape} on ranks {rank}", f"on ranks {others}")


@FAULTS.add
def a_rank_gives_another_number_of_axes(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, PP * TP))
    w.spoil(rank, "norm", global_shape=(w.cols, 1), global_offset=(0, 0), local_shape=(w.cols, 1),
            axis_fragmentations=None)  # fmt: skip
    return differs(f"float32 ({w.cols}, 1) on ranks {rank}", f"float32 ({w.cols},) on ranks")


@FAULTS.add
def a_rank_thinks_that_there_are_more_fragments(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, RANKS))
    data = torch.zeros(w.rows, w.cols)
    w.entities[rank]["tied"] = ShardedTensor.from_rank_offsets("tied", data, (0, 0, TP + 1))
    return differs("'tied': ", f"float32 ({w.rows * (TP + 1)}, {w.cols}) on ranks {rank}")


@FAULTS.add
def a_rank_gives_another_dtype(w: World) -> ExpectedError:
    rank = w.any_main("flat")
    w.spoil(rank, "flat", dtype=torch.bfloat16)
    return differs("'flat': ", f"bfloat16 ({w.rows * PP * TP}, {w.cols}) on ranks {rank}")


@FAULTS.add
def one_key_is_a_tensor_here_and_an_object_there(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, PP * TP))
    w.entities[rank]["norm"] = ShardedObject("norm", 1, (w.cols,), (0,))
    return differs("'norm': ", f"object ({w.cols},) on ranks {rank}")


# --- objects


@FAULTS.add
def an_object_is_missing(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, RANKS))
    del w.entities[rank]["rng"]
    return not_covered(f"object 'rng/shard_{rank}_{RANKS}' is saved by no rank", "declare other chunks")


@FAULTS.add
def an_object_is_given_twice(w: World) -> ExpectedError:
    here, there = sorted(w.rng.choice(RANKS, 2, replace=False).tolist())
    w.entities[there]["rng"] = ShardedObject("rng", 0, (RANKS,), (here,))
    return not_covered(
        f"object 'rng/shard_{here}_{RANKS}' is saved by more than one main replica (ranks {here}, {there})",
        f"object 'rng/shard_{there}_{RANKS}' is saved by no rank",
    )


@FAULTS.add
def an_object_has_two_main_replicas(w: World) -> ExpectedError:
    rank = w.any_main("grid")
    w.entities[rank + 1]["grid"] = replace(w.entities[rank + 1]["grid"], replica_id=0)
    pp, tp = divmod(rank // DP, TP)
    name = f"object 'grid/shard_{pp}.{tp}_{PP}.{TP}'"
    return not_covered(f"{name} is saved by more than one main replica (ranks {rank}, {rank + 1})")


@FAULTS.add
def an_object_has_no_main_replica(w: World) -> ExpectedError:
    rank = w.any_main("grid")
    w.entities[rank]["grid"] = replace(w.entities[rank]["grid"], replica_id=(0, 1, 0))
    pp, tp = divmod(rank // DP, TP)
    name = f"object 'grid/shard_{pp}.{tp}_{PP}.{TP}'"
    return not_covered(f"{name} is saved by no rank; ranks {rank}, {rank + 1} declare replicas")


@FAULTS.add
def an_array_of_objects_has_another_shape_on_one_rank(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, RANKS))
    w.entities[rank]["rng"] = ShardedObject("rng", 0, (RANKS + 1,), (rank,))
    return differs("'rng': ", f"object ({RANKS + 1},) on ranks {rank}")


# --- declarations that contradict themselves, made inside the save


def built(w: World, rank: int, key: str, build: Callable[[], ShardedBase]) -> ExpectedError:
    w.entities[rank][key] = ShardedTensorFactory(
        key, torch.zeros(1), lambda *_: [build()], lambda parts: parts[0]
    )
    return ExpectedError(DeclarationError, (repr(key), f"ank {rank}"))


@FAULTS.add
def an_object_lies_outside_of_its_array(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, RANKS))
    return built(w, rank, "rng", lambda: ShardedObject("rng", 0, (RANKS,), (RANKS,)))


@FAULTS.add
def a_fragment_lies_outside_of_its_grid(w: World) -> ExpectedError:
    rank = int(w.rng.integers(0, RANKS))
    return built(
        w, rank, "tied", lambda: ShardedTensor.from_rank_offsets("tied", torch.zeros(2), (0, TP, TP))
    )


@FAULTS.add
def a_box_lies_outside_of_its_array(w: World) -> ExpectedError:
    rank, tensor = 0, w.tensor(0, "uneven")
    return built(w, rank, "uneven", lambda: replace(tensor, global_offset=(w.edges[-1] - 1, 0)))


@FAULTS.add
def a_flat_range_lies_outside_of_its_block(w: World) -> ExpectedError:
    rank, tensor = int(w.rng.integers(0, RANKS)), w.tensor(0, "flat")
    beyond = slice(0, w.rows * w.cols + 1)
    return built(w, rank, "flat", lambda: replace(tensor, data=None, flattened_range=beyond))


# --- common state


@FAULTS.add
def a_common_value_differs(w: World) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    w.common[rank]["lr"] = math.nextafter(0.5, 1)
    return differs(f"'args.lr' on rank(s) {rank}\n")


@FAULTS.add
def common_values_differ_on_the_first_rank(w: World) -> ExpectedError:
    w.common[0]["lr"] = 0.25
    return differs("'args.lr' on rank(s) 1, 2, 3, 4, 5, 6, 7\n")


@FAULTS.add
def a_common_value_has_another_type(w: World) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    w.common[rank]["step"] = 3.0
    return differs(f"'args.step' on rank(s) {rank}\n")


@FAULTS.add
def a_common_list_is_a_tuple(w: World) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    w.common[rank]["names"] = ("a", "b")
    return differs(
        f"'args.names[0]' on rank(s) {rank} (missing there)", f"'args.names' on rank(s) {rank} (missing on"
    )


@FAULTS.add
def a_common_value_is_missing(w: World) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    del w.common[rank]["none"]
    return differs(f"'args.none' on rank(s) {rank} (missing there)")


@FAULTS.add
def a_common_value_is_extra(w: World) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    w.common[rank]["more"] = None
    return differs(f"'args.more' on rank(s) {rank} (missing on rank 0)")


@FAULTS.add
def a_common_value_is_a_number_where_others_have_nan(w: World) -> ExpectedError:
    rank = int(w.rng.integers(1, RANKS))
    w.common[rank]["nan"] = 0.0
    return differs(f"'args.nan' on rank(s) {rank}\n")


@FAULTS.add
def a_common_zero_is_negative(w: World) -> ExpectedError:
    for rank in range(RANKS):
        w.common[rank]["lr"] = -0.0 if rank == 5 else 0.0
    return differs("'args.lr' on rank(s) 5\n")
