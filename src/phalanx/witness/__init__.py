"""An independent reference: the plain PyTorch loop of a job, and a user's own loop.

This folder imports nothing that a proof judges: only ``phalanx.config`` and errors.
"""
