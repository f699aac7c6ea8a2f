"""The demo's jobs: whole, and inside the package, so that an installed wheel can run them.

``examples/digits.py`` and ``examples/gpt.py`` are links to these files.
"""
