"""Models composed of megackpt's parallel layers. They declare; no offset is computed here."""

from models.block_config import (
    AttentionConfig,
    DynamicScaling,
    LatentConfig,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    MTPConfig,
    NormConfig,
    RotaryConfig,
    SlidingWindow,
    YarnScaling,
)
from models.config import GPTConfig
from models.gpt import GPT, build_gpt
from models.init import init_weights
from models.moe_config import MoEConfig

__all__ = [
    "GPT",
    "AttentionConfig",
    "DynamicScaling",
    "GPTConfig",
    "LatentConfig",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "MLPConfig",
    "MTPConfig",
    "MoEConfig",
    "NormConfig",
    "RotaryConfig",
    "SlidingWindow",
    "YarnScaling",
    "build_gpt",
    "init_weights",
]
