"""Communication between ranks: one interface, several transports."""

from fullshard.transport.base import Axes, Fetch, Home, Reduction, Transport, Weights
from fullshard.transport.groups import Exchange, copy_from_first
from fullshard.transport.select import make_transport, resolve_transport

__all__ = [
    "Axes",
    "Exchange",
    "Fetch",
    "Home",
    "Reduction",
    "Transport",
    "Weights",
    "copy_from_first",
    "make_transport",
    "resolve_transport",
]
