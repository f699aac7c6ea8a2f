"""Pipeline parallelism: ranks hold runs of a model's parts, and micro-batches pass from one to the next."""

from phalanx.parallel.pipeline.cutting import Pipeline, StageCuts, cut
from phalanx.parallel.pipeline.program import Call
from phalanx.parallel.pipeline.run import PipelineRunner

__all__ = ["Call", "Pipeline", "PipelineRunner", "StageCuts", "cut"]
