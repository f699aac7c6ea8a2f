"""How the workers of a run are started: here, or by torchrun."""
