"""Ranks of one host that map one copy of the weights, and read each other's gradients."""

from fullshard.engine.collectives.shared_home.board import Peers
from fullshard.engine.collectives.shared_home.segment import Host
from fullshard.engine.collectives.shared_home.transport import SharedTransport

__all__ = ["Host", "Peers", "SharedTransport"]
