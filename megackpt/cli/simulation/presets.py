"""Published models by name. The tests have their totals and sources."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megackpt.cli.simulation.transformer import Experts, LatentAttention, ModelSizes

PRESETS: Mapping[str, ModelSizes] = MappingProxyType(
    {
        # Dubey et al. 2024, table 3; first and last stage have one layer less each (section 3.3.2).
        "llama3-8b": ModelSizes(
            vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, query_groups=8, ffn_size=14336
        ),
        "llama3-70b": ModelSizes(
            vocab_size=128256, hidden_size=8192, num_layers=80, num_heads=64, query_groups=8, ffn_size=28672
        ),
        "llama3-405b": ModelSizes(
            vocab_size=128256,
            hidden_size=16384,
            num_layers=126,
            num_heads=128,
            query_groups=8,
            ffn_size=53248,
            ends_count_as_layers=True,
        ),
        # meta-llama/Llama-3.2-1B, config.json.
        "llama3-1b": ModelSizes(
            vocab_size=128256,
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            query_groups=8,
            ffn_size=8192,
            tied_embeddings=True,
        ),
        # Brown et al. 2020, table 2.1; Radford et al. 2019 for what the table leaves out.
        "gpt3-175b": ModelSizes(
            vocab_size=50257,
            hidden_size=12288,
            num_layers=96,
            num_heads=96,
            ffn_size=49152,
            gated=False,
            linear_bias=True,
            norm_bias=True,
            tied_embeddings=True,
            positions=2048,
        ),
        # Jiang et al. 2024, table 1.
        "mixtral-8x7b": ModelSizes(
            vocab_size=32000,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            query_groups=8,
            ffn_size=14336,
            experts=Experts(count=8, ffn_size=14336),
        ),
        # DeepSeek-AI 2024 (DeepSeek-V3), section 4.2, without the module that predicts further tokens.
        "deepseek-v3": ModelSizes(
            vocab_size=129280,
            hidden_size=7168,
            num_layers=61,
            num_heads=128,
            ffn_size=18432,
            latent=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
            experts=Experts(count=256, ffn_size=2048, shared_ffn_size=2048, dense_layers=3, router_bias=True),
        ),
        # Small enough to be planned in a moment.
        "gpt-125m": ModelSizes(
            vocab_size=50257,
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            ffn_size=3072,
            gated=False,
            linear_bias=True,
            norm_bias=True,
            tied_embeddings=True,
            positions=2048,
        ),
    }
)
