"""`Selection`: how queries choose blocks of keys, once everything about it is settled."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.generator.problem import MaskClass, Problem

SELECT_BLOCKS, SELECTED_ATTENTION = "select_blocks", "selected_attention"
"""The operations of the two stages."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is chosen from, by whom, and how much of it.

    block_size: keys a block; the last block may be shorter. list_width: places in a list, the largest budget.
    num_choosers: num_heads, or num_kv_heads where a group of query heads shares its choice.
    query_group: consecutive queries that share a choice; the last group may be smaller.
    causal: keys after a query's position are not seen; query i is at position i + seqlen_kv - seqlen_q.
    sink_blocks: the first blocks, always in. window_blocks: always in are the blocks of a group's own positions and the
    window_blocks - 1 before them, without `causal` as many after them too; 0: none, but causal ones' own.
    """

    block_size: int
    list_width: int
    num_choosers: int
    query_group: int = 1
    causal: bool = False
    sink_blocks: int = 0
    window_blocks: int = 0

    def num_blocks(self, seqlen_kv: int) -> int:
        """Blocks of a sequence, the shorter last one included."""
        return -(-seqlen_kv // self.block_size)

    def num_groups(self, seqlen_q: int) -> int:
        """Groups of queries, the smaller last one included."""
        return -(-seqlen_q // self.query_group)

    def mask_class(self, num_heads: int, seqlen_kv: int) -> MaskClass:
        """What the choice of a kernel depends on; budgets of single heads are data."""
        parts = [
            *(["causal()"] if self.causal else []),
            f"block_size({self.block_size})",
            f"top_blocks({self.list_width})",
            f"query_group({self.query_group})",
            f"heads_a_choice({num_heads // max(self.num_choosers, 1)})",
        ]
        density = min(1.0, self.list_width * self.block_size / max(seqlen_kv, 1))
        terms = ("bound",) if self.causal else ()
        return MaskClass(terms, " & ".join(parts), per_head=True, per_batch=True, density=round(density, 6))

    def problem(
        self,
        operation: str,
        *,
        dtype: str,
        head_dim: int,
        batch: int,
        num_heads: int,
        num_kv_heads: int,
        seqlen_q: int,
        seqlen_kv: int,
        target: str,
    ) -> Problem:
        """The problem of one of the two stages, the key under which its winner is stored."""
        return Problem(
            dtype=dtype,
            head_dim=head_dim,
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            target=target,
            mask=self.mask_class(num_heads, seqlen_kv),
            operation=operation,
        )
