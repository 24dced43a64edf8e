"""The operator table of the judge: how one element of each operator follows from its inputs, and how exactly it must.

Each rule takes the operator, the number of an output, the position of an element in it (row order of the view that the
operator returned), and a reader of the inputs; it reads no more than that element needs. An operator that has no rule here
cannot be judged by itself; the whole step is judged then. Rules stand by what an element needs: one element of each input
(``elementwise_rules``), a sum (``sum_rules``), a window (``window_rules``), a whole row (``row_rules``).

Units are counted in unit roundoffs u of the output's dtype: a chain of k correctly rounded operations on a magnitude m has
k m of them (Higham 2002, section 3.1: (1 + u)**k - 1 <= gamma_k). Elementary functions may be off by ``FUNCTION`` units: what
vector libraries promise is 1 to 4 in the last place, and torch's attention on the CPU uses an exponential good to 20.
Every bound leaves room for some ten more roundings of inputs and output, so that machines that flush, contract or scale
differently, and the jitter that stands in for another machine in tests, stay within it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tallystick.dispute.bounds.elementwise import ELEMENTWISE
from tallystick.dispute.bounds.operands import Rule
from tallystick.dispute.bounds.rows import ROWS
from tallystick.dispute.bounds.sums import SUMS
from tallystick.dispute.bounds.windows import WINDOWS
from tallystick.dispute.operator_list import Operator

_IN_PLACE: Mapping[str, str] = {"aten::bernoulli_": "aten::bernoulli_"}
_RULES: Mapping[str, Rule] = {**ELEMENTWISE, **SUMS, **WINDOWS, **ROWS}


def find_rule(operator: Operator) -> Rule | None:
    """Return the rule for ``operator``, or None if the table has none."""
    name = operator.name
    if name.endswith("_") and not name.endswith("__"):
        name = _IN_PLACE.get(name, name[:-1])
    return _RULES.get(f"{name}.{operator.overload}") or _RULES.get(name)
