"""What a model allows each dimension of a plan to be."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.forecast import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one work.

    Attributes:
        batch: samples in a step: the most replicas.
        tokens: in a sample.
        blocks: the most stages of a pipeline.
        heads: of keys: what ``tp`` must divide; 0 without attention.
        experts: what ``ep`` must divide; 0 without.
        products: whether any weights can be cut over ``tp``.
    """

    batch: int
    tokens: int
    blocks: int
    heads: int
    experts: int
    products: bool

    @classmethod
    def of(cls, work: Work) -> Limits:
        """The limits of ``work``."""
        profile = work.profile
        shares = [weights.share for part in profile.parts if part.role == "block" for weights in part.weights]
        return cls(
            batch=work.batch,
            tokens=work.tokens,
            blocks=profile.blocks,
            heads=profile.heads,
            experts=profile.experts,
            products="inner" in shares,
        )

    @property
    def attends(self) -> bool:
        """Whether samples have tokens to share out."""
        return self.heads > 0 and self.tokens > 1

    def tp(self, ranks: int) -> bool:
        """Whether so many ranks can share out each layer."""
        return ranks == 1 or (self.products and (self.heads == 0 or self.heads % ranks == 0))

    def cp(self, ranks: int) -> bool:
        """Whether so many can share out each sample's tokens."""
        return ranks == 1 or (self.attends and self.tokens % ranks == 0)

    def pp(self, stages: int) -> bool:
        """Whether there can be so many stages."""
        return stages <= max(1, self.blocks)

    def ep(self, ranks: int) -> bool:
        """Whether so many can share out the experts."""
        return ranks == 1 or (self.experts > 0 and self.experts % ranks == 0)
