"""Changed folders of other tools before their importers: what a case is made of, and what came of it.

A case is a small real folder with one or two random changes: of names, kinds and bytes of files, of the trees
and tensors in them, of documents; some of them happen while the importer reads. The importer then raises an
error of ours, or what it stores is, bit for bit, what a slow and obvious reader finds in the same folder. No
memory is what it happens to be: in a case, new memory is filled with a pattern.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import megackpt
from megackpt.contrib.peft import export_peft, import_peft
from megackpt.formats.foreign.mapped_files import load_mapped_file
from megackpt.maps import family_of
from tests.support.dcp_alone import ALONE
from tests.system.attacks.mutation import HOSTILE, positions_in, replaced
from tests.system.attacks.trial import in_child, virtual_bytes

CONTRIB = Path(__file__).parents[2] / "contrib"
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 2500
DEADLINE_S = 120.0
CONFIG = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 12, "tie_word_embeddings": True,
}  # fmt: skip

Draw = random.Random
Tree = Any


# Kinds of tensors, and other changes of a tree.

KINDS: Mapping[str, Callable[[Tensor], Any]] = {
    "turned": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "a column": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t.flatten()[:1].expand(7_000_000),
    "conjugate": lambda t: torch.complex(t.float(), t.float()).conj(),
    "negative": lambda t: torch._neg_view(t.float()),
    "parameter": lambda t: torch.nn.Parameter(t.float()),
    "sparse": lambda t: t.to_sparse(),
    "rows": lambda t: t.float().reshape(1, -1).to_sparse_csr(),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]], layout=torch.jagged),
    "numpy": lambda t: t.float().numpy(),
    "double": lambda t: t.double(),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "bits": lambda t: t.to(torch.uint8).view(torch.bits8),
    "longer": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "shorter": lambda t: t.flatten()[:-1],
    "flat": lambda t: t.flatten(),
    "empty": lambda t: t[:0] if t.dim() else t,
    "65 dims": lambda t: t.reshape((1,) * 65 + tuple(t.shape)),
    "not a number": lambda t: t.float() * torch.nan,
    "other values": lambda t: t + 1,
    "a tuple": lambda t: (t, t),
    "a list": lambda t: [t],
}  # fmt: skip


def change_tree(tree: Tree, draw: Draw) -> None:
    """Change one value in nested dicts, lists and inert objects, in place."""
    positions = list(_positions(tree))
    if not positions:
        return
    container, key = draw.choice(positions)
    leaf = container[key]
    way = draw.randrange(8)
    if isinstance(leaf, Tensor) and way < 5:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, that a kind of tensor is in beta state
                container[key] = KINDS[draw.choice(sorted(KINDS))](leaf)
        except RuntimeError:  # torch has no such tensor
            return
    elif isinstance(leaf, Tensor) and way == 5:
        other, other_key = draw.choice([(c, k) for c, k in positions if isinstance(c[k], Tensor)])
        container[key] = other[other_key]
    elif isinstance(container, dict) and way == 6:
        items = list(container.items())
        container.clear()
        draw.shuffle(items)
        container.update(item for item in items if item[0] != key or draw.random() < 0.5)
    elif isinstance(container, dict) and way == 7 and isinstance(key, str):
        container[key + draw.choice("x.0")] = leaf
    else:
        container[key] = draw.choice(HOSTILE)


def _positions(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a tree with each of its keys."""
    container = vars(tree) if hasattr(tree, "is_inert") else tree
    if isinstance(container, (dict, list)):
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            yield container, key
            yield from _positions(container[key])


