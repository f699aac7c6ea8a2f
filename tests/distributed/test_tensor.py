"""Tensor parallelism talks no more than Megatron-LM's: counted, collective by collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.comm import Place, default_process_group
from phalanx.demo.jobs import gpt
from phalanx.launch import launch
from phalanx.parallel import Example
from phalanx.parallel.context.regions import entrances, share_out_tokens
from phalanx.parallel.local_shards import Axis, Placed
from phalanx.parallel.tensor import dry, find, show_slices, split_weights

IDS = torch.arange(24).view(2, 12) % 60


def own_gpt(layers: int) -> torch.nn.Module:
    return gpt.gpt_job(layers=layers, width=32, heads=4, context=12).model()


def gpt2(layers: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=layers, n_head=4, vocab_size=64, n_positions=12))


def llama(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=layers, intermediate_size=48, vocab_size=64, **sizes)
    return LlamaForCausalLM(config)


def loss(output: Any, batch: torch.Tensor) -> Any:
    return px.next_token_loss(output, batch)


def sent(model: Callable[[int], torch.nn.Module], layers: int, sequence: bool) -> Callable[..., list[Counter[str]]]:
    """A worker's work: collectives of one forward, and of its backward."""

    def work(place: Place, report: Any) -> list[Counter[str]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            torch.manual_seed(0)
            module = model(layers)
            example = Example(args=(IDS,), kwargs={}, batch=IDS, loss=loss)
            seen: list[str] = []
            axis = Axis(
                "tp",
                size=place.world_size,
                rank=place.rank,
                group=dist.group.WORLD,
                tokens=sequence,
                notice=lambda kind, _: seen.append(kind),
            )
            with dry(module, example) as ran:
                cuts = find(ran, place.world_size).cuts
                entering = entrances(ran, place.world_size) if sequence else {}
            share_out_tokens(module, entering, axis)
            _, places = split_weights(module, {name: (Placed(axis, *how),) for name, how in cuts.items()})
            show_slices(places)
            total = loss(module(IDS), IDS).sum
            forward, seen[:] = Counter(seen), []
            total.backward()
            return [forward, Counter(seen)]

    return work


@pytest.mark.parametrize("model", [own_gpt, gpt2, llama])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp sequence"])
def test_each_block_talks_as_little_as_megatrons(model: Callable[[int], torch.nn.Module], sequence: bool) -> None:
    (few, few_back), _ = launch(sent(model, 2, sequence), 2)
    (more, more_back), _ = launch(sent(model, 4, sequence), 2)
    forward = {kind: (more[kind] - few[kind]) / 2 for kind in more if more[kind] != few[kind]}
    backward = {kind: (more_back[kind] - few_back[kind]) / 2 for kind in more_back if more_back[kind] != few_back[kind]}
    if sequence:
        # Korthikanti et al. 2022, section 4.2: each all-reduce becomes a gather and a scatter
        assert forward == {"all_gather": 2, "reduce_scatter": 2}
        assert backward == {"all_gather": 2, "reduce_scatter": 2}
    else:
        assert forward == {"all_reduce": 2}  # Shoeybi et al. 2019, section 3
        assert backward == {"all_reduce": 2}


@pytest.mark.parametrize("plan", ["tp=2", "tp=3 sequence=true"])
def test_whatever_the_job_says_of_cuts_it_learns_the_same(plan: str) -> None:
    job = gpt.gpt_job(layers=2, width=32, heads=4, context=12)
    odd: dict[str, Any] = {"*.query_key_value": "rowwise", "*.up": "rowwise", "*.down": "whole", "token": "colwise"}
    proof = px.prove(replace(job, batch=5, clip=0.5, tensor_parallel=odd), plan, steps=3)
    assert proof.equal, proof.first
