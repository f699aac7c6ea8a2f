"""How the workers of a run are started: forked here, by torchrun, or on other hosts.

Names are fetched when first used: most need torch, and the hosts of a launch are reached while that is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.launch.elastic_size import ElasticSize
    from phalanx.launch.failure import record
    from phalanx.launch.jobfile import Reference, load_job
    from phalanx.launch.local import launch
    from phalanx.launch.reaper import raise_stopped
    from phalanx.launch.restarts import Restarts
    from phalanx.launch.runfile import RunFolder, default_folder, how_to_go_on, job_of, settled
    from phalanx.launch.side_process import LookAhead, look_ahead
    from phalanx.launch.supervision import supervise
    from phalanx.launch.torch_warmup import make_ready
    from phalanx.launch.torchrun import place_of_this_process
    from phalanx.launch.worker_process import Launch

_FILES = {
    "elastic_size": ("ElasticSize",),
    "failure": ("record",),
    "jobfile": ("Reference", "load_job"),
    "local": ("launch",),
    "reaper": ("raise_stopped",),
    "restarts": ("Restarts",),
    "runfile": ("RunFolder", "default_folder", "how_to_go_on", "job_of", "settled"),
    "side_process": ("LookAhead", "look_ahead"),
    "supervision": ("supervise",),
    "torch_warmup": ("make_ready",),
    "torchrun": ("place_of_this_process",),
    "worker_process": ("Launch",),
}
_WHERE = {name: file for file, names in _FILES.items() for name in names}

__all__ = [
    "ElasticSize",
    "Launch",
    "LookAhead",
    "Reference",
    "Restarts",
    "RunFolder",
    "default_folder",
    "how_to_go_on",
    "job_of",
    "launch",
    "load_job",
    "look_ahead",
    "make_ready",
    "place_of_this_process",
    "raise_stopped",
    "record",
    "settled",
    "supervise",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    except AttributeError as error:  # else Python would hide it: a name that cannot be imported
        raise ImportError(f"{error}, as {_WHERE[name]} of phalanx.launch was imported") from error
    globals()[name] = value
    return value
