"""The append-only event log of a run, and its one reader."""

from phalanx.events.log import EventLog, EventReader, Outcome, RunLog, finite
from phalanx.events.schema import SCHEMA, SCHEMA_VERSION, faults

__all__ = ["SCHEMA", "SCHEMA_VERSION", "EventLog", "EventReader", "Outcome", "RunLog", "faults", "finite"]
