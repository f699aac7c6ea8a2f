"""Claims on scaling that tutorials repeat: what their sources support, and the setting to forecast beside them."""

from __future__ import annotations

from dataclasses import dataclass

from published.settings import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A speed-up that somebody stated.

    Attributes:
        setting: beside whose forecast it stands.
        devices: on how many.
        speed_up: over the first count of the setting.
        source: who states it.
        measured: whether it was measured; else it is only repeated.
    """

    setting: Setting
    devices: int
    speed_up: float
    source: str
    measured: bool = True

    @property
    def efficiency(self) -> float:
        """Speed-up over what as many more devices could give at most; 1 is linear."""
        return self.speed_up * self.setting.counts[0] / self.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A speed, or a time, that somebody measured.

    Attributes:
        setting: beside whose forecast it stands.
        devices: on how many.
        stated: as the source says it.
        value: the same as a number, in ``word``.
        samples: of the whole training where ``stated`` is its time; 0 where it is samples per second.
        unit: seconds in the unit of the time; 1 where it is samples per second.
        word: the unit in words.
    """

    setting: Setting
    devices: int
    stated: str
    value: float
    samples: int = 0
    unit: float = 1.0
    word: str

    def of_step(self, step: float) -> float:
        """The same figure for a step of so many seconds, in ``word``."""
        if not self.samples:
            return self.setting.samples(self.devices) / step
        return self.samples / self.setting.samples(self.devices) * step / self.unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim and what is known of it.

    Attributes:
        title: heading of its section.
        repeated: the claim as tutorials repeat it.
        verdict: on it, in a few words.
        supported: what its source supports, in a few sentences of Markdown.
        source: the source, as a Markdown link.
        differs: how the setting that is forecast differs from the source's.
        settings: forecast beside it.
        points: speed-ups stated, repeated or measured.
        speeds: speeds measured.
    """

    title: str
    repeated: str
    verdict: str
    supported: str
    source: str
    differs: str
    settings: tuple[Setting, ...]
    points: tuple[Point, ...] = ()
    speeds: tuple[Speed, ...] = ()


_IMAGES = 1_281_167  # in the training set of ImageNet 2012
_EIGHT = (1, 2, 4, 8)

_ALEXNET = Setting(name="AlexNet", model="alexnet", device="P100-PCIe", per_node=8, counts=_EIGHT, share=128)
_RESNET_SMALL = Setting(name="ResNet-50", model="resnet50", device="P100-PCIe", per_node=8, counts=_EIGHT, share=32)

KRIZHEVSKY = Claim(
    title="1.7x, 3.5x and 6.2x on 2, 4 and 8 GPUs",
    repeated="Krizhevsky 2012: AlexNet on ImageNet is 1.7 times as fast on 2 GPUs, 3.5 on 4, 6.2 on 8",
    verdict="An illustration: only the last of the three was measured, two years later",
    supported=(
        "Not in that paper, which uses two GPUs for their memory and says that this takes slightly less time than a"
        " net on one. About 6.2 times on 8 GPUs is in Krizhevsky 2014, with convolutions data-parallel and the fully"
        " connected layers split. 3.5 times on 4 resembles a prediction in a later blog post. The three numbers"
        " together are an illustration, not a measurement."
    ),
    source="[Krizhevsky 2014](https://arxiv.org/abs/1404.5997)",
    differs=(
        "GPUs of that time are not in the catalog. The forecast is for P100 on PCI Express 3.0 in one host, in fp32,"
        " with all layers data-parallel: 128 images a GPU for AlexNet, whose 61 million gradients come with little"
        " work, and 32 for ResNet-50, whose 26 million come with more."
    ),
    settings=(_ALEXNET, _RESNET_SMALL),
    points=(
        Point(setting=_ALEXNET, devices=2, speed_up=1.7, source="as repeated", measured=False),
        Point(setting=_ALEXNET, devices=4, speed_up=3.5, source="as repeated", measured=False),
        Point(setting=_ALEXNET, devices=8, speed_up=6.2, source="Krizhevsky 2014, about"),
    ),
)

_GOYAL = Setting(
    name="ResNet-50",
    model="resnet50",
    device="P100",
    per_node=8,
    network="50Gb/s",
    counts=(8, 16, 32, 64, 128, 256, 352),
    share=32,
)

GOYAL = Claim(
    title="ImageNet in one hour",
    repeated="Goyal 2017: ResNet-50 on ImageNet in 1 hour on 256 GPUs, 29 hours on 8",
    verdict="Supported",
    supported=(
        "Supported: 8 and 256 P100, about 90 % scaling efficiency, 32 images a GPU, so that the global batch grows to"
        " 8,192, with a learning rate in proportion and 5 epochs of warm-up. From 8 to 352 GPUs an iteration takes 12"
        " % longer. The paper also gives 16 minutes an epoch on 8 GPUs, which would be 24 hours for 90 epochs, not"
        " 29."
    ),
    source="[Goyal et al. 2017](https://arxiv.org/abs/1706.02677)",
    differs="As in the paper: 8 P100 with NVLink a server, 50 Gbit/s of Ethernet, fp32. Loading of data is left out.",
    settings=(_GOYAL,),
    points=(
        Point(setting=_GOYAL, devices=256, speed_up=0.9 * 32, source="Goyal 2017, about 90 %"),
        Point(setting=_GOYAL, devices=352, speed_up=44 / 1.12, source="Goyal 2017, iteration 12 % longer"),
    ),
    speeds=(
        Speed(
            setting=_GOYAL,
            devices=8,
            stated="29 hours",
            value=29,
            samples=90 * _IMAGES,
            unit=3600,
            word="hours, 90 epochs",
        ),
        Speed(
            setting=_GOYAL,
            devices=256,
            stated="1 hour",
            value=1,
            samples=90 * _IMAGES,
            unit=3600,
            word="hours, 90 epochs",
        ),
        Speed(setting=_GOYAL, devices=352, stated="about 30 s", value=30, samples=_IMAGES, word="seconds, 1 epoch"),
    ),
)

_HOROVOD = (1, 4, 16, 64, 256, 512)
_RESNET_101 = Setting(
    name="ResNet-101", model="resnet101", device="P100-PCIe", per_node=4, network="25Gb/s", counts=_HOROVOD, share=64
)
_VGG = Setting(
    name="VGG-16", model="vgg16", device="P100-PCIe", per_node=4, network="25Gb/s", counts=_HOROVOD, share=64
)

HOROVOD = Claim(
    title="90 % on 512 GPUs",
    repeated="Horovod scales with 90 % efficiency to 512 GPUs",
    verdict="Supported for two models of three",
    supported=(
        "Supported for two models of three: 90 % for Inception V3 and for ResNet-101, but 68 % for VGG-16, on 128"
        " servers with 4 Pascal GPUs each and 25 Gbit/s of RoCE. Which model is asked matters as much as how many"
        " devices: VGG-16 sends 138 million gradients a step, ResNet-101 45 million."
    ),
    source="[Horovod, benchmarks](https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst)",
    differs=(
        "Which Pascal GPU is not stated: the forecast takes P100 on PCI Express, 64 images each as in the commands"
        " shown there, in fp32, over one GPU. Inception V3 is left out."
    ),
    settings=(_RESNET_101, _VGG),
    points=(
        Point(setting=_RESNET_101, devices=512, speed_up=0.90 * 512, source="Horovod, 90 %"),
        Point(setting=_VGG, devices=512, speed_up=0.68 * 512, source="Horovod, 68 %"),
    ),
)

_TPU = Setting(
    name="ResNet-50",
    model="resnet50",
    device="TPU-v3",
    per_node=1024,
    counts=(16, 32, 64, 128, 256, 512, 1024),
    share=32,
    precision="bf16",
)

TPUS = Claim(
    title="Near-linear to 1,024 accelerators",
    repeated="Shallue 2018: near-linear to 1,024 TPUs, 2.2 minutes an epoch against 256 on one",
    verdict="Not as worded",
    supported=(
        "Not as worded. In Ying 2018 the *whole* training, not an epoch, takes 2.2 minutes on 1,024 TPU v3 chips, at"
        " over 1.05 million images/s. Between 16 and 1,024 chips, MLPerf v0.6 has 2,530 s and 77 s to the same"
        " accuracy: 32.9 times for 64 times the chips."
    ),
    source=(
        "[Ying et al. 2018](https://arxiv.org/abs/1811.06992),"
        " [MLPerf v0.6](https://github.com/mlcommons/training_results_v0.6)"
    ),
    differs=(
        "The forecast is of images per second, 32 a chip in bf16. A time to a given accuracy also holds what"
        " forecasts of steps do not know: larger batches need more epochs, and evaluation takes its share of the 77"
        " s. So the forecast says how fast the chips could train, and MLPerf what came of it."
    ),
    settings=(_TPU,),
    points=(Point(setting=_TPU, devices=1024, speed_up=32.9, source="MLPerf v0.6, time to accuracy"),),
    speeds=(Speed(setting=_TPU, devices=1024, stated="over 1,050,000", value=1.05e6, word="images/s"),),
)

_BERT = Setting(
    name="BERT-Large",
    model="bert-large",
    device="V100-32GB",
    per_node=16,
    network="8x100Gb/s",
    counts=(16, 32, 64, 128, 256, 512, 1024),
    batch=65536,
    micro=64,
    precision="fp16",
    optimizer="lamb",
    state=8.0,
    preset="nvidia-examples",
)
_ABCI = Setting(
    name="ResNet-50, ABCI",
    model="resnet50",
    device="V100",
    per_node=4,
    network="2x100Gb/s",
    counts=(4, 2048),
    share=40,
    precision="fp16",
)

BERT = Claim(
    title="46.5x on 512 GPUs",
    repeated="Yamazaki 2019: BERT on SQuAD is 46.5 times as fast on 512 GPUs",
    verdict="Not in that paper",
    supported=(
        "Not in that paper, which trains ResNet-50 in 74.7 s on 2,048 V100, at over 1.73 million images/s. Measured"
        " for BERT-Large: NVIDIA's examples pre-train 28 to 29.5 times as fast on 512 GPUs as on 16 and, in an"
        " earlier table, 55.7 times on 1,024; DeepSpeed pre-trains to a given score in 1,993 minutes on 16 V100, 521"
        " on 64, 144 on 256 and 44 on 1,024. Fine-tuning on SQuAD is 14.0 times as fast on 16 V100 as on one."
    ),
    source=(
        "[Yamazaki et al. 2019](https://arxiv.org/abs/1903.12650), [NVIDIA's"
        " examples](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/LanguageModeling/BERT),"
        " [DeepSpeed](https://www.deepspeed.ai/tutorials/bert-pretraining/)"
    ),
    differs=(
        "The forecast is for samples of 128 tokens, 65,536 a step on any number of GPUs, 64 in one forward, 16 V100 a"
        " node with 8 x 100 Gbit/s (a network that the sources do not state), with the preset of NVIDIA's examples."
        " NVIDIA's nodes were DGX-2H, whose V100 draw more power and are faster. DeepSpeed's times also hold a phase"
        " with samples of 512 tokens. For Yamazaki 2019 the forecast takes 40 images a GPU, 4 GPUs and 2 x 100 Gbit/s"
        " a node."
    ),
    settings=(_BERT,),
    points=(
        Point(setting=_BERT, devices=64, speed_up=12709.88 / 3379.2, source="NVIDIA, DGX-2H"),
        Point(setting=_BERT, devices=256, speed_up=51937.28 / 3379.2, source="NVIDIA, DGX-2H"),
        Point(setting=_BERT, devices=512, speed_up=28.0, source="NVIDIA, 28 to 29.5"),
        Point(setting=_BERT, devices=1024, speed_up=188088.32 / 3379.2, source="NVIDIA, DGX-2H"),
        Point(setting=_BERT, devices=64, speed_up=1993 / 521, source="DeepSpeed, both phases"),
        Point(setting=_BERT, devices=256, speed_up=1993 / 144, source="DeepSpeed, both phases"),
        Point(setting=_BERT, devices=1024, speed_up=1993 / 44, source="DeepSpeed, both phases"),
    ),
    speeds=(
        Speed(setting=_BERT, devices=16, stated="3,379 (DGX-2H)", value=3379, word="samples/s"),
        Speed(setting=_BERT, devices=1024, stated="188,088 (DGX-2H)", value=188088, word="samples/s"),
        Speed(setting=_ABCI, devices=2048, stated="over 1,730,000", value=1.73e6, word="images/s"),
    ),
)

CLAIMS = (KRIZHEVSKY, GOYAL, HOROVOD, TPUS, BERT)
"""All of them, in the order shown."""
