"""Faults of losses over the whole global batch, as somebody might make them."""

from __future__ import annotations

from mutation import Mutation

LOSS, GATHER, WHOLE = "train/coupled_loss.py", "train/row_gather.py", "train/whole_batch.py"
EVERY = "test distributed/test_coupled_loss.py contrastive"

COUPLED = (
    Mutation(
        "a loss over the whole batch: gradients are counted once a rank",
        LOSS,
        "return read.weight * self._step.layout.divisor / (read.count or 1)",
        "return read.weight / (read.count or 1)",
        (EVERY,),
    ),
    Mutation(
        "a loss over the whole batch: what has no rows gets its gradient from every micro-batch",
        WHOLE,
        "shares = [count / self.samples for count in column.samples]",
        "shares = [1 for _ in column.samples]",
        (EVERY,),
    ),
    Mutation(
        "a loss over the whole batch: each rank puts its rows first",
        WHOLE,
        "torch.cat([rows[:start], own, rows[start + len(own) :]])",
        "torch.cat([own, rows[:start], rows[start + len(own) :]])",
        (EVERY,),
    ),
    Mutation(
        "a loss over the whole batch: fillers have rows",
        GATHER,
        "real = [one.detach()[:count] for",
        "real = [one.detach()[: max(1, count)] for",
        (EVERY,),
    ),
    Mutation(
        "a loss over the whole batch: rows are those of the batch before where these are of another form",
        GATHER,
        "if headers == known[0]:",
        "if fits:",
        ("test distributed/test_coupled_loss.py shorter",),
    ),
    Mutation(
        "a loss over the whole batch: the second forward has other random numbers",
        "train/grad_accumulation.py",
        "reseed(device, stream(self._job.seed, step.progress.step, index, step.first_part + part, *step.streams))",
        "reseed(device, stream(self._job.seed, step.progress.step, index, step.first_part + len(self._read)))",
        ("test distributed/test_coupled_loss.py alike",),
    ),
    Mutation(
        "a loss over the whole batch: buffers change twice",
        LOSS,
        "stack.enter_context(buffers_kept(module))",
        "pass",
        ("test distributed/test_coupled_loss.py buffers",),
    ),
    Mutation(
        "a loss over the whole batch: nobody looks whether the second output is the first",
        LOSS,
        "                raise LossError(_ANOTHER)",
        "                pass",
        ("test distributed/test_coupled_loss.py another",),
    ),
    Mutation(
        "a loss over the whole batch: what differs from rank to rank is taken from each",
        GATHER,
        "alike = bool(one.why) or self._alike(one.name, part)",
        "alike = True",
        ("test distributed/test_coupled_loss.py together",),
    ),
)
