"""The size in which gradients go out, which the runtime works by and forecasts go by."""

from __future__ import annotations

BUCKET_BYTES = 25 * 2**20
"""Of a bucket of gradients that are reduced in one collective, about; a larger tensor stands alone. As in torch."""
