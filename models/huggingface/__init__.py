"""Models that a Hugging Face `config.json` describes: the configs of ours that compute the same."""

from models.huggingface.decoders import gpt_config
from models.huggingface.encoders import bert_config, t5_config

__all__ = ["bert_config", "gpt_config", "t5_config"]
