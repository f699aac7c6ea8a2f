"""Steps of the record, one module each with ``run(step)``; all training steps share ``training``."""
