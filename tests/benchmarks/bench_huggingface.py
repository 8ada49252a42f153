"""Hugging Face folders: rate and memory of exports and imports, compared with raw copies and with DCP.

Everything runs on the disk of `--directory`, in processes of their own, in turns, `--rounds` times; medians
are printed, and ratios of times of the same round. Each process first does its work with a small model, so
that no import is in the time. Before each run the files that it reads are dropped from the page cache.
Everything that is written is durable when the time ends: we and the raw copies flush each file, and after
DCP, which does not, the whole file system is flushed. Raw copies read the folder, whose files are those that
an export writes.

    python tests/benchmarks/bench_huggingface.py --gib 4 --directory /work/bench

What is compared with DCP: its writer gets the state in memory and writes and consolidates a folder; our
export gets a checkpoint on the disk. Its reader fills tensors in
memory; so does `megackpt.load` from the same folder, while our import also writes a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megackpt.cli.benchmark.page_cache import drop
from tests.benchmarks.measuring import GIB, MIB, in_a_process, options
from tests.benchmarks.peers.counters import peak_above

HIDDEN, FFN, VOCAB, HEADS, GROUPS = 2048, 5632, 32_000, 16, 4
COPY_BYTES = 8 * MIB
SMALL = "small"  # the directory with the small model


def config_of(gib: float) -> dict[str, Any]:
    """Return a Llama of about so many GiB in bfloat16."""
    layer = HIDDEN * (2 * HIDDEN + 2 * HIDDEN * GROUPS // HEADS + 3 * FFN)
    layers = max(1, round((gib * GIB / 2 - 2 * VOCAB * HIDDEN) / layer))
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "torch_dtype": "bfloat16",
    }  # fmt: skip


def small_config() -> dict[str, Any]:
    """Return a Llama of some 100 kB."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return config_of(0) | sizes


def arrays_of(config: dict[str, Any], *, theirs: bool) -> dict[str, Any]:
    """Return tensors in the names of the folder or in ours, with bits that do not repeat in a tensor."""
    import torch

    from megackpt.maps import family_of
    from megackpt.whole.huggingface_map import with_stacked_layers_where_equal

    made = with_stacked_layers_where_equal(family_of(config).region_map(config))
    arrays = made.right if theirs else made.left
    generator = torch.Generator().manual_seed(1)
    return {
        key: torch.empty(array.stored, dtype=torch.int16)
        .random_(-(2**15), 2**15, generator=generator)
        .view(torch.bfloat16)
        for key, array in arrays.items()
    }


def save_ours(directory: Path, config: dict[str, Any]) -> None:
    """Save the state in our names."""
    import megackpt
    from megackpt import ShardedTensor

    arrays = arrays_of(config, theirs=False)
    state = {key: ShardedTensor.from_rank_offsets(key, array) for key, array in arrays.items()}
    directory.mkdir(parents=True)
    megackpt.save(state, directory, content_metadata={"huggingface_config": config})


Work = Callable[[], object]


def export(source: Path, target: Path, how: dict[str, Any]) -> Work:
    from megackpt import export_huggingface

    return lambda: export_huggingface(source, target, **how)


def import_(source: Path, target: Path, how: dict[str, Any]) -> Work:
    from megackpt import import_huggingface

    return lambda: import_huggingface(source, target, **how)


def raw_copy(source: Path, target: Path, how: dict[str, Any]) -> Work:
    """Copy all files through one buffer, and flush each."""
    buffer = memoryview(bytearray(COPY_BYTES))
    target.mkdir(parents=True)

    def copy() -> None:
        for number, file in enumerate(files_below(source)):
            with file.open("rb", buffering=0) as read, (target / str(number)).open("wb", 0) as write:
                while count := read.readinto(buffer):
                    write.write(buffer[:count])
                os.fsync(write.fileno())

    return copy


def direct_copy(source: Path, target: Path, how: dict[str, Any]) -> Work:
    """Copy all files with dd, past the page cache."""
    target.mkdir(parents=True)

    def copy() -> None:
        for number, file in enumerate(files_below(source)):
            command = ["dd", f"if={file}", f"of={target / str(number)}", "bs=8M", "conv=fsync", "status=none"]
            is_long = file.stat().st_size > 64 * MIB
            subprocess.run([*command, *(["iflag=direct", "oflag=direct"] if is_long else [])], check=True)

    return copy


def dcp_save(source: Path, target: Path, how: dict[str, Any]) -> Work:
    """Write the state with DCP, consolidated into as many files as our export has."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    state = arrays_of(json.loads((source / "config.json").read_text()), theirs=True)
    numbers = {key: int(file.split("-")[1]) for key, file in index.items()}
    writer = HuggingFaceStorageWriter(
        str(target), fqn_to_index_mapping=numbers, thread_count=2, save_distributed=True,
        enable_consolidation=True, thread_count_consolidation=2,
    )  # fmt: skip

    def save() -> None:
        dcp.save(state, storage_writer=writer, no_dist=True)
        os.sync()

    return save


def dcp_load(source: Path, target: Path, how: dict[str, Any]) -> Work:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state, reader = empty_state(source), HuggingFaceStorageReader(str(source), thread_count=2)
    return lambda: dcp.load(state, storage_reader=reader, no_dist=True)


def our_load(source: Path, target: Path, how: dict[str, Any]) -> Work:
    from megackpt import ShardedTensor, load

    state = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in empty_state(source).items()}
    return lambda: load(state, source)


def empty_state(folder: Path) -> dict[str, Any]:
    """Return tensors of the folder's shapes whose memory is touched."""
    import torch

    from megackpt.maps import family_of

    config = json.loads((folder / "config.json").read_text())
    arrays = family_of(config).region_map(config).right
    return {key: torch.ones(array.stored, dtype=torch.bfloat16) for key, array in arrays.items()}


