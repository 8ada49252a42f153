"""Damage of every kind to every file of a checkpoint: a load gives the original or names what is damaged."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch

from megackpt import CheckpointError, ShardedObject, ShardedTensor, load, save
from megackpt.storage import MemoryStore
from megackpt.testing.identical import difference

Files = dict[str, bytes]
CASES = 5000
SEED = 20261122
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
KINDS = ("flip", "flip", "flip", "truncate", "extend", "swap files", "duplicate", "swap ranges")


def request(*, empty: bool) -> dict[str, object]:
    generator = torch.Generator().manual_seed(SEED)
    tensors = []
    for number, dtype in enumerate(DTYPES):
        data = torch.randint(0, 2, (6, 5 + number), generator=generator).to(dtype)
        data = torch.zeros_like(data) if empty else data
        tensors.append(ShardedTensor.from_rank_offsets(f"t{number}", data))
    held = None if empty else {"text": "x" * 50, "tensor": torch.arange(9)}
    return {"model": tensors, "o": ShardedObject("o", held, (1,), (0,))}


def loaded(files: Files) -> object:
    return load(request(empty=True), MemoryStore(files=files))


@pytest.fixture(scope="module")
def original() -> Files:
    store = MemoryStore()
    common = {"step": 7, "table": torch.arange(20.0), "nested": {"a": [1, 2.5, None, "text"]}}
    save(request(empty=False) | common, store)
    return {name: store.read(name, max_bytes=1 << 20) for name in store.names()}


def damaged(files: Files, case: int) -> tuple[Files, str]:
    """Return files with one fault, and what it is."""
    generator = random.Random(f"{SEED}-{case}")
    names = sorted(files)
    name = names[case % len(names)]  # every file equally often, however small
    kind = generator.choice(KINDS)
    data, result = bytearray(files[name]), dict(files)
    other = generator.choice([n for n in names if n != name])
    at = generator.randrange(len(data))
    if kind == "flip":
        data[at] ^= generator.randrange(1, 256)
    elif kind == "truncate":
        del data[at:]
    elif kind == "extend":
        data += generator.randbytes(generator.randrange(1, 5000))
    elif kind == "duplicate":
        data = bytearray(files[other])
    elif kind == "swap files":
        data, result[other] = bytearray(files[other]), files[name]
    else:
        length = generator.randrange(1, 1 + len(data) // 2)
        first = generator.randrange(len(data) - 2 * length + 1)
        second = generator.randrange(first + length, len(data) - length + 1)
        low, high = data[first : first + length], data[second : second + length]
        data[first : first + length], data[second : second + length] = high, low
    result[name] = bytes(data)
    return result, f"case {case}: {kind} at {at} of {name}"


def test_any_damage_is_harmless_or_named(original: Files) -> None:
    expected = loaded(original)
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    for case in range(CASES):
        files, what = damaged(original, case)
        began = time.thread_time()
        try:
            found = loaded(files)
        except CheckpointError as error:
            outcomes[type(error).__name__] += 1
            if error.path is None and error.key is None:
                faults.append(f"{what}: names neither file nor key: {error}")
        except Exception as error:  # noqa: BLE001 - what must not be seen, collected
            faults.append(f"{what}: {type(error).__name__}: {error}")
        else:
            outcomes["equal"] += 1
            if (reason := difference(found, expected)) is not None:
                faults.append(f"{what}: wrong: {reason}")
        if time.thread_time() - began > 2:
            faults.append(f"{what}: took {time.thread_time() - began:.1f} s")
    print(outcomes)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(f[:300] for f in faults[:30])
    assert outcomes["IntegrityError"] > CASES // 10
