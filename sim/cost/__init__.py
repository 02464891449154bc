"""What a step costs, in seconds of host and device."""

from __future__ import annotations

from sim.cost.datasheet import DATASHEET_BAND, DatasheetCost
from sim.cost.linear import LinearCost
from sim.cost.measured import MeasuredCost
from sim.cost.work import AffineCost, StepCost, StepWork

__all__ = ["DATASHEET_BAND", "AffineCost", "DatasheetCost", "LinearCost", "MeasuredCost", "StepCost", "StepWork"]
