"""How Dynamo captures a call of a higher-order operator of ours: the body as a graph, the rest as constants.

Private names: Dynamo's checkpoint variable, from which ours inherits how a body is captured, and the table from
operator to variable. Import it only where Dynamo is at work: it imports all of torch._dynamo.
Would be replaced by: a public way to register a higher-order operator with Dynamo.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from recollect._core.errors import CompileError

try:
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import higher_order_ops
    from torch._ops import HigherOrderOperator
except ImportError as error:
    message = (
        f"regions in compiled code need parts of torch that torch {torch.__version__} has not ({error}).\n"
        "They are tested with torch 2.11 and 2.13; regions in eager code still work. Use one of those versions, or "
        "compile the model without its regions."
    )
    raise CompileError(message) from error

Constants = Callable[[list[Any], dict[str, Any]], dict[str, Any]]
"""From the function and its arguments, and the options of a call, as Dynamo sees them, to its node's constants."""


def capture_calls(op: HigherOrderOperator, constants: Constants) -> None:
    """Let Dynamo capture each ``op(fn, args, kwargs, **options)`` as ``op(body, *operands, **constants(...))``.

    Side effects of the function happen once, when the graph has run.
    """

    class Variable(higher_order_ops.CheckpointHigherOrderVariable):
        _HOP_NAME = op.__name__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.allow_side_effects = True

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            fn, arguments, keywords = (arg.realize() for arg in args)
            given = list(arguments.unpack_var_sequence(tx))
            named = {key.vt.as_python_constant(): value for key, value in keywords.items.items()}
            options = constants(
                [fn, *given, *named.values()], {name: option.realize() for name, option in kwargs.items()}
            )
            captured = self.create_wrapped_node(tx, fn, given, named, self._HOP_NAME)
            operands, _, example, result = captured[:4]
            return higher_order_ops._call_function_with_auto_output_flattening(
                tx, self.value, operands, options, example, result, captured[6]
            )

    higher_order_ops._hop_name_to_variable_class[op.__name__] = Variable


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
    """A module, or the one whose method it is."""
    variable = variable.realize()
    if hasattr(variable, "func") and getattr(variable, "args", None):  # a partial: of the method and the module
        variable = variable.args[0].realize()
    variable = getattr(variable, "obj", variable)  # a bound method, in torch 2.11
    value = getattr(variable, "value", None)
    value = getattr(value, "__self__", value)  # and in 2.13
    return value if isinstance(value, nn.Module) else None


def break_graph(reason: str) -> NoReturn:
    """Have Dynamo break its graph at the call that it captures; where it must not, this is its error.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(reason, "recollect")
