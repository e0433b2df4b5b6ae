"""Ranks of one host that map one copy of the weights, and read each other's gradients."""

from fullshard.transport.shared.board import Peers
from fullshard.transport.shared.segment import Host
from fullshard.transport.shared.transport import SharedTransport

__all__ = ["Host", "Peers", "SharedTransport"]
