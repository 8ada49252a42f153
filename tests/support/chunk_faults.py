"""Faults of chunks: boxes and flat ranges that leave gaps, overlap, or have no main replica."""

from __future__ import annotations

from dataclasses import replace

from tests.support.declared_worlds import DP, PP, RANKS, TP, World, rank_of
from tests.support.fault_registry import ExpectedError, FaultRegistry, not_covered

FAULTS = FaultRegistry()


# --- boxes


@FAULTS.add
def a_box_begins_one_row_early(w: World) -> ExpectedError:
    block = int(w.rng.integers(1, PP * TP))
    rank, at = block * DP, w.edges[block]
    shape = (w.edges[block + 1] - at + 1, w.cols)
    w.spoil(rank, "uneven", global_offset=(at - 1, 0), local_shape=shape)
    both = f"(ranks {rank - DP}, {rank})"
    return not_covered(f"'uneven': elements [{at - 1}:{at}, 0:{w.cols}] are saved by more than one", both)


@FAULTS.add
def a_box_ends_one_row_early(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    rank, at = block * DP, w.edges[block + 1]
    w.spoil(rank, "uneven", local_shape=(at - w.edges[block] - 1, w.cols))
    return not_covered(
        f"'uneven': elements [{at - 1}:{at}, 0:{w.cols}] are saved by no rank",
        f"ranks {rank + 1} declare replicas, but no rank has the main one",
    )


@FAULTS.add
def a_box_lacks_its_last_column(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    low, high = w.edges[block : block + 2]
    w.spoil(block * DP, "uneven", local_shape=(high - low, w.cols - 1))
    return not_covered(f"'uneven': elements [{low}:{high}, {w.cols - 1}:{w.cols}] are saved by no rank")


@FAULTS.add
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


@FAULTS.add
def a_box_has_no_main_replica(w: World) -> ExpectedError:
    rank = w.any_main("regular")
    w.spoil(rank, "regular", replica_id=(0, 0, 5))
    return not_covered(
        "'regular': elements [", "are saved by no rank", f"ranks {rank}, {rank + 1} declare replicas"
    )


@FAULTS.add
def a_box_has_two_main_replicas(w: World) -> ExpectedError:
    rank = w.any_main("regular")
    w.spoil(rank + 1, "regular", replica_id=0)
    return not_covered("'regular': elements [", f"more than one main replica (ranks {rank}, {rank + 1})")


@FAULTS.add
def every_replica_is_a_main_one(w: World) -> ExpectedError:
    for rank in range(PP * TP):
        w.spoil(rank, "norm", replica_id=(0, 0, 0))
    return not_covered(
        f"'norm': elements [0:{w.cols}] are saved by more than one main replica (ranks 0, 1, 2, 3)"
    )


@FAULTS.add
def the_tied_copy_is_a_main_replica_too(w: World) -> ExpectedError:
    tp = int(w.rng.integers(0, TP))
    first, last = rank_of(0, tp, 0), rank_of(1, tp, 0)
    w.spoil(last, "tied", replica_id=(0, 0, 0))
    return not_covered("'tied': elements [", f"more than one main replica (ranks {first}, {last})")


@FAULTS.add
def a_rank_declares_a_box_twice(w: World) -> ExpectedError:
    rank = w.any_main("regular")
    w.entities[rank]["again"] = replace(w.tensor(rank, "regular"))
    return not_covered("'regular': elements [", f"more than one main replica (all of rank {rank})")


@FAULTS.add
def a_box_has_the_position_of_another(w: World) -> ExpectedError:
    tp = int(w.rng.integers(0, TP))
    here, there = rank_of(0, tp, 0), rank_of(0, 1 - tp, 0)
    w.spoil(there, "regular", global_offset=w.tensor(here, "regular").global_offset)
    low, high = (1 - tp) * w.rows, (2 - tp) * w.rows
    return not_covered(
        f"more than one main replica (ranks {min(here, there)}, {max(here, there)})",
        f"'regular': elements [0:1, {low}:{high}, 0:{w.cols}] are saved by no rank",
    )


@FAULTS.add
def a_prepended_offset_is_wrong(w: World) -> ExpectedError:
    tp = int(w.rng.integers(0, TP))
    here, there = rank_of(0, tp, 0), rank_of(1, tp, 0)
    w.spoil(there, "regular", global_offset=(0, tp * w.rows, 0))
    rest = f"{tp * w.rows}:{(tp + 1) * w.rows}, 0:{w.cols}]"
    return not_covered(
        f"'regular': elements [0:1, {rest} are saved by more than one main replica (ranks {here}, {there})",
        f"'regular': elements [1:2, {rest} are saved by no rank",
    )


@FAULTS.add
def the_middle_of_a_pinwheel_is_missing(w: World) -> ExpectedError:
    del w.entities[4]["pinwheel"]
    return not_covered(
        "'pinwheel': elements [2:3, 2:3] are saved by no rank", "ranks 0, 1, 2, 3 declare other chunks"
    )


@FAULTS.add
def a_wing_of_a_pinwheel_is_a_row_too_long(w: World) -> ExpectedError:
    w.spoil(0, "pinwheel", local_shape=(3, 3))
    return not_covered("'pinwheel': elements [2:3, 0:3] are saved by more than one", "(ranks 0, 3, 4)")


@FAULTS.add
def a_box_of_as_many_elements_lies_crosswise(w: World) -> ExpectedError:
    w.spoil(0, "pinwheel", local_shape=(3, 2))  # 6 elements as before: the volumes still add up
    return not_covered(
        "'pinwheel': elements [0:2, 2:3] are saved by no rank",
        "'pinwheel': elements [2:3, 0:2] are saved by more than one main replica (ranks 0, 3)",
    )


# --- flat ranges


def element_of_flat(w: World, block: int, position: int) -> str:
    row, col = divmod(position, w.cols)
    return f"'flat': elements [{block * w.rows + row}:{block * w.rows + row + 1}, {col}:{col + 1}]"


@FAULTS.add
def flat_ranges_leave_a_gap(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    w.spoil(block * DP, "flat", flattened_range=slice(0, w.cut[block] - 1))
    return not_covered(f"{element_of_flat(w, block, w.cut[block] - 1)} are saved by no rank")


@FAULTS.add
def flat_ranges_overlap(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    rank = block * DP
    w.spoil(rank + 1, "flat", flattened_range=slice(w.cut[block] - 1, w.rows * w.cols))
    element = element_of_flat(w, block, w.cut[block] - 1)
    return not_covered(f"{element} are saved by more than one main replica (ranks {rank}, {rank + 1})")


@FAULTS.add
def a_flat_range_is_shifted(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    rank, cut = block * DP, w.cut[block]
    w.spoil(rank, "flat", flattened_range=slice(1, cut + 1))
    twice = f"{element_of_flat(w, block, cut)} are saved by more than one main replica"
    return not_covered(
        f"{element_of_flat(w, block, 0)} are saved by no rank",
        f"{twice} (ranks {rank}, {rank + 1})",
    )


@FAULTS.add
def the_last_flat_range_is_short(w: World) -> ExpectedError:
    block, numel = int(w.rng.integers(0, PP * TP)), w.rows * w.cols
    if w.cut[block] == numel - 1:
        w.spoil(block * DP + 1, "flat", flattened_range=slice(numel, numel))
    else:
        w.spoil(block * DP + 1, "flat", flattened_range=slice(w.cut[block], numel - 1))
    return not_covered(f"{element_of_flat(w, block, numel - 1)} are saved by no rank")


@FAULTS.add
def a_flat_range_is_empty(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    w.spoil(block * DP, "flat", flattened_range=slice(0, 0))
    return not_covered("'flat': elements [", "are saved by no rank")


@FAULTS.add
def a_rank_declares_the_block_instead_of_its_range(w: World) -> ExpectedError:
    block = int(w.rng.integers(0, PP * TP))
    rank = block * DP
    w.spoil(rank, "flat", flattened_range=None)
    return not_covered("'flat': elements [", f"more than one main replica (ranks {rank}, {rank + 1})")


@FAULTS.add
def flat_ranges_belong_to_the_wrong_block(w: World) -> ExpectedError:
    low, high = w.tensor(0, "flat").global_offset, w.tensor(6, "flat").global_offset
    w.spoil(0, "flat", global_offset=high)
    assert low != high
    return not_covered(
        "'flat': elements [0:",
        "are saved by no rank",
        "more than one main replica (ranks 0, 6",
    )
