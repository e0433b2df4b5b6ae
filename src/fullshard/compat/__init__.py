"""Other tools' Python interfaces, as thin layers over the engine.

Errors of these interfaces also have the types that the originals raise:

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
    """A MisuseError where the interface raises a ValueError."""


class MisuseTypeError(MisuseError, TypeError):
    """A MisuseError where the interface raises a TypeError."""


class MisuseAssertionError(MisuseError, AssertionError):
    """A MisuseError where the interface raises an AssertionError."""


class NoSuchPartError(MisuseError, AttributeError):
    """A part of torch's engine that does not exist here."""


class NotOfferedError(MisuseError, NotImplementedError):
    """A part of the interface that is not supported; names the alternative."""
