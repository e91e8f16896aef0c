"""How the choosers of a call whose budgets differ are shared out between kernels of stage 1."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tilewright.generator.arch import arch_named
from tilewright.generator.space import families_for, family_default
from tilewright.runtime.call_problem import stage_problem
from tilewright.runtime.dispatch import Choice, Dispatcher, Stage
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.selection import SELECT_BLOCKS, Selection

WORTH_LISTS = 2**14
"""Lists that each of two kernels must have to choose, 128 for each of 128 multiprocessors: with fewer a kernel leaves
part of a GPU idle, and two take their time one after the other. An estimate."""

MAX_SHARED_OUT = 1024
"""Calls whose shares are remembered; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one kernel chooses of a call: for the choosers that have a budget here; those of 0 are left alone.

    top_blocks: the largest budget, by which the kernel was chosen.
    """

    choice: Choice
    loaded: LoadedKernel
    budgets: tuple[int, ...]
    top_blocks: int


_shared_out: dict[tuple[int, tuple[int, ...]], tuple[Stage, tuple[Share, ...]]] = {}


def shares_of(
    dispatcher: Dispatcher,
    widest: Stage,
    query: Tensor,
    key: Tensor,
    budgets: tuple[int, ...],
    selection: Selection,
) -> tuple[Share, ...]:
    """The kernels that choose, and for whom: one, or two of different families.

    widest: the stage of this very call, which has a kernel. It takes all choosers, unless there is a family whose rules
    allow a narrower budget and not the widest one. For the largest such budget the dispatcher is asked as for a call of
    lists so wide, tuned winners and all. If it names such a family, that kernel takes the choosers of up to so many
    blocks, and `widest` the others, if both have `WORTH_LISTS`. Families that could take the widest budget are no
    reason: one kernel was found to be the best for that. A repeated call costs a probe.
    """
    # The entry keeps its stage, so that no other one gets its id; after a reload the dispatcher has other stages.
    look_up = (id(widest), budgets)
    found = _shared_out.get(look_up)
    if found is not None:
        return found[1]
    assert widest.loaded is not None
    whole = Share(widest.choice, widest.loaded, budgets, selection.list_width)
    shares: tuple[Share, ...] = (whole,)
    most = _narrower(dispatcher, widest, query, key, budgets, selection)
    narrow = dispatcher.stage(SELECT_BLOCKS, query, key, replace(selection, list_width=most)) if most else None
    if narrow is not None and narrow.loaded is not None:
        few = tuple(budget if budget <= most else 0 for budget in budgets)
        many = tuple(budget if budget > most else 0 for budget in budgets)
        shares = (replace(whole, budgets=many), Share(narrow.choice, narrow.loaded, few, most))
    _shared_out[look_up] = widest, shares
    while len(_shared_out) > MAX_SHARED_OUT:
        _shared_out.pop(next(iter(_shared_out)), None)
    return shares


def _narrower(
    dispatcher: Dispatcher, widest: Stage, query: Tensor, key: Tensor, budgets: tuple[int, ...], selection: Selection
) -> int:
    """Up to how many blocks another family takes; 0: none."""
    problem = widest.choice.problem
    families = families_for(SELECT_BLOCKS, arch_named(problem.target))
    narrow = [family for family in families if family.proven and family_default(problem, family) is None]
    for most in sorted(set(budgets), reverse=True)[1:] if narrow else ():
        asked = stage_problem(SELECT_BLOCKS, query, key, replace(selection, list_width=most))
        able = {family.name for family in narrow if family_default(asked, family) is not None}
        if not able:
            continue
        few = sum(budget <= most for budget in budgets)
        lists = query.shape[0] * selection.num_groups(query.shape[2])  # of a chooser
        if min(few, len(budgets) - few) * lists < WORTH_LISTS:
            return 0
        spec = dispatcher.choose(asked, query.device).spec
        return most if spec is not None and spec.family in able else 0
    return 0
