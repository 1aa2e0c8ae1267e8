"""What to do: TOML and command line go in, one frozen, checked config comes out. Imports neither torch nor models."""
