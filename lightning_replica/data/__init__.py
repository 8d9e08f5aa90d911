"""Which batch comes next, exactly."""
