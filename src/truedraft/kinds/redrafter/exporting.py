"""No other engine runs recurrent heads."""

from __future__ import annotations

from truedraft.drafters.exporting import Exports

EXPORTS = Exports({}, {"": "train an EAGLE-3 head in its place: truedraft train eagle"})
