"""Communication between ranks: one interface (base.py), several transports."""
