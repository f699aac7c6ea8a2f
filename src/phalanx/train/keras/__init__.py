"""Keras 3 models on its torch backend: a job of what ``compile`` and ``fit`` get, and the trained model back."""
