"""Faults of whole runs: servers, pipelines, phases, sweeps, token batches, schedulers, torchrun and trained models."""

from __future__ import annotations

from mutation import Mutation

TOKENS, SCHEDULERS, PHASES = "data/token_batches.py", "train/torch_scheduler.py", "train/phased_step.py"
COORDINATOR, MODEL, LOOP = "train/parameter_server/coordinator.py", "train/trained_model.py", "train/own_step.py"
FIRST_STEP = "witness/reference_step.py"

RUNS = (
    Mutation(
        "token batches: a step goes on when its tokens are reached exactly",
        TOKENS,
        "np.searchsorted(total, taken + self.tokens)",
        'np.searchsorted(total, taken + self.tokens, side="right")',
        ("test distributed/test_token_runs.py own_and_workers",),
    ),
    Mutation(
        "token batches: the most samples of a step do not count",
        TOKENS,
        "min(enough, begin + self.batch, len(total))",
        "min(enough, len(total))",
        ("test distributed/test_token_runs.py most_samples",),
    ),
    Mutation(
        "token batches: a resume does not compare the lengths",
        TOKENS,
        """return f"lengths {zlib.crc32(lengths_of(job.batch_tokens, size).astype('<i8').tobytes()):08x}\"""",
        'return "lengths"',
        ("test distributed/test_token_runs.py other_samples",),
    ),
    Mutation(
        "schedulers: an evaluation counts again after a resume",
        SCHEDULERS,
        'self._evaluated = int(saved["evaluated"])',
        "self._evaluated = 0",
        ("test distributed/test_groups_and_schedules.py counts_once",),
    ),
    Mutation(
        "schedulers: the state of a phase's scheduler is not restored",
        SCHEDULERS,
        "            one.restore(there[name])",
        "            there[name]",
        ("test distributed/test_phases.py goes_on",),
    ),
    Mutation(
        "schedulers: one over another optimizer is taken",
        SCHEDULERS,
        "if scheduler.optimizer is not optimizer:",
        "if scheduler.optimizer is None:",
        ("test distributed/test_groups_and_schedules.py cannot_be_honoured",),
    ),
    Mutation(
        "phases: each steps its scheduler itself, too",
        PHASES,
        "step.scheduler = None  # each is stepped with those of the other phases",
        "pass",
        ("test distributed/test_phases.py scheduled",),
    ),
    Mutation(
        "phases: the loss of a step is the last phase's",
        PHASES,
        "first = found[self.phases[0][0].name]",
        "first = [*found.values()][-1]",
        ("test distributed/test_phases.py gan",),
    ),
    Mutation(
        "phases: an evaluation takes the last phase's loss",
        "train/phase_jobs.py",
        "return phase_jobs(job)[0]",
        "return phase_jobs(job)[-1]",
        ("test distributed/test_phases.py evaluation_is",),
    ),
    Mutation(
        "phases: two may update one parameter",
        "config/phases.py",
        "            if name in owner:",
        "            if name in owner and not owner:",
        ("test distributed/test_phases.py held_against",),
    ),
    Mutation(
        "servers: the schedule of the learning rate is left out",
        COORDINATOR,
        "rate=rate, watched",
        "rate=self.run.lr_scale, watched",
        ("test distributed/test_server.py without_staleness",),
    ),
    Mutation(
        "servers: gradients are divided by the pieces of a step",
        COORDINATOR,
        "scale, batch = self._divisor / count,",
        "scale, batch = self._divisor / len(parts),",
        ("test distributed/test_server.py without_staleness",),
    ),
    Mutation(
        "servers: running statistics of a step are dropped",
        COORDINATOR,
        "                self.store.statistics = statistics",
        "                pass",
        ("test distributed/test_server.py running_statistics",),
    ),
    Mutation(
        "servers: a resume loses the optimizer's state",
        "train/parameter_server/shard_store.py",
        "state = self._whole.state.get(whole, {})",
        "state: dict[str, Any] = {}",
        ("test distributed/test_server.py goes_on",),
    ),
    Mutation(
        "sweep: the steps asked for are left out",
        "sweep.py",
        "folder=folder, steps=self.steps)",
        "folder=folder)",
        ("test distributed/test_sweep.py in_python_is",),
    ),
    Mutation(
        "sweep: a refused combination gives the exit code of a failed one",
        "sweep.py",
        'return FAILED if "failed" in outcomes else REFUSED if "refused" in outcomes else 0',
        'return FAILED if outcomes - {"done"} else 0',
        ("test distributed/test_sweep.py cannot_be_trained_is",),
    ),
    Mutation(
        "sweep: runs that are not done stand among the others",
        "report/sweep_rows.py",
        "return _OUTCOMES.index(row.outcome), lacking,",
        "return 0, lacking,",
        ("test distributed/test_sweep.py without_a_number",),
    ),
    Mutation(
        "trained model: it is left in training mode",
        MODEL,
        "return with_values(module, values, where).eval()",
        "return with_values(module, values, where)",
        ("test distributed/test_trained_model.py was_evaluated",),
    ),
    Mutation(
        "trained model: of shapes only the number of dimensions is compared",
        MODEL,
        "if name in own and own[name].shape != value.shape",
        "if name in own and own[name].ndim != value.ndim",
        ("test distributed/test_trained_model.py does_not_fit",),
    ),
    Mutation(
        "frozen values: their fingerprint has no places",
        "train/frozen_values.py",
        "mixed = (place * _ODD + _STEP) ^ ((place * _STEP) >> 29)",
        "mixed = torch.full_like(place, _STEP)",
        ("test distributed/test_trained_model.py another_base",),
    ),
    Mutation(
        "initial values: whole numbers fill a parameter of floats",
        "train/pretrained.py",
        "if tuple(tensor.shape) != entry.shape or tensor.is_floating_point() != entry.floating",
        "if tuple(tensor.shape) != entry.shape",
        ("test distributed/test_pretrained.py refused_before",),
    ),
    Mutation(
        "initial values: an index may name files elsewhere",
        "train/pretrained.py",
        'if Path(file).name != file or not file.endswith(".safetensors"):',
        'if not file.endswith(".safetensors"):',
        ("test distributed/test_pretrained.py refused_before",),
    ),
    Mutation(
        "parameter groups: biases keep their decay",
        "train/param_groups.py",
        "(one.dim() > 1) is decayed",
        "(one.dim() > 0) is decayed",
        ("test distributed/test_groups_and_schedules.py serves_plain",),
    ),
    Mutation(
        "timelines: clocks of machines are not set beside each other",
        "train/timeline.py",
        "round(moment + behind[rank] - zero, 6)",
        "round(moment - zero, 6)",
        ("test distributed/test_run_results.py clocks",),
    ),
    Mutation(
        "waits for data: the time of a step counts",
        "data/loader.py",
        """        while True:
            began = time.perf_counter()
            batch = next(steps, None)""",
        """        began = time.perf_counter()
        while True:
            batch = next(steps, None)""",
        ("test distributed/test_run_results.py no_wait",),
    ),
    Mutation(
        "pipelines: the length of a cut axis does not come with its slices",
        "parallel/pipeline/messages.py",
        "                one.axis.length = one.cut.size // one.cut.outer  # as where values are first sliced",
        "                pass",
        ("test distributed/test_pipeline.py slices_pass",),
    ),
    Mutation(
        "pipelines: a tied parameter is with the first stage alone",
        "parallel/pipeline/cutting.py",
        "name: tuple(sorted({stage_of[region] for region in its})) or (0,)",
        "name: tuple(sorted({stage_of[region] for region in its}))[:1] or (0,)",
        ("test distributed/test_pipeline.py tied_parameters",),
    ),
    Mutation(
        "unused parameters: one that a rank leaves out is not looked for",
        "parallel/zero.py",
        "if not self._may_be_unused and len(self._seen) < len(self._partition.slices):",
        "if not self._may_be_unused and not self._seen:",
        ("test distributed/test_gradients.py left_out",),
    ),
    Mutation(
        "loops of one's own: a batch that was left out is not seen",
        LOOP,
        """                if self._step.progress.step <= batch.step:
                    raise""",
        """                if self._step.progress.step < batch.step:
                    raise""",
        ("test distributed/test_own_loop.py left_out",),
    ),
    Mutation(
        "the first step: ranks but the first are not looked at",
        FIRST_STEP,
        "for rank, told in enumerate(ranks):\n            for name, (cuts",
        "for rank, told in enumerate(ranks[:1]):\n            for name, (cuts",
        ("test unit/test_tolerances.py every_rank",),
    ),
    Mutation(
        "the first step: a gradient that is not a number passes",
        FIRST_STEP,
        "if not off <= worst * allowed:",
        "if off > worst * allowed:",
        ("test unit/test_tolerances.py every_rank",),
    ),
    Mutation(
        "the first step: what no rank has passes",
        FIRST_STEP,
        'words = words or (f"no rank has',
        'words = words and (f"no rank has',
        ("test unit/test_tolerances.py every_rank",),
    ),
    Mutation(
        "the first step: what it reports is no difference at all",
        FIRST_STEP,
        "apart[name] = max(off, apart.get(name, 0.0))",
        "apart[name] = 0.0",
        ("test unit/test_tolerances.py every_rank",),
    ),
    Mutation(
        "the first step: samples of another process are not looked at",
        FIRST_STEP,
        "known = mine.get(number, digest)",
        "known = digest",
        ("test distributed/test_first_step.py stops",),
    ),
    Mutation(
        "the first step: backward that does not follow the loss is not seen",
        FIRST_STEP,
        "for times in _LOSS_TIMES",
        "for times in (1, 1)",
        ("test distributed/test_first_step.py stops",),
    ),
    Mutation(
        "the first step: a run goes on after a difference",
        "launch/first_step.py",
        """if said["stop"]:""",
        """if said["stop"] and self._scene.notes:""",
        ("test distributed/test_stand_in_device.py stops",),
    ),
)
