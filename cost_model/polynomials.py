"""Exact counts that may depend on sizes which vary between calls.

A count is an ``int`` where all sizes are known, else a :class:`Polynomial` in the symbols of the capture.
Sympy's own expressions would do, at a hundred times the cost; a rewrite counts thousands of nodes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import sympy
import torch

Count: TypeAlias = "int | Fraction | Polynomial"

_Atoms: TypeAlias = "tuple[sympy.Expr, ...]"


class Polynomial:
    """A sum of coefficients times products of atoms.

    An atom is a symbol, or an expression that is no polynomial (``floor(s0/2)``), taken as a symbol of its
    own: at least 0, as every size is, and otherwise unknown.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[_Atoms, Any]) -> None:
        self.terms = {atoms: factor for atoms, factor in terms.items() if factor}

    def __add__(self, other: Count) -> Polynomial:
        terms = dict(self.terms)
        for atoms, factor in _terms(other).items():
            terms[atoms] = terms.get(atoms, 0) + factor
        return Polynomial(terms)

    def __mul__(self, other: Count) -> Polynomial:
        if not isinstance(other, Polynomial):
            return Polynomial({atoms: factor * other for atoms, factor in self.terms.items()})
        terms: dict[_Atoms, Any] = {}
        for (a, x), (b, y) in itertools.product(self.terms.items(), other.terms.items()):
            atoms = tuple(sorted(a + b, key=str))
            terms[atoms] = terms.get(atoms, 0) + x * y
        return Polynomial(terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Polynomial:
        return self * -1

    def __sub__(self, other: Count) -> Polynomial:
        return self + other * -1

    def __rsub__(self, other: Count) -> Polynomial:
        return self * -1 + other

    def __truediv__(self, number: int) -> Polynomial:
        return self * Fraction(1, number)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, Fraction, Polynomial)):
            return not (self - other).terms
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(to_sympy(self))


def _terms(count: Count) -> dict[_Atoms, Any]:
    return count.terms if isinstance(count, Polynomial) else {(): count}


def to_sympy(count: Count) -> sympy.Expr:
    """The same count as a sympy expression."""
    return sympy.Add(*(sympy.Mul(sympy.Rational(factor), *atoms) for atoms, factor in _terms(count).items()))


def halve(count: Count) -> Count:
    """Half of a count that is even for all sizes."""
    return count / 2 if isinstance(count, Polynomial) else count // 2


def size(value: Any) -> Count:
    """A size of a tensor: an ``int``, or the expression of a ``SymInt``. Adds no guard to the capture."""
    return of_expression(value.node.expr) if isinstance(value, torch.SymInt) else int(value)


def product(sizes: Iterable[Any]) -> Count:
    """The product of sizes."""
    number: int = 1
    rest: list[Count] = []
    for value in sizes:
        if isinstance(value, int):
            number *= value
        else:
            rest.append(size(value) if isinstance(value, torch.SymInt) else value)
    result: Count = number
    for count in rest:
        result = result * count
    return result


def numel(tensor: torch.Tensor) -> Count:
    return product(tensor.shape)


@functools.lru_cache(maxsize=4096)
def of_expression(expression: sympy.Expr) -> Count:
    """A sympy expression as a count; parts that are no polynomial become atoms."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression.is_Add:
        return functools.reduce(lambda a, b: a + b, map(of_expression, expression.args))
    if expression.is_Mul:
        return functools.reduce(lambda a, b: a * b, map(of_expression, expression.args))
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return functools.reduce(lambda a, b: a * b, [of_expression(expression.base)] * int(expression.exp))
    return Polynomial({(expression,): 1})


def atoms_of(count: Count) -> set[sympy.Expr]:
    return {atom for atoms in _terms(count) for atom in atoms}


def rest_above(count: Count, lowest: Mapping[sympy.Expr, int]) -> dict[_Atoms, Any]:
    """The terms of ``count`` with every atom ``x`` replaced by ``x + lowest[x]`` (0 where not given)."""
    result: dict[_Atoms, Any] = {}
    for atoms, factor in _terms(count).items():
        expanded = Polynomial({(): factor})
        for atom in atoms:
            expanded = expanded * Polynomial({(atom,): 1, (): lowest.get(atom, 0)})
        for key, value in expanded.terms.items():
            result[key] = result.get(key, 0) + value
    return result


def is_nonnegative(count: Count, lowest: Mapping[sympy.Expr, int]) -> bool:
    """Whether ``count >= 0`` follows for all sizes of at least ``lowest`` (0 where not given).

    Sufficient: no negative coefficient is left once every size is written as its least value plus a rest.
    """
    return all(factor >= 0 for factor in rest_above(count, lowest).values())


def evaluate(count: Count, values: Mapping[sympy.Expr, int]) -> Fraction:
    """The value at a point; atoms that are not given are 0."""
    return Fraction(
        sum(
            factor * math.prod(values.get(atom, 0) for atom in atoms)
            for atoms, factor in _terms(count).items()
        )
    )


def counterexample(count: Count, lowest: Mapping[sympy.Expr, int]) -> dict[sympy.Expr, int] | None:
    """Sizes for which ``count`` is negative, searched for at small and large ones; None if none is found."""
    atoms = sorted(atoms_of(count), key=str)
    grid = ((0, 1, 15, 1 << 20) for _ in atoms)
    for steps in itertools.product(*grid):
        point = {atom: lowest.get(atom, 0) + step for atom, step in zip(atoms, steps, strict=True)}
        if evaluate(count, point) < 0:
            return point
    return None
