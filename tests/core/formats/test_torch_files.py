"""Files of torch.save become a checkpoint: full state dicts, and ShardedTensors; crafted files are errors."""

from __future__ import annotations

import os
import random
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megackpt
from megackpt import CheckpointError, FormatError, IntegrityError, NotACheckpointError
from megackpt.cli import main
from megackpt.errors import UnknownClassError, UnsupportedError
from megackpt.formats.foreign import mapped_memory
from megackpt.formats.foreign.mapped_files import load_mapped_file
from megackpt.formats.foreign.mapped_memory import in_memory
from megackpt.formats.foreign.state import ForeignArray, have_equal_bits
from megackpt.formats.foreign.strategy import TensorChunks
from megackpt.formats.torch_dist.save import TorchDistSaveStrategy
from tests.support.effort import few, with_all
from tests.support.states import PickledCall, sharded
from tests.system.attacks import pickles
from tests.system.attacks.opcodes import binary, call, named, pickled, tensor, text, zipped


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def assert_same(loaded: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):
        assert loaded.dtype == saved.dtype
        assert torch.equal(loaded, saved)
    elif isinstance(saved, dict):
        assert loaded.keys() == saved.keys()
        for key in saved:
            assert_same(loaded[key], saved[key])
    elif isinstance(saved, list):
        assert len(loaded) == len(saved)
        for ours, theirs in zip(loaded, saved, strict=True):
            assert_same(ours, theirs)
    else:
        assert loaded == saved


@pytest.mark.parametrize("form", ["file", "folder", "ranks", "kinds"])
def test_a_full_state_dict_loads_as_one_that_was_saved(form: str, tmp_path: Path) -> None:
    saved = state_of(*trained(), 7)
    source = tmp_path / "source"
    source.mkdir()
    if form == "ranks":
        for rank in range(2):
            torch.save(saved, source / f"rank_{rank}.pt")
    elif form == "kinds":
        torch.save(saved["model"], source / "model.pt")
        torch.save(saved["optimizer"], source / "optimizer.pt")
    else:
        torch.save(saved, source / "checkpoint.pt")
    report = megackpt.import_torch(
        source / "checkpoint.pt" if form == "file" else source, tmp_path / "imported"
    )
    assert report.is_verified
    assert report.left_out == ()
    if form == "kinds":
        del saved["step"]
    assert_same(megackpt.load({}, tmp_path / "imported"), saved)
    fresh = state_of(*trained(seed=1), 0)
    loaded = megackpt.load({key: fresh[key] for key in saved}, tmp_path / "imported")
    assert_same(loaded, saved)


def test_prefixes_of_wrappers_are_left_out_and_a_prefix_is_put_before_bare_weights(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "ddp.pth")
    command = ["convert", str(tmp_path / "ddp.pth"), str(tmp_path / "new"), "--from", "torch"]
    assert main([*command, "--prefix", "model."]) == 0
    assert_same(megackpt.load({}, tmp_path / "new"), {"model": model.state_dict()})


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module._orig_mod.{}", "{}"),
        ("_orig_mod.module.{}", "{}"),
        ("body._orig_mod.{}", "body.{}"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.{}", "a.{}"),
        ("my_orig_mod.{}", "my_orig_mod.{}"),
    ],
)
def test_what_wrappers_put_into_names_is_left_out(wrapped: str, plain: str, tmp_path: Path) -> None:
    torch.save({wrapped.format(name): torch.ones(2) for name in "xy"}, tmp_path / "a.pt")
    megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new", prefix="model.")
    assert set(megackpt.load_tensors_metadata(tmp_path / "new")) == {"model." + plain.format(n) for n in "xy"}
    # Two names are not made one.
    torch.save({"a.x": torch.ones(1), "a._orig_mod.x": torch.zeros(1)}, tmp_path / "two.pt")
    assert len(megackpt.load({}, tmp_path / "two.pt")) == 2


