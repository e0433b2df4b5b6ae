"""Other tools' Python interfaces, as thin layers over the engine."""
