"""The faults: what training on several devices, or one, gets wrong in practice."""

from __future__ import annotations

from mutation import Mutation

STEP = "train/step.py"
ACCUMULATION = "train/grad_accumulation.py"
_STEPPED = "            self.optimizer.step()\n        self._stepped"
_RANK = "__import__('torch').distributed.get_rank()"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "gradients × 2 between backward and update, on both sides",
        STEP,
        "        nothing = self._nothing_here(batch, totals)\n",
        "        nothing = self._nothing_here(batch, totals)\n"
        "        scale(local_gradients(held.parameters.values()), 2.0)\n",
        ("prove rich single",),
    ),
    Mutation(
        "gradients × 2 where sums are divided by the count",
        STEP,
        "scale(local_gradients(self.layout.holdings.parameters.values()), correction)",
        "scale(local_gradients(self.layout.parameters.values()), correction * 2)",
        ("prove rich dp=2",),
    ),
    Mutation(
        "the optimizer steps twice",
        STEP,
        _STEPPED,
        f"            self.optimizer.step()\n{_STEPPED}",
        ("prove rich single",),
    ),
    Mutation(
        "clipping is off",
        "train/grad_clipping.py",
        "clip(grads, norm, how.norm)",
        "clip(grads, norm, 1e30)",
        ("prove rich single",),
    ),
    Mutation(
        "the learning rate × 2",
        "train/lr_schedule.py",
        "rate = self._set[index] = self._base[index] * factor",
        "rate = self._set[index] = self._base[index] * factor * 2",
        ("prove rich single",),
    ),
    Mutation(
        "initial values from another seed",
        "train/build_model.py",
        "seed = stream(job.seed, 0)",
        "seed = stream(job.seed, 1)",
        ("prove rich single",),
    ),
    Mutation(
        "a mean of means over ranks",
        ACCUMULATION,
        "return read.samples * step.layout.divisor / self._batch.samples",
        "return 1.0",
        ("prove mean dp=3",),
    ),
    Mutation(
        "each rank divides by its own count",
        ACCUMULATION,
        "        return self._given(numbers[:-1].tolist() if kind_of(numbers.device).on_host else numbers[:-1])",
        "        return float(numbers[0]), self._local_numbers(self._device())[1] * dist.get_world_size()",
        ("prove rich dp=2",),
    ),
    Mutation(
        "one rank's samples on every rank",
        "placement/batch_split.py",
        "share(held, place, inner)",
        "share(held, 0, inner)",
        ("prove mean dp=2",),
    ),
    Mutation(
        "a copy drifts by 3e-6 a step on rank 1",
        STEP,
        _STEPPED,
        "            self.optimizer.step()\n"
        f"            if {_RANK} == 1:\n"
        "                next(iter(self.layout.holdings.parameters.values())).data.add_(3e-6)\n        self._stepped",
        ("prove rich dp=2",),
    ),
    Mutation(
        "running statistics of its own on each rank",
        "parallel/ddp.py",
        "        self._statistics.share()",
        "        pass",
        ("copies norm dp=2",),
    ),
    Mutation(
        "the schedule counts micro-batches",
        "train/lr_schedule.py",
        "self._scale * self._schedule.factor(step=step,",
        "self._scale * self._schedule.factor(step=step * 2,",
        ("prove rich single",),
    ),
    Mutation(
        "the last batch of an epoch is dropped",
        "data/sampler.py",
        "return self.length // self.batch if self.drop_last else -(-self.length // self.batch)",
        "return self.length // self.batch",
        ("prove rich single",),
    ),
    Mutation(
        "a parameter is not stepped",
        STEP,
        _STEPPED,
        f"            next(iter(self.layout.holdings.parameters.values())).grad = None\n{_STEPPED}",
        ("prove rich single",),
    ),
    Mutation(
        "gradients are reduced twice",
        "parallel/ddp.py",
        "        if not self._may_be_unused:\n            check_reduced",
        "        for one in self.parameters.values():\n"
        "            torch.distributed.all_reduce(one.grad)\n"
        "        if not self._may_be_unused:\n            check_reduced",
        ("prove rich dp=2",),
    ),
    Mutation(
        "weight decay on the wrong group",
        "train/build_optimizer.py",
        "    held = {id(tensor) for group in optimizer.param_groups",
        "    decays = [group['weight_decay'] for group in optimizer.param_groups]\n"
        "    for group, decay in zip(optimizer.param_groups, decays[::-1], strict=True):\n"
        "        group['weight_decay'] = decay\n"
        "    held = {id(tensor) for group in optimizer.param_groups",
        ("prove rich single",),
    ),
    Mutation(
        "the optimizer's state is not restored",
        "checkpoint/optimizer.py",
        "    optimizer.state.update(states)\n",
        "",
        ("resume rich dp=2",),
    ),
    Mutation(
        "parameters are not restored",
        "train/state.py",
        "        checkpoint.load(path, model_tensors(layout, left_out))\n",
        "",
        ("resume rich dp=2",),
    ),
    Mutation(
        "a resumed run begins with the first samples again",
        "data/loader.py",
        "            first=first_step,\n",
        "            first=0,\n",
        ("resume rich dp=2",),
    ),
    Mutation(
        "what a mean is weighted with is the same for every micro-batch",
        "train/loss.py",
        "return LossReading(result, float(samples), samples, samples, True)",
        "return LossReading(result, 1.0, 1, samples, True)",
        ("prove mean micro=4",),
    ),
    Mutation(
        "warm-up begins one step late",
        "config/optimizing.py",
        "rise = min(1.0, (step + 1) / warmup)",
        "rise = min(1.0, step / warmup)",
        ("prove rich single",),
    ),
    Mutation(
        "the decay does not reckon with the warm-up",
        "config/optimizing.py",
        "progress = min(1.0, (step - warmup) / max(1.0, total - warmup))",
        "progress = min(1.0, step / max(1.0, total))",
        ("prove rich single",),
    ),
    Mutation(
        "every epoch in the same order",
        "data/sampler.py",
        "Permutation.keyed(self.length, self.seed, epoch)",
        "Permutation.keyed(self.length, self.seed, 0)",
        ("prove rich single",),
    ),
    Mutation(
        "every epoch draws the same for a sample",
        "data/sampler.py",
        "repr((seed, epoch)).encode(), digest_size=8",
        "repr((seed, 0)).encode(), digest_size=8",
        ("fit noisy single",),
    ),
    Mutation(
        "numpy's generator is not seeded for samples",
        "data/sampler.py",
        "    np.random.seed(seed & 0xFFFFFFFF)\n",
        "",
        ("fit noisy single",),
    ),
    Mutation(
        "the same dropout in every step",
        ACCUMULATION,
        "reseed(device, stream(self._job.seed, step.progress.step, index",
        "reseed(device, stream(self._job.seed, 0, index",
        ("fit noisy single",),
    ),
    Mutation("evaluation with dropout", "train/evaluate.py", "    module.eval()\n", "", ("fit noisy single",)),
    Mutation(
        "each rank evaluates its own samples only",
        "train/evaluate.py",
        "    sum_over_ranks(totals)\n",
        "",
        ("prove rich dp=2",),
    ),
    Mutation(
        "fillers count in the evaluation",
        "train/evaluate.py",
        "counts=micro.samples > 0)",
        "counts=True)",
        ("prove rich dp=2",),
    ),
    Mutation(
        "the ledger notes the last micro-batch only",
        "data/ledger.py",
        "for micro in part for one in micro.ids]",
        "for one in part[-1].ids]",
        ("ledger rich dp=2 micro=3",),
    ),
    Mutation(
        "the audit of a ledger misses samples that were never seen",
        "data/ledger_audit.py",
        "if unseen > max(0, length - whole):",
        "if unseen > length:",
        ("test unit/test_data_ledger.py",),
    ),
    Mutation(
        "half precision computes in fp32",
        "train/loss_scaling.py",
        "return torch.autocast(device.type, dtype=HALVES[plan.precision])",
        "return nullcontext()",
        ("test unit/test_train_step.py products",),
    ),
    Mutation(
        "fp16's loss scale never comes down",
        "train/loss_scaling.py",
        "self.scale = max(_LEAST, self.scale / 2)",
        "self.scale = max(_LEAST, self.scale)",
        ("prove overflow precision=fp16",),
    ),
    Mutation(
        "the loss scale is divided out twice",
        ACCUMULATION,
        "        factor = (self._divided_by or self._constant()) * self._step.layout.divisor\n",
        "        factor = (self._divided_by or self._constant()) * self._step.layout.divisor\n"
        "        factor *= self._step.progress.loss_scale.scale if self._step.progress.loss_scale else 1.0\n",
        ("prove rich precision=fp16",),
    ),
    Mutation(
        "gradients below the limit are clipped up to it",
        "train/grad_clipping.py",
        "torch.clamp(limit / (norm + 1e-6), max=1.0)",
        "limit / (norm + 1e-6)",
        ("prove gentle dp=2",),
    ),
    Mutation(
        "a checkpoint without the optimizer's state",
        "train/state.py",
        "    outer, told = outer_tensors(assembly, parts(held))\n    state = {",
        "    tensors, groups = {}, {**groups, 'state': {}}\n"
        "    outer, told = outer_tensors(assembly, parts(held))\n    state = {",
        ("prove rich dp=2",),
    ),
    Mutation(
        "Adam's count of steps is not restored",
        "checkpoint/optimizer.py",
        "    optimizer.state.clear()\n",
        "    for one in states.values():\n        if 'step' in one:\n            one['step'].zero_()\n"
        "    optimizer.state.clear()\n",
        ("prove rich dp=2",),
    ),
    Mutation(
        "Adam's count of steps differs by rank after the last step",
        STEP,
        _STEPPED,
        "            self.optimizer.step()\n"
        f"            if {_RANK} == 1 and self.progress.step == 7:\n"
        "                for one in self.optimizer.state.values():\n"
        "                    one['step'] += 5\n        self._stepped",
        ("prove rich dp=2",),
    ),
    Mutation(
        "bf16: evaluations are 20 % off",
        "train/evaluate.py",
        'else ratios.pop("loss")',
        'else ratios.pop("loss") * 1.2',
        ("prove rich dp=2 precision=bf16",),
    ),
    Mutation(
        "a decay ends early once it is resumed",
        "train/assembly.py",
        "total_steps=_total_steps(job, self.loader),",
        "total_steps=_total_steps(job, self.loader) - self.start.step,",
        ("again rich dp=2",),
    ),
    Mutation(
        "local SGD: a replica goes its own way after the last averaging",
        "parallel/local_sgd.py",
        "        if steps == self._last:\n            self._come_together()\n",
        "        if steps == self._last:\n            self._come_together()\n"
        "            if self.across.index == 1:\n"
        "                for one in self._layout.parameters.values():\n"
        "                    one.mul_(3.0)\n",
        ("copies mean dp=2 sync=local",),
    ),
    Mutation(
        "the router's z-loss is not squared",
        "train/loss.py",
        "torch.logsumexp(_at_least_fp32(logits), dim=-1).square()",
        "torch.logsumexp(_at_least_fp32(logits), dim=-1)",
        ("test unit/test_losses.py",),
    ),
)
