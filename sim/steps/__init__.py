"""Scripted workloads step by step, without a clock, and every decision as vLLM's recorder writes it.

The outputs are forced, so that nothing but the scheduler decides. Traces of vLLM's own scheduler in the same format are
the test that a preset decides as vLLM does.
"""

from sim.steps.compare import Difference, check, compare, read_trace
from sim.steps.play import play
from sim.steps.script import Script, read_script

__all__ = ["Difference", "Script", "check", "compare", "play", "read_script", "read_trace"]
