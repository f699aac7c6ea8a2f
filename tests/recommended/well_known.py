"""Models that people train, on the devices that they train them on: what ``phalanx plan`` is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]  # of a config.json of transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model on a cluster.

    Attributes:
        name: as people call it.
        config: as the model's publisher has it.
        on: the cluster.
        batch: samples in a step.
        length: tokens of a sample; 0 for images.
    """

    name: str
    config: Config
    on: str
    batch: int
    length: int = 0

    @property
    def asked(self) -> tuple[str, ...]:
        """Arguments of ``phalanx plan`` beside the configuration."""
        length = ("--seq", str(self.length)) if self.length else ()
        return ("--on", self.on, "--batch", str(self.batch), *length)


def _llama(width: int, layers: int, heads: int, inner: int, context: int = 8192) -> Config:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": context,
    }


def _gpt2(width: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


_LLAMA_8B = _llama(4096, 32, 32, 14336)
_LLAMA_13B: Config = {
    **_llama(5120, 40, 40, 13824, 4096),
    "num_key_value_heads": 40,
    "vocab_size": 32000,
}
_MIXTRAL: Config = {
    **_llama(4096, 32, 32, 14336, 32768),
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_BERT_LARGE: Config = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
_VIT_LARGE: Config = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 224,
    "patch_size": 16,
    "num_labels": 1000,
}
_RESNET_50: Config = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "image_size": 224,
    "num_labels": 1000,
}

SETTINGS = (
    Setting(name="GPT-2 small, a server", config=_gpt2(768, 12, 12), on="8xA100-40GB", batch=512, length=1024),
    Setting(name="Llama 8B, a server", config=_LLAMA_8B, on="8xH100", batch=128, length=8192),
    Setting(name="Llama 70B, 8 servers", config=_llama(8192, 80, 64, 28672), on="8x8xH100", batch=512, length=8192),
    Setting(
        name="Llama 405B, 128 servers", config=_llama(16384, 126, 128, 53248), on="128x8xH100", batch=2048, length=8192
    ),
    Setting(name="Mixtral 8x7B, 4 servers", config=_MIXTRAL, on="4x8xH100", batch=512, length=4096),
    Setting(
        name="Llama 8B, 128k tokens", config=_llama(4096, 32, 32, 14336, 131072), on="4x8xH100", batch=32, length=131072
    ),
    Setting(name="ViT-L, a server", config=_VIT_LARGE, on="8xA100-80GB", batch=4096),
    Setting(name="ResNet-50, a server", config=_RESNET_50, on="8xV100-16GB", batch=1024),
    Setting(name="BERT large, consumer cards", config=_BERT_LARGE, on="4xRTX-3090", batch=32, length=384),
    Setting(name="GPT-2 small, processors", config=_gpt2(768, 12, 12), on="2x16xcpu", batch=64, length=1024),
    Setting(name="Llama 13B, slow network", config=_LLAMA_13B, on="4x8xA100-80GB@10Gb/s", batch=512, length=4096),
    Setting(
        name="GPT-2 XL, unequal servers",
        config=_gpt2(1600, 48, 25),
        on="8xA100-40GB+8xV100-32GB",
        batch=512,
        length=1024,
    ),
    Setting(name="Llama 8B, a TPU pod", config=_LLAMA_8B, on="64xTPU-v5p", batch=512, length=8192),
)
