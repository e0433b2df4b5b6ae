"""One run: from a configuration to started ranks, one loop on either engine, and its folder."""
