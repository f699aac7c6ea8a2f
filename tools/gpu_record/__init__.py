"""A programme that measures Phalanx on a GPU, and the page made from its records."""
