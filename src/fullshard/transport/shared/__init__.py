"""Ranks of one host that map one copy of the weights, and read each other's gradients."""

from fullshard.transport.shared.board import Peers
from fullshard.transport.shared.home import SharedTransport
from fullshard.transport.shared.segment import Host

__all__ = ["Host", "Peers", "SharedTransport"]
