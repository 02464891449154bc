"""Which costs a run takes: the best there are for its GPU and model, or those that were asked for."""

from __future__ import annotations

from sim.cost.body import BodyCost, body_behind
from sim.cost.datasheet import DatasheetCost
from sim.cost.measured import MeasuredCost
from sim.cost.profile import named, shipped
from sim.cost.server import ServedCost, server_behind

Cost = DatasheetCost | MeasuredCost | ServedCost | BodyCost


def cost_of(costs: str, datasheet: DatasheetCost) -> Cost:
    """`costs`: auto, datasheet, the name of a shipped profile, or the path of one, of a server's costs or of a body's.

    Auto passes over profiles that price no operation of this model. Raises ValueError for what is not there.
    """
    if costs == "datasheet":
        return datasheet
    if (server := server_behind(costs)) is not None:
        return ServedCost(server, datasheet)
    if (body := body_behind(costs)) is not None:
        return BodyCost(body, datasheet)
    if costs != "auto":
        return MeasuredCost.of(named(costs, datasheet.device.name), datasheet)
    measured = (MeasuredCost.of(profile, datasheet) for profile in shipped(datasheet.device.name))
    return next((cost for cost in measured if not cost.ops.are_none), datasheet)
