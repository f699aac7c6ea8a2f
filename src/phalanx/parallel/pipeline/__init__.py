"""Pipeline parallelism: ranks hold runs of a model's parts, and micro-batches pass from one to the next."""

from phalanx.parallel.pipeline.cutting import CutPipeline, StageCuts, cut
from phalanx.parallel.pipeline.program import UnitCall
from phalanx.parallel.pipeline.runner import PipelineRunner

__all__ = ["CutPipeline", "PipelineRunner", "StageCuts", "UnitCall", "cut"]
