"""The append-only event log of a run."""

from phalanx.events.log import EventLog, EventReader, finite, read
from phalanx.events.schema import SCHEMA, SCHEMA_VERSION, faults

__all__ = ["SCHEMA", "SCHEMA_VERSION", "EventLog", "EventReader", "faults", "finite", "read"]
