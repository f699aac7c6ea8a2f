"""A plan's meaning for a model, worked out once and without torch; the runtime, the forecast and ``show`` read it."""
