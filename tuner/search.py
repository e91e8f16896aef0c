"""Which variant to measure next: every legal one in order, or Optuna's TPE over them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from tilewright.generator.variant import AxisValue, VariantSpec

if TYPE_CHECKING:
    import optuna


class Strategy(Protocol):
    """Proposes variants among a fixed list of legal ones, each at most once."""

    def propose(self, count: int) -> list[VariantSpec]:
        """Up to `count` variants that were neither proposed nor told before; empty when none is left."""

    def tell(self, spec: VariantSpec, time_us: float | None) -> None:
        """Report a variant's time in microseconds, or None where it gave no usable kernel."""


class Exhaustive:
    """All candidates, in the order given."""

    def __init__(self, candidates: Iterable[VariantSpec]) -> None:
        self._left = dict.fromkeys(candidates)

    def propose(self, count: int) -> list[VariantSpec]:
        taken = list(self._left)[:count]
        for spec in taken:
            del self._left[spec]
        return taken

    def tell(self, spec: VariantSpec, time_us: float | None) -> None:
        self._left.pop(spec, None)


class Guided:
    """What strategies share that choose by what they were told: `left`, `times`, and a list that comes first.

    candidates: the legal variants, cheapest-looking first. first: variants to propose before any choice, in order.
    A subclass chooses with `choose`. A variant on its way is in `waiting`, one that failed has the time infinity.
    """

    def __init__(self, candidates: Sequence[VariantSpec], first: Sequence[VariantSpec] = ()) -> None:
        self.left = dict.fromkeys(candidates)
        self.times: dict[VariantSpec, float] = {}
        self.waiting: dict[VariantSpec, None] = {}
        self._first = [spec for spec in dict.fromkeys(first) if spec in self.left]

    def choose(self, count: int) -> list[VariantSpec]:
        """`count` different variants of `left`, which has at least as many."""
        raise NotImplementedError

    def propose(self, count: int) -> list[VariantSpec]:
        """As `Strategy.propose`."""
        self._first = [spec for spec in self._first if spec in self.left]
        taken, self._first = self._first[:count], self._first[count:]
        self._take(taken)
        wanted = min(count - len(taken), len(self.left))
        if wanted:
            chosen = self.choose(wanted)
            self._take(chosen)
            taken += chosen
        return taken

    def _take(self, specs: Iterable[VariantSpec]) -> None:
        for spec in specs:
            del self.left[spec]
            self.waiting[spec] = None

    def tell(self, spec: VariantSpec, time_us: float | None) -> None:
        """As `Strategy.tell`; a second report of a variant changes nothing, nor does one of a stranger."""
        if spec in self.left or spec in self.waiting:
            self.left.pop(spec, None)
            self.waiting.pop(spec, None)
            self.times[spec] = math.inf if time_us is None else time_us

    def fastest(self) -> list[VariantSpec]:
        """What ran, fastest first."""
        return sorted((spec for spec, time in self.times.items() if time < math.inf), key=lambda spec: self.times[spec])


class OptunaTpe:
    """Tree-structured Parzen estimators over the candidates' axes (Bergstra et al. 2011; Optuna's TPESampler).

    The axes of each family are parameters of their own, under the family's choice; integers that are powers of two
    are searched as their logarithm. A point that is no candidate, or was measured, is replaced by the nearest
    candidate left, so that every proposal is legal and new.

    candidates: the legal variants, cheapest-looking first.
    first: variants to propose before the model's own, in order.
    seed: of the sampler; the same seed and reports give the same proposals.
    """

    def __init__(self, candidates: Sequence[VariantSpec], *, first: Sequence[VariantSpec] = (), seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._left = dict.fromkeys(candidates)
        self._first = [spec for spec in dict.fromkeys(first) if spec in self._left]
        self._space = _AxisSpace(candidates)
        with warnings.catch_warnings():
            # `multivariate` and `group` are marked experimental, some with one Optuna release and some with another.
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=5
            )
        self._study = optuna.create_study(sampler=sampler)
        self._running: dict[VariantSpec, optuna.trial.Trial] = {}

    def propose(self, count: int) -> list[VariantSpec]:
        return [self._next() for _ in range(min(count, len(self._left)))]

    def _next(self) -> VariantSpec:
        while self._first:
            spec = self._first.pop(0)
            if spec in self._left:
                return self._start(spec)
        trial = self._study.ask()
        point = self._space.suggest(trial)
        if point in self._left:
            del self._left[point]
            self._running[point] = trial
            return point
        import optuna

        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # a failed trial teaches the model nothing
        return self._start(self._space.nearest(point, self._left))

    def _start(self, spec: VariantSpec) -> VariantSpec:
        """Make `spec` a running trial, which constant_liar keeps the next proposals away from."""
        self._study.enqueue_trial(self._space.params(spec))
        trial = self._study.ask()
        self._space.suggest(trial)
        del self._left[spec]
        self._running[spec] = trial
        return spec

    def tell(self, spec: VariantSpec, time_us: float | None) -> None:
        """As `Strategy.tell`; variants that this strategy did not propose (an earlier run's) are welcome."""
        import optuna

        if spec not in self._running:
            if spec not in self._left:
                return
            self._start(spec)
        trial = self._running.pop(spec)
        if time_us is None:
            # Optuna ranks a pruned trial below every complete one: the model learns where kernels fail.
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, math.log(max(time_us, 1e-3)))  # twice as fast is as good at 10 us as at 10 ms


