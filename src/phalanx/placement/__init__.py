"""What a plan means for a model, worked out once and without torch; the runtime, the forecast and ``show`` read it."""
