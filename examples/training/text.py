"""Real text as training samples, by number.

The tokens of sample `i` are a pure function of the text and `i`. So the data position of a run is one
integer, whatever the layout: the number of samples that were consumed.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

END_OF_TEXT = 256
VOCAB_SIZE = 257  # bytes, and the end of a text


class NoTextError(Exception):
    """There is no text to train on, or too little."""


class Text:
    """Byte-level tokens of some files, cut into samples of `seq_length` tokens and their successors.

    The samples are the non-overlapping windows of the text, in an order that looks random: the distance from
    one to the next is coprime to the number of windows, so that an epoch has each window once.

    Attributes:
        windows: the number of windows, which are the samples of an epoch.
        order: plain values that distinguish the order of the samples from others.
    """

    def __init__(self, texts: Iterable[bytes], *, seq_length: int, seed: int) -> None:
        joined = bytearray()
        ends: list[int] = []
        for text in texts:
            joined += text + b"\0"  # replaced below by END_OF_TEXT, which does not fit into a byte
            ends.append(len(joined) - 1)
        self.windows = (len(joined) - 1) // seq_length  # the last label of a window is the next one's first
        if self.windows < 1:
            raise NoTextError(
                f"the text has {len(joined)} tokens, fewer than the {seq_length + 1} of one sample; give "
                f"more text to --data or a smaller --seq-length"
            )
        self._tokens = torch.frombuffer(joined, dtype=torch.uint8).to(torch.int16)
        self._tokens[ends] = END_OF_TEXT
        self._seq_length = seq_length
        # From one window to the next about 0.618 of the text: the golden ratio keeps neighbours far apart.
        self._stride = _coprime(self.windows, start=int(self.windows * 0.6180339887) + seed)
        self.order = {"text": _digest(self._tokens), "seq_length": seq_length, "seed": seed}

    @classmethod
    def read(cls, files: Sequence[Path], *, seq_length: int, seed: int) -> Text:
        """Read files; without any, the sources of Python's own standard library.

        Raises:
            NoTextError: a file cannot be read, or all files together are shorter than a sample.
        """
        files = files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        try:
            return cls((path.read_bytes() for path in files), seq_length=seq_length, seed=seed)
        except OSError as error:
            raise NoTextError(
                f"cannot read {error.filename}: {error.strerror}; give readable files to --data"
            ) from error

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels of a sample, int64 `[seq_length]`. Numbers go on over epochs."""
        window = number * self._stride % self.windows
        window_tokens = self._tokens[window * self._seq_length :][: self._seq_length + 1].long()
        return window_tokens[:-1], window_tokens[1:]

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens and labels of several samples, both `[len(numbers), seq_length]`."""
        tokens, labels = zip(*(self.sample(n) for n in numbers), strict=True)
        return torch.stack(tokens), torch.stack(labels)


def _digest(tokens: Tensor) -> str:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()


def _coprime(number: int, *, start: int) -> int:
    """Return the first number from `start` on that shares no divisor with `number`."""
    candidate = max(1, start)
    while math.gcd(candidate, number) != 1:
        candidate += 1
    return candidate
