"""Starting from a Hugging Face folder, and writing one: --init-from and --export-to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt import DeclarationError, LoadOptions, LoadReport
from megackpt.maps import family_of, weights_of
from models import GPTConfig, MoEConfig
from models.huggingface import gpt_config
from training.text import VOCAB_SIZE

PRESETS = Path(__file__).parents[1] / "presets"
"""Small models of some families, one file for each."""


def read_config(folder: Path | str) -> dict[str, Any]:
    """Return the config.json of a folder, which may be a URL. Local.

    Raises:
        CheckpointError: there is no such folder, or no config.json that a map is for.
    """
    content = megackpt.load_content_metadata(folder)
    config = content.get("huggingface_config") if isinstance(content, dict) else None
    if not isinstance(config, dict):
        raise DeclarationError(f"{folder} has no config.json, which has the sizes of the model.")
    family_of(config)
    return config


def read_model(source: str) -> dict[str, Any]:
    """Return the config of a model: that of a file in the form of config.json, or a preset. Local.

    Raises:
        DeclarationError: there is no such file or preset, or it is no such file.
    """
    known = {path.stem: path for path in sorted(PRESETS.glob("*.json"))}
    try:
        config = json.loads(known.get(source, Path(source)).read_text())
    except (OSError, ValueError) as error:
        raise DeclarationError(
            f"--model {source} cannot be read: {error}. Give a file like config.json of a Hugging Face "
            f"folder, or one of {', '.join(known)}."
        ) from error
    if not isinstance(config, dict):
        raise DeclarationError(f"--model {source} is no config.json. Give a file with the fields of one.")
    family_of(config)
    return config


SEQ_LENGTH = 128
"""Tokens of a sample, if neither --seq-length nor a model says otherwise."""


def model_of(
    config: Mapping[str, Any],
    *,
    seq_length: int | None,
    dropout: float,
    dtype: torch.dtype,
    faults: list[str],
) -> GPTConfig:
    """Return the model of a config.json, with what a run chooses itself. Pure.

    Args:
        config: the config.json.
        seq_length: --seq-length; None for the default, or what the model takes if that is less.
        dropout: --dropout.
        dtype: dtype of the parameters.
        faults: other faults of the flags, which are reported with those of the config.

    Raises:
        CheckpointError: the model cannot be built, or there are faults: all of them are named.
    """
    model = gpt_config(config)
    texts = list(faults)
    if model.vocab_size < VOCAB_SIZE:
        texts.append(
            f"config.json has a vocabulary of {model.vocab_size}, and the text one of {VOCAB_SIZE}: bytes, "
            f"and the end of a text. Give a folder of a model with more."
        )
    if seq_length is None:
        seq_length = min(SEQ_LENGTH, model.seq_length)
    elif seq_length > model.seq_length:
        texts.append(
            f"--seq-length {seq_length} is more than the {model.seq_length} tokens of config.json. Give at "
            f"most as many."
        )
    if texts:
        raise DeclarationError(" ".join(texts))
    return replace(model, seq_length=seq_length, dropout=dropout, params_dtype=dtype, make_vocab_divisible=1)


def config_of_flags(model: GPTConfig) -> dict[str, Any] | None:
    """Return the config.json of a model that the flags describe: a Llama or a Mixtral. Pure.

    None if its experts are not those of Mixtral.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.moe is None:
        return config
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": model.moe.ffn_hidden_size,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.routing.top_k,
        "sliding_window": None,
    }
    return None if flags_unlike_mixtral(model.moe) else config | experts


def flags_unlike_mixtral(moe: MoEConfig) -> list[str]:
    """Return the flags that make experts that Mixtral does not have. Pure.

    No other family of Hugging Face has them either, without what no flag makes: norms of queries and keys,
    latent attention, a gate of the shared experts.
    """
    routing = moe.routing
    has_flags = {
        "--top-k=1": not routing.normalise,  # Mixtral's weights of a token's experts sum to 1
        "--router-score": routing.score_function != "softmax",
        "--expert-bias-rate": routing.bias_rate is not None,
        "--shared-experts": moe.shared_ffn_hidden_size > 0,
        "--moe-layer-freq": moe.layer_freq != 1,
    }
    return [flag for flag, is_given in has_flags.items() if is_given]


def import_weights(state: dict[str, Any], folder: Path | str, options: LoadOptions) -> LoadReport:
    """Fill the parameters of this rank, and their float32 masters, from a folder. Collective.

    The ranks read each byte once, and send each other what they need. Moments of the optimizer stay as they
    are.

    Raises:
        CheckpointError: the folder does not have the model, or is damaged; the same on all ranks.
    """
    shared = replace(options, exchange="all_to_all")
    return megackpt.load_with_report(weights_of(state), folder, maps="auto", options=shared)[1]


def export_folder(checkpoint: str, target: Path | str, source: Path | str | None) -> str:
    """Write a checkpoint of this program as a folder. Collective.

    Args:
        checkpoint: its directory, or URL.
        target: the folder to write, a directory or URL.
        source: the folder that the run began with: the files of its tokenizer are copied if it is a
            directory.

    Returns:
        A line that says what was written.

    Raises:
        CheckpointError: the folder cannot be written; the same on all ranks.
    """
    config = source if isinstance(source, Path) else None  # then that in the checkpoint
    export = megackpt.export_huggingface(checkpoint, target, config=config)
    return f"exported {checkpoint} to {export.location}: {export.tensors} tensors in {export.files} files"
