"""Programs that are not trusted."""
