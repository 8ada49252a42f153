"""The BERT that a Hugging Face `config.json` describes.

Source: transformers 4.57 and 5.23, `BertConfig` and its models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from models.bert import BertConfig
from models.block_config import LearnedPositions, MLPConfig
from models.huggingface_fields import WITHOUT_EFFECT, ConfigFields

_DEFAULTS: Mapping[str, Any] = {
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
    fields = ConfigFields(config, _DEFAULTS)
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
