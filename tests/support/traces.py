"""Caches traces of models, because commands of one process plan the same few models."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from fullshard.run.outlook import Tracer

_KNOWN: dict[Any, Any] = {}


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Traces a model once per process with each setting of the tracer."""

    def once(name: str) -> Any:
        trace = getattr(Tracer, name)

        def once(self: Any, plan: Any, config: Any, key: Any, samples: int) -> Any:
            model = type(self.model), str(self.model.config), self.spec
            if self.teacher is not None:
                teacher = getattr(self.teacher.model, "config", None)
                model = *model, str(teacher), str(self.teacher.config)
            known = (name, *model, self.length, self.chunk_size, self.on_gpu, key, samples)
            if known not in _KNOWN:
                _KNOWN[known] = trace(self, plan, config, key, samples)
            return _KNOWN[known]

        return once

    with pytest.MonkeyPatch.context() as patch:
        for name in ("trace", "find_work"):
            patch.setattr(Tracer, name, once(name))
        yield
