"""Faults of profiles, placement, reports, settings of a job and orders of data, as somebody might make them."""

from __future__ import annotations

from mutation import Mutation

STAGES, ORDERS, SCHEDULE = "placement/stages.py", "data/own_orders.py", "config/optimizing.py"

TRACE = (
    Mutation(
        "a cut of a pipeline: the dearest stage is the last one",
        STAGES,
        "(max(largest, cost := sums[end] - sums[cut]), squares + cost * cost, cut)",
        "(cost := sums[end] - sums[cut], squares + cost * cost, cut)",
        ("test unit/test_model_cuts.py dearest",),
    ),
    Mutation(
        "a cut of a pipeline: allowed places are off by one",
        STAGES,
        "if end < len(costs) and not allowed[end]",
        "if end < len(costs) and not allowed[end - 1]",
        ("test unit/test_model_cuts.py allowed",),
    ),
    Mutation(
        "micro-batches: the last one reaches into the share of the next rank",
        "placement/batch_split.py",
        "return (first, min(first + size, stop)) if first < stop else (0, 0)",
        "return (first, first + size) if first < stop else (0, 0)",
        ("test unit/test_own_sampler.py every_split",),
    ),
    Mutation(
        "a warm-up begins with a rate of 0",
        SCHEDULE,
        "min(1.0, (step + 1) / warmup)",
        "min(1.0, step / warmup)",
        ("test unit/test_spec.py test_schedules",),
    ),
    Mutation(
        "a decay at milestones comes a step late",
        SCHEDULE,
        "sum(step >= milestone for milestone in self.milestones)",
        "sum(step > milestone for milestone in self.milestones)",
        ("test unit/test_spec.py test_schedules",),
    ),
    Mutation(
        "uneven shares: samples left over go to the first ranks",
        "config/sync.py",
        "key=lambda at: (-round(parts[at] - counts[at], 9), at))",
        "key=lambda at: at)",
        ("test unit/test_sharing.py largest_remainder",),
    ),
    Mutation(
        "shares that follow speed: they change in a step that some rank has read",
        "train/uneven_shares.py",
        "start = max(int(row[3]) for row in rows)",
        "start = min(int(row[3]) for row in rows)",
        ("test unit/test_sharing.py nobody_has_read",),
    ),
    Mutation(
        "a value of the command line: false is true",
        "config/params.py",
        "return _TRUTHS[given.lower()] if kind is bool else kind(given)",
        "return kind(given)",
        ("test unit/test_jobfile.py type_of_their_default",),
    ),
    Mutation(
        "a value of the job: one that nothing declares is ignored",
        "config/params.py",
        "        _active.reset(token)\n    overrides.check()",
        "        _active.reset(token)",
        ("test unit/test_jobfile.py nothing_declares",),
    ),
    Mutation(
        "a sampler by weight without replacement: light samples come first",
        ORDERS,
        "waits = generator.exponential(size=len(chances)) / chances",
        "waits = generator.exponential(size=len(chances)) * chances",
        ("test unit/test_own_sampler.py without_replacement",),
    ),
    Mutation(
        "a sampler by length: the partial last batch is lost",
        ORDERS,
        "return np.concatenate([batches[generator.permutation(len(batches))].ravel(), shuffled[whole:]])",
        "return batches[generator.permutation(len(batches))].ravel()",
        ("test unit/test_own_sampler.py each_sample_once",),
    ),
    Mutation(
        "the network of a host: ports without a link count",
        "hardware/probe.py",
        'if found and "ACTIVE" in _read(port / "state") else None',
        "if found else None",
        ("test unit/test_machine.py infiniband",),
    ),
    Mutation(
        "a summary: idle time is of one rank",
        "report/drawing.py",
        "1.0 - busy / (self.length * len(self.ranks))",
        "1.0 - busy / self.length",
        ("test unit/test_observe.py TestIdle",),
    ),
    Mutation(
        "a summary: steps before the resume count",
        "events/log.py",
        "return self.events[starts[-1] :]",
        "return self.events[starts[0] :]",
        ("test unit/test_observe.py since_the_resume",),
    ),
    Mutation(
        "show: the last of a run of ranks is left out",
        "report/show_output.py",
        "found[-1][1:] = [number]",
        "found[-1][1:] = [number - 1]",
        ("test unit/test_show.py test_ranks",),
    ),
    Mutation(
        "events: a viewer that has failed is asked again",
        "events/following.py",
        "            self._viewers.remove(viewer)\n",
        "",
        ("test unit/test_observe.py left_out",),
    ),
    Mutation(
        "token files: the first token of a document is predicted from the document before",
        "data/token_files.py",
        '        sample["labels"][begins[self.shifted :]] = IGNORED',
        '        sample["labels"][begins[: self.length]] = IGNORED',
        ("test unit/test_token_batches.py told_apart",),
    ),
    Mutation(
        "blocks of a model: children of unlike types that have names are taken for blocks",
        "trace/blocks.py",
        "return members if len(members) >= 2 and alike else []",
        "return members if len(members) >= 2 else []",
        ("test unit/test_model_cuts.py containers",),
    ),
    Mutation(
        "a profile: sizes do not grow with the samples",
        "trace/laws.py",
        "_power(values[1] / value, 2.0), 0.0",
        "_power(values[0] / value, 2.0), 0.0",
        ("test unit/test_profile.py powers",),
    ),
    Mutation(
        "messages between ranks: what is true on one rank is true on none",
        "comm/json_messages.py",
        "dist.all_reduce(found, op=dist.ReduceOp.MAX)",
        "dist.all_reduce(found, op=dist.ReduceOp.MIN)",
        ("test unit/test_json_messages.py everybodys",),
    ),
)
