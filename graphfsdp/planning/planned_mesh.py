"""The mesh of a plan: how many ranks there are along which axis, in integers alone."""

from dataclasses import dataclass

from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class PlannedMesh:
    """Ranks of a mesh (replicate, shard), counted along the inner axis first.

    Attributes:
        num_ranks: All of them.
        num_outer: Ranks of the outer axis; 1 for a mesh of one axis.
        cuts_outside: Main weights, main grads and optimizer state are cut over both axes.
    """

    num_ranks: int
    num_outer: int = 1
    cuts_outside: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_outer < 1 or self.num_ranks % self.num_outer:
            raise ConfigError(
                f"num_ranks must be at least 1 and a multiple of the outer axis, got "
                f"{self.num_ranks} ranks and {self.num_outer} outer ones"
            )

    @property
    def num_inner(self) -> int:
        """Ranks that a unit's gathered weights come from."""
        return self.num_ranks // self.num_outer

    @property
    def num_parts(self) -> int:
        """Into how many parts main weights and optimizer state are cut."""
        return self.num_ranks if self.cuts_outside else self.num_inner

    def part(self, rank: int) -> int:
        """Return which of them a rank holds."""
        outer, inner = divmod(rank, self.num_inner)
        return inner * self.num_outer + outer if self.cuts_outside else inner
