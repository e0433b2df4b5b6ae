"""The Python interfaces of other tools, thin over the engine."""
