"""Context parallelism: samples shared out along their tokens, and how attention meets all of them."""
