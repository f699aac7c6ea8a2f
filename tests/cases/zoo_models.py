"""Models and data of the zoo that the other grid does not have: of libraries, and for the features of a job."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from case_jobs import drawn
from case_models import CLASSES, FEATURES, WIDTH, Branch, Residual
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softplus

import phalanx as px

VOCABULARY, LENGTH, SAMPLES = 32, 12, 48
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **NO_DROPOUT))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, num_labels=CLASSES, **sizes, **none)
    return BertForSequenceClassification(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES}
    return ViTForImageClassification(
        ViTConfig(**sizes, **image, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_channels=1, num_labels=CLASSES)).double()


def lora() -> nn.Module:
    import peft

    targets = ["c_attn", "c_proj", "c_fc"]
    given = {"r": 4, "lora_alpha": 8, "target_modules": targets, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(init_lora_weights=False, **given))


class Shaken(Residual):
    def add(self, branch: Any, x: Tensor) -> Tensor:
        given = branch(x)
        return given + 0.1 * torch.randn_like(given) if self.training else given


class Normed(nn.Module):
    """BatchNorm between linear layers. A bias before it has no gradient but rounding, of which Adam makes steps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = (
            nn.Linear(FEATURES, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).relu())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, phase: str) -> tuple[Tensor, ...]:
        fake = self.generator(x[:, :CLASSES])
        if phase == "generator":
            return (self.critic(fake),)
        between = (0.5 * (x + fake)).detach().requires_grad_()
        return self.critic(x), self.critic(fake.detach()), self.critic(between), between


def critic_loss(output: tuple[Tensor, ...], batch: Any) -> px.Loss:
    return px.Loss((softplus(-output[0]) + softplus(output[1])).sum(), len(output[0]))


def penalised_loss(output: tuple[Tensor, ...], batch: Any) -> px.Loss:
    (grad,) = torch.autograd.grad(output[2].sum(), output[3], create_graph=True)
    return px.Loss(critic_loss(output, batch).sum + 10 * (grad.norm(dim=1) - 1).square().sum(), len(output[0]))


def generator_loss(output: tuple[Tensor, ...], batch: Any) -> px.Loss:
    return px.Loss(softplus(-output[0]).sum(), len(output[0]))


def of_samples(output: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"class": F.cross_entropy(output, batch["y"]), "size": output.square().sum(-1).mean()}


def of_words(output: Tensor, batch: Any) -> dict[str, Any]:
    words = px.cross_entropy(output, batch["labels"])
    return {"words": words, "size": output[:, 0].square().mean(-1).mean()}


def words(batch: Any) -> dict[str, Tensor]:
    return {"words": (batch["labels"] != -100).sum()}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(FEATURES, WIDTH), Branch()
        self.actor, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.stem(x)
        hidden = hidden + self.body(hidden)
        return self.actor(hidden), self.value(hidden)[:, 0]


def value_loss(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> px.Loss:
    return px.mse(output[1], batch["x"].sum(1))


def actor_loss(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> px.Loss:
    advantage = (batch["x"].sum(1) - output[1]).detach()
    chosen = output[0].log_softmax(-1).gather(1, batch["y"][:, None])[:, 0]
    return px.Loss(-(advantage * chosen).sum(), len(chosen))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Attention() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        hidden, mask = self.tokens(input_ids) + self.places(position_ids), px.document_mask(document_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        queries, keys, values = (of(hidden)[:, None] for of in (self.queries, self.keys, self.values))
        return hidden + scaled_dot_product_attention(queries, keys, values, attn_mask=mask)[:, 0]


def texts_by_step() -> px.Curriculum:
    return px.Curriculum({0: _texts(8), 2: _texts(12)})


def _texts(length: int) -> px.Table:
    tokens = torch.randint(VOCABULARY, (SAMPLES, length), generator=drawn(length))
    return px.Table(input_ids=tokens, labels=tokens)


def token_file() -> px.TokenFile:
    path = Path(tempfile.gettempdir()) / f"zoo-{VOCABULARY}-{LENGTH}.bin"
    if not path.exists():
        generator = np.random.default_rng(0)
        tokens = generator.integers(1, VOCABULARY, size=SAMPLES * LENGTH)
        tokens[generator.random(len(tokens)) < 0.2] = 0
        partial = path.with_suffix(f".{generator.bit_generator.random_raw()}")
        tokens.astype("<u2").tofile(partial)
        partial.rename(path)
    return px.TokenFile(str(path), length=LENGTH, end_of_text=0)


def _once(path: Path, write: Callable[[Path], None]) -> str:
    """The file at ``path``, written unless it is there; processes may ask at once."""
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        write(partial)
        partial.rename(path)
    return str(path)


def _columns() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, FEATURES, generator=drawn(7))
    return x, x[:, :CLASSES].argmax(1)


def tar_files() -> px.TarFiles:
    def write(path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for index, (x, y) in enumerate(zip(*_columns(), strict=True)):
                row = io.BytesIO()
                np.save(row, x.numpy())
                for extension, content in (("npy", row.getvalue()), ("cls", str(int(y)).encode())):
                    member = tarfile.TarInfo(f"{index:03}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))

    return px.TarFiles(_once(Path(tempfile.gettempdir()) / f"zoo-{SAMPLES}-{FEATURES}.tar", write))


def parquet_files() -> px.ParquetFiles:
    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        x, y = _columns()
        pq.write_table(pa.table({"x": list(x.numpy()), "y": y.numpy()}), path, row_group_size=8)

    path = _once(Path(tempfile.gettempdir()) / f"zoo-{SAMPLES}-{FEATURES}.parquet", write)
    return px.ParquetFiles(path, shuffle_within=2)


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=drawn(index))
        labels = ids.clone()
        labels[: 1 + index % (LENGTH - 2)] = -100
        return {"input_ids": ids, "labels": labels}


class Classified(Tokens):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": ids[0] % CLASSES}


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.randn(1, 8, 8, generator=drawn(index))
        return {"pixel_values": image.to(self.dtype), "label": image[0, 0, :CLASSES].argmax()}


def huggingface() -> Any:
    import datasets

    x = torch.randn(SAMPLES, FEATURES, generator=drawn(7))
    return datasets.Dataset.from_dict({"x": x.numpy(), "y": x[:, :CLASSES].argmax(1).numpy()}).with_format("torch")


def huggingface_stream() -> Any:
    return huggingface().to_iterable_dataset(num_shards=2)


def contrastive(output: tuple[Tensor, Tensor], batch: Any) -> px.Loss:
    left, right = (F.normalize(one, dim=-1) for one in output)
    return px.Loss(F.cross_entropy(4.0 * left @ right.T, torch.arange(len(left)), reduction="sum"), len(left))


def grouped(params: Any) -> torch.optim.Optimizer:
    by_name = {"*bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-2}}
    return torch.optim.AdamW(px.groups(params, by_name), lr=1e-3, weight_decay=0.1)


def plateau(params: Any) -> Any:
    optimizer = torch.optim.SGD(params, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)


def _rows(seed: int, length: int) -> px.Table:
    x = torch.randn(length, FEATURES, generator=drawn(seed))
    return px.Table(x=x, y=x[:, :CLASSES].argmax(1))


MIXTURE = px.Mixture({"few": _rows(9, 16), "many": _rows(10, 32)}, {"few": 1, "many": 1})
