"""Tiny models of timm, torchvision and diffusers, and what they are trained on. ``make zoo`` installs the libraries."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from case_jobs import drawn
from case_models import CLASSES
from torch import Tensor, nn
from zoo_models import SAMPLES

import phalanx as px

NOISE_STEPS = 100


def needs(*libraries: str) -> str:
    """Which of them are not here, in words; empty where all are."""
    missing = [one for one in libraries if find_spec(one) is None]
    return f"{', '.join(missing)}: not installed" if missing else ""


def preload_libraries() -> None:
    """Import those that are here."""
    for name in ("timm", "torchvision", "diffusers"):
        if find_spec(name):
            import_module(name)


def declare_operators() -> Any:
    """What torchvision's Python part asks for, which transformers imports, too. No model here calls them.

    Gives what torch keeps them by.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def loads_compiled_part() -> bool:
    """Whether torchvision's compiled part is of this build of torch."""
    found = find_spec("torchvision")
    try:
        for path in Path(str(found and found.origin)).parent.glob("_C*.so"):
            torch.ops.load_library(str(path))
    except OSError:
        return False
    return True


_operators = None if find_spec("torchvision") is None or loads_compiled_part() else declare_operators()


def residual_network() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES).double()


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    model = VisionTransformer(image_size=8, patch_size=4, num_classes=CLASSES, **sizes)
    nn.init.normal_(model.heads.head.weight)  # zeros, which have no gradient to compare before them
    return model


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], num_classes=CLASSES)


def timm_vit() -> nn.Module:
    import timm

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, **sizes)


def timm_convnext() -> nn.Module:
    import timm

    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    return timm.create_model("convnext_atto", pretrained=False, num_classes=CLASSES, **sizes)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 8}
    return UNet2DModel(sample_size=8, in_channels=1, out_channels=1, **blocks, **sizes)


def dit(without_labels: float = 0.0) -> nn.Module:
    """``without_labels``: the share of samples whose label each block leaves out in training, drawn in its forward."""
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    model = DiTTransformer2DModel(
        in_channels=1, out_channels=1, num_embeds_ada_norm=CLASSES, norm_num_groups=4, dropout=0.0, **sizes
    )
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = without_labels
    return model


class Pictures(torch.utils.data.Dataset[Any]):
    """Images of three colours, and a class."""

    def __init__(self, side: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.side, self.dtype = side, dtype

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.randn(3, self.side, self.side, generator=drawn(index))
        return {"image": image.to(self.dtype), "label": image[0, 0, :CLASSES].argmax()}


class Noised(torch.utils.data.Dataset[Any]):
    """Images with the noise of a step between none and all; which noise and which step are the sample's own."""

    def __init__(self) -> None:
        from diffusers import DDPMScheduler

        self.scheduler = DDPMScheduler(num_train_timesteps=NOISE_STEPS)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = drawn(index)
        image, noise = (torch.randn(1, 1, 8, 8, generator=generator) for _ in range(2))
        step = torch.randint(NOISE_STEPS, (1,), generator=generator)
        noised = self.scheduler.add_noise(image, noise, step)
        return {"noised": noised[0], "noise": noise[0], "step": step[0], "label": image[0, 0, 0, :CLASSES].argmax()}


def to_unet(batch: Any) -> dict[str, Tensor]:
    return {"sample": batch["noised"], "timestep": batch["step"]}


def to_dit(batch: Any) -> dict[str, Tensor]:
    return {"hidden_states": batch["noised"], "timestep": batch["step"], "class_labels": batch["label"]}


def noise_loss(output: Any, batch: Any) -> px.Loss:
    """How far the noise that the model tells is from that which was added."""
    return px.mse(output.sample, batch["noise"])


def picture_loss(output: Tensor, batch: Any) -> px.Loss:
    return px.cross_entropy(output, batch["label"])
