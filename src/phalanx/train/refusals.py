"""Problems of a job's model, data and optimizer with a plan, on any devices: one list for every verb."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from phalanx.comm import is_dtensor
from phalanx.config import Job, Plan
from phalanx.data.loader import stream_problems
from phalanx.data.map_style import is_stream
from phalanx.errors import Problem, SpecError
from phalanx.parallel import RankHoldings, compression, global_batch_norm
from phalanx.parallel.grad_reduce import cut_problems, sparse, sparse_problems
from phalanx.parallel.parameter_server import starved
from phalanx.train.build_model import make_data
from phalanx.train.elementwise import Parameters, elementwise, learning, rows_problem, slice_problems, small
from phalanx.train.few_samples import whole_loader
from phalanx.train.lr_schedule import START, RunStart, scheduler_problems
from phalanx.train.own_loss import own_loss_problems
from phalanx.train.param_groups import unread_options
from phalanx.train.phase_jobs import parameters_of_phases, phase_jobs
from phalanx.train.torch_scheduler import MadeOptimizer
from phalanx.train.uneven_shares import read_ahead
from phalanx.units import show_names


def job_problems(job: Job, plan: Plan, module: nn.Module, start: RunStart = START) -> list[Problem]:
    """Return the problems of ``job`` with ``plan``; its model ``module`` needs no values.

    ``start``: a begin with other rates than the job's, or not at the first step.
    """
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    found = [*model_problems(job, plan, module), *data_problems(job, plan)]
    if plan.server:
        found += server_problems(job, plan, parameters)
    rows = sparse(module)
    if not job.phases:
        return [*found, *optimizer_problems(job, plan, parameters, start, sparse=rows)]
    for one, own in zip(phase_jobs(job), parameters_of_phases(job, module), strict=True):
        found += optimizer_problems(one, plan, own, start, sparse=rows)
    return found


def model_problems(job: Job, plan: Plan, module: nn.Module) -> list[Problem]:
    """Return the problems of the parameters and layers of ``module``, which needs no values, with ``plan``."""
    problems = [*sparse_problems(module, plan), *cut_problems(module, plan), *compression.problems(module, plan)]
    problems += [problem for one in phase_jobs(job) for problem in own_loss_problems(one, module)]
    problems += global_batch_norm.problems(job, plan, module)
    own: Any = getattr(module, "plan_problems", None)  # of a model that knows itself what plans do not keep of it
    return problems if own is None else [*problems, *own(plan)]


def data_problems(job: Job, plan: Plan) -> list[Problem]:
    """Return the problems of the job's data with ``plan``; data are made only for plans with limits."""
    if not (plan.server or (plan.shares == "auto" and job.workers > 0)):
        return []
    try:
        data = make_data(job, job.data)
        evaluation = make_data(job, job.evaluate) if plan.server and job.evaluate else None
    except Exception:  # a run reports the job's own error
        return []
    if plan.server:
        of_evaluation = [] if evaluation is None else stream_problems(evaluation, plan.dp, once=True)
        return [*stream_problems(data, plan.dp), *of_evaluation]
    return [read_ahead(job, plan)] if is_stream(data) else []


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTrial:
    """A job's optimizer, with the trials it still needs on small parameters.

    Attributes:
        scheduler: of torch's, returned by the job beside it.
        parameters: to be stepped; only names and numbers of dimensions are read.
        slices: whether they are slices as plain tensors.
        mesh: over which they are rows, as DTensors, or ``None``.
        alone: whether only one rank of ``mesh`` tries.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.Tensor]
    slices: bool
    scheduler: LRScheduler | None = None
    mesh: DeviceMesh | None = None
    alone: bool = False

    @classmethod
    def of_rank(
        cls, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, held: RankHoldings, *, tried: bool
    ) -> OptimizerTrial:
        """Build the trial for a rank's part; if the optimizer was ``tried``, slices are not tried again."""
        parameters = held.parameters
        slices = not tried and any(one.placed for name, one in held.slices.items() if name in parameters)
        mesh = next((one.device_mesh for one in parameters.values() if is_dtensor(one)), None)
        return cls(optimizer=optimizer, scheduler=scheduler, parameters=parameters, slices=slices, mesh=mesh)

    def problems(self, job: Job, plan: Plan, start: RunStart = START) -> list[Problem]:
        """Return the problems of the optimizer with ``plan``. Collective over ``mesh`` unless ``alone``."""
        if problems := closure_problems(self.optimizer):
            return problems
        problems += [*unread_options(self.optimizer), *compression.optimizer_problems(self.optimizer, plan)]
        problems += scheduler_problems(job, plan, MadeOptimizer(self.optimizer, self.scheduler), start)
        if self.slices:
            problems += slice_problems(job, plan, self.parameters)
        if self.mesh is not None:
            problem = rows_problem(job, plan, self.optimizer, self.parameters, self.mesh, alone=self.alone)
            problems += [problem] if problem else []
        return problems


