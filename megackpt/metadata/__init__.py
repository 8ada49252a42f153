"""What a checkpoint contains, as plain columns. No torch, no I/O."""

from megackpt.metadata.chunk_table import (
    ArraySpec,
    ChunkTable,
    DecodedArrays,
    decode_arrays,
    itemsizes,
    pad_shapes,
)
from megackpt.metadata.columns import (
    Column,
    column,
    integers,
    narrow_dtype,
    pack_columns,
    pack_strings,
    unpack_columns,
    unpack_strings,
)
from megackpt.metadata.declared import DeclaredChunks, decode_declarations, merge_declarations
from megackpt.metadata.dtypes import DTYPES, OBJECT
from megackpt.metadata.holdings import (
    PART_OF_RANKS,
    REPLICATED,
    Holdings,
    Lists,
    lists_of,
    merge_lists,
)
from megackpt.metadata.row_numbers import place_bases
from megackpt.metadata.stored import DIGEST_BLOCK_BYTES, StoredChunks, block_counts

__all__ = [
    "DIGEST_BLOCK_BYTES",
    "DTYPES",
    "OBJECT",
    "PART_OF_RANKS",
    "REPLICATED",
    "ArraySpec",
    "ChunkTable",
    "Column",
    "DeclaredChunks",
    "DecodedArrays",
    "Holdings",
    "Lists",
    "StoredChunks",
    "block_counts",
    "column",
    "decode_arrays",
    "decode_declarations",
    "integers",
    "itemsizes",
    "lists_of",
    "merge_declarations",
    "merge_lists",
    "narrow_dtype",
    "pack_columns",
    "pack_strings",
    "pad_shapes",
    "place_bases",
    "unpack_columns",
    "unpack_strings",
]
