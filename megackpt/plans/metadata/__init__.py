"""What a checkpoint contains, as plain columns. No torch, no I/O."""

from megackpt.plans.metadata.chunk_table import (
    DIGEST_BLOCK_BYTES,
    DTYPES,
    OBJECT,
    ArraySpec,
    ChunkTable,
    DecodedArrays,
    StoredChunks,
    block_counts,
    decode_arrays,
    itemsizes,
    pad_shapes,
)
from megackpt.plans.metadata.columns import (
    Column,
    column,
    integers,
    narrow_dtype,
    pack_columns,
    pack_strings,
    unpack_columns,
    unpack_strings,
)
from megackpt.plans.metadata.declarations import DeclaredChunks
from megackpt.plans.metadata.merged_declarations import (
    ON_SOME_RANKS,
    REPLICATED_VALUE,
    MergedDeclarations,
    PackedDeclarations,
    merge_packed_declarations,
    pack_declarations,
)

__all__ = [
    "DIGEST_BLOCK_BYTES",
    "DTYPES",
    "OBJECT",
    "ON_SOME_RANKS",
    "REPLICATED_VALUE",
    "ArraySpec",
    "ChunkTable",
    "Column",
    "DeclaredChunks",
    "DecodedArrays",
    "MergedDeclarations",
    "PackedDeclarations",
    "StoredChunks",
    "block_counts",
    "column",
    "decode_arrays",
    "integers",
    "itemsizes",
    "merge_packed_declarations",
    "narrow_dtype",
    "pack_columns",
    "pack_declarations",
    "pack_strings",
    "pad_shapes",
    "unpack_columns",
    "unpack_strings",
]
