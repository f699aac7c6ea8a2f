"""An independent witness: the plain PyTorch loop that a job is turned into, and a user's own loop.

Nothing in this folder imports what a proof judges: of Phalanx only what people write (``phalanx.config``) and errors.
"""