def _inert_classes(made: dict[str, ModuleType]) -> Any:
    """Return a module like pickle whose classes of other tools do nothing; made gets their modules."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if not module.startswith(("deepspeed", "megatron")):
                return super().find_class(module, name)
            members = {"__module__": module, "is_inert": True, "__init__": lambda self, *args: None}
            home = made.setdefault(module, ModuleType(module))
            if not hasattr(home, name):
                setattr(home, name, type(name, (), members))
            return getattr(home, name)

    inert = ModuleType("inert")
    inert.__dict__.update(Unpickler=Unpickler, Pickler=pickle.Pickler, load=pickle.load)
    return inert


def _change_pickle(file: Path, draw: Draw) -> None:
    made: dict[str, ModuleType] = {}
    tree = torch.load(file, weights_only=False, pickle_module=_inert_classes(made))
    for _ in range(draw.choice((1, 1, 2))):
        change_tree(tree, draw)
    kept = {name: sys.modules.pop(name, None) for name in made}
    sys.modules.update(made)  # for pickle, which looks classes up
    try:
        torch.save(tree, file.with_suffix(".changed"))
        file.with_suffix(".changed").replace(file)
    except Exception:  # noqa: BLE001 - a value that cannot be saved, so that the file stays
        file.with_suffix(".changed").unlink(missing_ok=True)
    finally:
        for name, module in kept.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _change_safetensors(file: Path, draw: Draw) -> None:
    tensors = load_file(file)
    change_tree(tensors, draw)
    plain = {k: v.contiguous() for k, v in tensors.items() if type(v) is Tensor and v.layout == torch.strided}
    try:
        save_file({k: v.clone() for k, v in plain.items() if not v.is_meta and not v.is_quantized}, file)
    except Exception:  # noqa: BLE001 - a tensor that the library does not write
        return


def _change_document(file: Path, draw: Draw) -> None:
    tree = json.loads(file.read_bytes())
    path = draw.choice(positions_in(tree))
    value = draw.choice((*HOSTILE, 10_000, 3, True, False))
    file.write_text(json.dumps(replaced(tree, path, value)))


def change_content(file: Path, draw: Draw) -> None:
    """Change what a file says, by its kind."""
    if file.suffix in (".pt", ".bin"):
        _change_pickle(file, draw)
    elif file.suffix == ".safetensors":
        _change_safetensors(file, draw)
    elif file.suffix == ".json":
        _change_document(file, draw)
    else:
        change_bytes(file, draw)


def change_bytes(file: Path, draw: Draw) -> None:
    """Change, cut or add bytes."""
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data) + 1)
    way = draw.randrange(4)
    if way == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif way == 1:
        del data[at:]
    elif way == 2:
        data[at:at] = draw.randbytes(draw.randrange(1, 9))
    else:
        data += draw.randbytes(8)
    file.write_bytes(data)


def change_kind(file: Path, draw: Draw) -> None:
    """Put something in the place of a file."""
    kept = file.with_name("kept-" + file.name.replace(".", "_"))
    file.rename(kept)
    way = draw.randrange(6)
    if way == 0:
        os.mkfifo(file)
    elif way == 1:
        file.mkdir()
    elif way == 2:
        file.symlink_to("/dev/zero")
    elif way == 3:
        file.symlink_to("nowhere")
    elif way == 4:
        file.symlink_to(kept.name)
    # Else it is missing.


def change_names(file: Path, draw: Draw) -> None:
    """Copy a file, over another one or under another name, or exchange two."""
    others = sorted(f for f in file.parent.iterdir() if f.is_file() and f.suffix == file.suffix and f != file)
    numbers = "".join(
        draw.choice(("0", "1", "00", "1764115200", "7", "")) if c.isdigit() else c for c in file.name
    )
    target = file.with_name(draw.choice((numbers, file.stem + ".bin", "x" + file.name, file.name.upper())))
    way = draw.randrange(3)
    if way == 0 and others:
        shutil.copy(file, draw.choice(others))
    elif way == 1 and others:
        other = draw.choice(others)
        first, second = file.read_bytes(), other.read_bytes()
        file.write_bytes(second)
        other.write_bytes(first)
    elif target != file:
        shutil.copy(file, target) if draw.random() < 0.7 else file.rename(target)


class WhileReading:
    """A change that happens when an import begins to write, or later."""

    def __init__(self, change: Callable[[], None], at: int) -> None:
        self._change, self._at, self._seen = change, at, 0

    def begin(self, doing: str, nbytes: int) -> None:
        self._step()

    def advance(self, nbytes: int) -> None:
        self._step()

    def _step(self) -> None:
        self._seen += 1
        if self._seen == self._at:
            self._change()


def change_meanwhile(file: Path, draw: Draw) -> None:
    """Cut, replace, overwrite or remove a file that is being read."""
    way = draw.randrange(4)
    if way == 0:
        os.truncate(file, draw.choice((0, 100, file.stat().st_size // 2)))
    elif way == 1:
        change_content(file, draw)
    elif way == 2:
        change_bytes(file, draw)
    else:
        file.unlink()


# The importers: what they read, and what a slow and obvious reader makes of it.


@dataclass(frozen=True)
class Importer:
    """An importer under test.

    Attributes:
        build: writes its folder.
        run: imports a folder to a target, with keyword arguments.
        compare: raises an AssertionError if the target does not have what the folder has.
        takes_progress: whether run takes `progress`.
    """

    build: Callable[[Path], None]
    run: Callable[..., Any]
    compare: Callable[[Path, Path, Any], None]
    takes_progress: bool = True


def assert_bits(stored: Any, expected: Tensor, key: str) -> None:
    dense = expected.detach().resolve_conj().resolve_neg().contiguous()
    assert isinstance(stored, Tensor), f"{key}: {type(stored)}"
    assert (stored.dtype, stored.shape) == (dense.dtype, dense.shape), key
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (stored, dense)]
    assert torch.equal(*flat), f"{key}: other bits"


def _torch_build(folder: Path) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    state = {"model": model.state_dict(), "rates": [0.1, 0.2], "step": 3, "rng": (1, torch.arange(4))}
    for rank in range(2):
        torch.save(state, folder / f"rank_{rank}.pt")
    torch.save({"noise": torch.randn(3, 4)}, folder / "extra.pt")


def _leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (dict, OrderedDict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{path}.{key}")
    else:
        yield path, tree


def _torch_compare(folder: Path, target: Path, report: Any) -> None:
    """Each tensor of a file of rank 0 is stored under its path, and nothing else is a tensor."""
    stored = {path: leaf for path, leaf in _leaves(megackpt.load({}, target)) if isinstance(leaf, Tensor)}
    by_path: dict[str, list[Tensor]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in (".pt", ".bin"):
            tree = torch.load(file, weights_only=False)
            for path, leaf in _leaves(tree):
                if isinstance(leaf, Tensor):
                    by_path.setdefault(path, []).append(leaf)
    left_out = " ".join(report.left_out)
    for path in by_path:
        matches = [key for key in stored if key == path or key.endswith(path)]
        steps = path.strip(".").split(".")
        prefixes = (".".join(steps[:count]) for count in range(1, len(steps) + 1))
        assert matches or any(prefix in left_out for prefix in prefixes), f"{path} is lost"
    for key, leaf in stored.items():
        candidates = [t for path, ts in by_path.items() if key == path or key.endswith(path) for t in ts]
        faults = []
        for candidate in candidates:
            try:
                assert_bits(leaf, candidate, key)
                break
            except AssertionError as error:
                faults.append(str(error))
        else:
            raise AssertionError(f"{key} is of no file: {faults}")


DEEPSPEED_CASES = ("zero1", "zero1_bf16", "zero2", "bf16_optimizer", "zero3", "zero3_bf16")


def _deepspeed_build(case: str, folder: Path) -> None:
    shutil.copytree(CONTRIB / "deepspeed" / "folders" / case, folder)


def _deepspeed_compare(folder: Path, target: Path, report: Any) -> None:
    """Masters are the stretches of the flat groups, as DeepSpeed's zero_to_fp32 cuts them."""
    step = folder / (folder / "latest").read_text().strip()
    arrays = megackpt.load_plain_tensors(target)
    models = [load_mapped_file(str(f)) for f in sorted(step.glob("*model_states.pt"))]
    name = re.compile(r"(bf16_)?zero_pp_rank_[01]_mp_rank_00_optim_states\.pt")
    files = sorted(f for f in step.glob("*optim_states.pt") if name.fullmatch(f.name))
    saved = [load_mapped_file(str(f))["optimizer_state_dict"] for f in files]
    is_zero_3 = "fp32_flat_groups" in saved[0]
    groups = [s["fp32_flat_groups" if is_zero_3 else "single_partition_of_fp32_groups"] for s in saved]
    paddings = saved[0].get("param_alignment_paddings")
    for number, shapes in enumerate(models[0]["param_shapes"]):
        parts = [of_rank[number].reshape(-1) for of_rank in groups]
        at = 0
        for index, (name, shape) in enumerate(shapes.items()):
            count = torch.Size(shape).numel()
            if is_zero_3:
                length = -(-count // len(parts))
                master = torch.cat([part[at : at + length] for part in parts])[:count]
                at += length
            else:
                master = torch.cat(parts)[at : at + count]
                at += count + (paddings[number][index] if paddings else 0)
            key = f"optimizer.state.fp32_param.{name}"
            assert_bits(arrays[key].reshape(-1), master, key)
            weight = models[0]["module"].get(name)
            if isinstance(weight, Tensor) and weight.numel() == count:
                assert_bits(arrays[name], weight, name)
    for name, value in models[0]["module"].items():
        if isinstance(value, Tensor) and value.numel():
            assert name in arrays, f"{name} is lost"


def _nvrx_build(folder: Path) -> None:
    shutil.copytree(CONTRIB / "nvrx" / "folders" / "fully_parallel", folder)


def _nvrx_compare(folder: Path, target: Path, report: Any) -> None:
    """Every element is that of a shard whose box has it."""
    arrays = megackpt.load_plain_tensors(target)
    seen: dict[str, Tensor] = {}
    names = [re.fullmatch(r"iter_(\d{7})_(\d+)_local\.pt", f.name) for f in folder.rglob("*.pt")]
    ranks_of: dict[str, set[str]] = {}
    for match in filter(None, names):
        ranks_of.setdefault(match[1], set()).add(match[2])
    newest = max(iteration for iteration, ranks in ranks_of.items() if ranks == {"0", "1"})
    for file in sorted(folder.rglob(f"iter_{newest}_*_local.pt")):
        for entity in _entities(load_mapped_file(str(file)).state["sharded_state_dict"]):
            state = entity.state
            if not isinstance(state, dict) or not isinstance(state.get("data"), Tensor):
                continue
            key, shape = state["key"], tuple(state["global_shape"])
            box = (1,) * (len(shape) - len(state["local_shape"])) + tuple(state["local_shape"])
            part = arrays[key]
            for dim, (start, extent) in enumerate(zip(state["global_offset"], box, strict=True)):
                part = part.narrow(dim, start, extent)
            flat = state.get("flattened_range")
            part = part.reshape(-1)[flat] if isinstance(flat, slice) else part.reshape(-1)
            assert_bits(part, state["data"].reshape(-1), key)
            mask = seen.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            for dim, (start, extent) in enumerate(zip(state["global_offset"], box, strict=True)):
                mask = mask.narrow(dim, start, extent)
            mask.fill_(True)
    for key, array in arrays.items():
        if key in seen:
            assert array.shape == seen[key].shape, key
            assert seen[key].all(), f"{key} has elements of no file"


def _entities(tree: Tree) -> Iterator[Any]:
    if isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _entities(value)
    elif hasattr(tree, "state"):
        yield tree


def _folder_build(folder: Path) -> None:
    folder.mkdir()
    made = family_of(CONFIG).region_map(CONFIG)
    torch.manual_seed(0)
    tensors = {key: torch.randn(array.stored) for key, array in made.right.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"a": [1, 2, 3]}')


def _folder_compare(folder: Path, target: Path, report: Any) -> None:
    """The way back gives every tensor of the folder, but for those that the report names."""
    back = target.parent / "back"
    megackpt.export_huggingface(target, back)
    stored = megackpt.load_plain_tensors(back)
    left_out = {text.partition(" ")[0] for text in report.left_out}
    options = megackpt.LoadOptions(exclude=tuple(left_out))  # what is left out may be of any kind
    expected = megackpt.load_plain_tensors(folder, options=options)
    assert expected.keys() - left_out == stored.keys(), expected.keys() ^ stored.keys()
    for key, value in stored.items():
        assert_bits(value, expected[key], key)


def _peft_build(folder: Path) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for layer in range(2):
        start = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors |= {f"{start}A.weight": torch.randn(4, 8), f"{start}B.weight": torch.randn(8, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "lora_dropout": 0.0,
        "use_rslora": False, "use_dora": False, "bias": "none", "target_parameters": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(document))


def _peft_compare(folder: Path, target: Path, report: Any) -> None:
    export_peft(target, target.parent / "back")
    stored, expected = (
        load_file(path / "adapter_model.safetensors") for path in (target.parent / "back", folder)
    )
    assert stored.keys() == expected.keys()
    for key, value in stored.items():
        assert_bits(value, expected[key], key)


def _dcp_state() -> dict[str, Tensor]:
    return {
        "w": torch.arange(40.0).reshape(5, 8),
        "b": torch.arange(6).to(torch.bfloat16),
        "n": torch.ones(3),
    }


def _dcp_build(folder: Path) -> None:
    dcp.save(_dcp_state(), checkpoint_id=folder, **ALONE)
    shutil.copytree(folder, folder / "of_step_2")  # a subfolder that is none of its business


def _dcp_compare(folder: Path, target: Path, report: Any) -> None:
    """What torch reads, or what was saved."""
    arrays, read = megackpt.load_plain_tensors(target), _dcp_state()
    try:
        dcp.load(read, checkpoint_id=folder, **ALONE)
    except BaseException:  # noqa: BLE001 - torch cannot read what is changed; its error is no Exception
        read = _dcp_state()
    assert arrays.keys() == read.keys()
    for key, value in arrays.items():
        assert_bits(value, read[key], key)


IMPORTERS: Mapping[str, Importer] = {
    "torch": Importer(_torch_build, megackpt.import_torch, _torch_compare),
    "deepspeed": Importer(partial(_deepspeed_build, "zero2"), megackpt.import_deepspeed, _deepspeed_compare),
    "nvrx": Importer(_nvrx_build, megackpt.import_nvrx, _nvrx_compare),
    "huggingface": Importer(_folder_build, megackpt.import_huggingface, _folder_compare),
    "peft": Importer(
        _peft_build,
        lambda folder, target: import_peft(folder, target, config=CONFIG),
        _peft_compare,
        takes_progress=False,
    ),
    "torch_dist": Importer(_dcp_build, partial(megackpt.convert, to="megackpt"), _dcp_compare),
}

CHANGES = (change_content, change_content, change_content, change_names, change_kind, change_bytes)


def case(name: str, seed: int, root: Path) -> str:
    """Make and import one changed folder in a child process; return what happened.

    "equal", "rejected: ..."; anything else is a fault.
    """
    home = root / f"{name}-{seed}"
    home.mkdir()
    outcome, end = in_child(partial(_outcome, name, seed, home), deadline_s=DEADLINE_S)
    shutil.rmtree(home)
    return outcome or f"FAULT: {end}"


def _outcome(name: str, seed: int, home: Path) -> str:
    draw, importer = random.Random(f"{name}{seed}"), IMPORTERS[name]
    if name == "deepspeed":
        importer = Importer(
            partial(_deepspeed_build, draw.choice(DEEPSPEED_CASES)), importer.run, importer.compare
        )
    folder, target = home / "folder", home / "new"
    importer.build(folder)
    arguments: dict[str, Any] = {}
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    file = draw.choice(files)
    is_meanwhile = importer.takes_progress and draw.random() < 0.25
    if is_meanwhile:
        change = partial(change_meanwhile, file, draw)
        arguments["progress"] = WhileReading(change, draw.choice((1, 1, 2, 3)))
        before = shutil.copytree(folder, home / "before", symlinks=True)
    else:
        draw.choice(CHANGES)(file, draw)
    limit = virtual_bytes() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _fill_new_memory()
    try:
        report = importer.run(folder, target, **arguments)
    except megackpt.CheckpointError as error:
        fault = _fault_of_error(error, target)
        return fault or f"rejected: {type(error).__name__}: {str(error)[:200]}"
    except BaseException as error:  # noqa: BLE001 - what must not be seen, whatever it is
        return f"FAULT: {type(error).__name__}: {error!s:.300}"
    try:
        importer.compare(before if is_meanwhile else folder, target, report)
    except Exception as error:  # noqa: BLE001 - the fault is told by whoever runs the cases
        if is_meanwhile:  # a change before the first read of a file, or after the last one
            try:
                shutil.rmtree(home / "back", ignore_errors=True)
                importer.compare(folder, target, report)
                return "equal"
            except Exception:  # noqa: BLE001 - neither the one nor the other
                pass
        return f"FAULT: accepted, and {type(error).__name__}: {error!s:.300}"
    return "equal"


def _fault_of_error(error: megackpt.CheckpointError, target: Path) -> str:
    if len(str(error)) > MOST_CHARACTERS:
        return f"FAULT: an error of {len(str(error))} characters"
    if (target / "metadata.json").exists():
        return f"FAULT: an error, and a checkpoint: {error!s:.200}"
    return ""


def _fill_new_memory() -> None:
    """Let `empty` of numpy and torch return memory that holds no values by chance."""
    of_numpy, of_torch = np.empty, torch.empty

    def empty_array(*args: Any, **kwargs: Any) -> Any:
        array = of_numpy(*args, **kwargs)
        if array.dtype.kind in "iufc" and array.size:
            array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array

    def empty_tensor(*args: Any, **kwargs: Any) -> Tensor:
        tensor = of_torch(*args, **kwargs)
        if tensor.device.type == "cpu" and tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
        return tensor

    np.empty, torch.empty = empty_array, empty_tensor  # type: ignore[assignment]
