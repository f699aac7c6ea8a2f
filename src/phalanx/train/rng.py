"""Random streams that depend on what is computed, not on where or after how many restarts."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def stream(seed: int, *words: int) -> int:
    """A 63-bit seed from ``seed`` and what the stream is for, such as (step, micro-batch, part).

    SplitMix64's finaliser (Steele et al. 2014) over each word in turn: streams of neighbouring words are unrelated.
    """
    state = 0
    for word in (seed, *words):  # the seed is mixed by itself first: seed + 1 at step 0 is not seed at step 1
        state = (state + 0x9E3779B97F4A7C15 + word) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
