"""Training: the step, what surrounds it, and the loop of one worker."""
