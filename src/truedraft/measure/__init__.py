"""Acceptance and gain of drafting: traces and their replay, plans, trees fitted to text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.measure.plan import Plan as Plan
    from truedraft.measure.plan import candidates_of as candidates_of
    from truedraft.measure.plan import fitting_drafters as fitting_drafters
    from truedraft.measure.plan import footprint_of as footprint_of
    from truedraft.measure.plan import make_plan as make_plan
    from truedraft.measure.plan import read_plan as read_plan
    from truedraft.measure.predictions import BATCHES as BATCHES
    from truedraft.measure.predictions import NONE as NONE
    from truedraft.measure.predictions import Footprint as Footprint
    from truedraft.measure.predictions import Level as Level
    from truedraft.measure.predictions import Prediction as Prediction
    from truedraft.measure.predictions import Traffic as Traffic
    from truedraft.measure.predictions import WhatIf as WhatIf
    from truedraft.measure.predictions import levels as levels
    from truedraft.measure.predictions import load_record as load_record
    from truedraft.measure.predictions import prediction_record as prediction_record
    from truedraft.measure.replay import BUDGETS as BUDGETS
    from truedraft.measure.replay import TREE_TEMPERATURES as TREE_TEMPERATURES
    from truedraft.measure.replay import Trace as Trace
    from truedraft.measure.traces import StepWatcher as StepWatcher
    from truedraft.measure.traces import outputs_along as outputs_along
    from truedraft.measure.traces import traces_of_answers as traces_of_answers
    from truedraft.measure.walks import walk_along as walk_along

_MODULES = {
    "measure.plan": "Plan candidates_of fitting_drafters footprint_of make_plan read_plan",
    "measure.predictions": (
        "BATCHES NONE Footprint Level Prediction Traffic WhatIf levels load_record prediction_record"
    ),
    "measure.replay": "BUDGETS TREE_TEMPERATURES Trace",
    "measure.traces": "StepWatcher outputs_along traces_of_answers",
    "measure.walks": "walk_along",
}
_HOMES = {name: f"truedraft.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
