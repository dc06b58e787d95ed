"""Executes a pipeline plan with Megatron Core's communicator, forward and backward steps.

`PipelineSchedule` stands where Megatron-LM asks for a forward-backward function, and has its signature.
"""

from megatron.bcd.pipeline.iteration import TimedAction
from megatron.bcd.pipeline.links import CountingCommunicator, OneWayLink
from megatron.bcd.pipeline.schedule import PipelineSchedule

__all__ = ["CountingCommunicator", "OneWayLink", "PipelineSchedule", "TimedAction"]
