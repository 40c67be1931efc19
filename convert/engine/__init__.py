"""The engine that every reader uses: rules per key, leaves of a file, the configuration that follows, its TOML."""
