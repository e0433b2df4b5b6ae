"""Misuse of a compat interface, catchable as what the interface itself raises.

EngineError (RuntimeError)
`-- MisuseError
    |-- MisuseValueError (ValueError)
    |-- MisuseTypeError (TypeError)
    |-- MisuseAssertionError (AssertionError)
    |-- NoSuchPartError (AttributeError)
    `-- NotOfferedError (NotImplementedError)     what these interfaces refuse by name
"""

from __future__ import annotations

from fullshard.errors import EngineError


class MisuseError(EngineError):
    """A call that the interface refuses."""


class MisuseValueError(MisuseError, ValueError):
    """The same, where the interface raises a ValueError."""


class MisuseTypeError(MisuseError, TypeError):
    """The same, where the interface raises a TypeError."""


class MisuseAssertionError(MisuseError, AssertionError):
    """The same, where the interface raises an AssertionError."""


class NoSuchPartError(MisuseError, AttributeError):
    """A part of torch's own engine that there is none of here."""


class NotOfferedError(MisuseError, NotImplementedError):
    """A part of the interface that is not offered here; names the way out."""
