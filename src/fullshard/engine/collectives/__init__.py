"""How bytes travel between ranks. One interface, several transports."""

from fullshard.engine.collectives.base import Axes, Fetch, Reduction, Transport
from fullshard.engine.collectives.exchange import Exchange
from fullshard.engine.collectives.groups import copy_from_first
from fullshard.engine.collectives.home import Home, Weights
from fullshard.engine.collectives.select import make_transport, resolve_transport

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
