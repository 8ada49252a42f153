"""The parts of a transformer layer."""

from models.blocks.attention import SelfAttention
from models.blocks.mixers import LatentAttention
from models.blocks.mlp import MLP, GatedMLP, MoE, SharedExperts
from models.blocks.transformer import TransformerLayer

__all__ = ["MLP", "GatedMLP", "LatentAttention", "MoE", "SelfAttention", "SharedExperts", "TransformerLayer"]
