"""How the workers of a run are started: forked here, or by one of the other launchers in the table."""

from phalanx.launch.failure import record
from phalanx.launch.jobfile import load_job
from phalanx.launch.launcher import LAUNCHERS, Launch, Launcher, find_launcher, place_of_this_process, supervise
from phalanx.launch.local import launch
from phalanx.launch.runfile import default_folder, prepare_run
from phalanx.launch.side_process import LookAhead, look_ahead
from phalanx.launch.torch_warmup import make_ready

__all__ = [
    "LAUNCHERS",
    "Launch",
    "Launcher",
    "LookAhead",
    "default_folder",
    "find_launcher",
    "launch",
    "load_job",
    "look_ahead",
    "make_ready",
    "place_of_this_process",
    "prepare_run",
    "record",
    "supervise",
]
