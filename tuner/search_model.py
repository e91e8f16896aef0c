"""Model-guided search: a Gaussian process over the axes says where the next variants may be faster."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.generator.variant import VariantSpec
from tilewright.tuner.axis_features import Matrix, features
from tilewright.tuner.search import Guided

CEILING = 4.0
"""Times over so many times the best count as that: by how much the slow differ teaches nothing about the fast."""

HOPEFUL = 400
"""Candidates among which a batch is chosen, those with most improvement expected before its first."""

DRAWS, KEPT = 48, 6
"""Settings of the process that are drawn, and how many of the likeliest its predictions are averaged over."""

SCALES = (0.5, 1.0)
"""Mean and deviation of the logarithm of a length scale; an axis spans 1."""

NOISE = (0.02, 0.3)
"""The part of the values' spread that the axes do not explain: from, to."""

LEAST_SCALE = 0.05
"""Values that spread less than this are not stretched further."""


class GaussianSearch(Guided):
    """Expected improvement over a Gaussian process of the logarithm of time (Jones et al. 1998), with Matern-3/2.

    Each axis has a length scale of its own. They are drawn from a prior and weighed by likelihood, not optimised: there
    are as many of them as first measurements. Within a batch, a variant that is proposed counts as measured with the
    predicted time, so that the next one lies elsewhere.

    candidates, first: as `Guided`. seed: of what is drawn.
    """

    def __init__(self, candidates: Sequence[VariantSpec], *, first: Sequence[VariantSpec] = (), seed: int = 0) -> None:
        super().__init__(candidates, first)
        self._random = np.random.default_rng(seed)
        self._points = features(candidates)
        self._index = {spec: index for index, spec in enumerate(candidates)}

    def choose(self, count: int) -> list[VariantSpec]:
        left = list(self.left)
        ran = self.fastest()
        if not ran:
            return [left[i] for i in self._random.choice(len(left), count, replace=False)]
        best_us = self.times[ran[0]]
        values = np.log([min(time / best_us, CEILING) for time in self.times.values()])
        # What is on its way counts as measured, too.
        candidates = self._at([*self.waiting, *left])
        process = _Process(self._at(list(self.times)), values, candidates, self._random)
        for index in range(len(self.waiting)):
            process.believe(index)
        skip = len(self.waiting)
        hopeful = skip + np.argsort(-process.improvement()[skip:], kind="stable")[: max(HOPEFUL, count)]
        process.keep(hopeful)
        chosen: list[int] = []
        for _ in range(count):
            gain = process.improvement()
            gain[chosen] = -1.0
            chosen.append(int(gain.argmax()))
            process.believe(chosen[-1])
        return [left[int(hopeful[index]) - skip] for index in chosen]

    def _at(self, specs: Sequence[VariantSpec]) -> Matrix:
        return self._points[[self._index[spec] for spec in specs]]


class _Process:
    """The posterior at the candidates, averaged over the likeliest few of the drawn settings."""

    def __init__(self, points: Matrix, values: Matrix, candidates: Matrix, random: np.random.Generator) -> None:
        # The mean of what was seen is what is expected where nothing was seen.
        self._mean, self._scale = float(values.mean()), max(float(values.std()), LEAST_SCALE)
        self._lowest = float(values.min())
        scales = np.exp(random.normal(SCALES[0], SCALES[1], (DRAWS, points.shape[1])))
        noises = np.exp(random.uniform(math.log(NOISE[0]), math.log(NOISE[1]), DRAWS))
        standard = (values - self._mean) / self._scale
        fits = [_Fit(points, standard, s, float(n)) for s, n in zip(scales, noises, strict=True)]
        self._fits = sorted(fits, key=lambda fit: -fit.likelihood)[:KEPT]
        weights = np.exp([fit.likelihood - self._fits[0].likelihood for fit in self._fits])
        self._weights = weights / weights.sum()
        for fit in self._fits:
            fit.look_at(candidates)

    def believe(self, index: int) -> None:
        """Take this candidate for measured, with the time that is predicted for it."""
        mean = float(self._weights @ [fit.mean[index] for fit in self._fits])
        for fit in self._fits:
            fit.believe(index, mean)

    def keep(self, indices: NDArray[np.intp]) -> None:
        """Forget all other candidates."""
        for fit in self._fits:
            fit.keep(indices)

    def improvement(self) -> Matrix:
        """By how much each candidate is expected to lie below the lowest value."""
        mean = sum(w * fit.mean for w, fit in zip(self._weights, self._fits, strict=True))
        square = sum(w * (fit.variance + fit.mean**2) for w, fit in zip(self._weights, self._fits, strict=True))
        deviation = self._scale * np.sqrt(np.maximum(square - mean**2, 1e-9))
        below = (self._lowest - self._mean - self._scale * mean) / deviation
        density = np.exp(-0.5 * below**2) / math.sqrt(2 * math.pi)
        gain: Matrix = deviation * (below * _normal(below) + density)
        return gain


class _Fit:
    """One setting: its likelihood, and by Cholesky's factor, row by row, its predictions at the candidates."""

    def __init__(self, points: Matrix, standard: Matrix, scales: Matrix, noise: float) -> None:
        self._points, self._scales, self._noise = points, scales, noise
        self._factor = np.linalg.cholesky(_kernel(points, points, scales) + noise**2 * np.eye(len(points)))
        self._residual = np.linalg.solve(self._factor, standard)
        self.likelihood = float(-0.5 * self._residual @ self._residual - np.log(np.diag(self._factor)).sum())

    def look_at(self, candidates: Matrix) -> None:
        self._candidates = candidates
        self._across = np.linalg.solve(self._factor, _kernel(self._points, candidates, self._scales))
        self.mean: Matrix = self._across.T @ self._residual
        self.variance: Matrix = np.maximum(1.0 - (self._across**2).sum(0), 1e-9)

    def keep(self, indices: NDArray[np.intp]) -> None:
        self._candidates, self._across = self._candidates[indices], self._across[:, indices]
        self.mean, self.variance = self.mean[indices], self.variance[indices]

    def believe(self, index: int, mean: float) -> None:
        column = self._across[:, index]
        diagonal = math.sqrt(float(self.variance[index]) + self._noise**2)
        row = _kernel(self._candidates[[index]], self._candidates, self._scales)[0] - column @ self._across
        row /= diagonal
        self.mean = self.mean + row * ((mean - float(self.mean[index])) / diagonal)
        self.variance = np.maximum(self.variance - row**2, 1e-9)
        self._across = np.vstack([self._across, row])


def _normal(x: Matrix) -> Matrix:
    """The standard normal distribution function, within 2e-4 (Page 1977)."""
    value: Matrix = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return value


def _kernel(one: Matrix, other: Matrix, scales: Matrix) -> Matrix:
    """Matern-3/2 correlations of two lists of points."""
    a, b = one / scales, other / scales
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    distance = np.sqrt(3 * np.maximum(squared, 0.0))
    correlation: Matrix = (1 + distance) * np.exp(-distance)
    return correlation
