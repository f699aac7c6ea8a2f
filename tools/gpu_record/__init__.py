"""A record of what Phalanx does on a GPU: ``run.py`` makes it."""
