"""Folders of other tools, under every command: it opens them, or says what they are and what to do next."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import megackpt
from megackpt import CheckpointError, ShardedTensor
from megackpt.cli import main
from megackpt.errors import MapError
from megackpt.formats.folder_kinds import KINDS
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models import build_gpt
from models.huggingface import gpt_config
from tests.support.command_line import CommandLine
from tests.support.huggingface_configs import random_fields
from tests.support.huggingface_models import assert_close, randomised, token_ids

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

NVRX = Path(__file__).parents[1] / "nvrx" / "folders" / "atomic"
ZERO = Path(__file__).parents[1] / "deepspeed" / "folders" / "zero2"


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def trainer_run(path: Path) -> Path:
    pytest.importorskip("accelerate")
    chosen = {"max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(path), **chosen)
    tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    transformers.Trainer(llama(), arguments, train_dataset=tokens).train()
    return path


def accelerate_folder(path: Path) -> Path:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    accelerator.save_state(str(path))
    return path


def adapter(path: Path) -> Path:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(llama(), config).save_pretrained(path)
    return path


def sharded_bin(path: Path) -> Path:
    """Shards of torch.save with their index, as transformers before version 5 wrote them."""
    path.mkdir()
    weight_map = {}
    for number, name in enumerate(("a.weight", "b.weight", "c.weight"), 1):
        file = f"pytorch_model-{number:05d}-of-00003.bin"
        torch.save({name: torch.full((2, 3), float(number))}, path / file)
        weight_map[name] = file
    index = {"metadata": {"total_size": 72}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    torch.save({"seed": 1}, path / "training_args.bin")
    return path


def variant(path: Path) -> Path:
    llama().save_pretrained(path, variant="fp16", max_shard_size="4KB")
    return path


def consolidated(path: Path) -> Path:
    path.mkdir()
    save_file({"w": torch.ones(2)}, path / "consolidated.safetensors")
    return path


def without_index(path: Path) -> Path:
    path.mkdir()
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(2)}, path / f"model-{number:05d}-of-00002.safetensors")
    return path


def diffusers(path: Path) -> Path:
    (path / "unet").mkdir(parents=True)
    (path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    save_file({"w": torch.ones(2)}, path / "unet" / "diffusion_pytorch_model.safetensors")
    return path


def orbax(path: Path) -> Path:
    (path / "default" / "d").mkdir(parents=True)
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    (path / "default" / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a")
    return path


def dcp_folder(path: Path) -> Path:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    return path


def dcp_without_metadata(path: Path) -> Path:
    dcp_folder(path)
    (path / ".metadata").unlink()
    return path


def torch_dist(path: Path) -> Path:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
    megackpt.save(state, path, sharded_strategy="torch_dist")
    return path


def legacy_megatron(path: Path) -> Path:
    folder = path / "iter_0000100" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(
        {"args": None, "model": {"mlp.linear_fc1.weight": torch.ones(4, 8)}}, folder / "model_optim_rng.pt"
    )
    (path / "latest_checkpointed_iteration.txt").write_text("100")
    return path


def neox(path: Path) -> Path:
    folder = path / "global_step100"
    folder.mkdir(parents=True)
    for rank in range(2):
        weight = {"mlp.dense_h_to_4h.weight": torch.ones(4, 8) * rank}
        torch.save(weight, folder / f"layer_02-model_{rank:02d}-model_states.pt")
        model = {"module": None, "mp_world_size": 2, "dp_world_size": 1, "global_steps": 100}
        torch.save(model, folder / f"mp_rank_{rank:02d}_model_states.pt")
    (path / "latest").write_text("global_step100")
    return path


def universal(path: Path) -> Path:
    folder = path / "zero" / "w"
    folder.mkdir(parents=True)
    torch.save({"param": torch.ones(2)}, folder / "fp32.pt")
    return path


def root_of_run(path: Path) -> Path:
    for step in (5, 10):
        megackpt.save({"w": torch.ones(2)}, path / f"iter_{step:07d}")
    return path


def gguf(path: Path) -> Path:
    path.mkdir()
    (path / "model.gguf").write_bytes(b"GGUF" + bytes(8))
    return path / "model.gguf"


def safetensors_file(path: Path) -> Path:
    consolidated(path)
    return path / "consolidated.safetensors"


class Kind(NamedTuple):
    """A kind of folder."""

    make: Callable[[Path], Path]  # writes it, and returns the path to name
    is_read: bool  # commands open it, but for `ls`, which lists steps of runs
    name: str  # what an error calls it
    advice: str  # what an error says to do, after the path where there is one
    lists: bool = False  # `ls` lists steps in it


FOLDERS = {
    "ours": Kind(
        lambda p: root_of_run(p) / "iter_0000010", True, "is a single checkpoint", "`megackpt inspect`"
    ),
    "the root of a run": Kind(root_of_run, True, "", "", lists=True),
    "torch_dist": Kind(torch_dist, True, "is a single checkpoint", "`megackpt inspect`"),
    "DCP": Kind(dcp_folder, True, "torch.distributed.checkpoint (DCP)", "`megackpt inspect"),
    "DCP without .metadata": Kind(
        dcp_without_metadata, False, "(DCP) without its file .metadata", "Copy the whole folder again"
    ),
    "legacy Megatron": Kind(legacy_megatron, True, "legacy checkpoint of Megatron-LM", "`megackpt convert"),
    "NeoX": Kind(neox, False, "of GPT-NeoX", "convert_neox_to_hf.py"),
    "DeepSpeed": Kind(lambda p: ZERO, True, "checkpoint of DeepSpeed", "`megackpt convert"),
    "universal": Kind(universal, False, "universal checkpoint of DeepSpeed", "Name the ZeRO folder"),
    "nvrx": Kind(lambda p: NVRX, True, "local checkpoint of nvidia-resiliency-ext", "`megackpt convert"),
    "a run of the Trainer": Kind(
        trainer_run, False, "a run of Hugging Face's Trainer", "/checkpoint-2; TrainerMixin resumes from it"
    ),
    "a step of the Trainer": Kind(
        lambda p: trainer_run(p) / "checkpoint-2",
        True,
        "a checkpoint of Hugging Face's Trainer",
        "TrainerMixin resumes from it",
    ),
    "accelerate": Kind(
        accelerate_folder, True, "what Accelerator.save_state wrote", "accelerate.load_state loads it"
    ),
    "folders of accelerate": Kind(
        lambda p: accelerate_folder(p / "checkpoint_3").parent,
        False,
        "checkpoints of Accelerator.save_state",
        "/checkpoint_3",
    ),
    "an adapter": Kind(adapter, True, "an adapter of peft", "`megackpt inspect"),
    "Hugging Face": Kind(
        lambda p: llama().save_pretrained(p) or p, True, "a folder of Hugging Face", "`megackpt convert"
    ),
    "Hugging Face, fp16": Kind(variant, True, "a folder of Hugging Face", "`megackpt convert"),
    "Hugging Face, .bin": Kind(sharded_bin, True, "a folder of Hugging Face", "`megackpt convert"),
    "Hugging Face, consolidated": Kind(consolidated, True, "files of safetensors", "fetch the index"),
    "Hugging Face, without index": Kind(without_index, False, "files of safetensors", "fetch the index"),
    "diffusers": Kind(diffusers, False, "a pipeline of diffusers", "/unet"),
    "Orbax": Kind(orbax, False, "a checkpoint of Orbax", "docs/coming-from.md#orbax"),
    "a file of llama.cpp": Kind(gguf, False, "(GGUF)", "Name the Hugging Face folder"),
    "a file of safetensors": Kind(safetensors_file, False, "files of safetensors", "Name such a folder"),
}

COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "ls": lambda path, new: ["ls", path],
    "inspect": lambda path, new: ["inspect", path],
    "verify": lambda path, new: ["verify", path],
    "diff": lambda path, new: ["diff", path, path],
    "convert": lambda path, new: ["convert", path, str(new), "--to", "megackpt"],
    "convert without --to": lambda path, new: ["convert", path, str(new)],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the path of a folder of a kind, which is made once."""
    paths: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in paths:
            root = tmp_path_factory.mktemp("kinds")
            paths[name] = str(FOLDERS[name].make(root / "folder"))
        return paths[name]

    return make


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_command_works_or_names_the_folder(
    name: str,
    command: str,
    made: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, path = FOLDERS[name], made(name)
    capsys.readouterr()
    code = main(COMMANDS[command](path, tmp_path / "new"))
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    if command == "convert without --to" and kind.is_read and code:
        assert "Missing option '--to'" in err
    elif kind.lists or (kind.is_read and command != "ls"):
        assert code == 0, err
    else:
        assert code in (2, 3), (code, out, err)
        assert kind.name in err
        assert kind.advice in err
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_load_works_or_names_the_folder(name: str, made: Callable[[str], str]) -> None:
    kind, path = FOLDERS[name], made(name)
    if kind.is_read and not kind.lists:
        assert megackpt.load_plain_tensors(path)
        return
    with pytest.raises(CheckpointError) as error:
        megackpt.load({}, path)
    text = str(error.value)
    assert (kind.name or "the root of a run") in text
    assert (kind.advice or "iter_0000010") in text


def test_the_command_of_an_advice_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = accelerate_folder(tmp_path / "a folder of 'mine'")
    command_line = CommandLine(capsys)
    err = command_line.err("ls", folder, code=3)
    _, *words = shlex.split(err.partition("`")[2].partition("`")[0])
    assert "weight" in command_line.out(*words)


def test_shards_of_torch_save_are_one_checkpoint(made: Callable[[str], str]) -> None:
    arrays = megackpt.load_plain_tensors(made("Hugging Face, .bin"))
    values = {key: array.unique().tolist() for key, array in arrays.items()}
    assert values == {"a.weight": [1.0], "b.weight": [2.0], "c.weight": [3.0]}


@pytest.mark.parametrize(
    ("shard", "content", "named"),
    [
        ("00002-of-00003", None, "no shard 00002-of-00003"),
        ("00002-of-00003", {"a.weight": torch.ones(1)}, "'a.weight', as another shard"),
        ("00002-of-00003", {"d": torch.ones(1)}, "contradicts the shards, for instance about 'b.weight'"),
        ("00002-of-00003", [1], r"00002-of-00003.bin: it has no dict"),
        ("00001-of-00001", {"d": torch.ones(1)}, "has shards of several models"),
    ],
    ids=["lost", "twice", "not in the index", "no dict", "of another model"],
)
def test_shards_that_do_not_belong_together_are_an_error(
    shard: str, content: Any, named: str, tmp_path: Path
) -> None:
    file = sharded_bin(tmp_path / "folder") / f"pytorch_model-{shard}.bin"
    torch.save(content, file) if content else file.unlink()
    with pytest.raises(megackpt.FormatError, match=named):
        megackpt.load_plain_tensors(tmp_path / "folder")


def test_training_state_next_to_a_model_is_left_out_by_name(
    made: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = " ".join(CommandLine(capsys).out("inspect", made("a step of the Trainer")).split())
    assert "Left out: optimizer.pt (state of a Trainer or of accelerate)" in out


def test_every_kind_of_the_table_has_a_next_step() -> None:
    for kind in KINDS:
        assert kind.advice.endswith("."), kind.name
        assert "{subfolder}" not in kind.advice or kind.subfolder, kind.name


SIZES = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}


def _in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return codes of 8 bits, and a scale of 1/8 for each block of 32 x 32."""
    if "_proj.weight" not in name:
        return {name: weight.bfloat16()}
    scales = torch.full([extent // 32 for extent in weight.shape], 0.125)
    return {name: (weight * 8).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _in_mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return codes of 4 bits by two, and an exponent for each 32 inputs; both random."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight.bfloat16()}
    experts, inputs, outputs = weight.shape
    return {
        f"{name}_blocks": torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8),
    }


QUANTISED: dict[str, tuple[str, dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]]]] = {
    "fp8": ("llama", {"quantization_config": FP8}, _in_fp8),
    "mxfp4": ("gpt_oss", {**EXPERTS, "quantization_config": {"quant_method": "mxfp4"}}, _in_mxfp4),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_the_advice_gives_a_folder_that_is_imported(method: str, tmp_path: Path) -> None:
    family, fields, quantised = QUANTISED[method]
    torch.manual_seed(0)
    fields = {**SIZES, **fields}
    quantisation = fields.pop("quantization_config")
    config = transformers.AutoConfig.for_model(family, **fields)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    stored: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        stored |= quantised(name, weight)
    folder, plain = tmp_path / "folder", tmp_path / "plain"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    written = {**json.loads(config.to_json_string()), "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(MapError, match=rf"quantised .{method};") as failed:
        megackpt.import_huggingface(folder, tmp_path / "imported")

    advice = re.search(r"transformers 5: (.*)\. Then give", str(failed.value))
    assert advice is not None
    classes = {name: getattr(transformers, name) for name in re.findall(r"\w+Config|Auto\w+", advice[1])}
    names: dict[str, Any] = {**classes, "folder": folder, "plain": plain}
    exec(advice[1], names)
    megackpt.import_huggingface(plain, tmp_path / "imported")
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "again")
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    expected = names["model"].state_dict()
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(array, expected[key]) for key, array in read.state_dict().items())
    assert all(array.dtype == torch.bfloat16 for array in expected.values())


IMAGE = {"mm_tokens_per_image": 4, "boi_token_index": 37, "eoi_token_index": 38, "image_token_index": 39}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
TEXTS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""The model type of the text in a multimodal model."""


def multimodal(family: str) -> Any:
    """Return a random model of images and text."""
    ties = {"tie_word_embeddings": family == "gemma3"}
    text = {"model_type": TEXTS[family], **random_fields(TEXTS[family], 0), "vocab_size": 40, **ties}
    text["final_logit_softcapping"] = None  # which transformers leaves out of a multimodal Gemma 3
    vision = VISION | ({"model_type": "pixtral"} if family == "mistral3" else {})
    fields = {"text_config": text, "vision_config": vision, **IMAGE, **ties}
    config = transformers.AutoConfig.for_model(family, **fields)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    return randomised(transformers.AutoModelForImageTextToText.from_config(config).eval(), 0)


@pytest.mark.parametrize("spelling", ["as it is written", "of the modules"])
@pytest.mark.parametrize("family", TEXTS)
def test_logits_are_those_of_the_whole_model_on_text(family: str, spelling: str, tmp_path: Path) -> None:
    whole, folder = multimodal(family), tmp_path / "folder"
    whole.save_pretrained(folder)
    if spelling == "of the modules":  # in memory; also what some folders have
        tied = {"lm_head.weight"} if family == "gemma3" else set()
        stored = {key: value for key, value in whole.state_dict().items() if key not in tied}
        assert stored.keys() != load_file(folder / "model.safetensors").keys()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MapError, match=rf"model_type '{family}'.*text_only=True.*--text-only"):
        megackpt.import_huggingface(folder, tmp_path / "imported")
    report = megackpt.import_huggingface(folder, tmp_path / "imported", text_only=True)
    assert report.map == TEXTS[family].removesuffix("_text")
    all_names = megackpt.load_tensors_metadata(folder).keys()
    assert set(report.left_out) == {name for name in all_names if "language" not in name} - {"lm_head.weight"}
    assert any("vision_tower" in name for name in report.left_out)

    content = megackpt.load_content_metadata(tmp_path / "imported")
    config = gpt_config(content["huggingface_config"])
    model = build_gpt(config, ParallelGroups.create(ParallelLayout()))
    megackpt.load({"model": model.sharded_state_dict()}, tmp_path / "imported")
    ids = token_ids(config.vocab_size) % 37  # no tokens of images
    with torch.no_grad():
        expected = whole(ids).logits
    (chunk,) = model
    with torch.no_grad():
        assert_close(chunk(ids).transpose(0, 1)[..., : config.vocab_size].numpy(), expected)

    # Exported, it is a model of text alone.
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "text")
    text: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(text(ids).logits, expected)
