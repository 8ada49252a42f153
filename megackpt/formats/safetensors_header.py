"""Reads and checks headers of safetensors files; `safetensors_encoding` makes them.

The rules are those of the safetensors library (https://huggingface.co/docs/safetensors; `Metadata.validate`
of its Rust crate): tensors follow each other without gaps and overlaps, and the file ends with the last one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megackpt.codec.tree import object_of
from megackpt.errors import FormatError
from megackpt.formats.safetensors_encoding import DTYPE_NAMES, LENGTH_BYTES, METADATA
from megackpt.plans.metadata import DTYPES
from megackpt.storage import Store, digest_of

MAX_HEADER_BYTES = 100_000_000
"""Longest header, as in the safetensors library."""

# Bits of an element of dtypes that have no name here: several elements share a byte.
_SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_FIELDS = ("dtype", "shape", "data_offsets")
_ENTRY_MAX_CHARACTERS = 4096  # of JSON for one tensor; 100 are usual
_SPACE = re.compile(r"[ \t\n\r]*")
_MAX_UINT = 2**64 - 1
_MAX_DIGITS = 20  # of 2**64 - 1; longer integers are only looked at as floats, which takes linear time


class HeaderEntry(NamedTuple):
    """A tensor of a safetensors file.

    Attributes:
        name: its name.
        dtype: the code of its dtype, such as `"BF16"`; a key of `DTYPE_NAMES`, or one that is not known here.
        shape: its extents, in elements.
        start: its first byte, counted from the beginning of the data.
        stop: one past its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file, checked.

    Attributes:
        entries: the tensors, in the order of their bytes: without gaps, up to the end of the file.
        data_start: the byte of the file with which data begins.
        metadata: the strings of `__metadata__`.
        digest: xxh3-128 of the bytes of the header, 32 hexadecimal digits.
    """

    entries: tuple[HeaderEntry, ...]
    data_start: int
    metadata: Mapping[str, str]
    digest: str

    @property
    def file_nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.data_start + (self.entries[-1].stop if self.entries else 0)


def read_header(store: Store, name: str) -> Header:
    """Return the header of a safetensors file. Nothing is read beyond the header. Local.

    Raises:
        FormatError: the file is not a safetensors file, or its size is not that which its header describes.
        StorageError: the file cannot be read.
    """
    where = f"{store.location}/{name}"
    size = store.size(name)
    if size < LENGTH_BYTES:
        raise _error(f"the file has {size} bytes, fewer than the length of a header", where)
    prefix = bytearray(LENGTH_BYTES)
    store.read_into(name, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    # Checked before memory is allocated for it.
    if length > MAX_HEADER_BYTES:
        raise _error(
            f"it says that its header has {length:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed", where
        )
    if length > size - LENGTH_BYTES:
        raise _error(f"it says that its header has {length:,} bytes, and the file has only {size:,}", where)
    text = bytearray(length)
    store.read_into(name, LENGTH_BYTES, memoryview(text))
    return parse_header(bytes(text), data_nbytes=size - LENGTH_BYTES - length, where=where)


def parse_header(text: bytes, *, data_nbytes: int, where: str) -> Header:
    """Return a header from its JSON text.

    Args:
        text: the bytes after the length of the header.
        data_nbytes: size of the file without header and length.
        where: what errors call the file.

    Raises:
        FormatError: the text is not a header, or does not fit to data of this size.
    """
    entries: list[HeaderEntry] = []
    metadata: dict[str, str] = {}
    try:
        reader = _HeaderText(text.decode())
        for name in reader.members():
            if name == METADATA:
                metadata = reader.strings()
            else:
                entries.append(_entry(name, reader.fields(name), where))
        reader.check_end()
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise _error(f"its header is not that of a safetensors file ({error})", where) from error
    # By start, then stop: a tensor without bytes comes before the one that begins at the same byte.
    entries.sort(key=_byte_range)
    _check_ranges(entries, data_nbytes, where)
    return Header(tuple(entries), LENGTH_BYTES + len(text), metadata, digest_of(text))


def _integer(digits: str) -> int | float:
    # Like the Rust parser: what is no integer of 64 bits is a float, and so no extent and no offset.
    return _finite_float(digits) if digits == "-0" or len(digits) > _MAX_DIGITS else int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is infinite as a float")
    return value


def _reject_constant(text: str) -> Any:
    raise ValueError(f"the constant {text}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=object_of,
    parse_int=_integer,
    parse_float=_finite_float,
    parse_constant=_reject_constant,
)


class _HeaderText:
    """The JSON text of a header, read from front to back, as strictly as the safetensors library reads it.

    A header has up to 100 MB. It is read one tensor at a time, and the text of each is limited: so a text
    that only costs memory, such as a long list of lists, is rejected at its first tensor.

    Methods raise ValueError for any other text.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        # The text itself is valid Unicode, so only an escape can be half of a character.
        self._has_escapes = "\\u" in text
        self._at = 0
        self._skip_space()

    def members(self) -> Iterator[str]:
        """Yield the name of each member of an object, whose value has to be read before the next name."""
        self._expect("{")
        names: set[str] = set()
        is_last = self._take("}")
        while not is_last:
            name = self._string()
            if name in names:
                raise ValueError(f"the key {name!r:.80} is repeated in one object")
            names.add(name)
            self._expect(":")
            yield name
            is_last = not self._take(",")
            if is_last:
                self._expect("}")

    def strings(self) -> dict[str, str]:
        """Return an object of strings; an empty one for null."""
        return {} if self._take("null") else {name: self._string() for name in self.members()}

    def fields(self, name: str) -> Any:
        """Return the value of a tensor, which should be an object; its text has a limited length."""
        # A longer entry is cut off here, and the decoder then raises an error.
        text = self._text[self._at : self._at + _ENTRY_MAX_CHARACTERS]
        try:
            value, length = _DECODER.raw_decode(text)
        except ValueError as error:
            raise ValueError(f"at {name!r:.200}: {error}") from error
        self._advance(length)
        if self._has_escapes:
            _check_characters(value)
        return value

    def check_end(self) -> None:
        """Check that the text has been read to its end."""
        if self._at != len(self._text):
            raise ValueError(f"there is more after character {self._at:,}")

    def _string(self) -> str:
        if not self._text.startswith('"', self._at):
            raise ValueError(f"a string is expected at character {self._at:,}")
        value, end = _DECODER.raw_decode(self._text, self._at)
        self._advance(end - self._at)
        if self._has_escapes:
            _check_characters(value)
        return str(value)

    def _take(self, word: str) -> bool:
        """Skip a word and the space after it, if it is next; return whether it was."""
        is_next = self._text.startswith(word, self._at)
        if is_next:
            self._advance(len(word))
        return is_next

    def _expect(self, word: str) -> None:
        if not self._take(word):
            raise ValueError(f"{word!r} is expected at character {self._at:,}")

    def _advance(self, length: int) -> None:
        self._at += length
        self._skip_space()

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None  # it matches an empty text
        self._at = match.end()


