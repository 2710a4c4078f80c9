"""Lightning: a callback that turns parts of a module into regions during a fit. Tested with lightning 2.6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from recollect._apply.handle import Applied
from recollect._apply.model import Rules, apply, check_request
from recollect._core.spelling import options_of, refuse_unknown
from recollect._policy.base import PolicyLike
from recollect.integrations.extras import require

__all__ = ["RecollectCallback"]

if TYPE_CHECKING:
    Callback = object
else:
    Callback = require("lightning", extra="lightning").Callback


class RecollectCallback(Callback):
    """A callback that turns modules into regions when a fit begins, and undoes that when it ends or fails.

    Pass it to the Trainer: ``Trainer(callbacks=[RecollectCallback()])``. It works with any strategy: the regions are
    made after the strategy has wrapped the model, and checkpoints do not show them.

    Args:
        rules: as for `recollect.apply`, including plans; by default the repeated blocks are recomputed.
        policy: as for `recollect.apply`.
        every: as for `recollect.apply`.
        first: as for `recollect.apply`.
        unknown: there are no other options.

    Raises:
        ValueError: an option has an invalid value.
        TypeError: an option is unknown, or has the wrong type.

    Attributes:
        handle: the handle from `recollect.apply`, during a fit.

    >>> from recollect.integrations.lightning import RecollectCallback
    >>> callback = RecollectCallback({"net.layers.*": "selective"})
    """

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        policy: PolicyLike | str | None = None,
        every: int | None = None,
        first: int | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(
                "RecollectCallback", unknown, options_of(RecollectCallback), "it takes the arguments of recollect.apply"
            )
        check_request(rules, policy=policy, every=every, first=first)
        self._options: dict[str, Any] = {"rules": rules, "policy": policy, "every": every, "first": first}
        self.handle: Applied | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer, after the strategy has set the model up."""
        del trainer
        self._undo()
        self.handle = apply(pl_module, **self._options)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer."""
        del trainer, pl_module
        self._undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called by the trainer."""
        del trainer, pl_module, exception
        self._undo()

    def _undo(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
