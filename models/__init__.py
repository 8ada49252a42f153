"""Models composed of megackpt's parallel layers. They declare; no offset is computed here."""

from models.config import GPTConfig
from models.gpt import GPT, build_gpt
from models.init import init_weights
from models.moe_config import MoEConfig

__all__ = ["GPT", "GPTConfig", "MoEConfig", "build_gpt", "init_weights"]
