"""How the workers of a run are started: forked here, by torchrun, or on other hosts."""
