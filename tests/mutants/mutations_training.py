"""Faults of training, of what it keeps and of what it saves: averages, clipping, replicas, checkpoints, exports."""

from __future__ import annotations

from mutation import Mutation

AVERAGE, CLIPPING, SAVER = "train/weight_average.py", "train/grad_clipping.py", "checkpoint/background.py"
OPTIMIZER, REPLICAS = "checkpoint/optimizer.py", "parallel/local_sgd.py"

TRAINING = (
    Mutation(
        "the best evaluation: a run waits for one more than its patience",
        "checkpoint/best.py",
        "self.without_better >= self._by.patience",
        "self.without_better > self._by.patience",
        ("test distributed/test_settings_of_fit.py ends_early",),
    ),
    Mutation(
        "averaged weights: running statistics stay those of the start",
        AVERAGE,
        "            _copy([local(buffer.detach())], [local(self._buffers[name])])",
        "            continue",
        ("test distributed/test_averaged_weights.py one_device",),
    ),
    Mutation(
        "averaged weights: a resumed mean weighs the steps before as one",
        AVERAGE,
        'self.updates = saved["updates"]\n        return ""',
        'self.updates = 1\n        return ""',
        ("test distributed/test_averaged_weights.py another_plan",),
    ),
    Mutation(
        "averaged weights: an evaluation leaves them in the model",
        AVERAGE,
        "        finally:\n            self._exchange()\n",
        "        finally:\n",
        ("test distributed/test_averaged_weights.py loop_of_ones_own",),
    ),
    Mutation(
        "averaged weights: an export has the last weights",
        "checkpoint/export.py",
        "        stored |= put_in(MODEL, averages)\n",
        "",
        ("test distributed/test_averaged_weights.py plain_torch_loads",),
    ),
    Mutation(
        "clipping by the largest value of a group adds up the largest of parts",
        CLIPPING,
        "found = torch.maximum(found, part) if largest else found + part",
        "found = found + part",
        ("test distributed/test_groups_and_schedules.py as_torch_does",),
    ),
    Mutation(
        "clipping of groups looks at the gradients of a stage alone",
        CLIPPING,
        "        dist.all_reduce(found, how, group=held.stages)",
        "        pass",
        ("test distributed/test_groups_and_schedules.py proven",),
    ),
    Mutation(
        "clipping by value leaves what is below the limit",
        CLIPPING,
        "        torch._foreach_clamp_min_(found, -limit)\n",
        "",
        ("test distributed/test_groups_and_schedules.py clips",),
    ),
    Mutation(
        "a save in the background writes what the tensors have become",
        SAVER,
        "content=ready.content.copied_to(self._memory, self._given_up)",
        "content=ready.content",
        ("test distributed/test_checkpoint_saving.py moment",),
    ),
    Mutation(
        "a save in the background takes the memory of the last one, however small",
        SAVER,
        "        if len(self._memory) >= needed:\n            return True",
        "        if len(self._memory):\n            return True",
        ("test distributed/test_checkpoint_saving.py same_memory",),
    ),
    Mutation(
        "a save in the background that failed is forgotten",
        SAVER,
        "        if saving is not None:\n            saving.wait()",
        "        if saving is not None:\n            saving._over.wait()",
        ("test distributed/test_checkpoint_saving.py by_the_next",),
    ),
    Mutation(
        "checkpoints match groups of two stages by their places where those are not the same",
        OPTIMIZER,
        "by_place = all(options == here[0] for options in here)",
        "by_place = True",
        ("test distributed/test_checkpoint_reshard.py equal_options",),
    ),
    Mutation(
        "checkpoints save a copy's state a second time",
        OPTIMIZER,
        "return value if part.counts else PartTensor(value, TensorPart(shape=tuple(value.shape), counts=False))",
        "return value",
        ("test distributed/test_checkpoint_reshard.py no_piece",),
    ),
    Mutation(
        "checkpoints place the second range of a slice by where it ends",
        "checkpoint/tensor_part.py",
        "        at += stop - start",
        "        at += stop",
        ("test distributed/test_checkpoint_reshard.py blocks",),
    ),
    Mutation(
        "a load takes what other ranks hold for what nobody here knows",
        "checkpoint/store.py",
        "if name not in names and _prefix(name) in prefixes",
        "if name not in tensors and _prefix(name) in prefixes",
        ("test distributed/test_checkpoint_reshard.py names_and_groups",),
    ),
    Mutation(
        "replicas: the last averaging goes through the codec",
        REPLICAS,
        "self._average(whole=True)",
        "self._average()",
        ("test distributed/test_apart.py less_is_sent",),
    ),
    Mutation(
        "DiLoCo: a resumed run begins without outer momentum",
        "parallel/diloco.py",
        '        self._optimizer.state[self.copy]["momentum_buffer"] = momentum',
        "        pass",
        ("test distributed/test_apart.py uninterrupted",),
    ),
    Mutation(
        "running variances stay those of each rank",
        "parallel/buffer_sync.py",
        'return ("running_mean", "running_var") if layer.track_running_stats else ()',
        'return ("running_mean",) if layer.track_running_stats else ()',
        ("test distributed/test_drift.py same_statistics",),
    ),
    Mutation(
        "drift: a run that is only to warn of it ends",
        "train/drift.py",
        'elif self._policy == "warn":',
        'elif self._policy == "off":',
        ("test distributed/test_drift.py warn_goes_on",),
    ),
    Mutation(
        "drift: every look is at the same part",
        "train/drift.py",
        "self._parts[(step + 1) // self._every % PARTS]",
        "self._parts[0]",
        ("test distributed/test_drift.py named_within",),
    ),
    Mutation(
        "ep: a rank whose experts get no token has no gradients",
        "parallel/expert/dispatch.py",
        "        if arrived == 0:",
        "        if arrived < 0:",
        ("test distributed/test_expert.py without_tokens",),
    ),
    Mutation(
        "adapters: an export of adapters leaves out what was trained beside them, and does not say so",
        "train/adapters.py",
        "    if others:\n        given",
        "    if not others:\n        given",
        ("test distributed/test_lora.py alone_would_lose",),
    ),
    Mutation(
        "adapters: they are converted before they are merged",
        "train/adapters.py",
        """    if form.content == "adapter":
        _refuse_more_than_adapters(model, path)
    else:""",
        """    model = model if form.dtype is None else model.to(form.dtype)
    if form.content == "adapter":
        _refuse_more_than_adapters(model, path)
    else:""",
        ("test distributed/test_lora.py before_it_is_converted",),
    ),
)
