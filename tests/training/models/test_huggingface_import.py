"""`import_huggingface`: our arrays, bit for bit, and the same folder when they are exported again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.errors import MapError
from megackpt.testing.world import SimulatedWorld
from megackpt.whole import huggingface_model_files
from tests.support.effort import few, sampled
from tests.support.huggingface_configs import FAMILIES
from tests.support.huggingface_folders import (
    assert_same_tensors,
    folder_tensors,
    loaded_arrays,
    random_config,
    stacked_map,
    write_folder,
)
from tests.support.states import assembled, random_arrays

SEEDS = range(few(2, of=5))
LLAMA = random_config("llama", 0)


@sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_becomes_our_arrays_and_the_same_folder_again(
    model_type: str, seed: int, tmp_path: Path
) -> None:
    config = random_config(model_type, seed)
    made = stacked_map(config)
    tensors = random_arrays(made, seed)
    chance = random.Random(seed)
    write_folder(tmp_path / "folder", config, tensors, files=chance.choice([1, 3]))
    report = megackpt.import_huggingface(
        tmp_path / "folder", tmp_path / "saved", buffer_bytes=chance.choice([1000, 10**6])
    )
    assert_same_tensors(loaded_arrays(tmp_path / "saved"), assembled(made, tensors))
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    report = megackpt.export_huggingface(
        tmp_path / "saved",
        tmp_path / "again",
        max_file_bytes=chance.choice([4000, 20_000, 10**9]),
        buffer_bytes=chance.choice([700, 5000, 10**6]),
        workers=chance.choice([1, 3]),
    )
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)
    assert (report.tensors, report.dtype) == (len(tensors), "float32")


def test_ranks_write_one_checkpoint_of_any_format(tmp_path: Path) -> None:
    made = stacked_map(LLAMA)
    tensors = random_arrays(made, 1)
    write_folder(tmp_path / "folder", LLAMA, tensors)
    for format in ("megackpt", "torch_dist"):
        target = tmp_path / format
        SimulatedWorld(3).run(
            lambda group, to=format, target=target: megackpt.import_huggingface(  # type: ignore[misc]
                tmp_path / "folder", target, to, prefix="model.", group=group
            )
        )
        ours = {f"model.{key}": array for key, array in assembled(made, tensors).items()}
        assert_same_tensors(loaded_arrays(target), ours)


def test_layers_get_keys_of_their_own_if_wanted(tmp_path: Path) -> None:
    tensors = random_arrays(stacked_map(LLAMA), 2)
    write_folder(tmp_path / "folder", LLAMA, tensors)
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved", stacked=False)
    assert "decoder.layers.0.mlp.linear_fc2.weight" in megackpt.load_tensors_metadata(tmp_path / "saved")
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "again")
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)


def test_dtypes_are_converted_and_the_generation_config_is_kept(tmp_path: Path) -> None:
    made = stacked_map(LLAMA)
    tensors = random_arrays(made, 3)
    write_folder(tmp_path / "folder", LLAMA, tensors)
    (tmp_path / "folder/generation_config.json").write_text('{"top_k": 7}')
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved", dtype="bfloat16")
    ours = {key: array.bfloat16() for key, array in assembled(made, tensors).items()}
    assert_same_tensors(loaded_arrays(tmp_path / "saved"), ours)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "again")
    assert json.loads((tmp_path / "again/generation_config.json").read_text()) == {"top_k": 7}


def test_tensors_that_models_compute_again_are_left_out(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    tensors = random_arrays(stacked_map(config), 4)
    computed = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    write_folder(tmp_path / "folder", config, {**tensors, **computed})
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved")
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "again")
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model.norm.weight": None}, r"'model.norm.weight' \(\d+,\) is missing"),
        ({"model.unknown": torch.zeros(2)}, r"'model.unknown' \(2,\) is additional"),
        ({"model.norm.weight": torch.zeros(2)}, r"'model.norm.weight' has the shape \(2,\), and by the map"),
    ],
    ids=["missing", "additional", "wrong shape"],
)
def test_a_folder_that_does_not_fit_is_one_error_and_nothing_is_written(
    changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
    tensors = {**random_arrays(stacked_map(LLAMA), 5), **changed}
    write_folder(tmp_path / "folder", LLAMA, {k: t for k, t in tensors.items() if t is not None})
    with pytest.raises(MapError, match=text):
        megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_files_of_the_tokenizer_come_back_when_the_checkpoint_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_model_files, "MAX_KEPT_BYTES", 50)
    write_folder(tmp_path / "folder", LLAMA, random_arrays(stacked_map(LLAMA), 5), files=2)
    kept = {
        "tokenizer.json": b'{"\xc3\xa9": 1}',
        "tokenizer.model": b"\x00\xff",
        "chat_template.jinja": b"{{ x }}",
    }
    others = {
        "README.md": b"x",
        "vocab.json": b"{}" + 50 * b" ",
        "sub/tokenizer.json": b"{}",
        "pytorch_model.bin": b"x",
    }
    for name, data in {**kept, **others, "generation_config.json": b'{"top_k": 3}'}.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    for to in ("megackpt", "torch_dist", "zarr"):
        report = megackpt.import_huggingface(tmp_path / "folder", tmp_path / to, to)
        assert report.files == tuple(sorted(kept))
        assert "vocab.json" in caplog.text  # too long
        megackpt.export_huggingface(tmp_path / to, tmp_path / f"again-{to}")
        written = {p.name: p.read_bytes() for p in (tmp_path / f"again-{to}").iterdir()}
        assert {name: written.pop(name) for name in kept} == kept
        assert json.loads(written.pop("generation_config.json")) == {"top_k": 3}
        assert set(written) == {"config.json", "model.safetensors"}

    # A folder that is named has the files of another tokenizer.
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "config/tokenizer.json").write_bytes(b"[]")
    (tmp_path / "config/generation_config.json").write_bytes(b'{ "top_k": 4 }')
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "new", config=tmp_path / "config")
    megackpt.export_huggingface(tmp_path / "new", tmp_path / "new-folder")
    assert (tmp_path / "new-folder/tokenizer.json").read_bytes() == b"[]"
    assert (tmp_path / "new-folder/tokenizer.model").read_bytes() == b"\x00\xff"
    assert (tmp_path / "new-folder/generation_config.json").read_bytes() == b'{ "top_k": 4 }'


def test_files_of_a_forged_checkpoint_stay_in_the_folder_and_replace_nothing(tmp_path: Path) -> None:
    tensors = random_arrays(stacked_map(LLAMA), 6)
    names = [
        "../up.json", "/tmp/up.json", "a/b.json", ".hidden.json", "config.json", "Config.JSON", "a\0.json",
        "model.safetensors", "model.safetensors.index.json", "run.py", "..", "", 3,
    ]  # fmt: skip
    forged = {**dict.fromkeys(names, b"{}"), "tokenizer.json": "text", "merges.txt": b"a b"}
    state = {
        key: ShardedTensor.from_rank_offsets(key, array)
        for key, array in assembled(stacked_map(LLAMA), tensors).items()
    }
    metadata = {"huggingface_config": LLAMA, "huggingface_files": forged}
    megackpt.save(state, tmp_path / "saved", content_metadata=metadata)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "out/folder")
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == {"folder/config.json", "folder/model.safetensors", "folder/merges.txt"}
    assert_same_tensors(folder_tensors(tmp_path / "out/folder"), tensors)
    megackpt.save(state, tmp_path / "other", content_metadata={**metadata, "huggingface_files": ["x"]})
    megackpt.export_huggingface(tmp_path / "other", tmp_path / "other-folder")
