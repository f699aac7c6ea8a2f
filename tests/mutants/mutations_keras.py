"""Faults of Keras jobs, and of what a run says of its memory, metrics, values and copies."""

from __future__ import annotations

from mutation import Mutation

OPTIMIZERS, COMPILED, LAYERS = (f"train/keras/{name}.py" for name in ("keras_optimizers", "compiled", "layer_modules"))
PLANS, OF_LAYERS = "distributed/test_keras_plans.py", "distributed/test_keras_layers.py"

KERAS = (
    Mutation(
        "Keras: Adam corrects the bias of both moments by their roots",
        OPTIMIZERS,
        "return torch.sqrt(1 - powers[1]) / (1 - powers[0])",
        "return torch.sqrt((1 - powers[1]) / (1 - powers[0]))",
        (f"test {PLANS} formula",),
    ),
    Mutation(
        "Keras: RMSprop that is centered keeps the square of the mean",
        OPTIMIZERS,
        "torch._foreach_addcmul_(root, mean, mean, -1.0)",
        "pass",
        (f"test {PLANS} formula",),
    ),
    Mutation(
        "Keras: parameters that are left out of the decay of weights decay",
        OPTIMIZERS,
        '{"params": out, "weight_decay": 0.0}',
        '{"params": out}',
        (f"test {PLANS} formula",),
    ),
    Mutation(
        "Keras: a loss that is a sum is divided by the samples of a micro-batch",
        COMPILED,
        "count = samples / self._batch  # comes to 1 over the global batch",
        "count = samples",
        (f"test {PLANS} reduced",),
    ),
    Mutation(
        "Keras: a penalty is divided by the count of the loss",
        COMPILED,
        "return Loss(total if penalty is None else total + penalty * count, count)",
        "return Loss(total if penalty is None else total + penalty, count)",
        (f"test {OF_LAYERS} regularised",),
    ),
    Mutation(
        "Keras: what a batch draws depends on the samples that a rank takes of it",
        "train/keras/keras_data.py",
        "self._seeds.plant(number * self._batch)",
        "self._seeds.plant(int(part[0]))",
        (f"test {PLANS} batch_draws",),
    ),
    Mutation(
        "metrics: rows are joined in the order of ranks",
        "train/evaluation_sums.py",
        "for _, value in sorted(of, key=lambda one: one[0])]",
        "for _, value in of]",
        ("test distributed/test_metrics.py in_order",),
    ),
    Mutation(
        "copies: the manifest goes first",
        "checkpoint/mirror.py",
        "for name in [*manifest.files, MANIFEST]:",
        "for name in [MANIFEST, *manifest.files]:",
        ("test distributed/test_mirror.py over_another",),
    ),
    Mutation(
        "values of a model: what draws by a generator of its own is repeated by torch's",
        "parallel/deferred_init.py",
        'state = (kwargs.get("generator") or torch.default_generator).get_state()',
        "state = torch.default_generator.get_state()",
        ("test distributed/test_materialise.py Drawn",),
    ),
    Mutation(
        "values of a model: a parameter that does not learn learns once it has values",
        "parallel/deferred_init.py",
        "value = nn.Parameter(local, requires_grad=before.requires_grad)",
        "value = nn.Parameter(local)",
        ("test distributed/test_materialise.py Drawn",),
    ),
    Mutation(
        "memory: whole gradients of several micro-batches are forecast as shards",
        "forecast/memory.py",
        "split = np.where(whole, by[2], by[1])",
        "split = by[1]",
        ("test distributed/test_memory.py runs_hold",),
    ),
    Mutation(
        "losses by name: each is divided by the count of the first",
        "train/named_losses.py",
        "self._shares = [self._told[0] / count for count in self._told]",
        "self._shares = [1.0 for count in self._told]",
        ("test distributed/test_named_losses.py divided",),
    ),
)
