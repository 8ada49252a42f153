"""Models composed of megackpt's parallel layers. They declare; no offset is computed here."""

from models.bert import BERT, BertConfig, build_bert
from models.block_config import (
    AttentionConfig,
    DeltaNetConfig,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    MoEConfig,
    MTPConfig,
    NoPositions,
    NormConfig,
    RotaryConfig,
    SlidingWindow,
    YarnScaling,
)
from models.config import GPTConfig
from models.encoder_config import T5Config
from models.gpt import GPT, build_gpt
from models.init import init_weights
from models.t5 import T5, build_t5

__all__ = [
    "BERT",
    "GPT",
    "T5",
    "AttentionConfig",
    "BertConfig",
    "DeltaNetConfig",
    "DynamicScaling",
    "GPTConfig",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "MLPConfig",
    "MTPConfig",
    "MoEConfig",
    "NoPositions",
    "NormConfig",
    "RotaryConfig",
    "SlidingWindow",
    "T5Config",
    "YarnScaling",
    "build_bert",
    "build_gpt",
    "build_t5",
    "init_weights",
]
