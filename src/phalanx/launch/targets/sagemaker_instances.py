"""How many GPUs each instance type of SageMaker has that trains by CUDA, and which types have other devices."""

from __future__ import annotations

import difflib
import re

from phalanx.errors import Problem

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
