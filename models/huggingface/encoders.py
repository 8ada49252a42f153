"""The BERT or T5 that a Hugging Face `config.json` describes.

Source: transformers 4.57 and 5.23, `BertConfig`, `T5Config`, `MT5Config` and their models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megackpt.errors import DeclarationError
from models.bert import BertConfig
from models.block_config import AttentionConfig, LearnedPositions, MLPConfig
from models.encoder_config import T5Config
from models.huggingface.fields import ACTIVATIONS, WITHOUT_EFFECT, ConfigFields

_BERT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}


def bert_config(
    config: Mapping[str, Any], *, has_token_head: bool = True, ignored: Collection[str] = ()
) -> BertConfig:
    """Return the model that a `config.json` describes. Pure.

    Choices of a run are not taken from it: the dtype is float32, dropout is 0, and seq_length is the longest
    sequence that the model is made for. Change them with `dataclasses.replace`.

    Args:
        config: the parsed file, as transformers 4 or 5 write it.
        has_token_head: whether the model is that of `BertForMaskedLM`; otherwise it is that of `BertModel`,
            with its pooler and without an output layer.
        ignored: names of fields that the caller knows to change nothing.

    Raises:
        DeclarationError: a family or field that is not supported, a value that is not in its range, or sizes
            that do not fit together. The message has its name.
    """
    fields = ConfigFields(config, _BERT_DEFAULTS)
    fields.require("model_type", "bert")
    fields.skip({*WITHOUT_EFFECT, *ignored})
    fields.skip(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"))
    # Older files name what every BERT has, and sizes of heads for tasks.
    fields.require("position_embedding_type", None, "absolute")
    fields.skip(("gradient_checkpointing", "pooler_fc_size", "pooler_num_attention_heads", "directionality"))
    fields.skip(("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"))
    for name in ("is_encoder_decoder", "add_cross_attention", "is_decoder"):
        fields.require(name, None, False)
    fields.require("tie_word_embeddings", True)
    positions = fields.integer("max_position_embeddings")
    model = BertConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        ffn_hidden_size=fields.integer("intermediate_size"),
        seq_length=positions,
        positions=LearnedPositions(count=positions),
        norm_eps=fields.number("layer_norm_eps"),
        mlp=MLPConfig(gated=False, activation=fields.activation("hidden_act")),
        token_types=fields.integer("type_vocab_size"),
        tied_embeddings=has_token_head,
        has_token_head=has_token_head,
        has_pooler=not has_token_head,
    )
    fields.check_all_read()
    return model


_T5_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "scale_decoder_outputs": True,
}
_MT5_DEFAULTS = {
    **_T5_DEFAULTS,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


def t5_config(
    config: Mapping[str, Any],
    *,
    encoder_length: int = 512,
    decoder_length: int = 512,
    ignored: Collection[str] = (),
) -> T5Config:
    """Return the model that a `config.json` describes. Pure.

    Choices of a run are not taken from it: the dtype is float32, and dropout is 0. Change them with
    `dataclasses.replace`.

    Args:
        config: the parsed file, as transformers 4 or 5 write it, with model_type `t5` or `mt5`.
        encoder_length: tokens of the encoder in each sequence; the model itself has no longest sequence.
        decoder_length: most tokens of the decoder in each sequence.
        ignored: names of fields that the caller knows to change nothing.

    Raises:
        DeclarationError: a family or field that is not supported, a value that is not in its range, or sizes
            that do not fit together. The message has its name.
    """
    family = config.get("model_type")
    if family not in ("t5", "mt5"):
        raise DeclarationError(
            f"config.json: model_type {family!r} is not supported; t5 and mt5 are.", key="model_type"
        )
    fields = ConfigFields(config, _MT5_DEFAULTS if family == "mt5" else _T5_DEFAULTS)
    fields.skip({*WITHOUT_EFFECT, *ignored})
    fields.skip(("dropout_rate", "classifier_dropout", "initializer_factor"))
    # Made of feed_forward_proj; and older files have the maximum of their tokenizer.
    fields.skip(("is_gated_act", "dense_act_fn", "n_positions"))
    fields.require("is_encoder_decoder", None, True)
    layers = fields.integer("num_layers")
    decoder_layers = fields.integer("num_decoder_layers") if fields.has("num_decoder_layers") else layers
    # Not both: transformers 5 writes that weights are tied where they are not.
    tied = fields.flag("tie_word_embeddings") and fields.flag("scale_decoder_outputs") and family == "t5"
    model = T5Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("d_model"),
        num_layers=layers + decoder_layers,
        num_encoder_layers=layers,
        num_heads=fields.integer("num_heads"),
        ffn_hidden_size=fields.integer("d_ff"),
        seq_length=encoder_length + decoder_length,
        encoder_length=encoder_length,
        tied_embeddings=tied,
        norm_eps=fields.number("layer_norm_epsilon"),
        attention=AttentionConfig(head_dim=fields.integer("d_kv"), scale=1.0),
        mlp=_mlp(fields),
        relative_buckets=fields.integer("relative_attention_num_buckets"),
        max_distance=fields.integer("relative_attention_max_distance"),
    )
    fields.check_all_read()
    return model


def _mlp(fields: ConfigFields) -> MLPConfig:
    name = fields.value("feed_forward_proj")
    gate, dash, activation = name.rpartition("-") if isinstance(name, str) else ("", "", "")
    if activation not in ACTIVATIONS or gate + dash not in ("", "gated-"):
        raise fields.error("feed_forward_proj", f"is not supported; {', '.join(ACTIVATIONS)} are, or gated-")
    # transformers has the approximation for this spelling only.
    kind = "gelu_tanh" if name == "gated-gelu" else ACTIVATIONS[activation]
    return MLPConfig(gated=bool(gate), activation=kind)
