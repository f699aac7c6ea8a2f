"""Each example is a job: it builds, and one micro-batch through its model gives a finite sum and the right count."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

import phalanx as px
from phalanx.demo.jobs import digits, gpt
from phalanx.train.inputs import Inputs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def load():
    """The module of an example, imported from its file as ``phalanx train`` does."""
    loaded = {}

    def of(name):
        if name not in loaded:
            if name in ("bert_classify", "gpt2"):
                pytest.importorskip("transformers")
            spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            loaded[name] = module
        return loaded[name]

    yield of
    for name in loaded:
        del sys.modules[f"example_{name}"]


def collated(job, dataset, ids):
    samples = dataset.__getitems__(ids) if hasattr(dataset, "__getitems__") else [dataset[i] for i in ids]
    return (job.collate or default_collate)(samples) if isinstance(samples, list) else samples


def forward(job, model, dataset, ids):
    args, kwargs, batch = Inputs(job, model)(collated(job, dataset, ids), CPU)
    return model(*args, **kwargs), batch


@pytest.mark.parametrize("module", [digits, gpt])
def test_the_demo_and_the_example_are_one_file(module):
    assert (EXAMPLES / Path(module.__file__).name).samefile(module.__file__)


@pytest.mark.parametrize("name", NAMES)
def test_one_micro_batch(load, name):
    job = load(name).job()
    assert isinstance(job, px.Job)
    torch.manual_seed(job.seed)
    model = job.model()
    output, batch = forward(job, model, job.data(), [0, 1, 2, 3])
    loss = job.loss(output, batch)
    assert loss.sum.shape == ()
    assert loss.sum.dtype == torch.float32
    mean = float(loss.sum.detach()) / int(loss.count)
    classes = (output.logits if hasattr(output, "logits") else output).shape[-1]
    assert mean == pytest.approx(math.log(classes), rel=0.35), "an untrained model is about as good as a guess"
    loss.sum.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert len(job.optimizer(list(model.parameters())).param_groups) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_data_are_other_data(load, name):
    job = load(name).job()
    assert job.evaluate is not None
    training, evaluation = job.data(), job.evaluate()
    assert len(training) > len(evaluation) > 50
    with torch.no_grad():
        output, batch = forward(job, job.model().eval(), evaluation, [0, 1])
    for metric in (job.metrics or (lambda output, batch: {"loss": job.loss(output, batch)}))(output, batch).values():
        assert math.isfinite(float(metric.sum))
        assert int(metric.count) > 0


@pytest.mark.parametrize("name", ["bert_classify", "gpt2"])
def test_padding_changes_nothing(load, name):
    """Sums and counts of single samples add up to those of the batch they are padded in."""
    job = load(name).job()
    torch.manual_seed(0)
    model = job.model().eval()
    dataset = job.data()
    lengths = [int(collated(job, dataset, [i])["attention_mask"].sum()) for i in range(40)]
    ids = [lengths.index(min(lengths)), lengths.index(max(lengths)), 0]
    assert min(lengths) < max(lengths)
    with torch.no_grad():
        together = job.loss(*forward(job, model, dataset, ids))
        alone = [job.loss(*forward(job, model, dataset, [i])) for i in ids]
    torch.testing.assert_close(together.sum, sum(loss.sum for loss in alone), rtol=1e-5, atol=1e-5)
    assert int(together.count) == sum(int(loss.count) for loss in alone)


def test_gpt2_counts_real_tokens_only(load):
    job = load("gpt2").job()
    batch = job.data().__getitems__(list(range(40)))
    count = int(job.loss(torch.zeros(40, batch["input_ids"].shape[1], 256), batch).count)
    assert count == int(batch["attention_mask"].sum()) - 40
    assert count < batch["input_ids"].numel() - 40


def test_resnet50_is_the_real_one(load):
    with torch.device("meta"):
        model = load("resnet50").ResNet50(1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032  # as published with the weights
    strides = [block.residual[3].stride[0] for block in model.blocks]
    assert strides == [1] * 3 + [2] + [1] * 3 + [2] + [1] * 5 + [2] + [1] * 2
    assert all(block.residual[0].stride == (1, 1) for block in model.blocks)