def test_tensors_in_tuples_are_common_state(tmp_path: Path) -> None:
    torch.save({"pair": (torch.arange(3), 1), "w": torch.ones(2)}, tmp_path / "s.pt")
    for path in (tmp_path / "s.pt", megackpt.import_torch(tmp_path / "s.pt", tmp_path / "c").location):
        tensor, number = megackpt.load_common_state_dict(path)["pair"]
        assert (tensor.tolist(), number) == ([0, 1, 2], 1)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


NOT_DENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    "quantised by channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "quantized",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
    "blocks": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "sparse_bsr"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (jagged, "nested"),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "bits8"),
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "turned": lambda t: t.t(),
    "a column": lambda t: t[:, 1],
    "every other": lambda t: t[::2, 1::3],
    "expanded": lambda t: t[:1].expand(5, *t.shape[1:]),
    "conjugate": lambda t: torch.complex(t, -t).conj(),
    "conjugate, turned": lambda t: torch.complex(t, -t).t().conj(),
    "negative": lambda t: torch._neg_view(t),
    "negative of a conjugate": lambda t: torch.complex(t, t).conj().imag,
    "one number": lambda t: t[2, 3],
    "empty": lambda t: t[:0],
}
DENSE: dict[str, Callable[[], Any]] = {
    **{name: lambda form=form: form(torch.randn(8, 6)) for name, form in FORMS.items()},
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "many dims": lambda: torch.ones([1] * 64),
    "float8": lambda: torch.randn(3).to(torch.float8_e4m3fn),
    "numbers of numpy": lambda: np.arange(4.0),
    "texts of numpy": lambda: np.array(["a", "bc"]),
}
TOOLS: dict[str, Callable[[Path, Path], Any]] = {
    "import": lambda source, target: megackpt.import_torch(source, target),
    "convert": lambda source, target: megackpt.convert(source, target, "megackpt"),
    "load": lambda source, _: megackpt.load({}, source),
    "inspect": lambda source, _: megackpt.inspect(source),
    "verify": lambda source, _: raise_damage(source),
}


def raise_damage(source: Path) -> None:
    """Verify a file; what cannot be read is damage in its report."""
    for damage in megackpt.verify(source).damages:
        raise CheckpointError(damage.what)


