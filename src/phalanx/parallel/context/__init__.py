"""Context parallelism: samples shared out along their tokens, with attention over all tokens."""
