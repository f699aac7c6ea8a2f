"""Keras 3 models on its torch backend: a job from the arguments of ``compile`` and ``fit``, and the trained
model back.
"""