class _AxisSpace:
    """Variants as points of a conditional Optuna space: `family`, then `family/axis` for each of its axes."""

    def __init__(self, candidates: Sequence[VariantSpec]) -> None:
        self._families: dict[str, dict[str, list[AxisValue]]] = {}
        for spec in candidates:
            axes = self._families.setdefault(spec.family, {})
            for name, value in spec.values().items():
                seen = axes.setdefault(name, [])
                if value not in seen:
                    seen.append(value)
        for axes in self._families.values():
            for values in axes.values():
                values.sort(key=lambda value: (isinstance(value, str), value))

    def suggest(self, trial: optuna.trial.Trial) -> VariantSpec:
        family = str(trial.suggest_categorical("family", list(self._families)))
        values: dict[str, AxisValue] = {}
        for name, allowed in self._families[family].items():
            if _by_logarithm(allowed):
                low, high = _log2(allowed[0]), _log2(allowed[-1])
                values[name] = 2 ** trial.suggest_int(f"{family}/log2_{name}", low, high)
            else:
                values[name] = cast(AxisValue, trial.suggest_categorical(f"{family}/{name}", allowed))
        return VariantSpec.from_values(family, values)

    def params(self, spec: VariantSpec) -> dict[str, AxisValue]:
        """The Optuna parameters that give `spec`."""
        params: dict[str, AxisValue] = {"family": spec.family}
        for name, value in spec.values().items():
            if _by_logarithm(self._families[spec.family][name]):
                params[f"{spec.family}/log2_{name}"] = _log2(value)
            else:
                params[f"{spec.family}/{name}"] = value
        return params

    def nearest(self, point: VariantSpec, left: Iterable[VariantSpec]) -> VariantSpec:
        """The variant of `left` closest to `point`, the earliest where several are."""
        return min(left, key=lambda spec: axis_distance(point, spec))


def _log2(value: AxisValue) -> int:
    return int(value).bit_length() - 1


def _by_logarithm(values: Sequence[AxisValue]) -> bool:
    """Whether these are at least two powers of two with none left out between them."""
    if len(values) < 2 or any(isinstance(v, bool | str) or v < 1 or v & (v - 1) for v in values):
        return False
    return _log2(values[-1]) - _log2(values[0]) == len(values) - 1


def axis_distance(one: VariantSpec, other: VariantSpec) -> float:
    """How far apart two variants are: doublings of integers, 1 for another choice, 10 for another family."""
    if one.family != other.family:
        return 10.0
    distance, values = 0.0, other.values()
    for name, a in one.values().items():
        b = values.get(name)
        if a == b:
            continue
        both_integers = type(a) is int and type(b) is int and a > 0 and b > 0
        distance += abs(math.log2(a / b)) if both_integers else 1.0  # type: ignore[operator]
        if name == "mask_form":
            distance += 1.0  # another mask form is another algorithm
    return distance


def diverse(candidates: Sequence[VariantSpec], count: int, chosen: Sequence[VariantSpec] = ()) -> list[VariantSpec]:
    """Up to `count` candidates that differ: mask forms in turn, and within one those farthest from what is chosen.

    candidates: cheapest-looking first; ties go to the earlier one.
    chosen: variants that are measured anyway; none of them is returned.
    """
    picked: list[VariantSpec] = []
    groups: dict[tuple[str, str], list[VariantSpec]] = {}
    taken = set(chosen)
    for spec in candidates:
        if spec not in taken:
            groups.setdefault((spec.family, spec.mask_form), []).append(spec)
    while len(picked) < count and groups:
        for key in list(groups):
            if len(picked) == count:
                break
            members = groups[key]
            # Among the cheaper half only: the far corners of a space are where its worst tiles lie.
            cheaper = members[: max(8, len(members) // 2)]
            known = [spec for spec in (*chosen, *picked) if (spec.family, spec.mask_form) == key]
            best = max(cheaper, key=lambda s: min((axis_distance(s, k) for k in known), default=0.0))
            members.remove(best)
            picked.append(best)
            if not members:
                del groups[key]
    return picked
