"""Every error of save and load in one process, with its what, where and how."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import (
    CoverageError,
    DeclarationError,
    FormatError,
    IntegrityError,
    MismatchError,
    MissingKeyError,
    NotACheckpointError,
    ShardedTensor,
    StorageError,
    UnserializableError,
    load,
    load_common_state_dict,
    save,
)
from megackpt.testing.world import SimulatedWorld


def whole(key: str, data: torch.Tensor, **fields: object) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **fields)


def test_a_missing_key_is_named_with_the_most_similar_one(tmp_path: Path) -> None:
    save({"w": whole("decoder.weight", torch.zeros(2))}, tmp_path / "c")
    with pytest.raises(
        MissingKeyError, match=r"'decoder.wieght' \(the checkpoint has 'decoder.weight'\)"
    ) as caught:
        load({"w": whole("decoder.wieght", torch.zeros(2))}, tmp_path / "c")
    assert caught.value.key == "decoder.wieght"
    assert isinstance(caught.value, KeyError)
    assert "load_sharded_metadata" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (torch.zeros(3), r"'w': stored as float32 \(2,\), asked for as float32 \(3,\)"),
        (
            torch.zeros(2, dtype=torch.bfloat16),
            r"'w': stored as float32 \(2,\), asked for as bfloat16 \(2,\)",
        ),
    ],
)
def test_another_shape_or_dtype_than_stored_raises_an_error_before_anything_is_read(
    tmp_path: Path, asked: torch.Tensor, message: str
) -> None:
    save({"w": whole("w", torch.ones(2))}, tmp_path / "c")
    with pytest.raises(MismatchError, match=message) as caught:
        load({"w": whole("w", asked)}, tmp_path / "c")
    assert "allow_shape_mismatch" in str(caught.value)
    assert asked.sum() == 0


def test_elements_that_no_rank_saves_are_named(tmp_path: Path) -> None:
    third = ShardedTensor.from_rank_offsets("v", torch.zeros(2, 4), (0, 1, 3))
    with pytest.raises(CoverageError) as caught:
        save({"w": whole("w", torch.zeros(2, 4)), "v": third}, tmp_path / "c")
    text = str(caught.value)
    assert "'v': elements [0:2, 0:4] are saved by no rank (global shape (6, 4))" in text
    assert "'v': elements [4:6, 0:4] are saved by no rank" in text
    assert "global_offset and replica_id" in text
    assert "'w'" not in text


def test_elements_that_two_main_replicas_save_are_named_with_the_ranks(tmp_path: Path) -> None:
    def overlap(group: megackpt.comm.Group) -> None:
        data = torch.zeros(3, 2)
        offset = (0, 0) if group.rank == 0 else (2, 0)
        tensor = ShardedTensor("w", data, torch.float32, (3, 2), (5, 2), offset)
        save({"w": tensor}, tmp_path / "c", group=group)

    for error in SimulatedWorld(2).outcomes(overlap):
        assert isinstance(error, CoverageError)
        assert "'w': elements [2:3, 0:2] are saved by more than one main replica (ranks 0, 1)" in str(error)


def test_arrays_without_any_main_replica_are_holes(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match=r"'w': elements \[0:2\] are saved by no rank"):
        save({"w": whole("w", torch.zeros(2), replica_id=(0, 0, 1))}, tmp_path / "c")


def test_ranks_that_disagree_about_an_array_are_named(tmp_path: Path) -> None:
    def disagree(group: megackpt.comm.Group) -> None:
        tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2 + group.rank // 2), (0, group.rank, 3))
        save({"w": tensor}, tmp_path / "c", group=group)

    for error in SimulatedWorld(3).outcomes(disagree):
        assert isinstance(error, MismatchError)
        assert "'w': float32 (6,) on ranks 0, 1; float32 (9,) on ranks 2" in str(error)


def test_common_state_that_differs_is_named_by_path_and_rank(tmp_path: Path) -> None:
    def differ(group: megackpt.comm.Group) -> None:
        save({"args": {"lr": 1.0, "rank": group.rank}}, tmp_path / "c", group=group)

    def differ_knowingly(group: megackpt.comm.Group) -> None:
        save(
            {"args": {"lr": 1.0, "rank": group.rank}},
            tmp_path / "c",
            group=group,
            preprocess_common_before_consistancy_check=lambda common: {"lr": common["args"]["lr"]},
        )

    for error in SimulatedWorld(3).outcomes(differ):
        assert isinstance(error, MismatchError)
        assert "'args.rank' on rank(s) 1, 2" in str(error)
        assert "args.lr" not in str(error)
        assert "ShardedObject" in str(error)
    SimulatedWorld(3).run(differ_knowingly)
    assert load_common_state_dict(tmp_path / "c")["args"]["rank"] == 0


def test_a_value_without_a_codec_raises_an_error_at_save_with_its_path_and_type(tmp_path: Path) -> None:
    with pytest.raises(UnserializableError, match=r"args\.hooks\[1\].*(function|lambda)") as caught:
        save({"args": {"hooks": [1, lambda: None]}, "w": whole("w", torch.zeros(1))}, tmp_path / "c")
    assert "register_codec" in str(caught.value)
    assert not (tmp_path / "c" / "metadata.json").exists()


def test_a_sharded_entity_in_a_tuple_raises_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(
        DeclarationError, match=r"model\.pair: a ShardedTensor is inside of a tuple.*list or a dict"
    ):
        save({"model": {"pair": (whole("w", torch.zeros(1)),)}}, tmp_path / "c")


def test_an_entity_without_data_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="'w' has no data to save"):
        save({"w": whole("w", torch.zeros(1)).without_data()}, tmp_path / "c")


def test_an_empty_or_half_written_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        NotACheckpointError, match=r"is not a checkpoint: it has no metadata.json.*did not finish"
    ):
        load({}, tmp_path)
    save({"w": whole("w", torch.zeros(2))}, tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()
    with pytest.raises(NotACheckpointError):
        load({}, tmp_path / "c")


def test_a_flipped_bit_is_found_and_named_by_key_file_and_range(tmp_path: Path) -> None:
    save({"a": whole("a", torch.zeros(70_000)), "b": whole("b", torch.ones(70_000))}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").iterdir()
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 4
    file.write_bytes(damaged)
    load({"a": whole("a", torch.zeros(70_000))}, tmp_path / "c")
    with pytest.raises(IntegrityError) as caught:
        load({"b": whole("b", torch.zeros(70_000))}, tmp_path / "c")
    assert caught.value.key == "b"
    low = len(damaged) - 70_000 * 4 + 256 * 1024
    assert f"the bytes {low}:{len(damaged)} of {file}" in str(caught.value)
    load({"b": whole("b", torch.zeros(70_000))}, tmp_path / "c", options=megackpt.LoadOptions(verify=False))


@pytest.mark.parametrize(("key", "block"), [("a", 0), ("b", 3), ("b", 4), ("c", 0)])
def test_damage_is_named_where_several_chunks_are_read_at_once(tmp_path: Path, key: str, block: int) -> None:
    block_bytes = 256 * 1024
    nbytes = {"a": 4000, "b": 600 * 512 * 4, "c": 8000}  # b has 5 blocks
    arrays = {"a": torch.zeros(1000), "b": torch.zeros(600, 512), "c": torch.zeros(2000)}
    save({k: whole(k, t) for k, t in arrays.items()}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").iterdir()
    damaged = bytearray(file.read_bytes())
    start = len(damaged) - sum(n for k, n in nbytes.items() if k >= key)
    low, high = start + block * block_bytes, start + min((block + 1) * block_bytes, nbytes[key])
    damaged[low] ^= 1
    file.write_bytes(damaged)
    half = ShardedTensor.from_rank_offsets("b", torch.zeros(600, 256), (1, 0, 2))  # rows lie apart in b
    with pytest.raises(IntegrityError, match=f"'{key}'.* the bytes {low}:{high} of"):
        load(
            {"a": whole("a", torch.zeros(1000)), "b": half, "c": whole("c", torch.zeros(2000))},
            tmp_path / "c",
        )


@pytest.mark.parametrize("kind", ["index", "common"])
def test_damage_to_small_files_is_found(tmp_path: Path, kind: str) -> None:
    save({"w": whole("w", torch.zeros(2)), "lr": 0.25}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob(f"{kind}-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match=f"{kind}.*differs from what was saved"):
        load({"w": whole("w", torch.zeros(2))}, tmp_path / "c")


def test_a_missing_or_truncated_data_file_is_named(tmp_path: Path) -> None:
    save({"w": whole("w", torch.zeros(2000))}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").iterdir()
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(FormatError, match=file.name):
        load({"w": whole("w", torch.zeros(2000))}, tmp_path / "c")
    file.unlink()
    with pytest.raises(StorageError, match=file.name):
        load({"w": whole("w", torch.zeros(2000))}, tmp_path / "c")


def test_an_unknown_format_or_version_raises_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    save({}, tmp_path / "c")
    manifest = tmp_path / "c" / "metadata.json"
    manifest.write_text(
        manifest.read_text().replace('"sharded_backend_version": 1', '"sharded_backend_version": 99')
    )
    with pytest.raises(FormatError, match=r"version 99 cannot be read here. Known are megackpt version 1"):
        load({}, tmp_path / "c")
    with pytest.raises(
        DeclarationError, match=r"No strategy saves format 'parquet'. Known are megackpt version 1"
    ):
        save({}, tmp_path / "d", "parquet")


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        save({}, tmp_path / "file" / "c")
