"""Do server and trainer agree? A run's config goes in; tables of differences and an exit status come out."""