@pytest.mark.filterwarnings("default")  # torch warns of some of these kinds
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_tensor_that_no_checkpoint_can_hold_is_one_error_that_names_it(
    kind: str, tool: str, tmp_path: Path
) -> None:
    make, what = NOT_DENSE[kind]
    torch.save({"layer": {"odd": make()}, "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"layer\.odd.*{what}"):
        TOOLS[tool](tmp_path / "a.pt", tmp_path / "new")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_other_kind_of_tensor_is_stored_as_it_looks(
    kind: str, tool: str, ranks: int, tmp_path: Path
) -> None:
    saved = {"odd": DENSE[kind](), "w": torch.ones(2)}
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(ranks):
        torch.save(saved, source / f"rank_{rank}.pt")
    TOOLS[tool](source, tmp_path / "new")
    loaded = megackpt.load({}, tmp_path / "new" if tool in ("import", "convert") else source)["odd"]
    expected = np.asarray(saved["odd"]) if isinstance(saved["odd"], np.ndarray) else saved["odd"].detach()
    assert (type(loaded), loaded.dtype, loaded.shape) == (type(expected), expected.dtype, expected.shape)
    assert bool((loaded == expected).all())


def test_the_order_of_reads_is_that_of_the_files_wherever_they_are_mapped() -> None:
    """Ranks divide the work by it, and map the files to addresses of their own."""
    memory = torch.arange(30.0)
    for starts in ([0, 10, 20], [20, 10, 0]):
        tensors = {key: memory[start : start + 10] for key, start in zip("bca", starts, strict=True)}
        numbered = [(number, ForeignArray.whole(key, t)) for number, (key, t) in enumerate(tensors.items())]
        chunks = TensorChunks(sorted(numbered, key=lambda item: item[1].key), where="here")
        assert [spec.key for spec in chunks.table.arrays] == ["a", "b", "c"]
        assert chunks.position.tolist() == [2, 0, 1]


def test_two_files_of_one_number_are_an_error_and_a_number_may_be_long(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model_1764115200.pt")  # the time of its save
    assert list(megackpt.load({}, tmp_path)) == ["w"]
    for name in ("model_1764115200.bin", "model_001764115200.pt"):
        shutil.copy(tmp_path / "model_1764115200.pt", tmp_path / name)
        with pytest.raises(FormatError, match=r"model_.* and model_.* have one name and number"):
            megackpt.load({}, tmp_path)
        (tmp_path / name).unlink()
    torch.save({"w": torch.ones(2)}, tmp_path / "model_0.pt")
    with pytest.raises(FormatError, match=r"model_1, of rank 1, is missing"):
        megackpt.load({}, tmp_path)


@pytest.mark.parametrize("names", [("model.pt", "model_0.pt"), ("a-0.pt", "a_0.pt"), ("r_1.pt", "r1.pt")])
def test_two_files_whose_entries_would_have_one_name_are_an_error(
    names: tuple[str, str], tmp_path: Path
) -> None:
    for number, name in enumerate(names):
        torch.save({"w": torch.full((2,), float(number))}, tmp_path / name)
    with pytest.raises(FormatError, match="would both become") as raised:
        megackpt.load({}, tmp_path)
    assert all(name in str(raised.value) for name in names)


@pytest.mark.parametrize("way", ["pipe", "link to a device", "lost link"])
def test_only_regular_files_are_opened(way: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model_0.pt")
    if way == "pipe":
        os.mkfifo(tmp_path / "model_1.pt")
    else:
        (tmp_path / "model_1.pt").symlink_to("/dev/zero" if way == "link to a device" else tmp_path / "none")
    with pytest.raises(FormatError, match=r"model_1\.pt is missing, or is no regular file"):
        megackpt.load({}, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_elements_are_read_as_they_look(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "_SPAN_BYTES", 128)  # so that spans are halved
    monkeypatch.setattr(mapped_memory, "_LONG_BYTES", 32)  # so that some parts are read from the file
    torch.save({"w": FORMS[form](torch.arange(48.0).reshape(8, 6))}, tmp_path / "a.pt")
    tensor = load_mapped_file(str(tmp_path / "a.pt"))["w"]
    expected = tensor.resolve_conj().resolve_neg().contiguous()
    assert torch.equal(in_memory(tensor), expected)
    dtypes = {tensor.dtype, torch.complex128 if tensor.is_complex() else torch.float64}
    for dtype in sorted(dtypes, key=str):
        chunks = TensorChunks([(0, ForeignArray.whole("w", tensor, dtype))], where="here")
        for row in range(len(chunks.table)):
            read = bytearray(int(chunks.table.nbytes[row]))
            for at in range(0, len(read), 48):  # in parts, as a copy reads
                chunks.read_into(row, at, memoryview(read)[at : at + 48], verify=True)
            assert bytes(read) == bytes(expected.to(dtype).reshape(-1).view(torch.uint8).numpy())


def test_a_file_that_is_cut_short_while_it_is_mapped_is_an_error(tmp_path: Path) -> None:
    """To look at its memory would end the process."""
    torch.save({"w": torch.ones(100_000), "step": 1}, tmp_path / "a.pt")
    tensor = load_mapped_file(str(tmp_path / "a.pt"))["w"]
    arrays = [ForeignArray.whole("plain", tensor), ForeignArray.whole("wide", tensor, torch.float64)]
    arrays.append(ForeignArray.whole("columns", tensor.view(1000, 100).t()))
    chunks = TensorChunks(list(enumerate(sorted(arrays, key=lambda array: array.key))), where="here")
    os.truncate(tmp_path / "a.pt", 4096)
    for row in range(len(chunks.table)):
        for nbytes in (16, int(chunks.table.nbytes[row])):  # by memory, and by the file
            with pytest.raises(IntegrityError, match=r"here: a file was cut short while it was read"):
                chunks.read_into(
                    row, int(chunks.table.nbytes[row]) - nbytes, memoryview(bytearray(nbytes)), verify=True
                )
    with pytest.raises(OSError, match="Input/output error"):
        have_equal_bits(tensor, torch.ones(100_000))


@pytest.mark.parametrize("way", ["save", "import_torch", "convert"])
def test_threads_that_write_files_at_the_same_time_write_their_own_tensors(way: str, tmp_path: Path) -> None:
    saved = {f"w{i}": torch.full((3 + i % 5, 4), float(i)).t() for i in range(300)}
    to = TorchDistSaveStrategy(thread_count=4)
    declared = {key: sharded(key, value.contiguous()) for key, value in saved.items()}
    torch.save(saved, tmp_path / "a.pt")
    megackpt.save(declared, tmp_path / "a")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads take turns within one another's statements
    try:
        if way == "save":
            megackpt.save(declared, tmp_path / "new", to)
        elif way == "import_torch":
            megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new", to)
        else:
            megackpt.convert(tmp_path / "a", tmp_path / "new", to)
    finally:
        sys.setswitchinterval(interval)
    assert_same(megackpt.load_plain_tensors(tmp_path / "new"), saved)


def test_files_of_ranks_that_differ_are_rejected_with_advice(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(3)}}, tmp_path / "rank_0.pt")
    cases: list[tuple[dict[str, Any], type[CheckpointError], str]] = [
        ({"weight": torch.ones(3)}, UnsupportedError, r"'model.weight' of rank 1 differs.*get_state_dict"),
        ({}, FormatError, "other entries on rank 1"),
        ({"weight": 1}, FormatError, r"rank_1\.pt: 'model.weight' is a int, and a Tensor in .*rank_0\.pt"),
    ]
    for model, error, message in cases:
        torch.save({"model": model}, tmp_path / "rank_1.pt")
        with pytest.raises(error, match=message):
            megackpt.import_torch(tmp_path, tmp_path / "new")
    (tmp_path / "rank_1.pt").rename(tmp_path / "rank_2.pt")
    with pytest.raises(FormatError, match=r"rank_1, of rank 1, is missing"):
        megackpt.import_torch(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", [0.5, None, [1], {"a": 1}, torch.ones(1), "text"])
def test_ranks_with_values_of_other_types_are_one_error(value: Any, tmp_path: Path) -> None:
    for table in ({"a": 1, "b": 2}, [1, 2], torch.ones(2)):
        torch.save({"model": table}, tmp_path / "rank_0.pt")
        torch.save({"model": value}, tmp_path / "rank_1.pt")
        with pytest.raises(CheckpointError, match="model"):
            megackpt.import_torch(tmp_path, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_a_damaged_file_and_an_empty_folder_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match=r"has no file of torch.save"):
        megackpt.import_torch(tmp_path / "empty", tmp_path / "new")
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 700)
    with pytest.raises(FormatError, match=r"a\.pt: it is damaged"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(FormatError, match="it holds a list"):
        megackpt.import_torch(tmp_path / "list.pt", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("state", ["array", "value", "ranks", "together", "one in many places"])
def test_a_few_bytes_that_claim_to_be_many_take_no_memory(state: str, tmp_path: Path) -> None:
    many = torch.ones(1).expand(1 << (40 if state in ("array", "value", "ranks") else 23))
    if state == "ranks":
        (tmp_path / "a.pt").mkdir()
        for rank in range(2):
            torch.save({"a": many}, tmp_path / "a.pt" / f"rank_{rank}.pt")
    elif state == "together":  # each of them is short enough
        torch.save({"a": [torch.ones(1).expand_as(many) for _ in range(3)]}, tmp_path / "a.pt")
    elif state == "one in many places":
        torch.save({"a": [many] * 3}, tmp_path / "a.pt")
    else:
        torch.save({"a": many} if state == "array" else {"a": (many,)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"'a[.0-9]*' repeats [0-9,]+ bytes over .*Save tensor\.contiguous"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_pickle_that_starts_a_program_is_rejected(tmp_path: Path) -> None:
    torch.save({"model": PickledCall(os.system, f"touch {tmp_path / 'ran'}")}, tmp_path / "a.pt")
    with pytest.raises(UnknownClassError, match=r"posix\.system"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def test_a_value_that_contains_itself_is_an_error(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.ones(2)}
    state["state"] = state
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="nested too deep"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")


@with_all("a plain run tries one that starts a program")
def test_no_crafted_pickle_gets_anywhere(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    crafted = {**pickles._makes(str(ran)), **pickles.WEIGHTS}
    rejected = 0
    for number, data in enumerate(crafted.values()):
        (tmp_path / "a.pt").write_bytes(zipped(data))
        try:
            megackpt.import_torch(tmp_path / "a.pt", tmp_path / str(number))
        except CheckpointError:
            rejected += 1
        assert not ran.exists(), list(crafted)[number]
    assert rejected > len(crafted) // 2


@contextmanager
def fake_rank(rank: int, ranks: int) -> Iterator[None]:
    """Make this process one of some ranks that do not exist, for a block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use DTensor instead")
            yield
    finally:
        dist.destroy_process_group()


def sharded_rows(whole: Tensor, rank: int, ranks: int) -> Any:
    """Return a tensor cut by rows as FSDP version 1 does, with the shard of this rank. In `fake_rank`."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    shards, metadata, at = [], [], 0
    for owner, rows in enumerate(whole.chunk(ranks)):
        offsets = [at] + [0] * (whole.dim() - 1)
        metadata.append(ShardMetadata(offsets, list(rows.shape), f"rank:{owner}/cpu"))
        at += len(rows)
        if owner == rank:
            shards.append(Shard(rows.clone(), ShardMetadata(offsets, list(rows.shape), f"rank:{owner}/cpu")))
    properties = TensorProperties(dtype=whole.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, whole.shape, properties)
    )


def save_rank_files(
    folder: Path,
    arrays: dict[str, Tensor],
    *,
    ranks: int,
    change: Callable[[dict[str, Any], int], None] = lambda state, rank: None,
    only: Sequence[int] | None = None,
) -> None:
    """Save a file `rank_<n>.pt` for each rank, with the arrays under "model", after a change of its state."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks) if only is None else only:
        with fake_rank(rank, ranks):
            state = {name: sharded_rows(whole, rank, ranks) for name, whole in arrays.items()}
            change(state, rank)
            torch.save({"model": state, "step": 3}, folder / f"rank_{rank}.pt")


RANKS = 4
# Of 5 rows on 4 ranks, three have 2, 2 and 1, and the last one has none.
ARRAYS: dict[str, Tensor] = {"w": torch.arange(15.0).view(5, 3), "b": torch.arange(2, dtype=torch.int32)}

Change = Callable[[dict[str, Any], int], None]


def test_shards_of_all_ranks_become_arrays(tmp_path: Path) -> None:
    def nest(state: dict[str, Any], _: int) -> None:
        state["inner"] = {"list": [state.pop("b")]}

    save_rank_files(tmp_path / "ranks", ARRAYS, ranks=RANKS, change=nest)
    command = ["convert", str(tmp_path / "ranks"), str(tmp_path / "new"), "--from", "torch"]
    assert main([*command, "--prefix", "run."]) == 0
    loaded = megackpt.load({}, tmp_path / "new")["run"]
    assert loaded["step"] == 3
    assert torch.equal(loaded["model"]["w"], ARRAYS["w"])
    assert torch.equal(loaded["model"]["inner"]["list"][0], ARRAYS["b"])


def test_equal_copies_of_a_shard_are_stored_once(tmp_path: Path) -> None:
    save_rank_files(tmp_path / "ranks", ARRAYS, ranks=RANKS, change=_copied(0.0))
    report = megackpt.import_torch(tmp_path / "ranks", tmp_path / "new")
    assert report.nbytes == sum(array.nbytes for array in ARRAYS.values())
    assert torch.equal(megackpt.load({}, tmp_path / "new")["model"]["w"], ARRAYS["w"])


def _copied(difference: float) -> Change:
    """Give rank 3 a copy of the shard of rank 0."""

    def change(state: dict[str, Any], rank: int) -> None:
        if rank == 3:
            from torch.distributed._shard.sharded_tensor import Shard

            box = state["w"]._metadata.shards_metadata[0]
            state["w"]._local_shards.append(Shard(ARRAYS["w"][:2] + difference, box))

    return change


def _on_rank_1(edit: Callable[[Any, Any], object]) -> Change:
    """Edit the tensor and its local shard on rank 1."""

    def change(state: dict[str, Any], rank: int) -> None:
        if rank == 1:
            edit(state["w"], state["w"]._local_shards[0])

    return change


def _offsets(*offsets: Any) -> Change:
    return _on_rank_1(lambda _, shard: setattr(shard.metadata, "shard_offsets", list(offsets)))


def _size(*size: int) -> Change:
    return _on_rank_1(lambda whole, _: setattr(whole._metadata, "size", torch.Size(size)))


def _shard(tensor: Any) -> Change:
    return _on_rank_1(lambda _, shard: setattr(shard, "tensor", tensor))


def _replaced(by: Callable[[], Tensor]) -> Change:
    """Save another tensor on rank 1."""

    def change(state: dict[str, Any], rank: int) -> None:
        if rank == 1:
            state["w"] = by()

    return change


def _overlap(state: dict[str, Any], rank: int) -> None:
    """Move the shard of rank 1 one row up, in all metadata."""
    state["w"]._metadata.shards_metadata[1].shard_offsets = [1, 0]
    if rank == 1:
        state["w"]._local_shards[0].metadata.shard_offsets = [1, 0]


OWN = r"rank_1\.pt: the ShardedTensor 'model.w' contradicts itself"
AT = rf"{OWN} \(the shard at \(2, 0\)"
CRAFTED: dict[str, tuple[Change, str]] = {
    "offset outside": (
        _offsets(40, 0),
        rf"{OWN} \(the shard of shape \(2, 3\) at \(40, 0\) does not lie in the array of shape \(5, 3\)",
    ),
    "offset outside in the metadata": (
        _on_rank_1(lambda t, _: setattr(t._metadata.shards_metadata[3 - 1], "shard_offsets", [5, 0])),
        rf"{OWN} \(the shard of shape \(1, 3\) at \(5, 0\) does not lie in",
    ),
    "negative offset": (_offsets(-1, 0), f"{OWN} .*malformed"),
    "offset that is text": (_offsets("2", 0), f"{OWN} .*malformed"),
    "another number of dimensions": (
        _offsets(2),
        rf"{OWN} \(the shard of shape \(2, 3\) at \(2,\) does not lie",
    ),
    "huge array": (_size(2**40, 2**40), rf"{OWN} \(no ShardedTensor has shape"),
    "array without dimensions": (_size(), rf"{OWN} \(no ShardedTensor has shape \(\)"),
    "tensor of another shape": (
        _shard(torch.zeros(1, 3)),
        rf"{AT} is a tensor of shape \(1, 3\) .* say \(2, 3\)",
    ),
    "tensor of another dtype": (
        _shard(torch.zeros(2, 3).double()),
        rf"{AT} is a tensor of shape \(2, 3\) and torch.float64",
    ),
    "tensor that repeats its elements": (_shard(torch.zeros(1).expand(2, 3)), f"{AT} repeats"),
    "tensor without storage": (_shard(torch.empty(2, 3, device="meta")), f"{AT} is no plain tensor"),
    "sparse tensor": (_shard(torch.zeros(2, 3).to_sparse()), f"{AT} is no plain tensor"),
    "no tensor": (_shard(7), f"{AT} is no plain tensor"),
    "no metadata": (_on_rank_1(lambda t, _: setattr(t, "_metadata", None)), f"{OWN} .*ShardedTensorMetadata"),
    "no properties": (_on_rank_1(lambda t, _: setattr(t._metadata, "tensor_properties", 1)), OWN),
    "no shards": (_on_rank_1(lambda t, _: setattr(t, "_local_shards", 1)), OWN),
    "shard that its metadata lack": (
        _on_rank_1(lambda whole, _: whole._metadata.shards_metadata.pop(1)),
        rf"{OWN} \(its metadata lack the shard of shape \(2, 3\) at \(2, 0\)",
    ),
    "plain tensor": (_replaced(lambda: ARRAYS["w"]), r"rank_1\.pt: 'model.w' has no ShardedTensor here, "),
    "array of another shape": (
        _replaced(lambda: sharded_rows(torch.zeros(6, 3), 1, RANKS)),
        r"rank_1\.pt: 'model.w' is an array of torch.float32 \(6, 3\), .*rank_0\.pt",
    ),
    "array of another dtype": (
        _replaced(lambda: sharded_rows(ARRAYS["w"].double(), 1, RANKS)),
        r"rank_1\.pt: 'model.w' is an array of torch.float64.*rank_0\.pt",
    ),
    "copies that differ": (
        _copied(1.0),
        r"rank_3\.pt: 'model.w' has other bits than in .*rank_0\.pt, in the part",
    ),
    "overlap": (_overlap, r"rank_0\.pt: has elements \[1:2, 0:3\] in no shard, or in several \('model.w'\)"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_shards_are_one_error_that_names_key_and_file(name: str, tmp_path: Path) -> None:
    change, message = CRAFTED[name]
    save_rank_files(tmp_path / "ranks", ARRAYS, ranks=RANKS, change=change)
    with pytest.raises(FormatError, match=message) as raised:
        megackpt.import_torch(tmp_path / "ranks", tmp_path / "new")
    assert raised.value.key == "model.w"
    assert Path(str(raised.value.path)).is_file()
    assert not (tmp_path / "new").exists()


def test_files_of_other_ranks_or_runs_are_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    save_rank_files(folder, ARRAYS, ranks=RANKS)

    def rejected(message: str) -> None:
        with pytest.raises(FormatError, match=message) as raised:
            megackpt.import_torch(folder, tmp_path / "new")
        assert raised.value.key == "model.w"
        assert not (tmp_path / "new").exists()

    (folder / "rank_3.pt").rename(tmp_path / "kept")
    assert megackpt.import_torch(folder, tmp_path / "three").arrays == 2  # rank 3 has no shard of any array
    (folder / "rank_2.pt").unlink()
    rejected(
        r"rank_0\.pt: .*shape \(1, 3\) at \(4, 0\) \('model.w'\)\. The files of ranks 2, 3 of 4 are missing"
    )
    shutil.copy(folder / "rank_0.pt", folder / "rank_2.pt")
    rejected(r"rank_2\.pt: '.*' is of rank 0, as in .*rank_0\.pt")
    save_rank_files(folder, ARRAYS, ranks=3, only=[2])
    rejected(r"rank_2\.pt: '.*' was saved by 3 ranks, and by 4 in .*rank_0\.pt")
    # The file of one rank, by itself.
    (folder / "rank_1.pt").unlink()
    (folder / "rank_2.pt").unlink()
    rejected(r"The files of ranks 1, 2, 3 of 4 are missing")


def test_flat_parameters_and_shards_in_tuples_are_rejected_with_advice(tmp_path: Path) -> None:
    save_rank_files(tmp_path / "flat", {"layers.0._flat_param": torch.arange(7.0)}, ranks=2)
    with pytest.raises(UnsupportedError, match=r"rank_0\.pt: 'model.layers.0._flat_param' .*FULL_STATE_DICT"):
        megackpt.import_torch(tmp_path / "flat", tmp_path / "new")

    def wrap(state: dict[str, Any], _: int) -> None:
        state["w"] = (state["w"],)

    save_rank_files(tmp_path / "tuple", ARRAYS, ranks=2, change=wrap)
    with pytest.raises(UnsupportedError, match=r"'?model.w.0'? is a ShardedTensor inside of a tuple"):
        megackpt.import_torch(tmp_path / "tuple", tmp_path / "new")
    assert not (tmp_path / "new").exists()


CLASS = named("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
WRAPPER = named("torch._utils", "_rebuild_wrapper_subclass")
# What torch pickles of a ShardedTensor of two numbers, before its state.
ARGUMENTS = (
    (b"(" + CLASS + named("torch", "float32") + b"(K\x02t(K\x01tK\0")
    + call(named("torch.serialization", "_get_layout"), "torch.strided")
    + call(named("torch", "device"), "cpu")
    + b"\x89t"
)
STATELESS = WRAPPER + ARGUMENTS + b"R"


def _rebuilt(
    state: bytes, *, function: bytes = WRAPPER, cls: bytes = CLASS, arguments: bytes = ARGUMENTS
) -> bytes:
    """Opcodes of the call that makes a tensor of a class and gives it a state."""
    return call(named("torch._tensor", "_rebuild_from_type_v2"), function, cls, arguments, state)


def _of_torch(name: str, *arguments: bytes) -> bytes:
    return call(named("torch._utils", name), *arguments)


def _pickles(ran: Path) -> dict[str, bytes]:
    mkdir, path = named("os", "mkdir"), b"(" + text(str(ran)) + b"t"
    hooks = named("collections", "OrderedDict") + b")R"
    cast = (STATELESS, named("torch", "float32"), text("cpu"), b"\x89")
    return {
        "no state": STATELESS,
        "state None": _rebuilt(b"N"),
        "state of numbers": _rebuilt(b"(K\1K\2K\3K\4K\5t"),
        "state of bytes": _rebuilt(binary(b"123")),
        "state that runs": _rebuilt(mkdir + path + b"R"),
        "function that runs": _rebuilt(b"N", function=mkdir, arguments=path),
        "call": call(CLASS, b"K\x08"),
        "large call": call(CLASS, b"\x8a\x06\0\0\0\0\0\x01"),
        "new object": CLASS + b"(K\x08t\x81",
        "other class": _rebuilt(b"N", cls=named("torch", "Tensor")),
        "parameter": _of_torch("_rebuild_parameter", STATELESS, b"\x89", hooks),
        "storage": _of_torch("_rebuild_tensor_v2", STATELESS, b"K\0", b")", b")", b"\x89", hooks),
        "cast": _of_torch("_rebuild_device_tensor_from_cpu_tensor", *cast),
        "nested": _of_torch("_rebuild_nested_tensor", STATELESS, tensor(), tensor(), tensor()),
        "attribute of the class": call(named("__builtin__", "getattr"), CLASS, "__subclasses__"),
        "attributes set on the class": CLASS + b"}" + text("a") + b"K\1sb",
        "items": STATELESS + text("a") + b"K\1s",
    }


@pytest.mark.parametrize("name", _pickles(Path()))
def test_no_crafted_sharded_tensor_gets_anywhere(name: str, tmp_path: Path) -> None:
    data = _pickles(tmp_path / "ran")[name]
    (tmp_path / "a.pt").write_bytes(zipped(pickled(b"}", text("w"), data, b"s"), {"data/0": bytes(16)}))
    with pytest.raises(CheckpointError) as raised:
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    assert "a.pt" in str(raised.value)
    if name in ("call", "large call", "new object"):  # torch.Tensor itself would allocate memory
        assert "that torch did not pickle" in str(raised.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


def test_changed_bytes_of_the_pickle_are_an_error_or_another_value(tmp_path: Path) -> None:
    """A byte that changes in the pickle raises no other error, and changes no class of the process."""
    save_rank_files(tmp_path / "ranks", ARRAYS, ranks=1)
    with zipfile.ZipFile(tmp_path / "ranks/rank_0.pt") as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    data = records.pop("data.pkl")
    records = {name: record for name, record in records.items() if name.startswith("data/")}
    choices, rejected = random.Random(0), 0
    tries = few(60, of=3000)
    for number in range(tries):
        changed = bytearray(data)
        changed[choices.randrange(len(data))] = choices.randrange(256)
        (tmp_path / "a.pt").write_bytes(zipped(bytes(changed), records))
        try:
            megackpt.import_torch(tmp_path / "a.pt", tmp_path / f"new {number}", verify=False)
        except CheckpointError:
            rejected += 1
            assert not (tmp_path / f"new {number}").exists()
    assert rejected > tries // 4
