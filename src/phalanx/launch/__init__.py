"""How the workers of a run are started: forked here, or by one of the other launchers in the table."""

from phalanx.launch.elastic_size import ElasticSize
from phalanx.launch.failure import record
from phalanx.launch.jobfile import Reference, load_job
from phalanx.launch.launcher import LAUNCHERS, Launch, Launcher, find_launcher, place_of_this_process, supervise
from phalanx.launch.local import launch
from phalanx.launch.reaper import StopSignals, raise_stopped
from phalanx.launch.restarts import Restarts
from phalanx.launch.runfile import RunFolder, default_folder, how_to_go_on, job_of, settled
from phalanx.launch.side_process import LookAhead, look_ahead
from phalanx.launch.torch_warmup import make_ready

__all__ = [
    "LAUNCHERS",
    "ElasticSize",
    "Launch",
    "Launcher",
    "LookAhead",
    "Reference",
    "Restarts",
    "RunFolder",
    "StopSignals",
    "default_folder",
    "find_launcher",
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
