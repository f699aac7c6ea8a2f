"""Training: the step, its surroundings, and the loop of one worker."""
