"""Process groups, meshes and the few collectives that are Phalanx's own."""

from phalanx.comm.place import Place, device_for, joined

__all__ = ["Place", "device_for", "joined"]