def optimizer_problems(
    job: Job,
    plan: Plan,
    parameters: Mapping[str, torch.Tensor],
    start: RunStart = START,
    *,
    sparse: Collection[str] = (),
) -> list[Problem]:
    """Return the problems of the job's optimizer with ``plan``, from names and shapes of ``parameters``.

    ``sparse``: names of the modules whose gradients are sparse. The optimizer is tried on small parameters. Empty if
    that fails: then a run shows its own error.
    """
    slices = max(plan.tp, plan.ep) > 1
    try:
        with torch.random.fork_rng(devices=[]):
            given: Any = job.optimizer(Parameters(learning(small(parameters)), whole=parameters))
    except SpecError as error:  # groups of names that the model does not have
        return list(error.problems)
    except Exception:  # a factory of any make
        return slice_problems(job, plan, parameters) if slices else []
    optimizer, scheduler = MadeOptimizer.of(given)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    dense = [name for name in parameters if (name.rpartition(".")[0] or "(the model itself)") not in sparse]
    if wrong := [*dense_problems(optimizer, dense), *too_short(job, scheduler, start)]:
        return wrong
    trial = OptimizerTrial(optimizer=optimizer, scheduler=scheduler, parameters=parameters, slices=slices)
    if plan.fsdp == 1 or dist.is_initialized():
        return trial.problems(job, plan, start)
    with rank_0(plan):
        return replace(trial, mesh=init_device_mesh("cpu", (plan.fsdp,)), alone=True).problems(job, plan, start)


def dense_problems(optimizer: torch.optim.Optimizer, dense: list[str]) -> list[Problem]:
    """Return a problem if ``optimizer`` needs sparse gradients, and is given ``dense`` ones."""
    if not isinstance(optimizer, torch.optim.SparseAdam) or not dense:
        return []
    given = f"SparseAdam for parameters whose gradients are dense: {show_names(dense)}"
    allowed = "SparseAdam for nn.Embedding(..., sparse=True) alone"
    fix = "optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)"
    return [Problem(where="job.optimizer", given=given, allowed=allowed, fix=fix)]


def too_short(job: Job, scheduler: LRScheduler | None, start: RunStart = START) -> list[Problem]:
    """Return a problem if ``scheduler`` ends before the run. The data are made to know their length."""
    if not isinstance(scheduler, OneCycleLR) or start.resumes:
        return []
    try:
        steps = job.steps or whole_loader(replace(job, workers=0)).total_steps
    except Exception:  # a run reports the job's own error
        return []
    if steps is None or steps <= scheduler.total_steps:
        return []
    given = f"OneCycleLR for {scheduler.total_steps} steps in a run of {steps}"
    fix = f"OneCycleLR(..., total_steps={steps})"
    return [Problem(where="job.optimizer", given=given, allowed=f"at least the {steps} steps", fix=fix)]


def server_problems(job: Job, plan: Plan, parameters: Mapping[str, torch.Tensor]) -> list[Problem]:
    """Return the problems of servers with ``parameters``."""
    problems = type_problems(parameters, plan)
    if plan.server > 1:
        problems += starved(parameters, plan, cut=elementwise(job, parameters))
    return problems


def type_problems(parameters: Mapping[str, torch.Tensor], plan: Plan) -> list[Problem]:
    """Return a problem for parameters of types without compression to servers."""
    others = {tensor.dtype for tensor in parameters.values()} - {torch.float32}
    if plan.compress == "none" or not others:
        return []
    given = f"compress={plan.compress} for parameters of {', '.join(sorted(map(str, others)))}"
    fix = str(replace(plan, compress="none"))
    return [Problem(where="plan.compress", given=given, allowed="parameters of torch.float32", fix=fix)]


def closure_problems(optimizer: torch.optim.Optimizer) -> list[Problem]:
    """Return a problem if ``optimizer`` steps with a closure."""
    first = next(iter(list(inspect.signature(type(optimizer).step).parameters.values())[1:]), None)
    if first is None or first.default is not inspect.Parameter.empty or first.kind is first.VAR_POSITIONAL:
        return []
    given = f"{type(optimizer).__name__}, which steps with a closure: it evaluates the loss itself, more than once"
    allowed = "optimizers that step by the gradients that are there"
    fix = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
    return [Problem(where="job.optimizer", given=given, allowed=allowed, fix=fix)]


@contextmanager
def rank_0(plan: Plan) -> Generator[None]:
    """Act as rank 0 of the plan's processes, for a job that reads its rank; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.processes)
    try:
        yield
    finally:
        with suppress(Exception):
            dist.destroy_process_group()
