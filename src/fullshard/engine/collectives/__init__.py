"""How bytes travel between ranks. One interface, several transports."""

from fullshard.engine.collectives.base import Axes, Fetch, Reduction, Transport
from fullshard.engine.collectives.select import make_transport, resolve_transport

__all__ = ["Axes", "Fetch", "Reduction", "Transport", "make_transport", "resolve_transport"]
