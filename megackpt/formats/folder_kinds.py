"""Names what a folder or a file of another tool is, and what to do with it.

A format opens a checkpoint. The kinds of this table also name folders that no format opens, folders above a
checkpoint, and the tool whose folder a format opens. They are recognised by the names of files alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shlex import quote

from megackpt.formats.file_names import (
    DEEPSPEED,
    HUGGINGFACE,
    LEGACY_MEGATRON,
    NVRX,
    TORCH_DIST,
    TORCH_SAVE,
    compiled,
)

_INSPECT = "Look into it with `megackpt inspect {shell}`"
_CONVERT = f"{_INSPECT}, or make a checkpoint of it with `megackpt convert {{shell}} NEW`."
_CONVERT_TO = f"{_INSPECT}, or make a checkpoint of it with `megackpt convert {{shell}} NEW --to megackpt`."


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """A kind of folder or file.

    Attributes:
        name: what it is, as a phrase with an article.
        files: regular expression; a folder that has a file with such a name is of this kind.
        advice: the next step. `{where}` stands for the location, `{shell}` for the same as a shell takes it,
            and `{subfolder}` for the first group of `subfolder`.
        subfolder: regular expression for names of files, or of folders in them; of several matches that with
            the largest number counts. The kind needs a match. None if advice does not name any.
    """

    name: str
    files: str
    advice: str
    subfolder: str | None = None


@dataclass(frozen=True, slots=True)
class RecognisedFolder:
    """What a location holds.

    Attributes:
        name: as in `FolderKind`.
        advice: the next step, as a sentence or two.
    """

    name: str
    advice: str


KINDS = (
    FolderKind(
        name="the root of a run, with a checkpoint for each step",
        files=r"iter_\d{7,}/metadata\.json",
        subfolder=r"(iter_\d{7,})/metadata\.json",
        advice="Name a step of it, such as {where}/{subfolder}.",
    ),
    FolderKind(
        name="a folder of Hugging Face's Trainer that has a checkpoint of megackpt in it",
        files=r"trainer_state\.json",
        subfolder=r"(megackpt)/metadata\.json",
        advice="Name that, {where}/{subfolder}.",
    ),
    FolderKind(
        name="a run of Hugging Face's Trainer, with a checkpoint for each step",
        files=r"checkpoint-\d+/trainer_state\.json",
        subfolder=r"(checkpoint-\d+/megackpt)/metadata\.json",
        advice="Name one of them, such as {where}/{subfolder}.",
    ),
    FolderKind(
        name="a run of Hugging Face's Trainer, with a checkpoint for each step",
        files=r"checkpoint-\d+/trainer_state\.json",
        subfolder=r"(checkpoint-\d+)/trainer_state\.json",
        advice="Name one of them, such as {where}/{subfolder}; TrainerMixin resumes from it.",
    ),
    FolderKind(
        name="a checkpoint of Hugging Face's Trainer under FSDP",
        files=r"trainer_state\.json",
        subfolder=r"(pytorch_model_fsdp_0)/\.metadata",
        advice="TrainerMixin resumes from it. Its weights are {where}/{subfolder}.",
    ),
    FolderKind(
        name="a checkpoint of Hugging Face's Trainer under DeepSpeed",
        files=r"trainer_state\.json",
        subfolder=r"(global_step\d+)/[^/]*mp_rank_\d+_model_states\.pt",
        advice="TrainerMixin does not resume from it: go on with the Trainer without the mixin, or make a "
        "checkpoint of {where}/{subfolder} with `megackpt convert`.",
    ),
    FolderKind(
        name="a checkpoint of Hugging Face's Trainer",
        files=r"trainer_state\.json",
        subfolder=r"((?:adapter_)?model\.safetensors(?:\.index\.json)?|(?:pytorch|adapter)_model.*\.bin)",
        advice=f"TrainerMixin resumes from it. {_INSPECT}.",
    ),
    FolderKind(
        name="what Accelerator.save_state wrote under FSDP",
        files=r"random_states_\d+\.pkl",
        subfolder=r"(pytorch_model_fsdp_0)/\.metadata",
        advice="megackpt.contrib.accelerate.load_state loads it. Its weights are {where}/{subfolder}.",
    ),
    FolderKind(
        name="what Accelerator.save_state wrote",
        files=r"random_states_\d+\.pkl",
        advice=f"megackpt.contrib.accelerate.load_state loads it. {_INSPECT}.",
    ),
    FolderKind(
        name="a folder of checkpoints of Accelerator.save_state",
        files=r"(?:[^/]+/){1,2}random_states_\d+\.pkl",
        subfolder=r"((?:[^/]+/)?[^/]+)/random_states_\d+\.pkl",
        advice="Name one of them, such as {where}/{subfolder}.",
    ),
    FolderKind(
        name="a pipeline of diffusers, which is several models",
        files=r"model_index\.json",
        subfolder=r"([^/]+)/[^/]*\.(?:safetensors|bin)",
        advice="Name the folder of one of them, such as {where}/{subfolder}.",
    ),
    FolderKind(name="an adapter of peft", files=r"adapter_config\.json", advice=_CONVERT_TO),
    FolderKind(
        name="a legacy checkpoint of Megatron-LM (--ckpt-format torch)",
        files=str(LEGACY_MEGATRON.foreign),
        advice=_CONVERT,
    ),
    FolderKind(
        name="a checkpoint of GPT-NeoX, or of another pipeline of DeepSpeed",
        files=r"(?:[^/]+/)?layer_\d+-model_\d+-model_states\.pt",
        advice="It is not read: its files have parts of parameters, and do not say which. Make a Hugging "
        "Face folder of it (GPT-NeoX has tools/ckpts/convert_neox_to_hf.py). Or make a universal checkpoint "
        "with DeepSpeed's ds_to_universal.py, load that with DeepSpeed into a model without pipeline and "
        "tensor parallelism, and save a ZeRO folder.",
    ),
    FolderKind(
        name="a universal checkpoint of DeepSpeed",
        files=r"(?:[^/]+/)?zero/.+/fp32\.pt",
        advice="It is not read. Name the ZeRO folder that it was made from.",
    ),
    FolderKind(name="a checkpoint of DeepSpeed", files=str(DEEPSPEED.foreign), advice=_CONVERT),
    FolderKind(name="a local checkpoint of nvidia-resiliency-ext", files=str(NVRX.foreign), advice=_CONVERT),
    FolderKind(
        name="a checkpoint of Orbax",
        files=r"(?:.*/)?(?:_CHECKPOINT_METADATA|manifest\.ocdbt)",
        advice="It is not read. Restore it with Orbax, and save the arrays with megackpt.save: "
        "docs/coming-from.md#orbax.",
    ),
    FolderKind(
        name="a checkpoint of NeMo",
        files=r"context/.*",
        subfolder=r"(weights)/(?:\.metadata|metadata\.json)",
        advice="Name its folder of weights, {where}/{subfolder}.",
    ),
    FolderKind(
        name="an archive of NeMo",
        files=r"[^/]+\.nemo",
        subfolder=r"([^/]+\.nemo)",
        advice="It is a tar file: unpack it, and name the folder model_weights or the .ckpt file in it.",
    ),
    FolderKind(
        name="a model in the cache of Hugging Face",
        files=r"blobs/[0-9a-f]{40,64}",
        advice="Name the folder of a revision, {where}/snapshots/REVISION.",
    ),
    FolderKind(
        name="a checkpoint of TensorFlow",
        files=r"(?:variables/)?[^/]+\.index|saved_model\.pb",
        advice="It is not read. Load it with TensorFlow, and write the arrays as safetensors.",
    ),
    FolderKind(
        name="a model for llama.cpp (GGUF)",
        files=r"[^/]+\.gguf",
        advice="It is not read, and its weights are rounded. Name the Hugging Face folder that it was made "
        "from.",
    ),
    FolderKind(
        name="a checkpoint of torch.distributed.checkpoint (DCP)",
        files=str(TORCH_DIST.foreign),
        advice=_CONVERT_TO,
    ),
    FolderKind(
        name="a checkpoint of torch.distributed.checkpoint (DCP) without its file .metadata",
        files=r"__\d+_\d+\.distcp",
        advice="That file is written last, and `cp DIR/*` leaves it out. Copy the whole folder again; if the "
        "file was never there, the save did not finish: name another step.",
    ),
    FolderKind(
        name="a folder of Hugging Face",
        files=(
            r"model\.safetensors|[^/]+\.safetensors\.index(?:\.[^/]+)?\.json"
            r"|pytorch_model[^/]*\.bin(?:\.index\.json)?"
        ),
        advice=_CONVERT_TO,
    ),
    FolderKind(
        name="one or more files of safetensors",
        files=str(HUGGINGFACE.foreign),
        advice="A folder is read if it has one such file, or the index of several, "
        "model.safetensors.index.json. Name such a folder: fetch the index, or put the file that you want "
        "into a folder of its own.",
    ),
    FolderKind(name="one or more files of torch.save", files=str(TORCH_SAVE.foreign), advice=_CONVERT),
    FolderKind(
        name="a folder with checkpoints in it",
        files=r"[^/]+/(?:\.metadata|metadata\.json|(?:model|adapter_model)\.safetensors(?:\.index\.json)?)",
        subfolder=r"([^/]+)/(?:\.metadata|metadata\.json|(?:model|adapter_model)\.safetensors(?:\.index\.json)?)",
        advice="Name one of them, such as {where}/{subfolder}.",
    ),
)
"""Kinds in the order in which they are looked for: those with more to say come first."""


def recognise_names(names: Sequence[str], *, where: str) -> RecognisedFolder | None:
    """Return what files of these names are; None if no kind has such files. Local, pure.

    >>> recognise_names(["checkpoint-10/trainer_state.json"], where="out").name
    "a run of Hugging Face's Trainer, with a checkpoint for each step"
    """
    for kind in KINDS:
        if any(map(compiled(kind.files).fullmatch, names)):
            subfolder = "" if kind.subfolder is None else _largest(kind.subfolder, names)
            if subfolder is not None:
                return RecognisedFolder(
                    kind.name, kind.advice.format(where=where, shell=quote(where), subfolder=subfolder)
                )
    return None


def _largest(pattern: str, names: Iterable[str]) -> str | None:
    """Return the first group of the match with the largest number in it; None if nothing matches."""
    groups = {match[1] for name in names if (match := compiled(pattern).fullmatch(name))}
    return max(groups, key=lambda group: ([int(n) for n in re.findall(r"\d+", group)], group), default=None)
