"""Rounds of an exchange: which parts of chunks are sent in one round, so that no rank buffers too much.

Pure and greedy: in each round readers take turns, and each adds its next parts as long as they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megackpt.plans.geometry import Ints


@dataclass(frozen=True, slots=True, eq=False)
class BufferSizes:
    """Bytes that ranks buffer for each of p parts.

    Attributes:
        reader: the rank that reads each part, `[p]`.
        reader_nbytes: what it buffers for the part, `[p]`.
        first: where the receivers of each part begin, `[p + 1]`.
        receiver: ranks that receive something of a part, `[r]`.
        receiver_nbytes: what each of these buffers for the part, `[r]`.
        ranks: number of ranks.
    """

    reader: Ints
    reader_nbytes: Ints
    first: Ints
    receiver: Ints
    receiver_nbytes: Ints
    ranks: int


def assign_rounds(sizes: BufferSizes, *, order: Ints, most_sent: int, most_received: int) -> Ints:
    """Return the round of each part, `[p]`; the parts of a reader are exchanged in the given order.

    In one round no reader buffers more than `most_sent` bytes, and no rank receives more than
    `most_received`. A single part may exceed either.
    """
    rounds = np.zeros(len(sizes.reader), np.int64)
    # The next part of a reader is the last of its queue.
    queues: list[list[int]] = [[] for _ in range(sizes.ranks)]
    for part in order[::-1].tolist():
        queues[int(sizes.reader[part])].append(part)
    reader_nbytes, first = sizes.reader_nbytes.tolist(), sizes.first.tolist()
    number = 0
    while any(queues):
        received = np.zeros(sizes.ranks, np.int64)
        for turn in range(sizes.ranks):  # another rank begins each round, so that none is always last
            queue = queues[(number + turn) % sizes.ranks]
            sent = 0
            while queue:
                part = queue[-1]
                # A part is sent to all of its receivers in one round, so it waits for the fullest of them.
                rows = slice(first[part], first[part + 1])
                receivers = sizes.receiver[rows]
                before = received[receivers]
                after = before + sizes.receiver_nbytes[rows]
                too_much_sent = sent and sent + reader_nbytes[part] > most_sent
                # A rank that has received nothing yet may take one part of any size.
                if too_much_sent or bool(((after > most_received) & (before > 0)).any()):
                    break
                received[receivers] = after
                sent += reader_nbytes[part]
                rounds[part] = number
                queue.pop()
        number += 1
    return rounds
