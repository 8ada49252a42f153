"""Declarations that are written as rows, without tensors."""

from __future__ import annotations

import numpy as np

from megackpt.plans.metadata import ArraySpec, ChunkTable, DeclaredChunks

Row = tuple[str, tuple[int, ...], tuple[int, ...], slice | None]
"""A chunk: its key, start, shape and flat range."""


def declared_rows(shapes: dict[str, tuple[int, ...]], *rows: Row, rank: int = 0) -> DeclaredChunks:
    """Return main replicas of one rank, in the order of the rows; shapes has the global ones."""
    keys = sorted(shapes)
    dims = max(map(len, shapes.values()))

    def padded(values: tuple[int, ...], fill: int) -> list[int]:
        return [*values, *[fill] * (dims - len(values))]

    flats = [(f.start, f.stop) if f else (0, int(np.prod(shape, dtype=int))) for _, _, shape, f in rows]
    low, high = np.array(flats, int).reshape(-1, 2).T
    table = ChunkTable(
        tuple(ArraySpec(key, "int8", shapes[key]) for key in keys),
        np.array([keys.index(key) for key, *_ in rows], int),
        np.array([padded(start, 0) for _, start, _, _ in rows], int).reshape(-1, dims),
        np.array([padded(shape, 1) for _, _, shape, _ in rows], int).reshape(-1, dims),
        low,
        high,
        high - low,
    )
    return DeclaredChunks(
        table,
        np.ones(len(rows), np.bool_),
        np.zeros(len(rows), np.bool_),
        np.full(len(rows), rank),
        np.arange(len(rows)),
    )