WORK: dict[str, Callable[[Path, Path, dict[str, Any]], Work]] = {
    "export": export, "import": import_, "raw": raw_copy, "direct": direct_copy, "dcp save": dcp_save,
    "dcp load": dcp_load, "load": our_load,
}  # fmt: skip


def run_child(name: str, source: Path, target: Path, how: dict[str, Any]) -> None:
    """Do one part of the work in this process; print its time, and by how much it raised resident memory."""
    WORK[name](source.parent / SMALL / source.name, target, how)()
    shutil.rmtree(target, ignore_errors=True)
    seconds = 0.0

    def timed() -> None:
        nonlocal seconds
        work = WORK[name](source, target, how)
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began

    print(json.dumps({"peak": peak_above(timed), "seconds": seconds}))


def files_below(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def measured(name: str, source: Path, target: Path, *, keep: bool = False, **how: Any) -> dict[str, float]:
    """Return the seconds and the peak of one run in a process of its own, whose files are then removed."""
    drop(source)
    result: dict[str, float] = in_a_process(__file__, "--child", name, source, target, json.dumps(how))
    if not keep:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
    return result


def compare_speed(source: Path, folder: Path, scratch: Path, *, rounds: int, file_bytes: int) -> None:
    times: dict[str, list[float]] = {}
    runs = [
        ("raw", folder, {}),
        ("direct", folder, {}),
        ("export", source, {"verify": False, "max_file_bytes": file_bytes}),
        ("dcp save", folder, {}),
        ("import", folder, {"verify": False}),
        ("load", folder, {}),
        ("dcp load", folder, {}),
    ]
    for number in range(rounds):
        for name, read, how in runs:
            seconds = measured(name, read, scratch, **how)["seconds"]
            times.setdefault(name, []).append(seconds)
            print(f"round {number}: {name} {seconds:.2f} s", flush=True)
    fastest = [min(pair) for pair in zip(times["raw"], times["direct"], strict=True)]
    ratios = {
        "export / faster raw copy (rate)": (fastest, times["export"]),
        "import / faster raw copy (rate)": (fastest, times["import"]),
        "export vs DCP's writer": (times["dcp save"], times["export"]),
        "import vs DCP's reader": (times["dcp load"], times["import"]),
        "load vs DCP's reader": (times["dcp load"], times["load"]),
    }
    for name, seconds in times.items():
        print(f"{name}: median {statistics.median(seconds):.2f} s")
    for name, (slow, quick) in ratios.items():
        print(f"{name}: median {statistics.median(a / b for a, b in zip(slow, quick, strict=True)):.2f}")


def compare_memory(source: Path, folder: Path, scratch: Path) -> None:
    buffers = [{"buffer_bytes": nbytes} for nbytes in (8 * MIB, 32 * MIB)]
    runs = [
        ("export", source, {"max_file_bytes": file_bytes} | sizes)
        for file_bytes in (500 * MIB, 5_000_000_000)
        for sizes in buffers
    ]
    for name, read, sizes in [*runs, *(("import", folder, sizes) for sizes in buffers)]:
        result = measured(name, read, scratch, **sizes)
        summary = f"{result['seconds']:.2f} s, peak {result['peak'] / MIB:.0f} MiB"
        print(f"{name}, {sizes}: {summary}", flush=True)


def main() -> None:
    default = Path("bench_huggingface")
    arguments = options(__doc__, child={"nargs": 4}, gib=4.0, rounds=3, directory=default)
    if arguments.child:
        name, source, target, how = arguments.child
        run_child(name, Path(source), Path(target), json.loads(how))
        return
    root: Path = arguments.directory
    root.mkdir(parents=True)
    try:
        source, folder, scratch = root / "checkpoint", root / "folder", root / "scratch"
        small = root / SMALL
        save_ours(small / "checkpoint", small_config())
        export(small / "checkpoint", small / "folder", {"max_file_bytes": 40_000})()
        save_ours(source, config_of(arguments.gib))
        file_bytes = max(int(arguments.gib * GIB / 4), 2 * VOCAB * HIDDEN)
        measured("export", source, folder, keep=True, max_file_bytes=file_bytes)
        total = sum(path.stat().st_size for path in files_below(folder))
        print(f"{total / GIB:.2f} GiB, {len(os.sched_getaffinity(0))} processors")
        compare_speed(source, folder, scratch, rounds=arguments.rounds, file_bytes=file_bytes)
        compare_memory(source, folder, scratch)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
