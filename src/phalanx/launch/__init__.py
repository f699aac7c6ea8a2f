"""How the workers of a run are started: here, or by torchrun."""

from phalanx.launch.failure import record
from phalanx.launch.jobfile import load_job
from phalanx.launch.local import launch
from phalanx.launch.runfile import default_folder, prepare_run
from phalanx.launch.side_process import look_ahead
from phalanx.launch.torch_warmup import make_ready
from phalanx.launch.torchrun import place_from_environment

__all__ = [
    "default_folder",
    "launch",
    "load_job",
    "look_ahead",
    "make_ready",
    "place_from_environment",
    "prepare_run",
    "record",
]
