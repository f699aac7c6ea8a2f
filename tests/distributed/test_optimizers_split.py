"""LARS and LAMB on parameters split by name take the steps that they take on whole ones."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from checkpoint_ranks import local, ranks
from split_layouts import SHAPES, laid_out, own, value
from torch import nn

from phalanx.parallel import Held
from phalanx.spec import Plan
from phalanx.train.optimizers import LAMB, LARS
from phalanx.train.slices import _GROUPS, groups_of_slices, note_slices

torch.set_num_threads(1)

OPTIMIZERS = {
    "lars": lambda params: LARS(params, lr=0.5, weight_decay=0.01, trust_coefficient=0.1),
    "lamb": lambda params: LAMB(params, lr=0.05, weight_decay=0.1),
    "lamb of all": lambda params: LAMB(params, lr=0.05, trust_clip=(0.5, 2.0), exclude_1d=False),
}


@pytest.fixture(autouse=True)
def fork_beside_threads() -> None:
    # 3.12 and later warn of every fork in a process that has threads, whoever started them.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)


def stepped(name: str, held: Held) -> None:
    optimizer = OPTIMIZERS[name](list(held.parameters.values()))
    for step in range(3):
        for key, parameter in held.parameters.items():
            parameter.grad = own(value(f"gradient {key} {step}", SHAPES[key]), key, parameter, held)
        optimizer.step()


def furthest(name: str, held: Held) -> float:
    """How far the parameters are from those of one process, after three steps."""
    straight = laid_out("single").held
    stepped(name, straight)
    stepped(name, held)
    away = 0.0
    for key, parameter in held.parameters.items():
        expected = local(own(straight.parameters[key].detach(), key, parameter, held))
        if expected.numel():
            away = max(away, float((local(parameter.detach()) - expected).abs().max()))
    return away


@pytest.mark.parametrize(
    "plan", ["tp=2", "tp=3", "fsdp=2 tp=2", "fsdp=2 tp=2 zero=1", "dp=2 tp=2", "pp=2 tp=2", "ep=2 tp=2"]
)
def test_split_equals_whole(plan: str) -> None:
    def target(rank: int) -> None:
        for name in OPTIMIZERS:
            held = laid_out(plan, rank).held
            note_slices(held)
            assert furthest(name, held) < 1e-6, name

    ranks(Plan.parse(plan).world_size, target)


def test_without_a_note_they_would_differ() -> None:
    def target(rank: int) -> None:
        assert furthest("lamb", laid_out("tp=2", rank).held) > 1e-3

    ranks(2, target)


def test_notes_end_with_their_parameters_and_are_not_copied() -> None:
    def target(rank: int) -> None:
        held = laid_out("tp=2", rank).held
        note_slices(held)
        parameter = held.parameters["down"]
        assert len(groups_of_slices(parameter)) == 1
        assert groups_of_slices(copy.deepcopy(parameter)) == ()
        assert groups_of_slices(held.parameters["norm"]) == ()
        known = len(_GROUPS)
        del held, parameter
        assert len(_GROUPS) < known

    ranks(2, target)
    assert groups_of_slices(nn.Parameter(torch.zeros(1))) == ()