def _check_characters(value: Any) -> None:
    """Check that no escape in a value stands for half of a character, which no text can have."""
    json.dumps(value, ensure_ascii=False).encode()


def _entry(name: str, fields: Any, where: str) -> HeaderEntry:
    """Return the checked entry of a tensor; whether it fits to the others is checked later."""
    if not isinstance(fields, dict) or not all(field in fields for field in _FIELDS):
        raise _error("it has no dtype, shape and data_offsets in the header", where, key=name)
    dtype, shape, offsets = (fields[field] for field in _FIELDS)
    # The library ignores other fields, but not those that are nested too deeply.
    if len(fields) > len(_FIELDS) and any(
        isinstance(value, (dict, list)) for field, value in fields.items() if field not in _FIELDS
    ):
        raise _error("it has nested fields in the header, which no safetensors file has", where, key=name)
    if not isinstance(dtype, str):
        raise _error(f"its dtype is not a string, but {_short(dtype)}", where, key=name)
    if not _are_extents(shape):
        raise _error(f"its shape is not a list of extents, but {_short(shape)}", where, key=name)
    if not _are_extents(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(f"its data_offsets are not a range of bytes, but {_short(offsets)}", where, key=name)
    _check_size(name, dtype, shape, offsets[1] - offsets[0], where)
    return HeaderEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_extents(values: Any) -> bool:
    """Return whether a JSON value is a list of integers that fit into 64 bits without a sign."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_UINT for value in values
    )


def _check_size(name: str, dtype: str, shape: Sequence[int], nbytes: int, where: str) -> None:
    """Check that a tensor has as many bytes as its shape and dtype say; any number for an unknown dtype."""
    numel = 1
    for extent in shape:
        numel *= extent
        # The library rejects a product that overflows even if a later extent is 0.
        if numel > _MAX_UINT:
            raise _error(f"its shape {_short(shape)} is larger than any tensor", where, key=name)
    bits = 8 * DTYPES[DTYPE_NAMES[dtype]].itemsize if dtype in DTYPE_NAMES else _SUB_BYTE_BITS.get(dtype)
    if bits is not None and (numel * bits > _MAX_UINT or numel * bits != 8 * nbytes):
        raise _error(
            f"its data_offsets give it {nbytes:,} bytes, its dtype {dtype} and shape {_short(shape)} "
            f"{numel * bits / 8:,.15g}",
            where,
            key=name,
        )


def _short(value: Any) -> str:
    """Return a JSON value as text for an error; only the beginning of a long one is looked at."""
    return f"{value[:16] if isinstance(value, (list, str)) else value!r:.80}"


def _byte_range(entry: HeaderEntry) -> tuple[int, int]:
    return entry.start, entry.stop


def _check_ranges(entries: Sequence[HeaderEntry], data_nbytes: int, where: str) -> None:
    """Check that tensors, in the order of their bytes, fill the data without gaps and overlaps."""
    position = 0
    for entry in entries:
        if entry.start != position:
            fault = "overlaps another tensor" if entry.start < position else "leaves a gap before it"
            raise _error(
                f"its bytes [{entry.start:,}, {entry.stop:,}) of the data do not begin where the tensor "
                f"before it ends, at {position:,}: it {fault}",
                where,
                key=entry.name,
            )
        position = entry.stop
    if position > data_nbytes:
        last = next(entry for entry in entries if entry.stop > data_nbytes)
        raise _error(
            f"its bytes [{last.start:,}, {last.stop:,}) of the data are not all in the file, which has "
            f"{data_nbytes:,} bytes of data: it was cut short",
            where,
            key=last.name,
        )
    if position < data_nbytes:
        raise _error(f"the file has {data_nbytes - position:,} bytes after its last tensor", where)


def _error(fault: str, where: str, *, key: str | None = None) -> FormatError:
    of = f"{key!r:.200}: " if key is not None else ""
    return FormatError(
        f"{where}: {of}{fault}. The file is damaged, or not a safetensors file: fetch it again, or load "
        f"another checkpoint.",
        key=key,
        path=where,
    )
