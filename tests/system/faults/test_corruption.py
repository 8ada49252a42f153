"""Damage of every kind to every file of a checkpoint: a load gives the original or names what is damaged."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest
import torch

from megackpt import (
    CheckpointError,
    LoadOptions,
    LoadReport,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    load_with_report,
    save,
)
from megackpt.comm import Group
from megackpt.formats.index_reader import WHOLE_BYTES
from megackpt.storage import MemoryStore
from megackpt.testing.identical import difference
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import contents
from tests.support.effort import few
from tests.support.states import filled

Files = dict[str, bytes]
CASES = 5000
SEED = 20261122
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
KINDS = ("flip", "flip", "flip", "truncate", "extend", "swap files", "duplicate", "swap ranges")


def request(*, empty: bool, replica: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(SEED)
    tensors = []
    for number, dtype in enumerate(DTYPES):
        data = torch.randint(0, 2, (6, 5 + number), generator=generator).to(dtype)
        data = torch.zeros_like(data) if empty else data
        tensors.append(ShardedTensor.from_rank_offsets(f"t{number}", data, replica_id=replica))
    owned = None if empty else {"text": "x" * 50, "tensor": torch.arange(9)}
    return {"model": tensors, "o": ShardedObject("o", owned, (1,), (0,), replica_id=replica)}


def loaded(files: Files) -> object:
    return load(request(empty=True), MemoryStore(files=files))


@pytest.fixture(scope="module")
def original() -> Files:
    store = MemoryStore()
    common = {"step": 7, "table": torch.arange(20.0), "nested": {"a": [1, 2.5, None, "text"]}}
    save(request(empty=False) | common, store)
    return contents(store)


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
            result = loaded(files)
        except CheckpointError as error:
            outcomes[type(error).__name__] += 1
            if error.path is None and error.key is None:
                faults.append(f"{what}: names neither file nor key: {error}")
        except Exception as error:  # noqa: BLE001 - what must not be seen, collected
            faults.append(f"{what}: {type(error).__name__}: {error}")
        else:
            outcomes["equal"] += 1
            if (reason := difference(result, expected)) is not None:
                faults.append(f"{what}: wrong: {reason}")
        if time.thread_time() - began > 2:
            faults.append(f"{what}: took {time.thread_time() - began:.1f} s")
    print(outcomes)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(f[:300] for f in faults[:30])
    assert outcomes["IntegrityError"] > CASES // 10


BLOCKWISE_CASES = few(60, of=1000)
PARTS = 22_500


def of_parts(*, empty: bool, parts: range) -> dict[str, object]:
    tensors = [
        filled(0.0 if empty else float(number), 2, key="many", rank=number, ranks=PARTS) for number in parts
    ]
    return request(empty=empty) | {"many": tensors}


@pytest.fixture(scope="module")
def blockwise() -> Files:
    """A checkpoint whose index is too long to be read whole."""
    store = MemoryStore()
    save(of_parts(empty=False, parts=range(PARTS)), store)
    files = contents(store)
    assert max(len(data) for name, data in files.items() if name.startswith("index")) > WHOLE_BYTES
    return files


def spoil(data: bytearray, kind: str, at: int, generator: random.Random) -> None:
    if kind == "flip":
        data[at] ^= generator.randrange(1, 256)
    elif kind == "zero":
        data[at : at + 5000] = bytes(len(data[at : at + 5000]))
    elif kind == "truncate":
        del data[at:]
    else:
        assert kind == "extend"
        data += generator.randbytes(100)


def damaged_index(files: Files, case: int) -> tuple[Files, str]:
    """Return files with one fault, most often in the index, and half of these in its head."""
    generator = random.Random(f"{SEED}-index-{case}")
    index = next(name for name in files if name.startswith("index"))
    head = json.loads(files["metadata.json"])["index"]["head"]["nbytes"]
    kind = generator.choice(("flip", "flip", "flip", "zero", "truncate", "extend", "metadata"))
    data, result = bytearray(files[index]), dict(files)
    at = generator.randrange(head if case % 2 else len(data))
    if kind != "metadata":
        spoil(data, kind, at, generator)
    else:
        text = bytearray(files["metadata.json"])
        at = generator.randrange(len(text))
        text[at] ^= generator.randrange(1, 128)
        result["metadata.json"] = bytes(text)
    result[index] = bytes(data)
    return result, f"case {case}: {kind} at {at}"


def test_any_damage_of_an_index_that_is_read_in_blocks_is_harmless_or_named(blockwise: Files) -> None:
    def read(files: Files, case: int) -> object:
        first = random.Random(case).randrange(PARTS - 4)
        return load(of_parts(empty=True, parts=range(first, first + 4)), MemoryStore(files=files))

    expected = [read(blockwise, case) for case in range(BLOCKWISE_CASES)]
    outcomes: Counter[str] = Counter()
    for case in range(BLOCKWISE_CASES):
        files, what = damaged_index(blockwise, case)
        try:
            values = read(files, case)
        except CheckpointError as error:
            outcomes[type(error).__name__] += 1
            named = error.path is not None or error.key is not None
        else:
            outcomes["equal"] += 1
            named = difference(values, expected[case]) is None
        assert named, what
    print(outcomes)
    assert min(outcomes["IntegrityError"], outcomes["equal"]) > BLOCKWISE_CASES // 10


PROTECTED_CASES = few(60, of=1000)
PROTECTED_KINDS = ("flip", "flip", "zero", "truncate", "extend", "duplicate", "swap ranges", "lose")


def of_rank(rank: int, *, empty: bool) -> dict[str, object]:
    long = torch.arange(100_000.0) + rank  # more than one block
    rows = torch.zeros(100_000) if empty else long
    state = request(empty=empty, replica=rank)
    return state | {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, 5))}


@pytest.fixture(scope="module")
def protected() -> Files:
    """What five ranks have saved, every two or three files with a parity file."""
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save(of_rank(group.rank, empty=False), store, options=SaveOptions(parity=3), group=group)

    SimulatedWorld(5).run(save_rank)
    return contents(store)


def damaged_data(files: Files, case: int) -> tuple[Files, str, str]:
    """Return files of which one data file is damaged; its name, and what was done."""
    generator = random.Random(f"{SEED}-parity-{case}")
    names = sorted(name for name in files if name.startswith("data/"))
    name = names[case % len(names)]
    kind = generator.choice(PROTECTED_KINDS)
    data, result = bytearray(files[name]), dict(files)
    at = generator.randrange(len(data))
    if kind == "duplicate":
        data = bytearray(files[generator.choice([n for n in names if n != name])])
    elif kind == "swap ranges":
        length = generator.randrange(1, len(data) // 2)
        data[:length], data[-length:] = data[-length:], data[:length]
    elif kind != "lose":
        spoil(data, kind, at, generator)
    result[name] = bytes(data)
    if kind == "lose":
        del result[name]
    return result, name, f"case {case}: {kind} at {at} of {name}"


def test_any_damage_to_one_data_file_is_recovered_by_parity(protected: Files) -> None:
    def read(files: Files) -> tuple[object, LoadReport]:
        asked = of_rank(0, empty=True) | {
            "rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(500_000), (0, 0, 1))
        }
        fallback = LoadOptions(on_corrupt="fallback")
        return load_with_report(asked, MemoryStore(files=files), options=fallback)

    expected, report = read(protected)
    assert not report.recovered
    recovered = 0
    for case in range(PROTECTED_CASES):
        files, name, what = damaged_data(protected, case)
        values, report = read(files)
        assert difference(values, expected) is None, what
        assert {m.file for m in report.recovered} <= {name}, what
        assert {m.source for m in report.recovered} <= {"parity"}, what
        recovered += bool(report.recovered)
    assert recovered > PROTECTED_CASES // 2  # where it was not, the damage lies in what no load reads
