"""Fields of a Hugging Face `config.json`: read, known to change nothing, or an error that names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megackpt.errors import DeclarationError
from megackpt.maps.families.sizes import how_to_dequantise
from models.block_config import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}

WITHOUT_EFFECT = frozenset(
    [
        "architectures",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "return_dict_in_generate",
        "task_specific_params",
        "tf_legacy_loss",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        "use_return_dict",
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "router_aux_loss_coef",
        "reorder_and_upcast_attn",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "pad_token_id",
        "remove_invalid_values",
        "repetition_penalty",
        "sep_token_id",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ]
)
"""What does not change the function: notes, generation, training (dropout, losses), the way to compute it."""


class ConfigFields:
    """The fields of a `config.json`, with the defaults of its family; remembers which ones were read.

    Args:
        config: the parsed file.
        defaults: values of fields that the file may leave out.
        path: what stands before a name in errors, for a mapping inside of the file.

    Attributes:
        config: the parsed file.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], path: str = "") -> None:
        self.config = config
        self._defaults = defaults
        self._path = path
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """Return a field as the file has it; its default, or None, if the file leaves it out."""
        self._read.add(name)
        return self.config.get(name, self._defaults.get(name))

    def integer(self, name: str, *, at_least: int = 1) -> int:
        """Return a positive integer; with `at_least=0`, 0 too.

        Raises:
            DeclarationError: the field is missing, or something else.
        """
        value = self.value(name)
        if type(value) is not int or value < at_least:
            raise self.error(name, "must be a positive integer" + (" or 0" if at_least == 0 else ""))
        return value

    def number(self, name: str) -> float:
        """Return a positive number.

        Raises:
            DeclarationError: the field is missing, or something else.
        """
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value; False if the field is missing or null.

        Raises:
            DeclarationError: it is something else.
        """
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return bool(value)

    def activation(self, name: str) -> Activation:
        """Return our name of an activation function.

        Raises:
            DeclarationError: there is none of this name.
        """
        value = self.value(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(name, f"is not supported; {', '.join(ACTIVATIONS)} are")
        return ACTIVATIONS[value]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a mapping inside of the file; an empty one if it is missing or null.

        Raises:
            DeclarationError: it is something else.
        """
        value = self.value(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, "must be a mapping")
        return value or {}

    def require(self, name: str, *allowed: object) -> None:
        """Check that a field that changes the function has a value that is supported.

        Raises:
            DeclarationError: it has another one.
        """
        if self.value(name) not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise self.error(name, f"is not supported; {choices} is")

    def has(self, name: str) -> bool:
        """Return whether the file or the defaults have a value that is not null. Counts as read."""
        return self.value(name) is not None

    def skip(self, names: Collection[str]) -> None:
        """Count fields as read, as others read them or they change nothing."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Check that no field is left that may change the function: what is null, false or empty does not.

        Raises:
            DeclarationError: there is one; all are named.
        """
        unknown = [
            self._path + name
            for name, value in self.config.items()
            if name not in self._read and not name.startswith("_") and _is_set(value)
        ]
        if "quantization_config" in unknown:
            raise DeclarationError(
                f"config.json has a quantization_config: the weights of the folder are codes and scales, and "
                f"this model has none. {how_to_dequantise(self.config)}",
                key="quantization_config",
            )
        if unknown:
            raise DeclarationError(
                f"config.json has fields that are not supported with model_type {self.family!r}: "
                f"{', '.join(unknown)}. They may change what the model computes. If they do not, give their "
                f"names as `ignored`.",
                key=unknown[0],
            )

    @property
    def family(self) -> str:
        """The `model_type`."""
        return str(self.value("model_type"))

    def error(self, name: str, fault: str) -> DeclarationError:
        """Return an error about a field."""
        value = self.value(name)
        state = "is missing and" if value is None else f"is {value!r}, which"
        return DeclarationError(
            f"config.json: {self._path}{name} {state} {fault} (model_type {self.family!r}). Correct the "
            f"file, or choose another model.",
            key=self._path + name,
        )

    def inside(self, name: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigFields:
        """Return the fields of a mapping inside of the file."""
        return ConfigFields(config, {**defaults, "model_type": self.family}, f"{self._path}{name}.")


def _is_set(value: Any) -> bool:
    return not (value is None or value is False or value == {} or value == [])
