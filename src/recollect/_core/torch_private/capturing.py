"""How Dynamo captures a call of a higher-order operator of ours: the body as a graph, the rest as constants.

Private names: Dynamo's checkpoint variable, from which ours inherits how a body is captured, the table from operator to
variable, the set of operators whose unused outputs are taken back, and the variables that stand for modules. Import it
only where Dynamo is at work: it imports all of torch._dynamo.
Would be replaced by: a public way to register a higher-order operator with Dynamo.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from recollect._core.errors import CompileError

try:
    from torch._dynamo.dce_extra_outputs import _HOPS_WITH_EXTRA_OUTPUTS
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstDictVariable, TupleVariable, higher_order_ops
    from torch._dynamo.variables.functions import FunctoolsPartialVariable, UserMethodVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.nn_module import NNModuleVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
    from torch._ops import HigherOrderOperator
except ImportError as error:
    message = (
        f"regions in compiled code need parts of torch that torch {torch.__version__} does not have "
        f"({error}).\n"
        "They are tested with torch 2.11 and 2.13; regions in eager code still work. Use one of those "
        "versions, or compile the model without its regions."
    )
    raise CompileError(message) from error

Constants = Callable[[list[Any], dict[str, Any]], dict[str, Any]]
"""From the function and its arguments, and the options of a call, as Dynamo sees them, to its node's constants."""


def capture_calls(op: HigherOrderOperator, constants: Constants) -> None:
    """Let Dynamo capture each ``op(fn, args, kwargs, **options)`` as ``op(body, *operands, **constants(...))``.

    Side effects of the function happen once, when the graph has run. A call that stands in a graph already, which is
    traced again, is captured as it stands.
    """

    class Variable(higher_order_ops.CheckpointHigherOrderVariable):
        _HOP_NAME = op.__name__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.allow_side_effects = True

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            fn, *rest = (arg.realize() for arg in args)
            options = {name: option.realize() for name, option in kwargs.items()}
            if _is_packed(rest):
                arguments, keywords = rest
                given = list(arguments.unpack_var_sequence(tx))
                named = {key.vt.as_python_constant(): value for key, value in keywords.items.items()}
                known = constants([fn, *given, *named.values()], options)
            else:
                given, named = rest, {}
                known = {name: option.as_python_constant() for name, option in options.items()}
            captured = self.create_wrapped_node(tx, fn, given, named, self._HOP_NAME)
            operands, _, example, result = captured[:4]
            return higher_order_ops._call_function_with_auto_output_flattening(
                tx, self.value, operands, known, example, result, captured[6]
            )

    higher_order_ops._hop_name_to_variable_class[op.__name__] = Variable
    # A body with side effects returns all that it makes, in case it leaks; Dynamo takes back what nobody uses.
    _HOPS_WITH_EXTRA_OUTPUTS.add(op)


def _is_packed(rest: list[Any]) -> bool:
    """Whether a call is one of Python, with its arguments in a tuple and a dict; in a graph they are tensors."""
    return len(rest) == 2 and isinstance(rest[0], TupleVariable) and isinstance(rest[1], ConstDictVariable)  # noqa: PLR2004


def value_of(variable: Any) -> Any:
    """The Python object behind what Dynamo sees; the compiled code then holds for this object alone."""
    if variable.is_python_constant():
        return variable.as_python_constant()
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
    if hasattr(variable, "guard_as_python_constant"):
        try:
            return variable.guard_as_python_constant()
        except Exception:
            pass
    for name in ("value", "fn"):
        if hasattr(variable, name):
            return getattr(variable, name)
    return variable.as_python_constant()


def guarded_by_nothing(variable: Any) -> Any:
    """The Python object behind what Dynamo sees; the compiled code may then serve others of its class, too."""
    return variable.as_python_constant() if variable.is_python_constant() else variable.value


def modules_called(called: list[Any]) -> list[nn.Module]:
    """The module that is called, and those among its arguments; none if a function is, which may use any."""
    first, *others = map(_module_behind, called)
    return [first, *(one for one in others if one is not None)] if first is not None else []


def _module_behind(variable: Any) -> nn.Module | None:
    """A module, or the one whose method it is.

    Asked of the kinds of variable that can stand for one, and of no other: many have a ``value`` that cannot be had
    (of a tuple of tensors, on torch 2.13), and what the function does not use is not to be guarded.
    """
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        value = variable.peek_value()
        owner = getattr(value, "__self__", value) if isinstance(value, MethodType) else value
        return owner if isinstance(owner, nn.Module) else None
    variable = variable.realize()
    if isinstance(variable, FunctoolsPartialVariable) and variable.args:  # of the method and the module
        variable = variable.args[0].realize()
    if isinstance(variable, UserMethodVariable):
        variable = variable.obj.realize()
    if isinstance(variable, NNModuleVariable):
        return variable.value
    if isinstance(variable, UserDefinedObjectVariable):
        value = getattr(variable.value, "__self__", variable.value)
        return value if isinstance(value, nn.Module) else None
    return None


def break_graph(reason: str) -> NoReturn:
    """Have Dynamo break its graph at the call that it captures; where it must not, this is its error.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(reason, "recollect")
