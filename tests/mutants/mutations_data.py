"""Faults of data, the command line, settings and checkpoints, as somebody might make them."""

from __future__ import annotations

from mutation import Mutation

SAMPLER, STREAMS, LEDGER = "data/sampler.py", "data/streams.py", "data/ledger.py"

DATA = (
    Mutation(
        "curriculum: samples of a pass are counted a step too many where the stretch begins within it",
        "data/changing_batches.py",
        "if steps >= rest:",
        "if steps > rest:",
        ("test unit/test_data_sampler.py counting_step_by_step",),
    ),
    Mutation(
        "curriculum: the next stretch of the same data begins a batch too early",
        "data/changing_batches.py",
        "last._replace(position=last.position + last.samples, samples=0)",
        "last._replace(position=last.position, samples=0)",
        ("test unit/test_data_sampler.py counting_step_by_step",),
    ),
    Mutation(
        "curriculum: a step that is reached is said never to be",
        "data/changing_batches.py",
        "if total_steps is not None and one.first >= total_steps",
        "if total_steps is not None and one.first < total_steps",
        ("test unit/test_data_sampler.py never_reached",),
    ),
    Mutation(
        "sampler: a process that holds part of a batch reads the samples of the epoch's first batch",
        SAMPLER,
        "dtype=np.int64)]) + index * self.batch",
        "dtype=np.int64)])",
        ("test unit/test_data_sampler.py computed_by_itself",),
    ),
    Mutation(
        "sampler: augmentations of a sample are alike in every epoch",
        SAMPLER,
        "hashlib.blake2b(repr((seed, epoch)).encode()",
        "hashlib.blake2b(repr((seed, 0)).encode()",
        ("test unit/test_data_loader.py augmented_alike",),
    ),
    Mutation(
        "shares: new weights hold from the step before on",
        "data/step_batch.py",
        "if since <= step)",
        "if since <= step + 1)",
        ("test unit/test_data_shares.py from_a_step_on",),
    ),
    Mutation(
        "shares: weights may change for a step that was dealt out",
        "data/step_batch.py",
        "if step < self.next:",
        "if step < self.next - 1:",
        ("test unit/test_data_shares.py dealt_out",),
    ),
    Mutation(
        "evaluation: the partial last batch is dropped as in training",
        "data/loader.py",
        "return GlobalBatchSampler(length=len(dataset), batch=job.batch, seed=job.seed, shuffle=False)",
        "return GlobalBatchSampler(\n"
        "        length=len(dataset), batch=job.batch, seed=job.seed, shuffle=False, drop_last=job.drop_last\n"
        "    )",
        ("test unit/test_data_loader.py each_sample_once_in_order",),
    ),
    Mutation(
        "streams: a pass after a resume by seeking begins at its first sample",
        STREAMS,
        "            self.dataset.seek(position)\n",
        "            self.dataset.seek(0)\n",
        ("test unit/test_data_stream.py resumed_steps",),
    ),
    Mutation(
        "streams: the epoch is not told to the stream",
        STREAMS,
        "            self.dataset.set_epoch(epoch)\n",
        "            self.dataset.set_epoch(0)\n",
        ("test unit/test_data_stream.py go_on_over_passes",),
    ),
    Mutation(
        "streams: drop_last keeps the partial batch of each pass",
        STREAMS,
        "            if len(samples) == self.batch or not self.drop_last:\n",
        "            if samples:\n",
        ("test unit/test_data_stream.py drop_last",),
    ),
    Mutation(
        "batch_tokens: a step ends before the sample with which there are enough tokens",
        "data/token_batches.py",
        "enough = int(np.searchsorted(total, taken + self.tokens)) + 1",
        "enough = max(begin + 1, int(np.searchsorted(total, taken + self.tokens)))",
        ("test unit/test_token_batches.py",),
    ),
    Mutation(
        "audit: a sample that comes twice in an epoch is not reported",
        "data/ledger_audit.py",
        "repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])",
        "repeated = np.unique(ordered[2:][ordered[2:] == ordered[:-2]])",
        ("test unit/test_data_ledger.py twice_on_one_rank",),
    ),
    Mutation(
        "audit: of several missing steps the last is not named",
        "data/ledger_audit.py",
        'yield f"steps {before + 1} to {after - 1} are missing"',
        'yield f"steps {before + 1} to {after - 2} are missing"',
        ("test unit/test_data_ledger.py missing_steps",),
    ),
    Mutation(
        "settings: the run file wins over the command line",
        "cli/settings.py",
        "            if name not in values and getattr(earlier, name) is not None:\n",
        "            if getattr(earlier, name) is not None:\n",
        ("test unit/test_cli_verbs.py arguments_win",),
    ),
    Mutation(
        "settings: a new run in a folder reads the run file that is there",
        "cli/settings.py",
        "if not (given.resume and given.folder):",
        "if not given.folder:",
        ("test unit/test_cli_verbs.py only_a_resume",),
    ),
    Mutation(
        "settings: threads do not count as devices",
        "cli/settings.py",
        "if self.plan and isinstance(self.devices, int) and self.plan.devices != self.devices:",
        "if self.plan and isinstance(self.devices, int) and self.plan.dp != self.devices:",
        ("test unit/test_cli_verbs.py threads_count",),
    ),
    Mutation(
        "options: a run with --resume alone is taken for --resume auto",
        "cli/options.py",
        'alone = [one == "--resume" and after != "auto" for',
        'alone = [one == "--resume" and False for',
        ("test unit/test_cli_verbs.py exit_code_2",),
    ),
    Mutation(
        "completion: keys that a plan has already are offered again",
        "cli/options.py",
        "if field.name not in used]",
        "if field.name]",
        ("test unit/test_cli_verbs.py plans",),
    ),
    Mutation(
        "copies: one that is damaged there is gone on from",
        "checkpoint/mirror.py",
        "if not verify(path):",
        "if path:",
        ("test unit/test_checkpoint_safety.py newest_whole_copy",),
    ),
    Mutation(
        "checkpoint: two chunks that overlap by one element pass",
        "checkpoint/format.py",
        "at + size <= start or start + length <= at",
        "at + size <= start + 1 or start + length <= at",
        ("test unit/test_checkpoint_safety.py cover",),
    ),
    Mutation(
        "checkpoint: a file of another size than was written counts as whole",
        "checkpoint/format.py",
        "            elif size != file.size:\n",
        "            elif size > file.size:\n",
        ("test unit/test_checkpoint_store.py cut_files",),
    ),
    Mutation(
        "checkpoint: the folder's name says another step than the manifest, and it is used",
        "checkpoint/format.py",
        "if (named := step_of(path)) is not None and named != step:",
        "if (named := step_of(path)) is not None and named < step:",
        ("test unit/test_checkpoint_safety.py under_another_name",),
    ),
    Mutation(
        "checkpoint: checkpoints are listed by name, so that step 100000000 comes before 99999999",
        "checkpoint/folder.py",
        "return [path for _, path in sorted(found, reverse=True)]",
        "return [path for _, path in sorted(found, key=lambda one: one[1].name, reverse=True)]",
        ("test unit/test_checkpoint_store.py eight_digits",),
    ),
    Mutation(
        "checkpoint: what a crash moved aside is deleted",
        "checkpoint/folder.py",
        "if _LEFTOVER.fullmatch(path.name) and not _give_back(path):",
        "if _LEFTOVER.fullmatch(path.name):",
        ("test unit/test_checkpoint_store.py moved_aside",),
    ),
    Mutation(
        "data are made with the numbers that the model has left",
        "train/build_model.py",
        "    with seeded(stream(job.seed, 0)):\n        return data()",
        "    return data()",
        ("test unit/test_data_sampler.py random_split",),
    ),
)
