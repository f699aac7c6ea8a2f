"""Which GPUs each instance type of SageMaker has that trains by CUDA, which types have other devices, and how many
cores those without any have.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from phalanx.errors import Problem, SpecError
from phalanx.hardware.catalog import find
from phalanx.launch.targets.offer import Offer

_LIKE_G5 = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1, "24xlarge": 4}
# https://docs.aws.amazon.com/ec2/ instance types, accelerated computing; family → size → GPUs
_GPUS = {
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "g4dn": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1},
    "g5": {**_LIKE_G5, "48xlarge": 8},
    "g6": {**_LIKE_G5, "48xlarge": 8},
    "g6e": {**_LIKE_G5, "48xlarge": 8},
}
# As the catalog names them; of a family that is not here it has none
_KINDS = {
    "p3": "V100-16GB",
    "p3dn": "V100-32GB",
    "p4d": "A100-40GB",
    "p4de": "A100-80GB",
    "p5": "H100",
    "p5e": "H200",
    "p5en": "H200",
    "p6-b200": "B200",
    "g4dn": "T4",
    "g5": "A10G",
    "g6": "L4",
    "g6e": "L40S",
}
_GIB_EACH = {"c": 2, "m": 4, "r": 8}  # of a vCPU, from the fifth generation on
_OTHER_DEVICES = ("trn", "inf", "dl")  # Trainium, Inferentia, Gaudi
_WITHOUT_GPUS = re.compile(r"[mcrt]\d")  # families for general use, for computing, with much memory
_TYPE = re.compile(r"ml\.(?P<family>[a-z][a-z0-9-]*)\.(?P<size>\d*x?large|medium)")


def gpus_of(instance: str) -> int | None:
    """GPUs of an instance type such as ``ml.p5.48xlarge``; ``None`` where this table does not know it."""
    matched = _TYPE.fullmatch(instance)
    if not matched:
        return None
    family, size = matched["family"], matched["size"]
    return _GPUS[family].get(size) if family in _GPUS else 0 if _WITHOUT_GPUS.match(family) else None


def instances_offered(options: Mapping[str, str]) -> Offer | None:
    """What so many instances of that type have; ``None`` where this table, or the catalog, does not know it.

    Of a type without GPUs a process has all cores.

    Raises:
        SpecError: there is no such type, or none is said.
    """
    instance, nodes = options.get("instance", ""), options.get("nodes", "1")
    if problems := instance_problems(instance, 0) if instance else [_wrong("none", "a type", "ml.p5.48xlarge")]:
        raise SpecError(problems)
    matched, gpus = _TYPE.fullmatch(instance), gpus_of(instance)
    if not matched or gpus is None or not re.fullmatch("[1-9][0-9]{0,6}", nodes):
        return None
    family, size = matched["family"], matched["size"]
    if gpus:
        kind = find(_KINDS.get(family, ""))
        return Offer(nodes=int(nodes), devices=gpus, device=kind.device.name, by=instance) if kind else None
    few = 1 if size == "medium" and family[0] != "t" else 2
    cores = 4 * int(size.removesuffix("xlarge") or 1) if size.endswith("xlarge") else few  # vCPUs
    memory = _GIB_EACH.get(family[0], 0) * cores * 2**30 if family[1] >= "5" else 0
    return Offer(nodes=int(nodes), devices=1, cores=cores, memory=memory, by=instance)


def instance_problems(instance: str, gpus: int) -> list[Problem]:
    """What is wrong with an instance type each of whose instances is to have as many ``gpus``, or as many processes.

    A type without GPUs trains on its cores. One that is not known here is left to SageMaker, which knows them all.
    """
    matched = _TYPE.fullmatch(instance)
    if not matched:
        return [_wrong(repr(instance), "an instance type of SageMaker", _nearest(instance, gpus))]
    family = matched["family"]
    if family.startswith(_OTHER_DEVICES):
        given = f"{instance}, whose devices are no GPUs of NVIDIA"
        return [_wrong(given, "types with GPUs of NVIDIA, or without accelerators", _smallest(gpus))]
    if family in _GPUS and matched["size"] not in _GPUS[family]:
        return [_wrong(f"{instance}, which there is not", _sizes(family), _nearest(instance, gpus))]
    there = gpus_of(instance)
    if there and there < gpus:
        what = f"{instance} with {there} GPU{'s' * (there > 1)}, of which the plan needs {gpus} on each"
        return [_wrong(what, "one with as many, or more --nodes", _smallest(gpus))]
    return []


def _sizes(family: str) -> str:
    return ", ".join(f"ml.{family}.{size}" for size in _GPUS[family])


def _nearest(instance: str, gpus: int) -> str:
    known = [f"ml.{family}.{size}" for family, sizes in _GPUS.items() for size in sizes]
    near = difflib.get_close_matches(instance, known, n=1, cutoff=0.7)
    return near[0] if near else _smallest(gpus)


def _smallest(gpus: int) -> str:
    """The type that serves as an example where so many GPUs are needed: of one family, from small to large."""
    sizes = ("xlarge", "12xlarge", "48xlarge")
    fits = [size for size in sizes if _GPUS["g5"][size] >= gpus]
    return f"ml.g5.{fits[0]}" if fits else "ml.p5.48xlarge"


def _wrong(given: str, allowed: str, fix: str) -> Problem:
    return Problem(where="--instance", given=given, allowed=allowed, fix=f"--instance {fix}")
